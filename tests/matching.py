"""Grammars in tests, and which tokens they allow, found without a matcher. Tokens are those of `byte_tokenizer`, a byte each."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from typing import Any

import regex
from checkpoints import byte_tokenizer
from family_configs import VOCAB_SIZE
from xgrammar import GrammarCompiler, GrammarMatcher

from eagle_rt.engine.grammars import tokenizer_info
from eagle_rt.engine.params import Grammar
from eagle_rt.speculate.grammar_match import GrammarMatch

END, NUM_SPECIAL = 3, 6
INFO = tokenizer_info(byte_tokenizer(), VOCAB_SIZE, [END])
BYTES = dict(enumerate(INFO.decoded_vocab[NUM_SPECIAL:], NUM_SPECIAL))
TOKENS = {text: token for token, text in BYTES.items()}

# Of a text's tokens: those that may follow it.
Allowed = Callable[[tuple[int, ...]], frozenset[int]]

COLOURS = Grammar("regex", r"(red|green|blue)( and (red|green|blue))*")
NUMBERS = Grammar("regex", r"-?[1-9][0-9]{0,3}(\.[0-9]+)?")
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large", "none"]}, "n": {"enum": [1, 12, 125]}},
    "required": ["ok", "size", "n"],
}
ANSWERS = Grammar("json_schema", json.dumps(ANSWER))
GRAMMARS = [COLOURS, NUMBERS, ANSWERS]
# A tool.
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "the weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENS[bytes([byte])] for byte in text.encode())


def text_of(tokens: Iterable[int]) -> bytes:
    return b"".join(BYTES[token] for token in tokens)


@cache
def compiled(grammar: Grammar):
    compiler = GrammarCompiler(INFO, max_threads=1)
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.text)
    return compiler.compile_json_schema(grammar.text, any_whitespace=False)


def match_of(grammar: Grammar) -> GrammarMatch:
    return GrammarMatch(GrammarMatcher(compiled(grammar)), VOCAB_SIZE, frozenset(INFO.special_token_ids))


def allowed_by(grammar: Grammar) -> Allowed:
    """By Python's expressions, or by all texts that there are."""

    @cache
    def allowed(tokens: tuple[int, ...]) -> frozenset[int]:
        begins, is_whole = (begins_expression, is_expression) if grammar.kind == "regex" else (begins_answer, is_answer)
        text = text_of(tokens)
        found = {token for token, byte in BYTES.items() if begins(grammar, text + byte)}
        return frozenset(found | {END} if is_whole(grammar, text) else found)

    return allowed


def begins_expression(grammar: Grammar, text: bytes) -> bool:
    return regex.fullmatch(grammar.text.encode(), text, partial=True) is not None


def is_expression(grammar: Grammar, text: bytes) -> bool:
    return regex.fullmatch(grammar.text.encode(), text) is not None


@cache
def answers() -> list[bytes]:
    options = product([True, False], ["small", "large", "none"], [1, 12, 125])
    return [json.dumps({"ok": ok, "size": size, "n": n}).encode() for ok, size, n in options]


def begins_answer(grammar: Grammar, text: bytes) -> bool:
    return any(answer.startswith(text) for answer in answers())


def is_answer(grammar: Grammar, text: bytes) -> bool:
    return text in answers()


def check_matches(structural_tag: str | dict[str, Any], matching: list[str], others: list[str]) -> None:
    """These texts, as whole replies, match it, and the others do not."""
    compiled = GrammarCompiler(INFO).compile_structural_tag(structural_tag)
    for text in matching + others:
        matcher = GrammarMatcher(compiled)
        assert (matcher.accept_string(text) and matcher.is_completed()) == (text in matching), text

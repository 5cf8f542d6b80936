"""From what a reply must match to something that follows it, made beside the engine's loop; by xgrammar, whose masks take
microseconds and whose matchers can go back, as trees need it."""

import json
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from eagle_rt.engine import grammar_process
from eagle_rt.engine.params import Grammar
from eagle_rt.models.tokenizer import HARMONY_MARKS, hidden_tokens, special_marks
from eagle_rt.speculate.grammar_match import GrammarMatch

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

# How many grammars, good and bad, are kept, the latest; and what compiling one may take of a processor.
MOST_KEPT, MOST_SECONDS = 64, 10.0
INSTALL = "a reply can only be made to match a grammar with xgrammar, which is not installed: pip install 'eagle_rt[grammar]'"


class Grammars:
    """Grammars over the tokens of a model. All methods are for one thread; what takes long is done on another and in a process of
    its own, which is started for the first grammar."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_token_ids = tokenizer, vocab_size, sorted(end_token_ids)
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._process: subprocess.Popen[str] | None = None
        self._info: TokenizerInfo | None = None
        self._special: frozenset[int] = frozenset()

    def compile(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Begin to. The future's exception says why it cannot be done: ever, if it is a ValueError.

        Raises:
            ValueError: no grammar can be compiled here.
        """
        if not find_spec("xgrammar"):
            raise ValueError(INSTALL)
        if not self._end_token_ids:
            raise ValueError(f"{grammar.kind} is not possible with this model: it names no token that ends a reply")
        known = self._compiled.pop(grammar, None)
        if known is None or (known.done() and isinstance(known.exception(), RuntimeError)):
            known = self._thread.submit(self._compile, grammar)
        self._compiled[grammar] = known
        if len(self._compiled) > MOST_KEPT:
            self._compiled.popitem(last=False)
        return known

    def match(self, compiled: "CompiledGrammar") -> GrammarMatch:
        """For a reply that begins."""
        from xgrammar import GrammarMatcher

        return GrammarMatch(GrammarMatcher(compiled), self._vocab_size, self._special)

    def close(self) -> None:
        """What is being compiled fails."""
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        from xgrammar import CompiledGrammar

        if self._info is None:
            self._info = tokenizer_info(self._tokenizer, self._vocab_size, self._end_token_ids)
            self._special = frozenset(self._info.special_token_ids)
        answer = self._ask(self._info, grammar)
        if "error" in answer:
            raise ValueError(f"{grammar.kind} is not possible: {answer['error']}")
        return CompiledGrammar.deserialize_json(answer["grammar"], self._info)

    def _ask(self, info: "TokenizerInfo", grammar: Grammar) -> dict[str, Any]:
        lines = [json.dumps(grammar)]
        if self._process is None:
            self._process, lines = start_process(), [info.serialize_json(), *lines]
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            print(*lines, sep="\n", file=process.stdin, flush=True)
            if answer := process.stdout.readline():
                return json.loads(answer)
        self._process = None
        raise RuntimeError(f"the process that compiles grammars has ended with exit code {process.wait()}: try again")


def tokenizer_info(tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: list[int]) -> "TokenizerInfo":
    """The tokens as xgrammar wants them. Special ones are never part of a text, whatever they are called, but for marks that models
    write: harmony's where one has them all."""
    from xgrammar import TokenizerInfo, VocabType

    found = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=end_token_ids)
    harmony = special_marks(tokenizer, HARMONY_MARKS)
    special = hidden_tokens(tokenizer) - (harmony if len(harmony) == len(HARMONY_MARKS) else frozenset())
    texts = [b"" if token in special else text for token, text in enumerate(found.decoded_vocab)]
    settings = {"stop_token_ids": end_token_ids, "add_prefix_space": found.add_prefix_space}
    return TokenizerInfo(texts, VocabType.RAW, vocab_size=vocab_size, **settings)


def start_process() -> subprocess.Popen[str]:
    # -P: modules that lie beside the file are not to be taken for Python's own. A group of its own: Ctrl-C is not for it, and it
    # ends together with its copies.
    command, pipe = [sys.executable, "-P", str(Path(grammar_process.__file__)), str(MOST_SECONDS)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True)

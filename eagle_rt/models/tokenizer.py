"""Tokenizer, chat template, end tokens and sampling defaults of a checkpoint, all by transformers."""

import json
from collections.abc import Sequence
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

# Of generation_config.json; the second ones hold for greedy replies too.
SAMPLED_DEFAULTS, DEFAULTS = ("temperature", "top_p", "top_k", "min_p"), ("repetition_penalty",)


# What transformers takes itself, or its templates are given by it.
TEMPLATE_ARGUMENTS = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}

CHAT_TEMPLATES = Path(__file__).parent / "chat_templates"

# With which gpt-oss writes messages within a reply: special tokens that are part of its text.
HARMONY_MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
# Of thoughts and calls, which other models write as special tokens, too.
OF_MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
OF_SEED = ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>")
OF_GEMMA4 = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
MARKS = (*OF_MISTRAL, *OF_SEED, *OF_GEMMA4)


def load_tokenizer(model_dir: Path, *, trust_remote_code: bool, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """chat_template: a file with another one than the checkpoint's, which may have it beside the tokenizer, too, or the name of one
    in CHAT_TEMPLATES.

    Raises:
        FileNotFoundError, ValueError: the folder holds no tokenizer that transformers can load, or the file no chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types here, most of them without naming the folder
        raise ValueError(f"no tokenizer could be loaded from {model_dir}: {error}") from None
    of_processor = model_dir / "chat_template.json"  # where it is for models that see
    if chat_template:
        named = CHAT_TEMPLATES / f"{chat_template}.jinja"
        tokenizer.chat_template = read_chat_template(named if named.is_file() else Path(chat_template))
        try:
            chat_tokens(tokenizer, [{"role": "user", "content": "?"}])
        except ValueError as error:
            raise ValueError(f"--chat-template {chat_template} cannot be used: {error}") from None
    elif tokenizer.chat_template is None and of_processor.is_file():
        tokenizer.chat_template = read_chat_template(of_processor)
    return tokenizer


def read_chat_template(file: Path) -> str:
    """A Jinja text, or a .json that holds one as its `chat_template`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or no such text in it.
    """
    if not file.is_file():
        known = ", ".join(sorted(own.stem for own in CHAT_TEMPLATES.glob("*.jinja")))
        raise FileNotFoundError(f"there is no chat template at {file}, nor is that the name of one, as are: {known}")
    text = file.read_text()
    if file.suffix != ".json":
        return text
    try:
        found = json.loads(text)["chat_template"]
    except (json.JSONDecodeError, KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        raise ValueError(f'{file} has no "chat_template" with a text')
    return found


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    options: dict[str, Any] | None = None,
) -> list[int]:
    """A dialogue in the model's chat template, by default up to where the model's reply begins. tools: that the model may call.
    options: what else the template asks for.

    Raises:
        ValueError: the model has no chat template, or its template refuses the messages, or an option is none of a template's.
    """
    if tokenizer.chat_template is None:
        raise ValueError("this model has no chat template: send a plain prompt instead, or start with --chat-template")
    for name in options or {}:
        if name in TEMPLATE_ARGUMENTS:
            raise ValueError(f"chat_template_kwargs.{name} is not the template's but the tokenizer's: leave it out")
    try:
        arguments = {"tools": tools, "add_generation_prompt": add_generation_prompt, "return_dict": False, **(options or {})}
        return cast(list[int], tokenizer.apply_chat_template(list(messages), **arguments))
    except Exception as error:  # templates raise jinja errors of many types
        raise ValueError(f"messages do not fit the model's chat template: {error}") from None


def writes_harmony(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a model replies as gpt-oss does, by its chat template."""
    template = str(tokenizer.chat_template)
    return "<|channel|>" in template and "<|message|>" in template


def question_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """What a user says, in the model's chat template where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return chat_tokens(tokenizer, [{"role": "user", "content": text}])


Prompts = str | list[int] | list[str] | list[list[int]]


def is_single(prompts: Prompts) -> bool:
    """Whether this is one prompt, as text or as tokens, and not a list of them."""
    return isinstance(prompts, str) or bool(prompts and isinstance(prompts[0], int))


def listed(prompts: Prompts) -> list[str | list[int]]:
    return cast(list[str | list[int]], [prompts] if is_single(prompts) else prompts)


def prompt_texts(tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[str]:
    """What one or several prompts say."""
    return [prompt if isinstance(prompt, str) else decode_tokens(tokenizer, prompt) for prompt in listed(prompts)]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[list[int]]:
    """One or several prompts, as text or as tokens, to lists of tokens.

    Raises:
        ValueError: something else.
    """
    several = listed(prompts)
    for prompt in several:
        are_tokens = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        if not (are_tokens or isinstance(prompt, str)):
            raise ValueError(f"a prompt must be a text or a list of token ids, but one is {prompt!r}")
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in several]


def decode_tokens(tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, keeps_special_tokens: bool = False) -> str:
    """Text, without special tokens unless these are kept, or are marks that a model writes."""
    if not keeps_special_tokens and special_marks(tokenizer, MARKS):
        hidden = hidden_tokens(tokenizer)
        tokens, keeps_special_tokens = [token for token in tokens if token not in hidden], True
    return cast(str, tokenizer.decode(tokens, skip_special_tokens=not keeps_special_tokens))


@lru_cache(maxsize=4)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Their ids."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset((*tokenizer.all_special_ids, *(token for token, entry in added if entry.special)))


@lru_cache(maxsize=4)
def hidden_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of those that are no part of a text: all but MARKS."""
    return special_tokens(tokenizer) - special_marks(tokenizer, MARKS)


@lru_cache(maxsize=8)
def special_marks(tokenizer: PreTrainedTokenizerBase, marks: tuple[str, ...]) -> frozenset[int]:
    """The ids of those that are special tokens here."""
    named = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.content in marks}
    return special_tokens(tokenizer) & named


def generation_config(model_dir: Path) -> dict[str, Any]:
    """generation_config.json, or an empty dictionary."""
    file = model_dir / "generation_config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def end_token_ids(config: dict[str, Any], generation: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a reply: of generation_config.json, config.json and the tokenizer together."""
    ids: set[int] = set()
    for value in (generation.get("eos_token_id"), config.get("eos_token_id"), cast(int | None, tokenizer.eos_token_id)):
        ids |= set(value) if isinstance(value, list) else {value} if value is not None else set()
    return frozenset(ids)


def sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """The model's own sampling settings, for requests that leave them open."""
    names = DEFAULTS if generation.get("do_sample") is False else SAMPLED_DEFAULTS + DEFAULTS
    return {name: generation[name] for name in names if generation.get(name) is not None}

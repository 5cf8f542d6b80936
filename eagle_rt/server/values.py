"""What the texts between the marks of calls stand for."""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
# What Python writes otherwise than JSON, as chat templates do that show a model its own calls.
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
# Around strings, and what else opens, closes or parts nothing, as Gemma 4 spells values.
QUOTE, PLAIN, SPACE = '<|"|>', re.compile(r"[^,\[\]{}]*"), re.compile(r"\s*")
# By what a schema may limit texts.
LIMITS = {"enum", "const", "pattern", "format"}
# The types of JSON schemas.
KINDS = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


def refuse(constant: str) -> None:
    """Python takes NaN and Infinity for JSON, which no one else does."""
    raise ValueError(f"{constant} is no number in JSON")


# What is none, or nested too deeply, raises one of NO_JSON.
DECODER, NO_JSON = json.JSONDecoder(parse_constant=refuse), (ValueError, RecursionError)


def decoded(text: str) -> Any:
    """What the JSON says; None if it is none, or nested too deeply."""
    try:
        return DECODER.decode(text)
    except NO_JSON:
        return None


def value_of(text: str, schema: Any) -> Any:
    """Of a parameter: what the text says as JSON, if the schema takes that or says nothing, and else the text. Around one that the
    schema limits there may be white space which is none of it."""
    if isinstance(schema, dict) and schema.keys() & LIMITS:
        choices = schema.get("enum")
        text = text if isinstance(choices, list) and text in choices else text.strip()
    text_of_json = PYTHON_NAMES.get(text, text)
    value, kinds = decoded(text_of_json), kinds_of(schema)
    if isinstance(value, str) or (value is None and text_of_json.strip() != "null"):
        return text
    return value if not kinds or any(kind in kinds for kind in KINDS[type(value)]) else text


def kinds_of(schema: Any) -> list[Any]:
    """The types that a schema names."""
    if not isinstance(schema, dict):
        return []
    named = schema.get("type", [])
    kinds = list(named) if isinstance(named, list) else [named]
    for choices in ("anyOf", "oneOf"):
        if isinstance(schema.get(choices), list):
            kinds += [kind for choice in schema[choices] for kind in kinds_of(choice)]
    return kinds


def gemma_value(text: str) -> Any:
    """What all of a text spells as Gemma 4 does (Google, Gemma 4 prompt formatting, 2026): keys without quotes, and strings between
    marks that are tokens of their own. None if it spells nothing, or is nested too deeply."""
    try:
        value, end = value_at(text, 0)
    except NO_JSON:
        return None
    return None if text[end:].strip() else value


def value_at(text: str, start: int) -> tuple[Any, int]:
    """What is spelled from there on, and where that ends."""
    start = end_of(SPACE, text, start)
    if text.startswith(QUOTE, start):
        return string_at(text, start)
    if text.startswith("{", start):
        members, end = items_at(text, start, "}", member_at)
        return dict(members), end
    if text.startswith("[", start):
        return items_at(text, start, "]", value_at)
    end = end_of(PLAIN, text, start)
    word = text[start:end].strip()
    if not word:
        raise ValueError(f"nothing is spelled at {text[start : start + 20]!r}")
    value = decoded(PYTHON_NAMES.get(word, word))
    return word if value is None and word not in ("null", "None") else value, end


def string_at(text: str, start: int) -> tuple[str, int]:
    start += len(QUOTE)
    return text[start : (end := text.index(QUOTE, start))], end + len(QUOTE)


def items_at(text: str, start: int, closes: str, item_at: Callable[[str, int], tuple[T, int]]) -> tuple[list[T], int]:
    """Those between commas, up to what closes them."""
    items: list[T] = []
    end = end_of(SPACE, text, start + 1)
    if text.startswith(closes, end):
        return items, end + 1
    while True:
        item, end = item_at(text, end)
        items.append(item)
        end = end_of(SPACE, text, end)
        if text.startswith(closes, end):
            return items, end + 1
        if not text.startswith(",", end):
            raise ValueError(f"{text[end : end + 20]!r} is neither a comma nor {closes}")
        end += 1


def member_at(text: str, start: int) -> tuple[tuple[str, Any], int]:
    """A key and its value."""
    colon = text.index(":", start)
    key = text[start:colon].strip().removeprefix(QUOTE).removesuffix(QUOTE)
    value, end = value_at(text, colon + 1)
    return (key, value), end


def end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Where what the pattern takes from there on ends; it may take nothing."""
    found = pattern.match(text, start)
    return found.end() if found else start

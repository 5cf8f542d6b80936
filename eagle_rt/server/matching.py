"""What a reply must match, behind what is free."""

import json
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from eagle_rt.engine.params import Grammar, SamplingParams, message_of
from eagle_rt.server.tools import json_format

TOO_DEEP = "{} is nested too deeply: make it simpler"


def matched_format(grammar: Grammar) -> dict[str, Any] | None:
    """The grammar as a part of xgrammar's structural tags; None for one that cannot be a part.

    Raises:
        ValueError: it is nested too deeply.
    """
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    try:
        document = json.loads(grammar.text)
    except ValueError:
        return None  # which its compiler will say
    except RecursionError:
        raise ValueError(TOO_DEEP.format(grammar.kind)) from None
    if grammar.kind == "json_schema":
        return json_format(document)
    return document.get("format") if isinstance(document, dict) else None


def behind(params: SamplingParams, elements: list[dict[str, Any]], answer: dict[str, Any]) -> SamplingParams:
    """The same of a reply that must match an answer behind these elements.

    Raises:
        ValueError: that is too long, or nested too deeply.
    """
    whole = {"type": "structural_tag", "format": {"type": "sequence", "elements": [*elements, answer]}}
    try:
        return replace(params, json_schema=None, regex=None, structural_tag=json.dumps(whole))
    except ValidationError as error:
        raise ValueError(message_of(error)) from None
    except RecursionError:
        raise ValueError(TOO_DEEP.format(params.grammar.kind if params.grammar else "it")) from None

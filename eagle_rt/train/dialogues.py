"""Dialogues to train a head on, in the JSON-lines forms that people have them in."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, str]

# Who speaks, in ShareGPT's words.
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Dialogue:
    """messages: alternating user and assistant, perhaps after a system message; id: where it stands in its file."""

    id: str
    messages: tuple[Message, ...]


def read_dialogues(files: list[Path]) -> Iterator[Dialogue]:
    """One dialogue a line: `messages` (role, content), `conversations` (ShareGPT's from, value), `turns` (what the user says), or
    `prompt` with or without `response`.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a line is none of these.
    """
    for file in files:
        with file.open() as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    messages = dialogue_messages(json.loads(line))
                except (json.JSONDecodeError, TypeError, KeyError, AttributeError):
                    messages = ()
                if not messages:
                    raise ValueError(
                        f"line {number} of {file} is no dialogue: it needs `messages`, `conversations`, `turns` or `prompt`"
                    )
                yield Dialogue(f"{file.stem}-{number}", messages)


def dialogue_messages(record: dict[str, Any]) -> tuple[Message, ...]:
    if "messages" in record:
        return tuple({"role": message["role"], "content": message["content"]} for message in record["messages"])
    if "conversations" in record:
        return tuple({"role": SHAREGPT_ROLES[message["from"]], "content": message["value"]} for message in record["conversations"])
    if "turns" in record:
        return tuple({"role": "user", "content": turn} for turn in record["turns"])
    messages = ({"role": "user", "content": record["prompt"]},)
    return (*messages, {"role": "assistant", "content": record["response"]}) if record.get("response") else messages

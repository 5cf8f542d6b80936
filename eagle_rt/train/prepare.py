"""Rows to train a head on: prompts with the target's own answers to them.

A head learns to foresee the target, so it should see the texts that the target writes, not those that people wrote.
"""

import json
import sys
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.tokenizer import chat_tokens, decode_tokens
from eagle_rt.train.dialogues import Dialogue, Message


@dataclass(frozen=True)
class Row:
    """One turn: everything up to where the answer begins, and the answer, as tokens; text is the answer to read."""

    id: str
    turn: int
    prompt: list[int]
    answer: list[int]
    text: str


def read_rows(file: Path) -> list[Row]:
    """Rows written so far; a last line that a kill cut short does not count.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another line is damaged.
    """
    rows = []
    for number, line in enumerate(whole_lines(file).splitlines(), start=1):
        try:
            rows.append(Row(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            raise ValueError(f"line {number} of {file} is not a row that `prepare` wrote: delete it, or start a new file") from None
    return rows


def whole_lines(file: Path) -> bytes:
    content = file.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def keep_answers(
    dialogues: Iterable[Dialogue], tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int], output: Path
) -> None:
    """Write rows with the answers that the dialogues bring."""
    with output.open("w") as stream:
        for dialogue in tqdm(dialogues, desc="dialogues", unit="dialogue"):
            turns = [index for index, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
            for turn, index in enumerate(turns):
                history = list(dialogue.messages[:index])
                prompt = chat_tokens(tokenizer, history)
                whole = chat_tokens(tokenizer, [*history, dialogue.messages[index]], add_generation_prompt=False)
                # Some templates follow the end token with more, which is not the assistant's.
                ends = [place for place in range(len(prompt), len(whole)) if whole[place] in eos_token_ids]
                answer = whole[len(prompt) : ends[-1] + 1 if ends else None]
                if whole[: len(prompt)] == prompt and answer:
                    write_row(stream, Row(dialogue.id, turn, prompt, answer, dialogue.messages[index]["content"]))


def write_row(stream: TextIO, row: Row) -> None:
    stream.write(json.dumps(asdict(row)) + "\n")
    stream.flush()


class Conversation:
    """A dialogue whose answers are being written anew."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.id = dialogue.id
        self._asked = deque(message for message in dialogue.messages if message["role"] == "user")
        self._history: list[Message] = [message for message in dialogue.messages if message["role"] == "system"]
        self.turn = 0

    @property
    def is_over(self) -> bool:
        return not self._asked

    def next_messages(self) -> list[Message]:
        return [*self._history, self._asked[0]]

    def answered(self, text: str) -> None:
        self._history += [self._asked.popleft(), {"role": "assistant", "content": text}]
        self.turn += 1


def regenerate(
    dialogues: Iterable[Dialogue], core: EngineCore, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams, output: Path
) -> None:
    """Answer every turn of every dialogue with the target; rows that `output` already holds are not made again.

    Sampled answers are seeded by the dialogue's id, so that a resumed run writes what an uninterrupted one would have.
    """
    done: dict[str, list[Row]] = {}
    if output.exists():
        output.write_bytes(whole_lines(output))
        for row in read_rows(output):
            done.setdefault(row.id, []).append(row)
    conversations: deque[Conversation] = deque()
    for dialogue in dialogues:
        conversation = Conversation(dialogue)
        for row in sorted(done.get(dialogue.id, []), key=lambda row: row.turn):
            conversation.answered(row.text)
        if not conversation.is_over:
            conversations.append(conversation)

    running: dict[str, tuple[Conversation, list[int], list[int]]] = {}

    def start(conversation: Conversation) -> bool:
        """Put the next turn in line; False if it cannot be answered."""
        try:
            prompt = chat_tokens(tokenizer, conversation.next_messages())
            seed = zlib.crc32(f"{conversation.id}-{conversation.turn}".encode())
            core.submit(conversation.id, prompt, replace(sampling, seed=seed))
        except ValueError as error:
            print(f"{conversation.id} left out: {error}", file=sys.stderr)
            return False
        running[conversation.id] = (conversation, prompt, [])
        return True

    num_wanted = 2 * core.scheduler.limits.max_running
    with output.open("a") as stream, tqdm(total=len(conversations), desc="answers", unit="dialogue") as progress:
        while conversations or running:
            while conversations and len(running) < num_wanted:
                progress.update(not start(conversations.popleft()))
            for event in core.step():
                conversation, prompt, answer = running[event.request_id]
                answer += event.tokens
                if event.finish_reason is None:
                    continue
                del running[event.request_id]
                text = decode_tokens(tokenizer, answer)
                write_row(stream, Row(conversation.id, conversation.turn, prompt, answer, text))
                conversation.answered(text)
                progress.update(conversation.is_over or not start(conversation))

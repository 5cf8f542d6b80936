"""The dialogues that the built-in pair is trained on, as messages and as packed token rows."""

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from eagle_rt.models.tokenizer import chat_tokens

HELD_OUT_FRACTION = 0.02
SEED = 0

Message = dict[str, str]
Dialogue = list[Message]

# GSM8K answers carry calculator notes, "48/2 = <<48/2=24>>24", that no reader wants to see.
CALCULATOR_NOTE = re.compile(r"<<[^>]*>>")


def load_dialogues(data_dir: Path) -> list[Dialogue]:
    """Read GSM8K (`gsm8k_train.jsonl`) and the two GPTeacher sets (`roleplay.json`, `codegen.json`).

    Raises:
        FileNotFoundError: one of the three files is not in `data_dir`.
    """
    pairs: list[tuple[str, str]] = []
    with (data_dir / "gsm8k_train.jsonl").open() as lines:
        for record in map(json.loads, lines):
            pairs.append((record["question"], CALCULATOR_NOTE.sub("", record["answer"])))
    for name in ("roleplay.json", "codegen.json"):
        for record in json.loads((data_dir / name).read_text()):
            question = "\n".join(filter(None, (record["instruction"], record["input"])))
            pairs.append((question, record["response"]))
    return [
        [{"role": "user", "content": question.strip()}, {"role": "assistant", "content": answer.strip()}]
        for question, answer in pairs
        if question.strip() and answer.strip()
    ]


@dataclass(frozen=True)
class PackedText:
    """Dialogues laid end to end and cut into rows of equal length.

    tokens: [num_rows, row_length] int64; is_answer: the same shape, True where the assistant speaks.
    """

    tokens: Tensor
    is_answer: Tensor

    def batch(self, step: int, batch_size: int, seed: int) -> "PackedText":
        """The rows of training step `step`: a function of its arguments alone, so that a resumed run sees the same text."""
        steps_per_epoch = len(self.tokens) // batch_size
        epoch, index = divmod(step, steps_per_epoch)
        order = torch.randperm(len(self.tokens), generator=torch.Generator().manual_seed(seed + epoch))
        rows = order[index * batch_size : (index + 1) * batch_size]
        return PackedText(self.tokens[rows], self.is_answer[rows])


def encode_dialogue(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> tuple[list[int], list[bool]]:
    """Token ids of a dialogue in the chat template, and which of them the assistant says (its end marker included)."""
    tokens: list[int] = []
    is_answer: list[bool] = []
    for turn in range(1, len(dialogue) + 1):
        answering = dialogue[turn - 1]["role"] == "assistant"
        if answering:
            prompt = chat_tokens(tokenizer, dialogue[: turn - 1])
            is_answer += [False] * (len(prompt) - len(tokens))
        whole = chat_tokens(tokenizer, dialogue[:turn], add_generation_prompt=False)
        is_answer += [answering] * (len(whole) - len(is_answer))
        tokens = whole
    return tokens, is_answer


def pack(tokenizer: PreTrainedTokenizerFast, dialogues: list[Dialogue], row_length: int, seed: int) -> PackedText:
    """Shuffle, encode and concatenate the dialogues; the tail that fills no row is dropped."""
    shuffled = random.Random(seed).sample(dialogues, len(dialogues))
    tokens: list[int] = []
    is_answer: list[bool] = []
    for dialogue in shuffled:
        some_tokens, some_answers = encode_dialogue(tokenizer, dialogue)
        tokens += some_tokens
        is_answer += some_answers
    num_rows = len(tokens) // row_length
    end = num_rows * row_length
    return PackedText(
        torch.tensor(tokens[:end]).view(num_rows, row_length),
        torch.tensor(is_answer[:end]).view(num_rows, row_length),
    )


def held_out_split(dialogues: list[Dialogue], fraction: float, seed: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """(training, held out): a seeded random split."""
    shuffled = random.Random(seed).sample(dialogues, len(dialogues))
    num_held_out = round(len(shuffled) * fraction)
    return shuffled[num_held_out:], shuffled[:num_held_out]


def texts(dialogues: list[Dialogue]) -> Iterator[str]:
    """Every message's text, for training a tokenizer."""
    return (message["content"] for dialogue in dialogues for message in dialogue)


def main() -> None:
    """Write the training dialogues as JSON lines of `messages`, for `python -m eagle_rt.train prepare`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_train.jsonl, roleplay.json, codegen.json")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines")
    args = parser.parse_args()
    training, _ = held_out_split(load_dialogues(args.data), HELD_OUT_FRACTION, SEED)
    args.output.write_text("".join(json.dumps({"messages": dialogue}) + "\n" for dialogue in training))


if __name__ == "__main__":
    main()

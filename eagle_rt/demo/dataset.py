"""The dialogues that the built-in pair is trained on, as messages and as packed token rows."""

import argparse
import json
import random
import re
from collections.abc import Iterator
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


def pack(tokenizer: PreTrainedTokenizerFast, dialogues: list[Dialogue], row_length: int, seed: int) -> Tensor:
    """[num_rows, row_length] int64: the dialogues in the chat template, shuffled and laid end to end; the tail that fills no row is
    dropped."""
    shuffled = random.Random(seed).sample(dialogues, len(dialogues))
    tokens = [token for dialogue in shuffled for token in chat_tokens(tokenizer, dialogue, add_generation_prompt=False)]
    num_rows = len(tokens) // row_length
    return torch.tensor(tokens[: num_rows * row_length]).view(num_rows, row_length)


def batch_at(rows: Tensor, step: int, batch_size: int, seed: int) -> Tensor:
    """The rows of training step `step`: a function of its arguments alone, so that a resumed run sees the same text."""
    epoch, index = divmod(step, len(rows) // batch_size)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch))
    return rows[order[index * batch_size : (index + 1) * batch_size]]


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

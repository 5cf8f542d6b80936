"""Count a corpus and write token maps: `python -m eagle_rt.token_map.build --tokenizer T --text FILES --sizes 8192 16384 32768`.

A map is a list of the most frequent token ids, most frequent first, which drafting is then restricted to (FR-Spec; Zhao et al.,
2025, section 3). Count text like the one that will be served: what the target itself writes is best.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

LINES_A_BATCH = 512


def lines_of(files: list[Path], field: str, progress: "tqdm[Any]") -> Iterator[str]:
    """Every line of text files, and that field of every line of .jsonl files.

    Raises:
        ValueError: a line of a .jsonl file has no such field.
    """
    for file in files:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                progress.update(len(line))
                if file.suffix != ".jsonl":
                    yield line.decode(errors="replace")
                    continue
                try:
                    text = json.loads(line)[field]
                except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
                    raise ValueError(
                        f"line {number} of {file} has no field {field!r}: name the one with the text by --field"
                    ) from None
                yield str(text)


def count_tokens(tokenizer: PreTrainedTokenizerBase, lines: Iterator[str]) -> Tensor:
    """[V] int64, how often each token occurs; only a few lines are in memory at a time."""
    counts = torch.zeros(len(tokenizer), dtype=torch.int64)
    while batch := list(islice(lines, LINES_A_BATCH)):  # itertools.batched needs Python 3.12
        ids = [token for tokens in tokenizer(batch, add_special_tokens=False)["input_ids"] for token in tokens]
        counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=len(counts))
    return counts


def frequent_tokens(counts: Tensor, size: int, needed: list[int]) -> list[int]:
    """The `size` most frequent ids, ties in the order of ids; the last ones give way to those of `needed` that are missing.

    Raises:
        ValueError: the vocabulary is smaller than that.
    """
    if size > len(counts):
        raise ValueError(f"a map of {size} is larger than the tokenizer's vocabulary of {len(counts)}")
    ids = counts.sort(descending=True, stable=True).indices[:size].tolist()
    missing = [token for token in needed if token not in ids]
    return ids[: size - len(missing)] + missing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_rt.token_map.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True, help="folder or hub id")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="text files, or .jsonl files with a field of text")
    parser.add_argument("--field", default="text", help="of .jsonl files")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="tokens of each map")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for freq_SIZE.pt")
    args = parser.parse_args(arguments)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        num_bytes = sum(file.stat().st_size for file in args.text)
        with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="counting", disable=None) as progress:
            counts = count_tokens(tokenizer, lines_of(args.text, args.field, progress))
        args.output.mkdir(parents=True, exist_ok=True)
        needed = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        print(f"{int(counts.sum()):,} tokens, {int((counts > 0).sum()):,} different ones")
        for size in args.sizes:
            ids = frequent_tokens(counts, size, needed)
            file = args.output / f"freq_{size}.pt"
            torch.save(ids, file)
            print(f"{file}: covers {counts[ids].sum() / max(1, int(counts.sum())):.2%} of them")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

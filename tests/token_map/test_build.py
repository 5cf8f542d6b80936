"""Counting a corpus: against a plain counter."""

import json
from collections import Counter
from pathlib import Path

import checkpoints
import pytest
import torch

from eagle_rt.token_map import build

TOKENIZER = checkpoints.byte_tokenizer()
LINES = ["hello there\n", "über allem\n", "zzz zzz\n"] * 400


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def run(tokenizer_dir: Path, text: list[Path], output: Path, *flags: str) -> int:
    return build.main(["--tokenizer", str(tokenizer_dir), "--text", *map(str, text), "--output", str(output), *flags])


def test_maps_are_the_most_frequent_tokens(tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("".join(LINES))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": "zebra", "id": 1}) + "\n" for _ in range(700)))
    assert run(tokenizer_dir, [tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "maps", "--sizes", "4", "12") == 0

    counter = Counter(token for line in [*LINES, *["zebra"] * 700] for token in TOKENIZER(line)["input_ids"])
    ranked = sorted(counter, key=lambda token: (-counter[token], token))
    for size in (4, 12):
        ids = torch.load(tmp_path / "maps" / f"freq_{size}.pt", weights_only=True)
        assert ids == [*ranked[: size - 1], TOKENIZER.eos_token_id]
        covered = sum(counter[token] for token in ids) / counter.total()
        assert f"freq_{size}.pt: covers {covered:.2%}" in capsys.readouterr().out if size == 12 else True


def test_the_end_token_keeps_its_place_if_it_is_frequent() -> None:
    counts = torch.tensor([5, 1, 9, 9])
    assert build.frequent_tokens(counts, 3, [0]) == [2, 3, 0]
    assert build.frequent_tokens(counts, 2, [2]) == [2, 3]
    assert build.frequent_tokens(counts, 2, [1]) == [2, 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sizes", "9999"], "larger than the tokenizer's vocabulary of 262"),
        (["--sizes", "4", "--field", "words"], "line 1 of"),
    ],
)
def test_what_cannot_be_counted_says_why(
    tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "zebra"}) + "\n")
    assert run(tokenizer_dir, [tmp_path / "b.jsonl"], tmp_path / "maps", *flags) == 1
    assert message in capsys.readouterr().err
    assert run(tokenizer_dir, [tmp_path / "none.txt"], tmp_path / "maps", "--sizes", "4") == 1

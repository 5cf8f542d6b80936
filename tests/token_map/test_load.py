"""Token maps from files of every kind, and from files that are none."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle_rt.token_map.load import load_token_map, with_tokens

IDS = [5, 3, 9, 0]


class Malice:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("a pickle ran code",)


def write(file: Path, content: object) -> Path:
    if file.suffix == ".json":
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    elif file.suffix == ".safetensors":
        save_file({"ids": torch.tensor(content)}, file)
    else:
        torch.save(content, file)
    return file


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("freq_4.pt", IDS),
        ("freq_4.pt", torch.tensor(IDS)),
        ("freq_4.pt", torch.tensor(IDS, dtype=torch.int32)),
        ("map.json", IDS),
        ("map.safetensors", IDS),
    ],
)
def test_every_form_keeps_its_order(tmp_path: Path, name: str, content: object) -> None:
    ids = load_token_map(str(write(tmp_path / name, content)), 10)
    assert ids.tolist() == IDS
    assert ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pt", [5, 10], "target id 10, but the target has only ids below 10"),
        ("a.pt", [5, -1], "target id -1"),
        ("a.pt", [5, 3, 5], "target id 5 twice"),
        ("a.pt", [], "one list of token ids"),
        ("a.pt", [0.5, 1.5], "one list of token ids"),
        ("a.pt", {"ids": IDS}, "one list of token ids"),
        ("a.pt", [IDS, IDS], "one list of token ids"),
        ("a.pt", torch.tensor([True, False]), "one list of token ids"),
        ("a.json", ["a", "b"], "one list of token ids"),
        ("a.json", "[1, 2", "damaged"),
    ],
)
def test_what_is_no_map_is_refused(tmp_path: Path, name: str, content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_token_map(str(write(tmp_path / name, content)), 10)


def test_a_pickle_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, save in (("a.pt", torch.save), ("b.pt", lambda value, file: file.write_bytes(pickle.dumps(value)))):
        save(Malice(), tmp_path / name)
        with pytest.raises(ValueError, match="not a plain file"):
            load_token_map(str(tmp_path / name), 10)
    assert "ran code" not in capsys.readouterr().out


def test_a_missing_file_says_what_may_be_given() -> None:
    with pytest.raises(FileNotFoundError, match="owner/repository/file"):
        load_token_map("./nowhere.pt", 10)


def test_needed_tokens_come_last_and_once() -> None:
    assert with_tokens(torch.tensor(IDS), frozenset({9, 7, 8})).tolist() == [5, 3, 9, 0, 7, 8]

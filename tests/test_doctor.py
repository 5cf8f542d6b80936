"""The doctor on the built-in pair and on heads that were spoiled in the ways that heads are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_rt import doctor

Spoil = Callable[[dict[str, Tensor], dict[str, object]], None]


def shifted_layers(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}


def swapped_order(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        tensors[name] = tensors[name].roll(256, dims=1)


def wrong_rope(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    config["rope_theta"] = 1000000.0


def random_weights(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.05


def another_targets(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    """Made for a target whose hidden states are laid out otherwise."""
    order = torch.randperm(768, generator=torch.Generator().manual_seed(0))
    tensors["fc.weight"] = tensors["fc.weight"][:, order].contiguous()


def examine(head_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = doctor.main(["--device", "cpu", "--seconds", "0", "--speculative-draft-model-path", str(head_dir)])
    captured = capsys.readouterr()
    return code, " ".join((captured.out + captured.err).split())


def test_the_built_in_head_fits(built_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = examine(built_in / "eagle3", capsys)
    assert code == 0
    assert "FITS" in report
    assert "DOES NOT FIT" not in report
    assert "steps that kept a draft at depth" in report
    assert "Recommended here" in report or "No tree is faster" in report


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (shifted_layers, "set --speculative-aux-layers 2 4 5"),
        (swapped_order, "with hidden state before the embedding"),
        (wrong_rope, "set rope_theta to 10000"),
        (random_weights, "made for another target, or its weights are damaged"),
        (another_targets, "made for another target, or its weights are damaged"),
    ],
)
def test_a_spoiled_head_does_not_fit(
    built_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Spoil, finding: str
) -> None:
    copy = Path(shutil.copytree(built_in / "eagle3", tmp_path / "head"))
    tensors, config = load_file(copy / "model.safetensors"), json.loads((copy / "config.json").read_text())
    spoil(tensors, config)
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(config))
    code, report = examine(copy, capsys)
    assert code == 1
    assert "DOES NOT FIT" in report
    assert finding in report


def test_a_head_that_cannot_be_loaded_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = examine(tmp_path, capsys)
    assert code == 1
    assert report.startswith("error: ")


def test_without_a_head_there_is_nothing_to_examine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--device", "cpu", "--speculative-algorithm", "NGRAM"]) == 1
    assert "--speculative-algorithm is NGRAM, but must be one with a head" in capsys.readouterr().err

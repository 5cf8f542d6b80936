"""Heads that cannot be loaded say what is wrong and where, before anything is served."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import load_target, make_core
from head_layouts import write_head
from safetensors.torch import load_file, save_file

from eagle_rt.models.decoder import Decoder
from eagle_rt.models.heads.load import load_head


class Malice:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("a pickle ran code",)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Decoder:
    return load_target(target_dir)


@pytest.fixture
def head(target_dir: Path, tmp_path: Path) -> Path:
    """A SpecForge-like head that the test may damage."""
    return write_head("eagle3-specforge", tmp_path / "head", target_dir).directory


def load(head_dir: Path, target: Decoder, algorithm: str = "EAGLE3") -> list[str]:
    return load_head(head_dir, target, algorithm, torch.float32, "cpu")[1]


def change_config(head_dir: Path, changes: dict[str, Any]) -> None:
    file = head_dir / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))


def change_tensors(head_dir: Path, **changes: torch.Tensor | None) -> None:
    file = head_dir / "model.safetensors"
    tensors = {**load_file(file), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden_size is 128 and the target's 64"),
        ({"hidden_size": "absent"}, "config.json has no hidden_size"),
        ({"vocab_size": 999}, "vocab_size is 999 and the target's 262"),
        ({"target_hidden_size": 96}, "target of hidden_size 96, and the target's is 64"),
        ({"draft_vocab_size": 100}, r"d2t .* has shape \[160\]"),
        ({"intermediate_size": 97}, r"midlayer\.mlp\.gate_proj\.weight .* has shape \[96, 64\]"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 of the head is not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 90]}}, "features of layer 90"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}, r"fc\.weight .* has shape \[64, 192\]"),
        ({"num_aux_hidden_states": 5}, "asks for 5 layers' features"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(head: Path, target: Decoder, changes: dict[str, Any], message: str) -> None:
    change_config(head, changes)
    with pytest.raises(ValueError, match=message):
        load(head, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc__weight": None}, "tensor fc.weight is missing"),
        ({"midlayer__hidden_norm__weight": None}, "holds a head of kind EAGLE: use --speculative-algorithm EAGLE"),
        ({"midlayer__mlp__up_proj__weight": None}, "tensor layers.0.mlp.up_proj.weight is missing"),
        ({"lm_head__weight": None}, "tensor lm_head.weight is missing"),
        ({"d2t": None}, "no d2t tensor"),
        ({"d2t": torch.full((160,), 200)}, "the target has only ids below 262"),
        ({"d2t": -torch.arange(160)}, "target id 0 twice"),
        ({"layers__0__hidden_norm__weight": torch.ones(64)}, "mean the same tensor"),
        ({"fc__weight": None, "midlayer__hidden_norm__weight": None}, "holds no EAGLE head"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else value,
)
def test_tensors_that_do_not_fit(head: Path, target: Decoder, changes: dict[str, torch.Tensor | None], message: str) -> None:
    change_tensors(head, **changes)
    with pytest.raises(ValueError, match=message):
        load(head, target)


def test_unexpected_tensors_are_named(head: Path, target: Decoder) -> None:
    change_tensors(head, surprise__weight=torch.zeros(1))
    assert load(head, target) == ["surprise.weight"]


def test_another_kind_of_head_is_told_by_name(head: Path, target: Decoder, target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds a head of kind EAGLE3: use --speculative-algorithm EAGLE3, not NEXTN"):
        load(head, target, "NEXTN")
    eagle = write_head("eagle-llama3", tmp_path / "eagle", target_dir).directory
    with pytest.raises(ValueError, match="use --speculative-algorithm EAGLE, not EAGLE3"):
        load(eagle, target)


def test_files_that_are_no_checkpoint(head: Path, target: Decoder, tmp_path: Path) -> None:
    weights = head / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged or only partly downloaded"):
        load(head, target)
    weights.write_bytes(b"hello")
    with pytest.raises(ValueError, match="damaged or only partly downloaded"):
        load(head, target)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="holds neither"):
        load(head, target)
    torch.save({"fc.weight": Malice()}, head / "pytorch_model.bin")
    with pytest.raises(ValueError, match="not a plain file of tensors"):
        load(head, target)


def test_flags_that_do_not_fit(target_dir: Path, head: Path, tmp_path: Path) -> None:
    eagle = write_head("eagle-llama3", tmp_path / "eagle", target_dir).directory
    empty = tmp_path / "map.json"
    empty.write_text("[300]")
    tree = (2, 2, 4)
    with pytest.raises(ValueError, match="names 2 layers, but this EAGLE3 head takes the features of 3"):
        make_core(target_dir, head, tree, speculative_aux_layers=(1, 2))
    with pytest.raises(ValueError, match="features of layer 9"):
        make_core(target_dir, head, tree, speculative_aux_layers=(1, 2, 9))
    with pytest.raises(ValueError, match="this EAGLE head takes the features of 1"):
        make_core(target_dir, eagle, tree, speculative_algorithm="EAGLE", speculative_aux_layers=(1, 2, 3))
    with pytest.raises(ValueError, match="target id 300"):
        make_core(target_dir, head, tree, speculative_token_map=str(empty))
    with pytest.raises(ValueError, match="has no multi-token-prediction layers of its own"):
        make_core(target_dir, None, tree, speculative_algorithm="NEXTN", speculative_draft_model_path=None)
    shutil.rmtree(head)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        make_core(target_dir, head, tree)

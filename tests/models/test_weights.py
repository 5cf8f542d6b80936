"""Checkpoints that are not what they should be."""

import json
import pickle
import shutil
import weakref
from pathlib import Path

import checkpoints
import pytest
import torch
from engines import load_target
from safetensors.torch import load_file, save_file

from eagle_rt.models import weights
from eagle_rt.models.weights import MemoryCheckpoint, checkpoint_dir


@pytest.fixture
def copy(target_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target_dir, tmp_path / "copy"))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    checkpoints.write_target(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        load_target(tmp_path)


def test_a_truncated_file_is_named(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_target(copy)


def test_a_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds neither"):
        load_target(copy)


def test_a_missing_and_a_misshapen_tensor_are_named(copy: Path) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.3.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, file)
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp\.down_proj\.weight .* has shape \[64, 95\]"):
        load_target(copy)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp\.down_proj\.weight is missing"):
        load_target(copy)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('the pickle ran')",)


def test_a_pickle_that_wants_to_run_code_does_not_run(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Trap()}))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        load_target(copy)


def test_unsupported_models_are_named(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    for change, message in (
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported are LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized by hqq"),
    ):
        (copy / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=message):
            load_target(copy)


def test_hub_ids_are_fetched_at_their_revision(monkeypatch: pytest.MonkeyPatch, target_dir: Path) -> None:
    calls = []

    def snapshot_download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repo, revision))
        if repo == "org/missing":
            raise OSError("no connection")
        return str(target_dir)

    monkeypatch.setattr(weights, "snapshot_download", snapshot_download)
    assert checkpoint_dir("org/model", "v2") == target_dir
    assert calls == [("org/model", "v2")]
    with pytest.raises(FileNotFoundError, match="org/missing is neither a folder here nor a hub id"):
        checkpoint_dir("org/missing")


def test_paths_that_lead_nowhere() -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/folder does not exist"):
        checkpoint_dir("/no/such/folder")
    with pytest.raises(FileNotFoundError, match="gpt17"):
        checkpoint_dir("gpt17")


def test_tensors_that_are_made_are_let_go_of_as_they_are_taken() -> None:
    """A model of many experts would not fit beside them."""
    made = torch.ones(2)
    there = weakref.ref(made)
    checkpoint = MemoryCheckpoint([("a.weight", made), ("b.weight", torch.ones(3))], torch.float32, "cpu", "made")
    del made
    taken = checkpoint.take("a.weight", (2,))
    assert taken.tolist() == [1, 1]
    del taken
    assert there() is None
    assert "a.weight" in checkpoint
    assert checkpoint.finish() == ["b.weight"]

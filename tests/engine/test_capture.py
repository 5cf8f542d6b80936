"""Which steps are captured, the room that they take, and what is said where that fails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_config

from eagle_rt.engine.build import build_core
from eagle_rt.engine.capture import ATTENTION_PARTS_BYTES, capture_steps, graph_batch_sizes, graph_bytes
from eagle_rt.engine.graphs import StepGraphs, default_batch_sizes
from eagle_rt.engine.load import model_info, require_room
from eagle_rt.kernels.delta_net import DeltaNetShape
from eagle_rt.kernels.experts import Mixing
from eagle_rt.models.layer_kinds import ExpertShape
from eagle_rt.models.spec import model_spec, read_config
from eagle_rt.tree_shape import TreeShape


def test_capturing_that_fails_is_said_or_refused(target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("out of graphs\nand much more")

    monkeypatch.setattr(StepGraphs, "__init__", fail)
    config = make_config(target_dir, head_dir, (2, 2, 4), attention_backend="triton", strict=True)
    core, _ = build_core(config, model_info(config))
    with pytest.raises(ValueError, match=r"capturing CUDA graphs failed, and --strict was given: out of graphs$"):
        capture_steps(core, config)
    config = make_config(target_dir, head_dir, (2, 2, 4), attention_backend="triton")
    assert capture_steps(core, config) == ["WARNING: capturing CUDA graphs failed, steps run eagerly: out of graphs"]
    assert core.runner.graphs is None


def test_batch_sizes(target_dir: Path) -> None:
    assert default_batch_sizes(1) == [1]
    assert default_batch_sizes(8) == [1, 2, 4, 8]
    assert default_batch_sizes(6) == [1, 2, 4, 6]
    assert graph_batch_sizes(make_config(target_dir, cuda_graph_bs=(9, 3), max_running_requests=5)) == [3, 5]
    assert graph_batch_sizes(make_config(target_dir, max_running_requests=2)) == [1, 2]
    with pytest.raises(ValueError, match="--cuda-graph-bs is 0"):
        make_config(target_dir, cuda_graph_bs=(0, 2))


def test_the_cache_leaves_room_for_the_graphs(target_dir: Path) -> None:
    spec = model_spec(read_config(target_dir))
    tree = TreeShape(3, 2, 8)
    config = replace(make_config(target_dir, attention_backend="triton", cuda_graph_max_bs=4), device="cuda")
    small = graph_bytes(replace(config, cuda_graph_bs=(1,)), spec, tree, torch.float16)
    assert small > 2 * 8 * spec.vocab_size * 6
    assert graph_bytes(config, spec, tree, torch.float16) - ATTENTION_PARTS_BYTES == 4 * (small - ATTENTION_PARTS_BYTES)
    # Each expert that a row takes has its own activations, a shared one too.
    taken = [replace(spec, experts=(ExpertShape(9, 512, Mixing(2, True, num_shared=own)),) * spec.num_layers) for own in (0, 1, 2)]
    none, one, two = (graph_bytes(config, own, tree, torch.float16) for own in taken)
    assert two - one == one - none == 4 * 8 * (4 * 512 + spec.shape.hidden_size) * 2
    # Where layers have memories, their inputs are noted, and in one of them channels, changes and what is found are in float32.
    net = DeltaNetShape(num_key_heads=2, num_heads=4, key_dim=16, value_dim=32, taps=4)
    noted = graph_bytes(config, replace(spec, delta_nets=(net, net, None)), tree, torch.float16) - graph_bytes(
        config, spec, tree, torch.float16
    )
    assert noted == 4 * 8 * (2 * 2 * (64 + 128 + 128 + 8) + 4 * (64 + 128 + 3 * 128))
    for without in (
        replace(config, disable_cuda_graph=True),
        replace(config, device="cpu"),
        replace(config, attention_backend="torch"),
    ):
        assert graph_bytes(without, spec, tree, torch.float16) == 0


def test_a_gpu_too_small_for_the_target_is_named(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model_spec(read_config(target_dir))
    needed = sum(file.stat().st_size for file in target_dir.glob("*.safetensors"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed // 2, 2**30))
    with pytest.raises(ValueError, match=r"GiB in float32, and the GPU has 0\.0 of its 1\.0 GiB free"):
        require_room(spec, torch.float32, "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * needed, 2**30))
    require_room(spec, torch.float32, "cuda")
    require_room(spec, torch.float32, "cpu")

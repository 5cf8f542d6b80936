import argparse
import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch

import bench_speculative
import launch_server
from eagle_rt.config import EngineConfig
from eagle_rt.resolve import resolve_device, resolve_tree, unused_options
from eagle_rt.tree_shape import TreeShape, num_tree_nodes


def parse(command: str) -> EngineConfig:
    from eagle_rt.config import config_from_args

    return config_from_args(launch_server.parser().parse_args(shlex.split(command)))


def test_the_published_command_parses() -> None:
    config = parse(
        "--model-path M --speculative-algorithm EAGLE3 --speculative-draft-model-path H --speculative-num-steps 5 "
        "--speculative-eagle-topk 8 --speculative-num-draft-tokens 32 --mem-fraction 0.6 --cuda-graph-max-bs 2 --dtype float16 "
        "--log-level warning"
    )
    assert (config.model_path, config.mem_fraction_static, config.dtype) == ("M", 0.6, "float16")
    assert resolve_tree(config, "cpu")[0] == TreeShape(5, 8, 32)
    assert any("CUDA graphs" in line for line in unused_options(config))


def test_adaptive_trees_say_that_they_have_no_use_for_a_sharpness() -> None:
    command = "--speculative-algorithm EAGLE3 --speculative-score-sharpness 1 --device cpu --speculative-tree"
    assert any("--speculative-score-sharpness" in line for line in unused_options(parse(f"{command} adaptive")))
    assert not unused_options(parse(f"{command} fixed"))


def test_every_other_flag_of_the_same_family_parses() -> None:
    config = parse(
        "--model M --host 0.0.0.0 --port 1 --enable-torch-compile --torch-compile-max-bs 2 --speculative-token-map x "
        "--trust-remote-code --max-running-requests 3 --api-key k --served-model-name n --context-length 9 "
        "--attention-backend auto --random-seed 4 --max-total-tokens 5 --chunked-prefill-size 6 --disable-radix-cache"
    )
    assert (config.model_path, config.context_length, config.max_running_requests, config.random_seed) == ("M", 9, 3, 4)
    assert config.disable_radix_cache
    assert config.trust_remote_code


def test_flags_and_keywords_share_their_defaults() -> None:
    assert parse("") == EngineConfig()


def tree(algorithm: str | None = "EAGLE3", **given: int) -> EngineConfig:
    return EngineConfig(speculative_algorithm=algorithm, **{f"speculative_{name}": value for name, value in given.items()})


def test_a_chain_has_steps_plus_one_tokens() -> None:
    shape, notes = resolve_tree(tree(num_steps=3, eagle_topk=1, num_draft_tokens=9), "cpu")
    assert shape == TreeShape(3, 1, 4)
    assert any("becomes 4" in note for note in notes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_not_given_is_decided_and_said(device: str) -> None:
    shape, notes = resolve_tree(tree(), device)
    assert shape.num_draft_tokens <= num_tree_nodes(shape.num_steps, shape.top_k)
    assert any(str(shape) in note for note in notes)
    assert resolve_tree(tree(num_steps=1, eagle_topk=2), device)[0].num_draft_tokens <= 3


@pytest.mark.parametrize(
    ("device", "prefill_delay", "waits"),
    [("cpu", "auto", False), ("cuda", "auto", True), ("cpu", "on", True), ("cuda", "off", False)],
)
def test_where_prompts_wait_for_each_other(device: str, prefill_delay: str, waits: bool) -> None:
    assert EngineConfig(device=device, prefill_delay=prefill_delay).delays_prefill == waits
    with pytest.raises(ValueError, match="--prefill-delay is never, but must be one of auto, on, off"):
        EngineConfig(prefill_delay="never")


@pytest.mark.parametrize(
    ("capability", "options", "attention", "is_adaptive"),
    [
        ((9, 0), {}, "triton", True),
        ((7, 5), {}, "torch", False),
        ((9, 0), {"attention_backend": "flashinfer"}, "flashinfer", False),
        ((9, 0), {"disable_cuda_graph": True}, "triton", False),
        ((9, 0), {"disable_cuda_graph": True, "speculative_tree": "adaptive"}, "triton", True),
        ((9, 0), {"speculative_tree": "fixed"}, "triton", False),
    ],
)
def test_what_serves_on_a_gpu(
    capability: tuple[int, int], options: dict[str, Any], attention: str, is_adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = resolve_device(EngineConfig(speculative_algorithm="EAGLE3", **options))
    assert (config.device, config.attention_backend, config.sizes_trees) == ("cuda", attention, is_adaptive)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tree(num_steps=2, eagle_topk=2, num_draft_tokens=8), r"can supply \(7, the root included\)"),
        (tree(num_steps=0), "speculative-num-steps is 0"),
        (tree(eagle_topk=0), "speculative-eagle-topk is 0"),
        (tree(num_steps=2, eagle_topk=2, num_draft_tokens=1), "speculative-num-draft-tokens is 1"),
        (tree(None, num_steps=2), "need --speculative-algorithm"),
    ],
)
def test_trees_that_cannot_be(config: EngineConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_tree(config, "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "--page-size is 0"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static is 1.5"),
        ({"dtype": "int4"}, "--dtype is int4"),
        ({"speculative_algorithm": "MEDUSA"}, "--speculative-algorithm is MEDUSA"),
    ],
)
def test_values_out_of_range(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize("parser", [launch_server.parser(), bench_speculative.parser()], ids=["server", "bench"])
def test_help_says_what_every_flag_does(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        assert action.help, action.dest
    assert "--speculative-num-draft-tokens" in parser.format_help()


def test_as_many_processes_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    alone, together = (resolve_device(EngineConfig(tensor_parallel_size=size)) for size in (1, 2))
    assert alone.captures_steps
    assert not together.captures_steps
    asked = replace(together, cuda_graph_max_bs=4)
    assert any("not captured with --tensor-parallel-size" in line for line in unused_options(asked))
    assert not unused_options(replace(asked, tensor_parallel_size=1))
    with pytest.raises(ValueError, match="--tensor-parallel-size is 4, but must be at most 2, the number of GPUs"):
        resolve_device(EngineConfig(tensor_parallel_size=4))

"""Engines of several processes beside engines of one."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from engines import Tree, make_config, make_core, random_prompts, run

from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.config import EngineConfig
from eagle_rt.engine.assemble import cache_bytes
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.engine import Engine
from eagle_rt.engine.load import load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.reading import read_texts
from eagle_rt.parallel.group import DropPool
from eagle_rt.parallel.lead import LeadingDecoder
from eagle_rt.speculate.triton_operations import TritonOperations

PROMPTS = random_prompts(4)
SAMPLINGS = [SamplingParams(temperature=number % 2, max_new_tokens=12, seed=number, ignore_eos=True) for number in range(4)]


@pytest.fixture
def make_two() -> Iterator[Any]:
    """Engines of two processes, closed at the end."""
    made: list[EngineCore] = []

    def make(*args: Any, **options: Any) -> EngineCore:
        made.append(make_core(*args, tensor_parallel_size=2, **options))
        return made[-1]

    yield make
    for core in made:
        core.close()


def followers_of(core: EngineCore) -> Any:
    target = core.runner.stepper.target
    assert isinstance(target, LeadingDecoder)
    return target._followers


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (None, {}),
        ((3, 2, 8), {"chunked_prefill_size": 32}),
        ((3, 2, 8), {"speculative_tree": "adaptive", "max_total_tokens": 256}),
        ((2, 2, 5), {"attention_backend": "triton"}),
        (None, {"speculative_algorithm": "NGRAM"}),
    ],
)
def test_texts_are_those_of_one_process(
    target_dir: Path, head_dir: Path, make_two: Any, tree: Tree | None, options: dict[str, Any]
) -> None:
    """Plain, drafted as the device and as the host steps, with prompts in chunks, cut-off requests and Triton's masks."""
    alone, together = make_core(target_dir, head_dir, tree, **options), make_two(target_dir, head_dir, tree, **options)
    assert run(together, PROMPTS, SAMPLINGS) == run(alone, PROMPTS, SAMPLINGS)
    assert run(together, PROMPTS[:1], SAMPLINGS[0]) == run(alone, PROMPTS[:1], SAMPLINGS[0])
    if tree or options:
        assert together.metrics.num_draft_tokens > 0


def test_a_head_drafts_with_the_output_layer_of_all(tmp_path: Path) -> None:
    """Of the built-in pair, whose EAGLE-2 head has none of its own: whole, rounded to eight bits, or only some tokens of it."""
    prompt = list(range(20, 60))
    greedy = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    kept = tmp_path / "kept.json"
    kept.write_text(str(list(range(300))))
    config = {"dtype": "float32", "device": "cpu", "max_total_tokens": 4096, "speculative_fit_check": "off"}
    tree = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8}
    for options in ({}, {"speculative_draft_model_quantization": "none", "speculative_token_map": str(kept)}):
        found = []
        for size in (1, 2):
            more: dict[str, Any] = config | tree | options
            with Engine(speculative_algorithm="EAGLE", speculative_tree="fixed", tensor_parallel_size=size, **more) as engine:
                reply = engine.generate(input_ids=prompt, sampling_params=greedy)
                found.append((reply["output_ids"], reply["meta_info"]["spec_accept_length"]))
        assert found[0] == found[1]


def test_weights_of_eight_bits(target_dir: Path, make_two: Any) -> None:
    """Outputs of the output layer are rounded each by itself; inputs in parts are others than whole, but by little."""
    alone, together = make_core(target_dir, quantization="int8"), make_two(target_dir, quantization="int8")
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = alone.runner.stepper.target.logits(hidden)
        assert torch.equal(together.runner.stepper.target.logits(hidden), expected)
        own, other = (read_texts(core.runner.stepper.target, PROMPTS, ()).hidden for core in (alone, together))
    assert 0 < (own - other).norm() < 0.1 * own.norm()
    assert all(len(reply) == 12 for reply in run(together, PROMPTS, SAMPLINGS))


def test_caches_are_dropped(target_dir: Path, make_two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_two(target_dir)
    target, told = core.runner.stepper.target, []
    with monkeypatch.context() as patch:
        tell = followers_of(core).tell
        patch.setattr(followers_of(core), "tell", lambda command: (told.append(command), tell(command)))
        for _ in range(2):
            pool = target.make_pool(4, 0)
            pool.move(torch.tensor([0]), torch.tensor([1]))
            number = pool.number
            del pool
            assert told[-1] == DropPool(number)
    assert run(core, PROMPTS[:1], SAMPLINGS[0]), "the cache that serves is another"


def test_triton_keeps_rows_of_all() -> None:
    """Not by the kernel, which the others would not hear of, but with what it does."""
    moved, whole, part = (
        [],
        KVPool([RowShape(1, 16)] * 2, 8, torch.float32, "cpu"),
        KVPool([RowShape(1, 16)] * 2, 8, torch.float32, "cpu"),
    )
    whole.storage.normal_()
    part.storage.copy_(whole.storage)
    part.is_part, move = True, part.move
    part.move = lambda sources, destinations: (moved.append(len(sources)), move(sources, destinations))
    slots, path = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]), torch.tensor([[0, 2, 3], [0, 3, -1]])
    for pool in (whole, part):
        TritonOperations(1.0).keep(pool, slots, path)
    assert moved == [6]
    assert torch.equal(part.storage[:, [0, 1, 2, 4, 5]], whole.storage[:, [0, 1, 2, 4, 5]])


def test_a_process_that_ends_is_told_of(target_dir: Path, make_two: Any) -> None:
    core = make_two(target_dir)
    (process,) = followers_of(core)._processes
    core.submit("lost", PROMPTS[0], SAMPLINGS[0])
    core.step()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(RuntimeError, match="process 1 of the model's has ended"):
        core.step()


def test_the_others_end_with_the_engine(target_dir: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        core = make_core(target_dir, tensor_parallel_size=2)
        (process,) = followers_of(core)._processes
        assert process.poll() is None
        assert torch.get_num_threads() == 2
        core.close()
        assert process.poll() == 0
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
    assert not torch.distributed.is_initialized()


def test_what_one_cannot_load_ends_all(target_dir: Path, tmp_path: Path) -> None:
    """A head that does not fit, or a cache that holds nothing, is found out when the others have loaded their parts already."""
    head_dir = checkpoints.write_eagle3_head(tmp_path, num_attention_heads=3)
    config = make_config(target_dir, head_dir, (3, 2, 8), tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"but config\.json implies"):
        load_models(config, model_info(config))
    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="the cache would hold 4 tokens"):
        make_core(target_dir, tensor_parallel_size=2, max_total_tokens=4)
    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="--tensor-parallel-size 3 does not divide the model's 4 attention heads"):
        make_core(target_dir, tensor_parallel_size=3)


def test_processes_share_the_memory_of_a_cpu() -> None:
    alone, together = (EngineConfig(device="cpu", tensor_parallel_size=size) for size in (1, 4))
    assert cache_bytes(together) == cache_bytes(alone) // 4


def test_one_group_a_process(target_dir: Path, make_two: Any) -> None:
    make_two(target_dir)
    with pytest.raises(ValueError, match=r"in a torch.distributed group already; use another process"):
        make_core(target_dir, tensor_parallel_size=2)
    assert torch.distributed.is_initialized(), "the other engine's"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is 0, but must be at least 1"),
        ({"tensor_parallel_size": 2, "enable_torch_compile": True}, "must be 1, since --enable-torch-compile"),
    ],
)
def test_what_cannot_be_asked_for(target_dir: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        make_config(target_dir, **options)

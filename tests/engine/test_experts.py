"""Engines whose target has experts: all that holds for others holds for them."""

from dataclasses import replace
from pathlib import Path

import checkpoints
import family_configs
import pytest
import torch
from captured import SETTINGS, make_captured
from engine.test_capturable import HostReadError, captured_callable, watching
from engines import Tree, make_config, make_core, random_prompts, run

from eagle_rt.engine.build import build_core
from eagle_rt.engine.load import model_info, num_weights, require_room
from eagle_rt.engine.params import SamplingParams
from eagle_rt.kernels import dispatch
from eagle_rt.models.spec import model_spec, read_config

PROMPTS = random_prompts(4, seed=8, longest=24)


@pytest.fixture(scope="module", params=checkpoints.WITH_EXPERTS)
def experts_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_target(tmp_path_factory.mktemp("experts"), request.param)


@pytest.fixture(scope="module")
def one_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_target(tmp_path_factory.mktemp("experts"), "qwen3-moe")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_trees_change_no_text(experts_dir: Path, head_dir: Path, kind: str, dtype: str) -> None:
    settings = [SamplingParams(temperature=index % 2, seed=index, max_new_tokens=24, ignore_eos=True) for index in range(4)]
    plain = run(make_core(experts_dir, dtype=dtype), PROMPTS, settings)
    assert run(make_core(experts_dir, head_dir, (4, 3, 12), speculative_tree=kind, dtype=dtype), PROMPTS, settings) == plain


@pytest.mark.usefixtures("on_gpu_kernels")
@pytest.mark.parametrize(
    ("name", "tree"),
    [("qwen3-moe", None), *((name, (2, 2, 4)) for name in ("qwen3-moe", "minimax-m2", "llama4", "gemma4-moe"))],
    ids=str,
)
def test_captured_steps_write_the_same_texts(
    tmp_path: Path, head_dir: Path, name: str, tree: Tree | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_dir = checkpoints.write_target(tmp_path, name)
    core = make_captured(one_dir, head_dir, tree, (2,))
    texts = run(core, PROMPTS[:2], SETTINGS[1:])
    assert "step" in core.runner.clock.seconds
    monkeypatch.undo()
    assert texts == run(make_core(one_dir), PROMPTS[:2], SETTINGS[1:])


@pytest.mark.usefixtures("on_gpu_kernels")
def test_what_is_captured_never_reads_a_tensor(one_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_captured(one_dir, head_dir, (3, 2, 6), (2,))
    step = captured_callable(core.runner.graphs.find(2, core.runner.tree_shape))
    with watching(monkeypatch):
        step()
    monkeypatch.setattr(dispatch, "prefers_triton", lambda x: False)
    with pytest.raises(HostReadError), watching(monkeypatch):
        step()  # the twin looks which experts are taken


def test_compiled_is_eager(one_dir: Path, head_dir: Path) -> None:
    settings = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    config = make_config(one_dir, head_dir, (3, 2, 8), enable_torch_compile=True, torch_compile_max_bs=2)
    core, notes = build_core(config, model_info(config))
    assert any(note.startswith("compiled in") for note in notes), notes
    assert not any("failed" in note for note in notes), notes
    assert run(core, PROMPTS, settings) == run(make_core(one_dir, head_dir, (3, 2, 8)), PROMPTS, settings)


def test_what_is_held_and_what_a_token_reads(one_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model_spec(read_config(one_dir))
    layer_attention = 64 * 32 * (2 * 4 + 2 * 2)
    outside = 8 * layer_attention + 64 * family_configs.VOCAB_SIZE
    assert num_weights(spec) == outside + 8 * (64 * 12 + 4 * 3 * 64 * 32)
    held = outside + 8 * (64 * 12 + 12 * 3 * 64 * 32) + 64 * family_configs.VOCAB_SIZE
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * held, 2**30))
    require_room(spec, torch.float32, "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * held - 1, 2**30))
    with pytest.raises(ValueError, match=r"the target's weights take 0\.0 GiB in float32, and the GPU has"):
        require_room(spec, torch.float32, "cuda")
    # Embeddings stay as they are, an output layer has eight bits at least, and each group of four-bit weights some more.
    embeddings = 64 * family_configs.VOCAB_SIZE
    layers = held - 2 * embeddings
    for quantization, num_bytes in (("int8", layers + embeddings), ("int4", layers * 5 // 8 + embeddings)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda num_bytes=num_bytes: (num_bytes + 4 * embeddings, 2**30))
        for own in (spec, replace(spec, tie_word_embeddings=True)):
            require_room(own, torch.float32, "cuda", 1, quantization)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda num_bytes=num_bytes: (num_bytes + 4 * embeddings - 1, 2**30))
        for own in (spec, replace(spec, tie_word_embeddings=True)):
            with pytest.raises(ValueError, match=r"take 0\.0 GiB in float32 and few bits, and the GPU has"):
                require_room(own, torch.float32, "cuda", 1, quantization)


def test_shared_experts_are_read_by_every_token(one_dir: Path) -> None:
    spec = model_spec(read_config(one_dir))
    shared = [own and replace(own, mixing=own.mixing._replace(num_shared=2)) for own in spec.experts]
    with_shared = replace(spec, experts=tuple(shared))
    for of_all in (False, True):
        assert num_weights(with_shared, of_all_experts=of_all) - num_weights(spec, of_all_experts=of_all) == 8 * 2 * 3 * 64 * 32


def test_more_experts_than_there_are(one_dir: Path) -> None:
    config = read_config(one_dir)
    with pytest.raises(ValueError, match=r"num_experts_per_tok is 13, but config\.json names 12 experts"):
        model_spec({**config, "num_experts_per_tok": 13})

"""A grown pair computes what the small one does, in the shape of a larger one."""

import json
from pathlib import Path

import pytest
import torch
from engines import load_target, make_config, make_core, run, text_logits
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle_rt.bench.grow.__main__ import grow
from eagle_rt.bench.grow.in_memory import grown_models
from eagle_rt.bench.grow.shapes import GrownShape, layer_places
from eagle_rt.engine.build import prepared_core
from eagle_rt.engine.core import run_to_end
from eagle_rt.engine.load import model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.spec import read_config
from eagle_rt.train.export import export_head
from eagle_rt.train.fit import FitConfig, make_trainee

# Every number differs from the built-in pair's, and a head is twice as large.
SHAPE = GrownShape(320, 800, 20, 5, 64, 12, 5000, 4200)
# 800 channels of the head's feed-forward part, and as many of every expert.
WITH_EXPERTS = GrownShape(320, 800, 20, 5, 64, 12, 5000, 4200, experts=(6, 2), head_intermediate_size=1024)
PROMPTS = [[1, 4, 300, 301, 302, 5], [1, 4, 900, 17, 5], [1, 4, 2000, 2001, 2002, 2003, 5]]


@pytest.fixture(scope="module", params=[SHAPE, WITH_EXPERTS], ids=["dense", "experts"])
def shape(request: pytest.FixtureRequest) -> GrownShape:
    return request.param


@pytest.fixture(scope="module")
def grown(shape: GrownShape, built_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grown")
    grow(built_in / "target", built_in / "eagle3", shape, directory, torch.float32)
    return directory


def test_logits_are_the_small_ones(grown: Path, built_in: Path) -> None:
    small, large = load_target(built_in / "target"), load_target(grown / "target")
    assert large.spec.shape.head_dim == 64
    for prompt in PROMPTS:
        expected, found = text_logits(small, prompt), text_logits(large, prompt)
        torch.testing.assert_close(found[:, :4096], expected, rtol=1e-3, atol=1e-3)
        assert (found[:, 4096:].amax(-1) < expected.amax(-1) - 20).all(), "an added token could win"


def test_text_and_acceptance_are_the_small_ones(grown: Path, built_in: Path) -> None:
    results = []
    for directory in (built_in, grown):
        core = make_core(directory / "target", directory / "eagle3", (5, 4, 16))
        texts = run_to_end(core, PROMPTS, [SamplingParams(temperature=0, max_new_tokens=48)] * 3)
        metrics = core.current_metrics()
        results.append((texts, metrics.accepted_per_position, metrics.num_drafts))
    assert results[0] == results[1]
    assert results[0][2] > 0


def test_a_pair_grown_in_memory_is_the_one_on_disk(grown: Path, shape: GrownShape, built_in: Path) -> None:
    config = make_config(grown / "target", grown / "eagle3", (3, 2, 8))
    models = grown_models(shape, model_info(make_config(built_in / "target")), torch.float32, "cpu", 256)
    sampling = [SamplingParams(temperature=0, max_new_tokens=24)] * 3
    expected = make_core(grown / "target", grown / "eagle3", (3, 2, 8))
    found = prepared_core(models, config)[0]
    assert run_to_end(found, PROMPTS, sampling) == run_to_end(expected, PROMPTS, sampling)
    assert found.current_metrics().accepted_per_position == expected.current_metrics().accepted_per_position


@pytest.mark.parametrize(("folder", "algorithm"), [("eagle3", "EAGLE3"), ("dflash", "DFLASH")])
def test_a_head_that_drafts_in_parallel_grows_alike(built_in: Path, tmp_path: Path, folder: str, algorithm: str) -> None:
    if algorithm == "DFLASH":
        write_block_head(built_in / "target", tmp_path / "small")
    else:
        write_parallel(built_in / "eagle3", tmp_path / "small")
    grow(built_in / "target", tmp_path / "small", SHAPE, tmp_path / "large", torch.float32)
    few = tuple((token, 30.0) for token in (40, 60, 80, 100, 120))  # which the head will guess
    sampling = [SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True, logit_bias=few)] * 3
    results = []
    for target, head in ((built_in / "target", tmp_path / "small"), (tmp_path / "large" / "target", tmp_path / "large" / folder)):
        core = make_core(target, head, (4, 3, 12), speculative_algorithm=algorithm)
        results.append((run_to_end(core, PROMPTS, sampling), core.current_metrics().accepted_per_position))
    assert results[0] == results[1]
    assert all(results[0][1][:2])


def write_block_head(target_dir: Path, directory: Path) -> None:
    """A new DFlash head, whose layers do something, and in which the token before has a say."""
    numbers = {"num_steps": 1, "batch_size": 1, "micro_batch_size": 1, "num_unrolled": 4, "draft_vocab_size": 0, "num_layers": 2}
    numbers |= {"markov_rank": 4}
    config = FitConfig("DFLASH", learning_rate=0.0, optimizer="adamw", precision=torch.float32, mask_token=2, **numbers)
    trainee = make_trainee(load_target(target_dir), config, [])
    for name, parameter in trainee.named_parameters():
        if name.endswith("_norm.weight"):  # of queries and keys, too
            parameter.data.mul_(1.5 + torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        if "markov_w2" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    export_head(trainee.config, trainee.state_dict(), directory, torch.float32)


def write_parallel(serial: Path, directory: Path) -> None:
    """A head with a second layer and a mask that are random."""
    tensors, config = load_file(serial / "model.safetensors"), read_config(serial)
    generator, size = torch.Generator().manual_seed(1), config["hidden_size"]
    for name, tensor in list(tensors.items()):
        if name.startswith("midlayer.") and "hidden_norm" not in name:
            own = tensor[:, :size] if tensor.dim() == 2 and tensor.shape[1] == 2 * size else tensor
            noise = torch.randn(own.shape, generator=generator) * 0.05
            tensors[name.replace("midlayer", "layers.1")] = (own + noise).to(tensor.dtype).contiguous()
    tensors["mask_hidden"] = torch.randn(1, 1, 3 * size, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "ptd_token_id": 2}))


def test_without_speculation_too(grown: Path, built_in: Path) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3, max_new_tokens=16)
    # Noise is drawn for every token of the vocabulary, and that of the added ones must not matter.
    assert run(make_core(grown / "target"), PROMPTS, sampling) == run(make_core(built_in / "target"), PROMPTS, sampling)


def test_the_files_have_the_shape(grown: Path, shape: GrownShape) -> None:
    config = read_config(grown / "target")
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (320, 12, 5000)
    assert (config.get("num_local_experts"), config.get("num_experts_per_tok")) == (shape.experts or (None, None))
    with safe_open(grown / "target" / "model-00001.safetensors", "pt") as tensors:
        part = "block_sparse_moe.experts.5.w3" if shape.experts else "mlp.up_proj"
        assert tensors.get_slice(f"model.layers.7.{part}.weight").get_shape() == [800, 320]
        assert not torch.equal(*(tensors.get_tensor(f"model.layers.{layer}.{part}.weight") for layer in (1, 7)))
    with safe_open(grown / "eagle3" / "model-00001.safetensors", "pt") as tensors:
        assert tensors.get_slice("midlayer.self_attn.q_proj.weight").get_shape() == [20 * 64, 640]
        assert tensors.get_slice("lm_head.weight").get_shape() == [4200, 320]
        assert tensors.get_slice("midlayer.mlp.up_proj.weight").get_shape() == [shape.head_intermediate_size or 800, 320]


def test_layers_keep_their_place_between_those_that_feed_the_head() -> None:
    places = layer_places(8, 32)
    assert places == {0: 0, 1: 1, 2: 2, 3: 3, 16: 4, 29: 5, 30: 6, 31: 7}
    with pytest.raises(ValueError, match="do not fit"):
        layer_places(8, 7)


def test_what_does_not_fit_is_refused(built_in: Path, tmp_path: Path) -> None:
    small = GrownShape(320, 800, 20, 5, 64, 12, 5000, 2100)
    with pytest.raises(ValueError, match="a head of 4096 draft tokens does not fit into one of 2100"):
        grow(built_in / "target", built_in / "eagle3", small, tmp_path, torch.float32)
    with pytest.raises(ValueError, match=r"heads .* do not fit"):
        grow(built_in / "target", built_in / "eagle3", GrownShape(320, 800, 14, 2, 64, 12, 5000, 4200), tmp_path, torch.float32)

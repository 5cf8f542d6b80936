"""The fit check on the trained pair: it reports what is true, and sees what is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import make_core
from transformers import LlamaForCausalLM

from eagle_rt.config import EngineConfig
from eagle_rt.engine.fit import FitProbe, FitResult, fitted, layer_conventions, other_conventions
from eagle_rt.engine.load import LoadedModels, ModelInfo, load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.heads.base import Head

CONFIG = EngineConfig(device="cpu", dtype="float32", speculative_algorithm="EAGLE3", speculative_draft_model_quantization="none")


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return model_info(CONFIG)


@pytest.fixture(scope="module")
def models(info: ModelInfo) -> LoadedModels:
    return load_models(CONFIG, info)


@pytest.fixture(scope="module")
def head(models: LoadedModels) -> Head:
    assert models.head is not None
    return models.head


@pytest.fixture(scope="module")
def probe(models: LoadedModels, info: ModelInfo) -> FitProbe:
    return FitProbe(models, CONFIG, info.tokenizer, num_answers=6, num_new_tokens=128)


def measured(probe: FitProbe, head: Head, models: LoadedModels) -> FitResult:
    return probe.measure(head, [*layer_conventions(head, models.spec.num_layers), *other_conventions(head, models.spec)])


@torch.inference_mode()
def test_acceptance_is_what_transformers_would_count(probe: FitProbe, head: Head, built_in: Path, info: ModelInfo) -> None:
    """The labels against transformers' favourites; the hits against drafting one token by the engine itself."""
    model = LlamaForCausalLM.from_pretrained(built_in / "target", dtype=torch.float32)
    labels = []
    for text, prompt_length in zip(probe._texts, probe.prompt_lengths, strict=True):
        favourites = model(torch.tensor([text])).logits[0].argmax(-1)
        labels += favourites[max(prompt_length - 1, 1) :].tolist()
    assert (torch.tensor(labels) == probe.labels).float().mean() > 0.999

    prompt = probe._texts[0][: probe.prompt_lengths[0]]
    hits = probe.guesses(head)[0][: len(probe._texts[0]) - len(prompt)]
    core = make_core(built_in / "target", built_in / "eagle3", (1, 1, 2))
    accepted = 0
    for place in range(len(prompt) + 1, len(probe._texts[0])):
        core.submit(str(place), probe._texts[0][: place - 1], SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True))
        while core.has_work:
            stats = [event.stats for event in core.step()]
        accepted += len(stats[-1].accepted_histogram) > 1
    assert accepted == int(hits[1:].sum())


def test_the_right_head_fits(probe: FitProbe, head: Head, models: LoadedModels) -> None:
    result = measured(probe, head, models)
    assert result.better is None
    assert not result.is_blind
    assert result.acceptance > 0.5
    assert result.coverage > 0.9


@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_off_by_one_are_seen(probe: FitProbe, head: Head, models: LoadedModels, shift: int) -> None:
    wrong = head.with_spec(feature_layers=tuple(layer + shift for layer in head.feature_layers))
    better = measured(probe, wrong, models).better
    assert better is not None
    assert better.convention.changes == {"feature_layers": head.feature_layers}


def test_other_conventions_are_seen(probe: FitProbe, head: Head, models: LoadedModels) -> None:
    for name, value in (("embedding_first", False), ("norm_before_residual", True)):
        better = measured(probe, head.with_spec(**{name: value}), models).better
        assert better is not None
        assert better.convention.changes == {name: getattr(head.spec, name)}
    better = measured(probe, head.with_spec(rope=replace(head.spec.rope, theta=500000.0)), models).better
    assert better is not None
    assert better.convention.changes["rope"] == head.spec.rope


def test_random_weights_and_another_targets_head_are_blind(probe: FitProbe, head: Head, models: LoadedModels) -> None:
    """A head for a target whose hidden states have another order of dimensions fits as badly as one of noise."""
    generator = torch.Generator().manual_seed(0)
    noise = head.with_spec()
    foreign = head.with_spec()
    original = head.fuse
    order = torch.randperm(3 * 256, generator=generator)
    weights = torch.randn(768, 256, generator=generator) * 0.05
    noise.fuse = lambda features: features @ weights  # type: ignore[method-assign]
    foreign.fuse = lambda features: original(features[:, order])  # type: ignore[method-assign]
    for wrong in (noise, foreign):
        result = probe.measure(wrong, [])
        assert result.is_blind, result


def test_at_load_it_warns_or_takes_the_better_layers(models: LoadedModels, head: Head, info: ModelInfo) -> None:
    shifted = replace(models, head=head.with_spec(feature_layers=tuple(layer - 1 for layer in head.feature_layers)))
    flag = "--speculative-aux-layers " + " ".join(map(str, head.feature_layers))

    warned = fitted(shifted, CONFIG, info.tokenizer)
    assert warned.head is shifted.head
    assert any(note.startswith("WARNING") and flag in note for note in warned.notes)

    mended = fitted(shifted, replace(CONFIG, speculative_fit_check="auto"), info.tokenizer)
    assert mended.head is not None
    assert mended.head.feature_layers == head.feature_layers
    assert any(note.startswith("WARNING") and "taking" in note for note in mended.notes)

    assert fitted(shifted, replace(CONFIG, speculative_fit_check="off"), info.tokenizer) is shifted
    assert not any(note.startswith("WARNING") for note in fitted(models, CONFIG, info.tokenizer).notes)


def test_a_map_for_other_text_is_warned_about(models: LoadedModels, head: Head, info: ModelInfo) -> None:
    narrow = replace(models, head=head.narrowed(head.token_map.target_ids[-60:]))
    config = replace(CONFIG, speculative_token_map="some.pt")
    assert any("--speculative-token-map holds only" in note for note in fitted(narrow, config, info.tokenizer).notes)

"""Gemma 4's own drafters, which look at what the target keeps."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import checkpoints
import family_configs
import pytest
import torch
from captured import make_captured
from engines import load_target, make_config, make_core, random_prompts, run
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.attention.grouped import GroupedAttention
from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.attention.rows import RowAttention
from eagle_rt.attention.triton import TritonAttention
from eagle_rt.batch import Batch, DeviceRows, HostMask, HostRows, MaskWords
from eagle_rt.engine.build import build_core
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.fit import FitProbe, other_conventions
from eagle_rt.engine.load import load_models, model_info
from eagle_rt.engine.params import SamplingParams, SpeculativeParams
from eagle_rt.kernels.triton.tree_attention import mask_words
from eagle_rt.models.decoder import FINAL_NORM, Decoder
from eagle_rt.models.heads.base import Head
from eagle_rt.models.heads.load import load_head
from eagle_rt.models.reading import text_batch
from eagle_rt.trace import StepTrace
from models.test_decoder import TOKENS

TEXT, PATH = TOKENS[:20], (30, 99, 7, 42)
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.fixture(scope="module", autouse=True)
def _layers_that_keep_nothing() -> Iterator[None]:
    """Of which transformers 5.23 has some in no model that it would make."""
    found = Gemma4TextConfig.kv_sharing_modes.fget

    def modes(config: Gemma4TextConfig) -> list[str | None]:
        keeps_nothing = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if keeps_nothing else found(config)

    with patch.object(Gemma4TextConfig, "kv_sharing_modes", property(modes)):
        yield


def write_assistant(directory: Path, seed: int = 3, backbone_hidden_size: int = 64, **overrides: Any) -> Path:
    """For "gemma4-small": three layers of 32 numbers."""
    text = {
        **family_configs.SIZES,
        **family_configs.GEMMA4_SMALL,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    text |= {
        "use_double_wide_mlp": False,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 3,
        "layer_types": LAYERS,
    }
    text |= {"final_logit_softcapping": None, **overrides}
    config = Gemma4AssistantConfig(text_config={"model_type": "gemma4_text", **text}, backbone_hidden_size=backbone_hidden_size)
    torch.manual_seed(seed)
    model = Gemma4AssistantForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.6, 1.4)
                parameter.mul_(0.2 if "q_norm" in name else 1.0)
            else:
                parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.2)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("assistant")
    return checkpoints.write_target(folder / "target", "gemma4-small"), write_assistant(folder / "head")


@torch.inference_mode()
def transformers_logits(target_dir: Path, head_dir: Path) -> list[Tensor]:
    """After the text, and after each token of the path below it."""
    target = Gemma4ForCausalLM.from_pretrained(target_dir, dtype=torch.float32, attn_implementation="eager")
    head = Gemma4AssistantForCausalLM.from_pretrained(head_dir, dtype=torch.float32, attn_implementation="eager")
    read = target.model(torch.tensor([TEXT[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    hidden, logits = read.hidden_states[-1][:, -1:], []
    for token in (TEXT[-1], *PATH):
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        output = head(
            inputs_embeds=torch.cat((embedded, hidden), dim=-1),
            position_ids=torch.tensor([[len(TEXT) - 1]]),
            shared_kv_states=read.shared_kv_states,
        )
        hidden = output.last_hidden_state
        logits.append(output.logits[0, 0])
    return logits


@torch.inference_mode()
def own_logits(head: Head, target: Decoder, backend: AttentionBackend) -> list[Tensor]:
    batch, num_cached = text_batch([TEXT[:-1]], torch.device("cpu")), len(TEXT) - 1
    pool = target.make_pool(num_cached + len(PATH), 1)
    features = target.forward(batch, pool, backend, (FINAL_NORM,)).features
    state = head.forward(torch.tensor(TEXT[1:]), head.fuse(features), batch, pool, backend)[-1:]
    logits = [head.logits(state)[0]]
    for depth, token in enumerate(PATH):
        row = torch.tensor([num_cached + depth])
        seen = HostMask(torch.ones(1, depth + 1, dtype=torch.bool).numpy(), (depth + 1,))
        rows = HostRows((num_cached + depth + 1,), (range(num_cached + depth + 1),))
        state = head.forward(torch.tensor([token]), state, Batch(row, row, row, (0, 1), rows, seen), pool, backend)
        logits.append(head.logits(state)[0])
    assert not any(layer[num_cached:].any() for layer in pool.layers), "it keeps nothing"
    return logits


@pytest.mark.parametrize("backend", [ReferenceAttention, GroupedAttention, RowAttention], ids=["reference", "grouped", "rows"])
def test_logits_are_those_of_transformers(pair: tuple[Path, Path], backend: Any) -> None:
    target = load_target(pair[0])
    head, unused = load_head(pair[1], target, "EAGLE", torch.float32, "cpu")
    assert not unused
    found = own_logits(head, target, backend(torch.float32))
    for own, expected in zip(found, transformers_logits(*pair), strict=True):
        assert expected.std() > 0.1
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_level_sees_texts_alone_however_its_mask_is_given(pair: tuple[Path, Path]) -> None:
    """Two nodes of each of two texts, behind one that was drafted before."""
    target = load_target(pair[0])
    head, _ = load_head(pair[1], target, "EAGLE", torch.float32, "cpu")
    texts, most = [TOKENS[:20], TOKENS[30:42]], 40
    pool, slots = target.make_pool(2 * most, 2), [range(number * most, (number + 1) * most) for number in range(2)]
    for text, own in zip(texts, slots, strict=True):
        batch = text_batch([text], torch.device("cpu"))
        rows = HostRows((len(text),), (own[: len(text)],))
        batch = replace(batch, slots=torch.tensor(own[: len(text)]), rows=rows)
        target.forward(batch, pool, ReferenceAttention(torch.float32))
    for layer in pool.layers:
        layer[torch.tensor([slot for text, own in zip(texts, slots, strict=True) for slot in own[len(text) :]])] = torch.nan
    states, tokens = torch.randn(4, head.shape.hidden_size, generator=torch.Generator().manual_seed(0)), torch.tensor([9, 8, 7, 6])
    places = torch.tensor([[len(text) + 1, len(text) + 2] for text in texts])
    kv_lens, visible = tuple(len(text) + 3 for text in texts), torch.ones(2, 2, 3, dtype=torch.bool)
    host_rows = HostRows(kv_lens, tuple(own[:kv_len] for own, kv_len in zip(slots, kv_lens, strict=True)))
    own_slots = (places + torch.tensor([[0], [most]])).flatten()
    batch = Batch(tokens, places.flatten(), own_slots, (0, 2, 4), host_rows, HostMask(visible.flatten(0, 1).numpy(), (3, 3)))
    expected = head.forward(tokens, states, batch, pool, ReferenceAttention(torch.float32))
    assert expected.isfinite().all()
    pages = torch.tensor([list(own) for own in slots], dtype=torch.int32)
    device_rows = DeviceRows(torch.tensor(kv_lens, dtype=torch.int32), pages, page_size=1)
    words = MaskWords(mask_words(visible), 3)
    for rows, mask, backend in (
        (host_rows, batch.tree_mask, RowAttention(torch.float32)),
        (host_rows, visible, GroupedAttention(torch.float32)),
        (host_rows, words, TritonAttention()),
        (device_rows, visible, TritonAttention()),
        (device_rows, words, TritonAttention()),
    ):
        found = head.forward(tokens, states, replace(batch, rows=rows, tree_mask=mask), pool, backend)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def traces_of(core: EngineCore, prompts: list[list[int]], num_new_tokens: int) -> list[list[StepTrace]]:
    traced = SamplingParams(
        temperature=0, max_new_tokens=num_new_tokens, ignore_eos=True, speculative=SpeculativeParams(trace=True)
    )
    traces: dict[str, list[StepTrace]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        core.submit(str(number), prompt, traced)
    while core.has_work:
        for event in core.step():
            traces[event.request_id] += [event.trace] if event.trace else []
    return list(traces.values())


OPTIONS: dict[str, Any] = {"speculative_algorithm": "EAGLE", "context_length": 100}


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_change_no_text(pair: tuple[Path, Path], kind: str, dtype: str) -> None:
    target_dir, head_dir = pair
    prompts = random_prompts(4, seed=5)
    settings = [SamplingParams(temperature=index % 2, seed=index, max_new_tokens=24, ignore_eos=True) for index in range(4)]
    core = make_core(target_dir, head_dir, (4, 3, 12), speculative_tree=kind, dtype=dtype, speculative_algorithm="NEXTN")
    assert run(core, prompts, settings) == run(make_core(target_dir, dtype=dtype), prompts, settings)
    assert kind == "adaptive" or core.metrics.num_draft_tokens > 0


@pytest.mark.usefixtures("on_gpu_kernels")
def test_captured_steps_write_the_same_texts(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, setting = random_prompts(2, seed=5, longest=30), SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    core = make_captured(*pair, (3, 2, 6), (2,), **OPTIONS)
    texts, counts = run(core, prompts, setting), core.metrics.num_draft_tokens
    assert "step" in core.runner.clock.seconds
    monkeypatch.undo()
    core = make_core(*pair, (3, 2, 6), **OPTIONS)
    assert run(core, prompts, setting) == texts
    assert counts > 0


@pytest.mark.usefixtures("on_gpu_kernels")
def test_steps_of_the_same_kernels_draft_the_same_trees(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target_dir, head_dir = pair
    prompts = random_prompts(2, seed=5, longest=30)
    captured = traces_of(make_captured(target_dir, head_dir, (3, 2, 6), (2,), **OPTIONS), prompts, 8)
    monkeypatch.undo()
    eager = traces_of(make_core(target_dir, head_dir, (3, 2, 6), **OPTIONS), prompts, 8)
    for found, expected in zip(captured, eager, strict=True):
        assert len(found) == len(expected) > 3
        for own, other in zip(found, expected, strict=True):
            assert (own.tokens, own.parents, own.path, own.choices) == (other.tokens, other.parents, other.path, other.choices)
            assert own.scores == pytest.approx(other.scores, abs=1e-3)


def test_its_weights_in_eight_bits(pair: tuple[Path, Path]) -> None:
    target = load_target(pair[0])
    head, _ = load_head(pair[1], target, "EAGLE", torch.float32, "cpu")
    exact, rounded = (own_logits(own, target, RowAttention(torch.float32)) for own in (head, head.quantized()))
    errors = torch.stack(rounded) - torch.stack(exact)
    assert 0 < errors.abs().mean() < 0.1 * torch.stack(exact).std()


def test_fewer_tokens_to_draft_with(pair: tuple[Path, Path]) -> None:
    target = load_target(pair[0])
    head, _ = load_head(pair[1], target, "EAGLE", torch.float32, "cpu")
    kept = torch.tensor([42, 7, 250])
    narrow, whole = (own_logits(own, target, RowAttention(torch.float32)) for own in (head.narrowed(kept), head))
    torch.testing.assert_close(torch.stack(narrow), torch.stack(whole)[:, kept])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"backbone_hidden_size": 96}, r"hidden_size 96, with 262 tokens and heads of keys \[\(2, 32\), \(2, 64\)\]"),
        ({"vocab_size": 300}, "hidden_size 64, with 300 tokens"),
        ({"num_key_value_heads": 1}, r"heads of keys \[\(1, 32\), \(1, 64\)\]"),
    ],
    ids=["size", "tokens", "heads"],
)
def test_drafters_of_other_targets(pair: tuple[Path, Path], tmp_path: Path, overrides: dict[str, Any], reason: str) -> None:
    write_assistant(tmp_path, **overrides)
    with pytest.raises(ValueError, match=rf"{reason}.*: this head was made for another target$"):
        load_head(tmp_path, load_target(pair[0]), "EAGLE", torch.float32, "cpu")


def test_what_it_cannot_draft_for(pair: tuple[Path, Path], target_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"^the head is a drafter of Gemma 4's, and the target is a LlamaForCausalLM$"):
        load_head(pair[1], load_target(target_dir), "EAGLE", torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"holds a drafter of Gemma 4's: use --speculative-algorithm EAGLE, not EAGLE3$"):
        load_head(pair[1], load_target(pair[0]), "EAGLE3", torch.float32, "cpu")
    config = make_config(*pair, (2, 2, 4), speculative_algorithm="EAGLE", tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"^--tensor-parallel-size 2: a drafter of Gemma 4's looks at all keys"):
        build_core(config, model_info(config))


def test_the_sparse_output_layer_is_not_needed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Published small ones have one, beside the whole."""
    for file in pair[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_ordered_embeddings": True, "num_centroids": 2}))
    head, unused = load_head(tmp_path, load_target(pair[0]), "EAGLE", torch.float32, "cpu")
    assert not unused
    assert len(head.token_map.target_ids) == 262


@torch.inference_mode()
def test_whether_it_fits_is_told_by_what_the_target_keeps(pair: tuple[Path, Path]) -> None:
    """Row by row what it makes of a text while it is drafted for."""
    config = make_config(*pair, (2, 2, 4), speculative_algorithm="EAGLE", context_length=64)
    info = model_info(config)
    models = load_models(config, info)
    assert models.head
    probe = FitProbe(models, config, info.tokenizer, num_new_tokens=8)
    right, log_probs = probe.guesses(models.head)
    text, start = probe._texts[0], max(probe.prompt_lengths[0] - 2, 0)
    batch = text_batch([text[:-1]], torch.device("cpu"))
    pool = models.target.make_pool(len(text) - 1, 1)
    features = models.target.forward(batch, pool, ReferenceAttention(torch.float32), (FINAL_NORM,)).features
    states = models.head.forward(torch.tensor(text[1:]), features, batch, pool, ReferenceAttention(torch.float32))
    expected = models.head.logits(states[start:]).log_softmax(dim=-1)
    labels = probe.labels[: len(expected)]
    torch.testing.assert_close(log_probs[: len(expected)], expected.gather(1, labels[:, None])[:, 0], atol=1e-4, rtol=1e-4)
    assert torch.equal(right[: len(expected)], expected.argmax(dim=-1) == labels)
    assert not list(other_conventions(models.head, models.spec))

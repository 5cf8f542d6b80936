"""Engines whose target remembers texts in most of its layers: drafts change nothing, though nothing can be taken back there."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import guessable
import pytest
import torch
from captured import make_captured
from engine.test_capturable import captured_callable, watching
from engines import make_config, make_core, random_prompts, run
from family_configs import VOCAB_SIZE
from guessable import make_drafting
from torch import Tensor

from eagle_rt.attention.recurrence import lineage_of
from eagle_rt.batch import Batch, HostMask, HostRows, MaskWords
from eagle_rt.engine import assemble
from eagle_rt.engine.build import build_core
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.load import model_info, num_weights
from eagle_rt.engine.params import SamplingParams
from eagle_rt.kernels import dispatch
from eagle_rt.models.spec import model_spec, read_config
from eagle_rt.tree.draft_tree import ancestor_mask

PROMPTS = random_prompts(3, seed=8, longest=50) + random_prompts(1, seed=9, longest=2)
SETTINGS = [SamplingParams(temperature=0.7, seed=index, max_new_tokens=40, ignore_eos=True) for index in range(4)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return guessable.write_pair(tmp_path_factory.mktemp("memories"), "qwen3.5")


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_change_no_text(pair: tuple[Path, Path], kind: str, dtype: str) -> None:
    core = make_drafting(pair, speculative_tree=kind, dtype=dtype)
    assert run(core, PROMPTS, SETTINGS) == run(make_core(pair[0], dtype=dtype), PROMPTS, SETTINGS)
    if kind == "fixed":
        assert core.metrics.num_accepted_tokens > 60, "of 160, or little would have been proven"


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 7},
        {"max_running_requests": 1},
        {"max_total_tokens": 136, "page_size": 1, "max_running_requests": 3},
        {"attention_backend": "torch"},
        {"quantization": "int8"},
    ],
    ids=str,
)
def test_however_texts_are_read(pair: tuple[Path, Path], options: dict[str, Any]) -> None:
    plain = {"quantization": options["quantization"]} if "quantization" in options else {}
    core = make_drafting(pair, **options)
    assert run(core, PROMPTS, SETTINGS) == run(make_core(pair[0], **plain), PROMPTS, SETTINGS)
    assert bool(core.scheduler.num_preemptions) == ("page_size" in options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_texts_repeat_changes_none_either(pair: tuple[Path, Path], dtype: str) -> None:
    """Prompts that hold the reply that the last token alone would lead to, and other ones."""
    plain, greedy = make_core(pair[0], dtype=dtype), SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    prompts = [prompt + reply + prompt for prompt, reply in zip(PROMPTS[:3], run(plain, PROMPTS[:3], greedy), strict=True)]
    core = make_core(pair[0], dtype=dtype, speculative_algorithm="NGRAM")
    assert run(core, prompts + PROMPTS, greedy) == run(plain, prompts + PROMPTS, greedy)
    assert core.metrics.num_accepted_tokens > 0


def test_in_torch_alone(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [SamplingParams(temperature=0.7, seed=index, max_new_tokens=12, ignore_eos=True) for index in range(4)]
    expected = run(make_core(pair[0]), PROMPTS, settings)
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    assert run(make_drafting(pair), PROMPTS, settings) == expected


@pytest.mark.usefixtures("on_gpu_kernels")
def test_captured_steps_write_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = guessable.write_pair(tmp_path, "qwen3.5", num_hidden_layers=4)
    settings = [SamplingParams(temperature=0.7, seed=index, max_new_tokens=8, ignore_eos=True) for index in range(2)]
    core = make_captured(*pair, (3, 2, 6), (2,), speculative_algorithm="EAGLE")
    texts = run(core, PROMPTS[:2], settings)
    assert core.metrics.num_accepted_tokens > 2
    with watching(monkeypatch):
        captured_callable(core.runner.graphs.find(2, core.runner.tree_shape))()
    monkeypatch.undo()
    assert texts == run(make_core(pair[0]), PROMPTS[:2], settings)


def test_a_dialogue_goes_on_where_it_was(pair: tuple[Path, Path]) -> None:
    """From the last full page of the prompt before, whose reply is read anew."""
    core, question = make_drafting(pair, page_size=4), random_prompts(1, seed=5, longest=80)[0] + [9] * 20
    answer = run(core, [question], SETTINGS[:1])[0]
    dialogue = question + answer + [7, 8, 9]
    assert run(core, [dialogue], SETTINGS[1:2]) == run(make_core(pair[0]), [dialogue], SETTINGS[1:2])
    assert core.metrics.num_cached_prompt_tokens == (len(question) - 1) // 4 * 4


@pytest.mark.parametrize("chunk_size", [7, 512])
def test_what_prompts_have_in_common_is_read_twice(pair: tuple[Path, Path], chunk_size: int) -> None:
    """The second shows where others part from it too, so that the third goes on from there."""
    common, cached = random_prompts(1, seed=6)[0] + [11] * 30, []
    core = make_drafting(pair, page_size=1, chunked_prefill_size=chunk_size)
    for own in (101, 102, 103, 104):
        prompt = [*common, own, 12, 13]
        assert run(core, [prompt], SETTINGS[:1]) == run(make_core(pair[0]), [prompt], SETTINGS[:1])
        cached.append(core.metrics.num_cached_prompt_tokens)
    # A page is only the same if the token behind it is.
    assert cached == [0, 0, len(common) - 1, 2 * (len(common) - 1)]


@pytest.mark.parametrize("seed", range(6))
def test_whoever_shares_what(pair: tuple[Path, Path], seed: int) -> None:
    """Texts are those of engines in which nothing is shared, whatever is saved, given up and gone on from."""
    draw = random.Random(seed)
    stem = [draw.randrange(6, 260) for _ in range(60)]
    prompts = [stem[: draw.randrange(1, 60)] + [draw.randrange(6, 260) for _ in range(draw.randrange(1, 9))] for _ in range(14)]
    settings = [replace(SETTINGS[0], seed=index, max_new_tokens=draw.randrange(1, 9)) for index in range(len(prompts))]
    options = {"page_size": draw.choice([1, 4]), "max_running_requests": draw.choice([1, 2, 4]), "max_total_tokens": 240}
    core = make_drafting(pair, chunked_prefill_size=draw.choice([5, 16, 512]), **options)
    alone = make_core(pair[0], disable_radix_cache=True, max_running_requests=4)
    assert run(core, prompts, settings) == run(alone, prompts, settings)
    assert core.metrics.num_cached_prompt_tokens > 0
    assert alone.runner.stepper.pool.memories.matrices.shape[1] == 5, "nothing is held for texts that nobody shares"


def test_what_is_said_at_start(pair: tuple[Path, Path]) -> None:
    config = make_config(pair[0], max_running_requests=5)
    _, notes = build_core(config, model_info(config))
    megabytes = 6 * (4 * 4 * 16 * 32 + 4 * 3 * (2 * 2 * 16 + 4 * 32)) / 2**20
    words = f"remember takes {megabytes:.1f} MiB for each of 5 requests (--max-running-requests) and of 5 texts"
    assert [note for note in notes if words in note]


def test_memories_take_from_what_the_cache_may(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "cache_bytes", lambda config: 2**20)
    of_a_text = 6 * (4 * 4 * 16 * 32 + 4 * 3 * (2 * 2 * 16 + 4 * 32))
    for options, num_texts in (({}, 6 + 5), ({"disable_radix_cache": True}, 6)):
        core = make_core(pair[0], max_total_tokens=None, max_running_requests=5, page_size=1, **options)
        assert core.scheduler.limits.num_pages == (2**20 - num_texts * of_a_text) // (2 * 2 * 2 * 32 * 4)


def test_what_a_token_reads(pair: tuple[Path, Path]) -> None:
    channels, values, heads = 2 * 2 * 16 + 4 * 32, 4 * 32, 4
    attention, others = 64 * 32 * (3 * 4 + 2 * 2), 64 * (channels + 2 * values + 2 * heads)
    spec = model_spec(read_config(pair[0]))
    assert num_weights(spec) == 2 * attention + 6 * others + 8 * 3 * 64 * 96 + 64 * VOCAB_SIZE


def test_what_cannot_be_done_with_it_yet(pair: tuple[Path, Path]) -> None:
    config = make_config(pair[0], tensor_parallel_size=2)
    with pytest.raises(ValueError, match="--tensor-parallel-size 2: Qwen3_5ForCausalLM cannot be cut into parts yet"):
        build_core(config, model_info(config))
    config = make_config(pair[0], enable_torch_compile=True)
    _, notes = build_core(config, model_info(config))
    assert [note for note in notes if note.startswith("WARNING: --enable-torch-compile: Qwen3_5ForCausalLM")]
    config = make_config(pair[0], enable_torch_compile=True, strict=True)
    with pytest.raises(ValueError, match="--enable-torch-compile: Qwen3_5ForCausalLM"):
        build_core(config, model_info(config))


def test_parents_are_found_in_every_kind_of_mask() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 2, 3], [-1, 0, 1, 1, 0, 4]])
    mask = ancestor_mask(parents, 4)
    words = (mask.long() << torch.arange(6)).sum(dim=2, keepdim=True)
    visible = mask.flatten(0, 1)
    rows = torch.arange(12)
    expected = torch.where(parents < 0, -1, parents + torch.tensor([[0], [6]])).flatten()
    for own in (mask, MaskWords(words, 6), HostMask(visible.numpy(), (6, 6))):
        lineage = lineage_of(Batch(rows, rows, rows, (0, 6, 12), HostRows((6, 6), (range(6), range(6))), own))
        assert torch.equal(lineage.parents, expected)
        assert lineage.visible is not None
        assert lineage.visible.is_contiguous()
        assert torch.equal(lineage.visible, visible)
        assert torch.equal(lineage.owners, rows // 6)
    ragged = HostMask(visible[[0, 1, 6, 7, 8, 9]].numpy(), (2, 4))
    lineage = lineage_of(Batch(rows[:6], rows[:6], rows[:6], (0, 2, 6), HostRows((2, 4), (range(2), range(4))), ragged))
    assert lineage.parents.tolist() == [-1, 0, -1, 2, 3, 3]
    assert lineage.owners.tolist() == [0, 0, 1, 1, 1, 1]
    texts = lineage_of(Batch(rows, rows, rows, (0, 5, 12), HostRows((5, 7), (range(5), range(7))), None))
    assert texts.is_text
    assert texts.parents.tolist() == [-1, 0, 1, 2, 3, -1, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_kept_of_a_tree_is_what_the_text_would_leave(pair: tuple[Path, Path], dtype: str) -> None:
    """After every step, bit for bit, in every layer."""
    settings = SamplingParams(temperature=0.7, seed=5, max_new_tokens=30, ignore_eos=True)

    def memories(core: EngineCore) -> dict[int, tuple[Tensor, Tensor]]:
        """What is remembered, by how many tokens have been read."""
        core.submit("one", PROMPTS[0], settings)
        request, found = core.scheduler.waiting["one"], {}
        while core.has_work:
            core.step()
            own = core.runner.stepper.pool.memories
            assert own
            found[request.num_cached] = own.matrices[:, 0].clone(), own.channels[:, 0].clone()
        return found

    drafted, plain = memories(make_drafting(pair, dtype=dtype)), memories(make_core(pair[0], dtype=dtype))
    shared = drafted.keys() & plain.keys()
    assert 5 < len(shared) < len(plain)
    for count in shared:
        assert torch.equal(drafted[count][0], plain[count][0])
        assert torch.equal(drafted[count][1], plain[count][1])

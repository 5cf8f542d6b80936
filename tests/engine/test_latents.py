"""Engines whose target attends over latents: any tree is verified in one pass, and changes nothing."""

from pathlib import Path
from typing import Any

import checkpoints
import guessable
import mtp_layouts
import pytest
import torch
from captured import make_captured
from engine.test_capturable import captured_callable, watching
from engines import load_target, make_config, make_core, random_prompts, run
from family_configs import VOCAB_SIZE
from guessable import make_drafting
from train.test_fit import CONFIG

from eagle_rt.attention import rows
from eagle_rt.attention.rows import RowAttention
from eagle_rt.engine.build import build_core
from eagle_rt.engine.load import model_info, num_weights
from eagle_rt.engine.params import SamplingParams
from eagle_rt.kernels.products import takes_own_kernel
from eagle_rt.models.reading import text_batch, text_pool
from eagle_rt.models.spec import model_spec, read_config
from eagle_rt.train.fit import head_config

PROMPTS = random_prompts(3, seed=8, longest=50) + random_prompts(1, seed=9, longest=2)
SETTINGS = [SamplingParams(temperature=0.7, seed=index, max_new_tokens=40, ignore_eos=True) for index in range(4)]
# Of a layer: queries in two products, latents, what leads to them and back, and the output.
ATTENTION = 64 * (64 + 4 * 40) + 64 * (32 + 16) + 4 * 32 * (24 + 32) + 4 * 32 * 64


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return guessable.write_pair(tmp_path_factory.mktemp("latents"), "glm4-moe-lite")


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
        {"max_total_tokens": 136, "page_size": 1, "max_running_requests": 3},
        {"attention_backend": "torch"},
        {"attention_backend": "triton", "max_running_requests": 2},
    ],
    ids=str,
)
def test_however_texts_are_read(pair: tuple[Path, Path], options: dict[str, Any]) -> None:
    assert run(make_drafting(pair, **options), PROMPTS, SETTINGS) == run(make_core(pair[0]), PROMPTS, SETTINGS)


def test_own_layers_draft_for_sampled_texts(tmp_path: Path) -> None:
    target = mtp_layouts.write_nextn(tmp_path / "target", "glm4-moe-lite").directory
    core = make_core(target, None, (3, 2, 6), speculative_algorithm="NEXTN", speculative_draft_model_path=None)
    assert core.runner.stepper.drafter.pool.storage.shape[2:] == (1, 1, 48), "its cache keeps latents, too"
    assert run(core, PROMPTS, SETTINGS) == run(make_core(target), PROMPTS, SETTINGS)


@pytest.mark.usefixtures("on_gpu_kernels")
def test_captured_steps_write_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = guessable.write_pair(tmp_path, "glm4-moe-lite", num_hidden_layers=3)
    settings = [SamplingParams(temperature=0.7, seed=index, max_new_tokens=8, ignore_eos=True) for index in range(2)]
    core = make_captured(*pair, (3, 2, 6), (2,), speculative_algorithm="EAGLE")
    texts = run(core, PROMPTS[:2], settings)
    assert core.metrics.num_accepted_tokens > 2
    with watching(monkeypatch):
        captured_callable(core.runner.graphs.find(2, core.runner.tree_shape))()
    monkeypatch.undo()
    assert texts == run(make_core(pair[0]), PROMPTS[:2], settings)


@pytest.mark.parametrize("name", checkpoints.WITH_LATENTS)
@torch.inference_mode()
def test_a_text_comes_out_the_same_whatever_else_is_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, in half precision too: so a tree changes no token. No row is torch's, whatever their number and the products."""
    monkeypatch.setattr(rows, "MANY_ROWS", 20)
    monkeypatch.setattr(rows, "takes_own_kernel", lambda weight: False)
    target = load_target(checkpoints.write_target(tmp_path, name), dtype=torch.bfloat16)
    if not takes_own_kernel(target.embedding):
        pytest.skip("other products serve on this processor")

    def hidden(*texts: list[int]) -> torch.Tensor:
        batch = text_batch(list(texts), target.embedding.device)
        pool = text_pool(batch, target.rows, target.embedding)
        return target.forward(batch, pool, RowAttention(torch.bfloat16)).hidden

    text = random_prompts(1, seed=4, longest=40)[0] + [9, 8, 7] * 30
    assert torch.equal(hidden(text[:7], text, text[5:])[7 : 7 + len(text)], hidden(text))
    assert torch.equal(hidden(text)[:7], hidden(text[:7])), "nor how many queries follow"


def test_what_a_token_reads_and_leaves(pair: tuple[Path, Path]) -> None:
    spec = model_spec(read_config(pair[0]))
    routed = 64 * 12 + (3 + 2) * 3 * 64 * 32
    assert num_weights(spec) == 8 * ATTENTION + 3 * 64 * 96 + 7 * routed + 64 * VOCAB_SIZE
    assert load_target(pair[0]).bytes_per_slot == 8 * (32 + 16) * 4


def test_heads_that_are_trained_for_it_attend_as_others(pair: tuple[Path, Path]) -> None:
    config = head_config(load_target(pair[0]), CONFIG, 100)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 4, 16)


def test_what_cannot_be_done_with_it_yet(pair: tuple[Path, Path]) -> None:
    config = make_config(pair[0], enable_torch_compile=True)
    _, notes = build_core(config, model_info(config))
    assert [note for note in notes if note.startswith("WARNING: --enable-torch-compile: Glm4MoeLiteForCausalLM")]

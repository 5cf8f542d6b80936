"""Layers that are one compiled function against the same ones part by part."""

from itertools import pairwise
from pathlib import Path

import checkpoints
import family_configs
import pytest
import torch
from engines import load_target
from torch import Tensor

from eagle_rt.attention import rows
from eagle_rt.attention.rows import RowAttention
from eagle_rt.batch import Batch, HostRows
from eagle_rt.kernels import dispatch
from eagle_rt.kernels.cpu.layer import layer
from eagle_rt.kernels.cpu.product import product
from eagle_rt.kernels.products import takes_own_kernel
from eagle_rt.models.decoder import Decoder
from eagle_rt.models.reading import text_batch, text_pool

MIXED = "qwen3-moe-mixed"  # layers with experts and without are not alike, and so not one function
OVERRIDES = {"glm4-moe": {"first_k_dense_replace": 0}}  # as they are here
TOKENS = torch.randint(6, family_configs.VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.inference_mode()
def logits_and_cache(target: Decoder, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    batch = text_batch(texts, target.embedding.device)
    pool = text_pool(batch, target.rows, target.embedding)
    hidden = target.forward(batch, pool, RowAttention(target.embedding.dtype)).hidden
    return target.logits(hidden).float(), pool.storage.float()


def in_parts(target: Decoder) -> Decoder:
    target._stack = None
    return target


def whole_target(directory: Path, name: str, dtype: torch.dtype) -> Decoder:
    checkpoints.write_target(directory, name, **OVERRIDES.get(name, {}))
    target = load_target(directory, 256, dtype)  # beyond which Ministral's queries would be scaled, between parts of a layer
    if not takes_own_kernel(target.embedding):
        pytest.skip("other products serve on this processor")
    assert bool(target._stack) == (name != MIXED)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in checkpoints.FAMILIES if name not in (MIXED, *checkpoints.IN_PARTS)])
def test_every_family(tmp_path: Path, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    target = whole_target(tmp_path, name, dtype)
    texts = [TOKENS, TOKENS[3:9], TOKENS[:1]]
    whole = logits_and_cache(target, texts)
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    parts = logits_and_cache(in_parts(target), texts)
    for own, other in zip(whole, parts, strict=True):
        errors = (own - other).abs()
        if dtype == torch.float32:
            assert errors.max() < 1e-4
        elif target.spec.experts[0]:
            assert errors.mean() < 0.1 * other.std()  # rounding makes a few tokens take other experts
        else:
            assert errors.max() < 0.35 * other.std()
        assert not torch.equal(own, other), "the same numbers to the last bit would have come of the same code"


def test_experts_of_the_best_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OVERRIDES, "glm4-moe", {"first_k_dense_replace": 0, "n_group": 4, "topk_group": 2})
    target = whole_target(tmp_path, "glm4-moe", torch.float32)
    whole = logits_and_cache(target, [TOKENS])
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    for own, other in zip(whole, logits_and_cache(in_parts(target), [TOKENS]), strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe", "glm4-moe", MIXED])
def test_a_text_comes_out_the_same_whatever_else_is_read(tmp_path: Path, name: str) -> None:
    """Bit by bit, in half precision too: so a tree changes no token."""
    target = whole_target(tmp_path, name, torch.bfloat16)
    together = logits_and_cache(target, [TOKENS[:7], TOKENS, TOKENS[5:]])[0]
    assert torch.equal(together[7 : 7 + len(TOKENS)], logits_and_cache(target, [TOKENS])[0])


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4-moe", MIXED])
@torch.inference_mode()
def test_a_prompt_comes_out_the_same_however_it_is_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in chunks, or from the prefix cache on, bit by bit in half precision, however long it is."""
    monkeypatch.setattr(rows, "MANY_ROWS", 128)
    target = whole_target(tmp_path, name, torch.bfloat16)
    text = torch.randint(6, family_configs.VOCAB_SIZE, (300,), generator=torch.Generator().manual_seed(2)).tolist()

    def hidden(*ends: int) -> Tensor:
        whole_batch = text_batch([text], target.embedding.device)
        pool = text_pool(whole_batch, target.rows, target.embedding)
        read = []
        for start, end in pairwise((0, *ends, len(text))):
            own = torch.arange(start, end)
            batch = Batch(torch.tensor(text[start:end]), own, own, (0, len(own)), HostRows((end,), (range(end),)), None)
            read.append(target.forward(batch, pool, RowAttention(torch.bfloat16)).hidden)
        return torch.cat(read)

    expected = hidden()
    assert torch.equal(hidden(100), expected)
    assert torch.equal(hidden(1, 63, 64, 230, 299), expected)


def test_a_layer_is_compiled_once_for_each_precision(tmp_path: Path) -> None:
    """Another memory layout of an argument is another function: it would be compiled in the middle of serving."""
    for name in ("llama", "qwen3", "mistral", "llama-biased", "mixtral", "qwen3-moe"):
        for dtype in (torch.float32, torch.bfloat16):
            logits_and_cache(whole_target(tmp_path / name, name, dtype), [TOKENS])
    kinds_of_weights = 4  # as they are, and, where such have been read, of eight bits; with experts and without
    assert len(layer.signatures) <= 2 * kinds_of_weights, layer.signatures
    # In either precision, and of half precision in float32 for routers.
    assert len(product.signatures) <= 3, product.signatures

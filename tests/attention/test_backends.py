"""Every backend serves the same text."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import make_core, random_prompts, run

from eagle_rt.attention.flashinfer import FlashInferAttention
from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.attention.select import attention_backend
from eagle_rt.batch import Batch, HostRows
from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.engine.params import SamplingParams


@pytest.mark.parametrize("tree", [None, (3, 2, 6)])
def test_the_kernel_serves_what_torch_serves(target_dir: Path, head_dir: Path, tree: tuple[int, int, int] | None) -> None:
    prompts = random_prompts(3, seed=4, longest=20)
    sampling = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    expected = run(make_core(target_dir, head_dir, tree), prompts, sampling)
    assert (
        run(make_core(target_dir, head_dir, tree, attention_backend="triton", chunked_prefill_size=8), prompts, sampling)
        == expected
    )


REASONS = {
    "needs a GPU; use torch, or set": ("triton", "cpu", torch.float32, {64}),
    "numba is for a CPU; use triton": ("numba", "cuda", torch.bfloat16, {64}),
    "numba reads bfloat16 and float32, not float16; use torch": ("numba", "cpu", torch.float16, {64}),
    "numba takes heads of 16, 32, 48, ... dimensions, not 40": ("numba", "cpu", torch.float32, {64, 40}),
    "flashinfer needs a GPU": ("flashinfer", "cpu", torch.bfloat16, {64}),
    "computes in bfloat16 or float16 only": ("flashinfer", "cuda", torch.float32, {64}),
    "no kernel for heads of 80 dimensions": ("flashinfer", "cuda", torch.bfloat16, {64, 80}),
    "flashinfer is not installed here; pip install flashinfer-python": ("flashinfer", "cuda", torch.bfloat16, {128}),
}


def rows_of(head_dims: set[int]) -> set[RowShape]:
    return {RowShape(2, head_dim) for head_dim in head_dims}


@pytest.mark.parametrize("reason", REASONS)
def test_a_backend_that_cannot_run_says_why(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flashinfer" else object())
    name, device, dtype, head_dims = REASONS[reason]
    with pytest.raises(ValueError, match=reason):
        attention_backend(name, device, dtype, rows_of(head_dims))


def test_flashinfer_does_not_read_latents() -> None:
    with pytest.raises(ValueError, match="not connected for latents, or scores that are scaled otherwise; use triton"):
        attention_backend("flashinfer", "cuda", torch.bfloat16, {RowShape(1, 576, 512)})


@pytest.mark.parametrize(
    ("dtype", "head_dims", "kind"),
    [
        (torch.bfloat16, {64, 32}, "RowAttention"),
        (torch.float16, {64}, "GroupedAttention"),
        (torch.float32, {64, 8}, "GroupedAttention"),
    ],
)
def test_auto_is_our_kernel_where_it_serves(dtype: torch.dtype, head_dims: set[int], kind: str) -> None:
    assert type(attention_backend("auto", "cpu", dtype, rows_of(head_dims))).__name__ == kind


class WrapperOnPaper:
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper` by its documentation, in loops: pages of one row, NHD, a flat mask."""

    def plan(self, query_starts, kv_starts, slots, last_page_lens, heads, kv_heads, head_dim, page_size, **options) -> None:
        assert page_size == 1
        assert last_page_lens.tolist() == [1] * (len(query_starts) - 1)
        assert all(values.dtype == torch.int32 for values in (query_starts, kv_starts, slots, last_page_lens))
        assert options["causal"] == (options["custom_mask"] is None)
        self.query_starts, self.kv_starts, self.slots = query_starts.tolist(), kv_starts.tolist(), slots.tolist()
        self.group, self.options = heads // kv_heads, options

    def run(self, queries, cache, out, return_lse=False):
        log2_total = torch.empty(queries.shape[:2])
        assert cache.shape[1:3] == (2, 1)
        bit = 0
        for start, stop, kv_start, kv_stop in zip(
            self.query_starts, self.query_starts[1:], self.kv_starts, self.kv_starts[1:], strict=False
        ):
            rows = self.slots[kv_start:kv_stop]
            for row in range(start, stop):
                seen = [column <= len(rows) - (stop - row) for column in range(len(rows))]
                if self.options["window_left"] >= 0:
                    last = len(rows) - (stop - row)
                    seen = [sees and last - column <= self.options["window_left"] for column, sees in enumerate(seen)]
                if self.options["custom_mask"] is not None:
                    seen = self.options["custom_mask"][bit : bit + len(rows)].tolist()
                    bit += len(rows)
                chosen = [slot for slot, sees in zip(rows, seen, strict=True) if sees]
                for head in range(queries.shape[1]):
                    keys, values = cache[chosen, 0, 0, head // self.group], cache[chosen, 1, 0, head // self.group]
                    scores = keys @ queries[row, head] / queries.shape[2] ** 0.5
                    out[row, head] = scores.softmax(0) @ values
                    log2_total[row, head] = scores.logsumexp(0) / math.log(2)
        assert self.options["custom_mask"] is None or bit == len(self.options["custom_mask"])
        return (out, log2_total) if return_lse else out


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 3.0, 40.0])], ids=["", "sinks"])
def test_flashinfer_is_asked_for_what_torch_computes(sinks: torch.Tensor | None, is_tree: bool, window: int | None) -> None:
    """As far as a machine without a GPU can tell."""
    generator = torch.Generator().manual_seed(0)
    pool = KVPool([RowShape(2, 8)] * 2, 40, torch.float32, "cpu")
    pool.storage.copy_(torch.randn(pool.storage.shape, generator=generator))
    rows = HostRows((9, 4), (range(3, 12), np.array([30, 2, 17, 25])))
    mask = None
    if is_tree:
        mask = torch.rand(2, 3, 3, generator=generator) < 0.5
        mask[:, [0, 1, 2], [0, 1, 2]] = True
    positions = torch.tensor([6, 7, 8, 1, 2, 3])
    batch = Batch(positions, positions, positions, (0, 3, 6), rows, mask)
    queries = torch.randn(6, 4, 8, generator=generator)
    expected, found = (
        backend.run(queries, 1, backend.plan(batch, pool), window, sinks)
        for backend in (ReferenceAttention(torch.float32), FlashInferAttention(WrapperOnPaper))
    )
    torch.testing.assert_close(found, expected)

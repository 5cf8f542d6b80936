"""Layers whose products of few rows are a GPU's kernels, here interpreted, against those that are torch's."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_target
from engines import load_target, random_prompts, text_logits
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from eagle_rt.kernels import dispatch
from eagle_rt.kernels.gate import GEGLU
from eagle_rt.kernels.skinny import SMALL_TILE, TURNED_TILE
from eagle_rt.models import layers, linear
from eagle_rt.models.linear import Linear

# Weights that tiles divide, and heads of 64.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 2}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Weights are held as on a GPU; the names of the kernels that ran."""
    names: list[str] = []

    def kernel(name: str, x: Tensor) -> Callable[..., Any] | None:
        own = getattr(importlib.import_module(f"eagle_rt.kernels.triton.{name}"), name)

        def run(*arguments: Any) -> Any:
            names.append(name)
            # A CPU holds weights the other way round.
            return own(*(value.contiguous() if isinstance(value, Tensor) and value.dim() == 2 else value for value in arguments))

        return run

    monkeypatch.setattr(linear, "most_skinny_rows", lambda weight: SMALL_TILE.most_rows)
    monkeypatch.setattr(layers, "most_turned_rows", lambda weight, head_dim: TURNED_TILE.most_rows)
    monkeypatch.setattr(linear, "product_with", lambda weight, bias, quantization: None)
    monkeypatch.setattr(dispatch, "triton_kernel", kernel)
    return names


@pytest.mark.parametrize("num_rows", [3, SMALL_TILE.most_rows, SMALL_TILE.most_rows + 1])
def test_few_rows_take_the_kernels(num_rows: int, called: list[str]) -> None:
    x, weight = torch.randn(num_rows, 256).bfloat16(), torch.randn(2 * 70, 256).bfloat16() / 4
    linear = Linear(weight)
    product = (x.float() @ weight.float().T).bfloat16()
    gate, up = product.float().chunk(2, dim=1)
    torch.testing.assert_close(linear(x), product, atol=0.05, rtol=0.02)
    torch.testing.assert_close(linear.gated(x), (gate * torch.sigmoid(gate) * up).bfloat16(), atol=0.1, rtol=0.04)
    is_few = num_rows <= SMALL_TILE.most_rows
    assert called == (["skinny_product", "gated_product"] if is_few else ["gated"])


def test_only_a_swiglu_is_part_of_a_product(called: list[str]) -> None:
    x, weight = torch.randn(3, 256).bfloat16(), torch.randn(2 * 70, 256).bfloat16() / 4
    gate, up = (x.float() @ weight.float().T).bfloat16().float().chunk(2, dim=1)
    expected = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(Linear(weight).gated(x, GEGLU), expected.bfloat16(), atol=0.1, rtol=0.04)
    assert called == ["skinny_product", "gated"]


def test_none_has_a_bias(called: list[str]) -> None:
    linear = Linear(torch.ones(4, 256).bfloat16(), torch.ones(4).bfloat16())
    assert linear(torch.zeros(1, 256).bfloat16()).tolist() == [[1.0] * 4]
    assert not called


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "num_tokens", "turns", "rotates"),
    [("llama", 12, 2, 0), ("llama", 33, 0, 2), ("qwen2", 12, 2, 0), ("qwen3", 12, 0, 2), ("minimax-m2", 12, 0, 2)],
)
def test_targets(tmp_path: Path, name: str, num_tokens: int, turns: int, rotates: int, called: list[str]) -> None:
    """Queries and keys with norms of their own, and many rows, are turned by another kernel."""
    write_target(tmp_path, name, **SIZES)
    tokens = random_prompts(1, seed=5, longest=34)[0]
    tokens = (tokens * num_tokens)[:num_tokens]
    logits = text_logits(load_target(tmp_path), tokens)
    assert (called.count("turned_product"), called.count("rotate_and_write")) == (turns, rotates)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(logits, model(torch.tensor([tokens])).logits[0], atol=1e-4, rtol=0)

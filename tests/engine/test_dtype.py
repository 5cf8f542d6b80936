"""`--dtype auto` on a CPU: bfloat16 where that is faster."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle_rt.config import EngineConfig
from eagle_rt.engine import load
from eagle_rt.models.spec import model_spec, read_config


@pytest.mark.parametrize("has_products", [True, False])
@pytest.mark.parametrize("has_own_kernels", [True, False])
def test_models_are_served_in_bfloat16_where_that_is_faster(
    built_in: Path, has_products: bool, has_own_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our own products any model on any processor; with others large ones, of which each step reads the weights, where the
    processor multiplies bfloat16."""
    monkeypatch.setattr(load, "has_bfloat16_products", lambda: has_products)
    monkeypatch.setattr(load, "takes_own_kernel", lambda weight: has_own_kernels and weight.dtype == torch.bfloat16)
    small, large = (model_spec({**read_config(built_in / "target"), "num_hidden_layers": number}) for number in (8, 100))
    config = EngineConfig(device="cpu")
    assert load.resolve_dtype(config, small) == (torch.bfloat16 if has_own_kernels else torch.float32)
    assert load.resolve_dtype(config, large) == (torch.bfloat16 if has_own_kernels or has_products else torch.float32)
    assert load.resolve_dtype(replace(config, dtype="float16"), large) == torch.float16

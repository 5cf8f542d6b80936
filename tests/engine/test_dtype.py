"""`--dtype auto` on a CPU: bfloat16 where the processor multiplies it and reading weights is what a step costs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle_rt.config import EngineConfig
from eagle_rt.engine import load
from eagle_rt.models.spec import model_spec, read_config


@pytest.mark.parametrize("has_products", [True, False])
def test_large_models_are_served_in_bfloat16_where_that_is_faster(
    built_in: Path, has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "has_bfloat16_products", lambda: has_products)
    small = model_spec(read_config(built_in / "target"))
    large = replace(small, num_layers=100)
    config = EngineConfig(device="cpu")
    assert load.resolve_dtype(config, small) == torch.float32
    assert load.resolve_dtype(config, large) == (torch.bfloat16 if has_products else torch.float32)
    assert load.resolve_dtype(replace(config, dtype="float16"), large) == torch.float16

"""The training loop: resuming gives the same weights as never having stopped."""

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from eagle_rt.train.loop import LoopConfig, fit, muon_for
from eagle_rt.train.muon import orthogonalised

CONFIG = LoopConfig(num_steps=12, log_every=2, evaluate_every=6, checkpoint_every=4)


def train(run_dir: Path, stop_before: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss_at(step: int, part: int) -> tuple[Tensor, dict[str, float]]:
        if step == stop_before:
            raise KeyboardInterrupt
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        return (module(x) - x.sum(1, keepdim=True)).square().mean(), {"step_seen": float(step)}

    fit(module, muon_for(module, matrix_lr=0.02, other_lr=0.01), loss_at, CONFIG, run_dir, lambda: {"held_out": 1.0})
    return module


def test_a_run_that_was_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", stop_before=7)
    resumed = train(tmp_path / "killed")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_it_learns_and_logs(tmp_path: Path) -> None:
    train(tmp_path)
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [int(row["step"]) for row in rows] == [2, 4, 6, 8, 10, 12]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert [row["step"] for row in csv.DictReader((tmp_path / "held_out.csv").open())] == ["6", "12"]


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    config = LoopConfig(num_steps=100, warmup_fraction=0.1)
    factors = [config.learning_rate_factor(step) for step in range(100)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert max(factors) == 1.0
    assert factors[-1] < 0.001


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_muon_evens_out_singular_values(shape: tuple[int, int]) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(update))
    assert values.min() > 0.3
    assert values.max() < 1.3

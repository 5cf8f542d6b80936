"""One training loop for everything here: warm-up and cosine, clipping, a CSV log, checkpoints that resume bit for bit.

Under torchrun every process computes its part of a step, and the gradients are added up.
"""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from tqdm import tqdm

from eagle_rt.train.muon import Muon

Metrics = dict[str, float]


@dataclass(frozen=True)
class LoopConfig:
    """num_steps optimizer steps, each from `num_parts` passes; the learning rate rises for `warmup_fraction` of them and then falls
    on a cosine to zero."""

    num_steps: int
    num_parts: int = 1
    warmup_fraction: float = 0.03
    clip_norm: float = 1.0
    log_every: int = 10
    evaluate_every: int = 250
    checkpoint_every: int = 250

    def learning_rate_factor(self, step: int) -> float:
        num_warmup = max(1, round(self.num_steps * self.warmup_fraction))
        if step < num_warmup:
            return (step + 1) / num_warmup
        progress = (step - num_warmup) / max(1, self.num_steps - num_warmup)
        return 0.5 * (1 + math.cos(math.pi * progress))


def adamw_for(module: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """What EAGLE heads are published to have been trained with."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)]


def muon_for(module: nn.Module, *, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, AdamW for embeddings, heads and norms.

    On a model this small Muon needs about half of AdamW's tokens for the same loss (Jordan et al., "Muon", 2024).
    """
    matrices, others = [], []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        is_table = any(part in name for part in ("embed", "lm_head", "markov"))
        (matrices if parameter.ndim == 2 and not is_table else others).append(parameter)
    return [
        Muon(matrices, lr=matrix_lr),
        torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rank_and_world_size() -> tuple[int, int]:
    """This process's number and how many there are, under torchrun or alone."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def add_up(tensors: list[Tensor]) -> None:
    """Sum each tensor over all processes, in place."""
    if distributed.is_initialized():
        for tensor in tensors:
            distributed.all_reduce(tensor)


def fit(
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loss_at: Callable[[int, int], tuple[Tensor, Metrics]],
    config: LoopConfig,
    run_dir: Path,
    evaluate: Callable[[], Metrics] | None = None,
) -> None:
    """Train `module` in place; `loss_at(step, part)` must depend on nothing but its arguments, the rank and the weights. Losses and
    metrics are added up over the parts and processes of a step.

    Writes `run_dir/checkpoint.pt` and `run_dir/log.csv`; a second call with the same `run_dir` goes on where the first stopped.
    """
    is_main = rank_and_world_size()[0] == 0
    run_dir.mkdir(parents=True, exist_ok=True)
    checkpoint_file = run_dir / "checkpoint.pt"
    peak_lrs = [optimizer.defaults["lr"] for optimizer in optimizers]
    first_step = 0
    if checkpoint_file.exists():
        checkpoint = torch.load(checkpoint_file, weights_only=True, map_location="cpu")
        module.load_state_dict(checkpoint["module"])
        for optimizer, state in zip(optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first_step = checkpoint["step"]

    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    progress = tqdm(
        range(first_step, config.num_steps),
        initial=first_step,
        total=config.num_steps,
        unit="step",
        disable=None if is_main else True,
    )
    for step in progress:
        for optimizer, peak_lr in zip(optimizers, peak_lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * config.learning_rate_factor(step)
        totals: Metrics = {}
        for part in range(config.num_parts):
            loss, metrics = loss_at(step, part)
            loss.backward()
            for name, value in {"loss": loss.item(), **metrics}.items():
                totals[name] = totals.get(name, 0.0) + value
        add_up([parameter.grad for parameter in parameters if parameter.grad is not None])
        nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        num_done = step + 1
        if num_done % config.log_every == 0:
            values = torch.tensor(list(totals.values()), dtype=torch.float64)
            add_up([values])
            totals = dict(zip(totals, values.tolist(), strict=True))
            progress.set_postfix({name: f"{value:.3f}" for name, value in totals.items()})
            if is_main:
                append_row(run_dir / "log.csv", {"step": num_done, **totals})
        is_last = num_done == config.num_steps
        if evaluate and is_main and (num_done % config.evaluate_every == 0 or is_last):
            held_out = evaluate()
            progress.write(f"step {num_done}: " + ", ".join(f"{name} {value:.3f}" for name, value in held_out.items()))
            append_row(run_dir / "held_out.csv", {"step": num_done, **held_out})
        if is_main and (num_done % config.checkpoint_every == 0 or is_last):
            save_checkpoint(checkpoint_file, module, optimizers, num_done)


def save_checkpoint(file: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    """Write beside the old checkpoint and rename, so that a kill in the middle leaves a whole file."""
    partial = file.with_suffix(".partial")
    torch.save(
        {"module": module.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers], "step": step},
        partial,
    )
    partial.rename(file)


def append_row(file: Path, row: dict[str, float]) -> None:
    is_new = not file.exists()
    with file.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, row)
        if is_new:
            writer.writeheader()
        writer.writerow(row)

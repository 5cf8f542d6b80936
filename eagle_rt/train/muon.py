"""The Muon optimizer in the weights' own precision.

torch.optim.Muon orthogonalises in bfloat16, which a CPU without bfloat16 instructions does several times slower than float32.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# The quintic of Jordan et al., "Muon: An optimizer for hidden layers" (2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalised(update: Tensor, num_iterations: int = 5) -> Tensor:
    """Push the singular values of `update` [rows, columns] towards 1 by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    is_tall = update.shape[0] > update.shape[1]
    x = update.T if is_tall else update
    x = x / (x.norm() + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum (Nesterov) whose update is orthogonalised, for weight matrices only."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalised(parameter.grad.lerp(state["momentum"], group["momentum"]))
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)

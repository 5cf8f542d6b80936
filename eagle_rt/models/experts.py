"""A feed-forward part of many experts, of which every token takes a few."""

from typing import TYPE_CHECKING

from torch import Tensor

from eagle_rt.kernels.experts import mix_experts, route
from eagle_rt.kernels.opaque import Opaque
from eagle_rt.kernels.packed_linear import OpaqueProduct
from eagle_rt.kernels.products import experts_with
from eagle_rt.models.spec import ExpertShape
from eagle_rt.models.weights import Checkpoint

if TYPE_CHECKING:  # not everywhere is numba installed
    from eagle_rt.kernels.panel_product import ProductStack


class Experts(Opaque):
    """See `kernels.experts`. router: [experts, H]; gate_and_up: [experts, 2 * I, H]; down: [experts, H, I].

    Where there are kernels with weights laid out for them these are held only so; in_int8: those of the experts are rounded to
    eight bits.
    """

    def __init__(self, router: Tensor, gate_and_up: Tensor, down: Tensor, shape: ExpertShape, *, in_int8: bool = False) -> None:
        super().__init__()
        self.out_size, self._router, self._shape = router.shape[1], router, shape
        self.panels = experts_with(router, gate_and_up, down, *self.routing, in_int8=in_int8)
        self._weights = None if self.panels else (gate_and_up, down)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Of gates and ups, and of downs; copies where only those laid out for products are held."""
        if self.panels:
            return self.panels.gate_and_up.unpacked(), self.panels.down.unpacked()
        assert self._weights is not None
        return self._weights

    @property
    def products(self) -> "tuple[OpaqueProduct | ProductStack | None, ...]":
        """Of the router, of gates and ups, and of downs."""
        panels = self.panels
        return (panels.router, panels.gate_and_up, panels.down) if panels else (None,) * 3

    @property
    def routing(self) -> tuple[int, bool]:
        return self._shape.top_k, self._shape.normalizes

    def quantized(self) -> "Experts":
        """The same with experts of eight bits."""
        return Experts(self._router, *self.weights, self._shape, in_int8=True)

    def apply(self, x: Tensor) -> Tensor:
        if self.panels:
            return self.panels(x)
        shares, experts = route(x @ self._router.t(), *self.routing)
        return mix_experts(x, shares, experts, *self.weights)


def load_experts(checkpoint: Checkpoint, prefix: str, hidden_size: int, shape: ExpertShape) -> Experts:
    """Each matrix is copied to its place as it is read, so that no more than one of them is in memory twice."""
    size = shape.intermediate_size
    router = checkpoint.take(f"{prefix}.gate.weight", (shape.count, hidden_size))
    gate_and_up = router.new_empty(shape.count, 2, size, hidden_size)
    down = router.new_empty(shape.count, hidden_size, size)
    for number in range(shape.count):
        name = f"{prefix}.experts.{number}"
        gate_and_up[number, 0] = checkpoint.take(f"{name}.gate_proj.weight", (size, hidden_size))
        gate_and_up[number, 1] = checkpoint.take(f"{name}.up_proj.weight", (size, hidden_size))
        down[number] = checkpoint.take(f"{name}.down_proj.weight", (hidden_size, size))
    return Experts(router, gate_and_up.flatten(1, 2), down, shape)


def expert_name(stored: str) -> str:
    """A stored name of a target's tensor as it is taken by: Mixtral's have names of their own."""
    if ".block_sparse_moe." not in stored:
        return stored
    for given, ours in ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")):
        stored = stored.replace(given, ours)
    return stored

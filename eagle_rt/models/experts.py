"""A feed-forward part of many experts, of which every token takes a few."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_rt.kernels.experts import ExpertTensors, Mixing, mix_experts
from eagle_rt.kernels.narrow_experts import NarrowStack
from eagle_rt.kernels.opaque import Opaque
from eagle_rt.kernels.packed_linear import OpaqueProduct
from eagle_rt.kernels.products import Quantization, experts_with
from eagle_rt.models.layer_kinds import ExpertShape
from eagle_rt.models.weights import Checkpoint

if TYPE_CHECKING:  # not everywhere is numba installed
    from numpy.typing import NDArray

    from eagle_rt.kernels.panel_product import ProductStack


CHOICE_BIAS = "gate.e_score_correction_bias"


class Experts(Opaque):
    """See `kernels.experts`. Where there are kernels with weights laid out for them these are held only so; quantization: of
    the experts, see `products.product_with`."""

    def __init__(self, weights: ExpertTensors, mixing: Mixing, quantization: Quantization = "none") -> None:
        super().__init__()
        self.out_size, self.form = weights.router.shape[1], mixing
        self._laid_out = experts_with(weights, mixing, quantization)
        nothing = weights.router.new_empty(0)
        self._weights = replace(weights, gate_and_up=nothing, down=nothing) if self._laid_out else weights

    @property
    def weights(self) -> ExpertTensors:
        """Copies where only those laid out for products are held."""
        if not self._laid_out:
            return self._weights
        gate_and_up, down = self._laid_out.unpacked()
        return replace(self._weights, gate_and_up=gate_and_up, down=down)

    @property
    def products(self) -> "tuple[OpaqueProduct | ProductStack | NarrowStack | None, ...]":
        """Of the router, of gates and ups, and of downs."""
        own = self._laid_out
        return (own.router, own.gate_and_up, own.down) if own else (None,) * 3

    @property
    def choice_bias(self) -> "NDArray | None":
        """As compiled functions take it."""
        return getattr(self._laid_out, "choice_bias", None)

    def quantized(self) -> "Experts":
        """The same with experts of eight bits."""
        return Experts(self.weights, self.form, "int8")

    def apply(self, x: Tensor) -> Tensor:
        """x: [R, H], or [R, 2 H] with another row, which the router looks at, beside each."""
        own, *router_x = (part.contiguous() for part in x.split(self.out_size, dim=1))
        return self._laid_out(own, *router_x) if self._laid_out else mix_experts(own, self._weights, self.form, *router_x)


def load_experts(checkpoint: Checkpoint, prefix: str, hidden_size: int, shape: ExpertShape, quantization: Quantization) -> Experts:
    """Each matrix is copied to its place as it is read, so that no more than one of them is in memory twice."""
    router = checkpoint.take(f"{prefix}.gate.weight", (shape.count, hidden_size))
    read = side_by_side if f"{prefix}.experts.gate_up_proj" in checkpoint else one_by_one
    weights = read(checkpoint, prefix, router, shape)
    if shape.mixing.by_sigmoid:
        weights = replace(weights, router=weights.router.float())
    return Experts(weights, shape.mixing, quantization)


def one_by_one(checkpoint: Checkpoint, prefix: str, router: Tensor, shape: ExpertShape) -> ExpertTensors:
    """As most have them: each expert's three matrices are tensors of their own."""
    hidden_size, size, mixing = router.shape[1], shape.intermediate_size, shape.mixing
    gate_and_up = router.new_empty(shape.count + mixing.num_shared, 2, size, hidden_size)
    down = router.new_empty(shape.count + mixing.num_shared, hidden_size, size)
    for number in range(shape.count):
        name = f"{prefix}.experts.{number}"
        gate_and_up[number, 0] = checkpoint.take(f"{name}.gate_proj.weight", (size, hidden_size))
        gate_and_up[number, 1] = checkpoint.take(f"{name}.up_proj.weight", (size, hidden_size))
        down[number] = checkpoint.take(f"{name}.down_proj.weight", (hidden_size, size))
    fill_shared(checkpoint, prefix, gate_and_up[shape.count :], down[shape.count :])
    if mixing.gates_shared:
        router = torch.cat((router, checkpoint.take(f"{prefix}.shared_expert_gate.weight", (1, hidden_size))))
    choice_bias = None
    if f"{prefix}.{CHOICE_BIAS}" in checkpoint:
        choice_bias = checkpoint.take_raw(f"{prefix}.{CHOICE_BIAS}", (shape.count,)).to(router.device, torch.float32)
    share_scales = checkpoint.take_optional(f"{prefix}.gate.per_expert_scale", (shape.count,))
    share_scales = None if share_scales is None else share_scales.float()
    return ExpertTensors(router, gate_and_up.flatten(1, 2), down, choice_bias=choice_bias, share_scales=share_scales)


def fill_shared(checkpoint: Checkpoint, prefix: str, gate_and_up: Tensor, down: Tensor) -> None:
    """Those that all tokens share, [N, 2, I, H] and [N, H, I], which are stored as one: channels do not know of one another."""
    count, _, size, hidden_size = gate_and_up.shape
    if not count:
        return
    for half, part in enumerate(("gate_proj", "up_proj")):
        own = checkpoint.take(f"{prefix}.shared_experts.{part}.weight", (count * size, hidden_size))
        gate_and_up[:, half] = own.unflatten(0, (-1, size))
    own = checkpoint.take(f"{prefix}.shared_experts.down_proj.weight", (hidden_size, count * size))
    down[:] = own.unflatten(1, (-1, size)).transpose(0, 1)


def side_by_side(checkpoint: Checkpoint, prefix: str, router: Tensor, shape: ExpertShape) -> ExpertTensors:
    """As gpt-oss and Llama 4 have them: all but shared ones in one tensor, inputs before outputs, gates and ups in turns, and
    biases if any."""
    (count, hidden_size), size = router.shape, shape.intermediate_size

    def taken(name: str, *own_shape: int) -> Tensor:
        return checkpoint.take(f"{prefix}.{name}", own_shape)

    gate_and_up = taken("experts.gate_up_proj", count, hidden_size, 2 * size).unflatten(2, (size, 2)).permute(0, 3, 2, 1)
    down = taken("experts.down_proj", count, size, hidden_size).transpose(1, 2).contiguous()
    if num_shared := shape.mixing.num_shared:
        gate_and_up, down = (torch.cat((own, own.new_empty(num_shared, *own.shape[1:]))) for own in (gate_and_up, down))
        fill_shared(checkpoint, prefix, gate_and_up[count:], down[count:])
    if f"{prefix}.gate.bias" not in checkpoint:
        return ExpertTensors(router, gate_and_up.flatten(1, 2), down)
    gate_and_up_bias = taken("experts.gate_up_proj_bias", count, 2 * size).unflatten(1, (size, 2)).transpose(1, 2)
    return ExpertTensors(
        router,
        gate_and_up.flatten(1, 2),
        down,
        taken("gate.bias", count),
        gate_and_up_bias.flatten(1),
        taken("experts.down_proj_bias", count, hidden_size),
    )


def expert_name(stored: str) -> str:
    """A stored name of a target's tensor as it is taken by: Mixtral's, MiniMax', gpt-oss', Qwen3.5's and Gemma 4's have names of
    their own."""
    stored = re.sub(r"(\.\d+)\.router\.(proj\.)?", r"\1.mlp.gate.", stored)
    stored = re.sub(r"(\.layers\.\d+)\.experts\.", r"\1.mlp.experts.", stored)
    stored = stored.replace(".mlp.router.", ".mlp.gate.").replace(".mlp.shared_expert.", ".mlp.shared_experts.")
    if ".block_sparse_moe." not in stored:
        return stored
    names = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.", ".mlp.e_score": ".mlp.gate.e_score"}
    for given, ours in {".block_sparse_moe.": ".mlp.", **names}.items():
        stored = stored.replace(given, ours)
    return stored

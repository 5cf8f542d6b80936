"""Tensor parallelism's cut: every process holds an equal part of each layer, of which the sums are what the layer gives (Shoeybi et
al., Megatron-LM, 2019, section 3): some of the heads, some of the feed-forward part's channels, and some tokens of the output
layer."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from eagle_rt.models.layer_kinds import ExpertShape, has_gate
from eagle_rt.models.layer_shape import LayerShape
from eagle_rt.models.spec import ModelSpec
from eagle_rt.models.weights import ChangedCheckpoint, Checkpoint

# Along which axis tensors are cut, by what their names end with; all others are whole in every part.
AXES = (
    (r"\b(q|k|v|q_b|kv_b|gate|up)_proj\.(weight|bias)|\.sinks|\blm_head\.(weight|bias)", 0),
    (r"\b(o|down)_proj\.weight|experts\.(gate_up_proj_bias|down_proj)", 1),
    (r"experts\.gate_up_proj", 2),
)
# What is added to the sum of all parts is added by the first of them.
ADDED_ONCE = r"\b(o_proj\.bias|down_proj\.bias|experts\.down_proj_bias)"


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def check(self, spec: ModelSpec) -> None:
        """Raises ValueError if the model cannot be cut into so many parts."""
        shape, size = spec.shape, self.size
        if spec.delta_net or shape.norms_all_heads:
            raise ValueError(f"--tensor-parallel-size {size}: {spec.architecture} cannot be cut into parts yet; use 1")
        numbers = [(shape.num_heads, "attention heads"), (spec.vocab_size, "tokens")]
        for experts in spec.experts:
            if experts:
                numbers.append((experts.intermediate_size, "channels of an expert"))
            if has_gate(experts):
                numbers.append((shape.intermediate_size, "feed-forward channels"))
        # Fewer heads are held by several.
        numbers += [(own.num_kv_heads, "heads of keys and values") for own in spec.layer_shapes if size % own.num_kv_heads]
        odd = [f"{number} {name}" for number, name in numbers if number % size]
        if odd:
            raise ValueError(f"--tensor-parallel-size {size} does not divide the model's {odd[0]}: choose one that does")

    def layer_shape(self, shape: LayerShape) -> LayerShape:
        return replace(
            shape,
            intermediate_size=shape.intermediate_size // self.size,
            num_heads=shape.num_heads // self.size,
            num_kv_heads=max(1, shape.num_kv_heads // self.size),
        )

    def expert_shape(self, shape: ExpertShape | None) -> ExpertShape | None:
        return shape and replace(shape, intermediate_size=shape.intermediate_size // self.size)

    def part_of(self, tensor: Tensor, axis: int, num_parts: int | None = None) -> Tensor:
        """A copy of this one's; num_parts: fewer than there are shards, and then some hold the same."""
        num_parts = num_parts or self.size
        size = tensor.shape[axis] // num_parts
        return tensor.narrow(axis, self.rank * num_parts // self.size * size, size).clone()


WHOLE = Shard()
Total = Callable[[Tensor], Tensor]


def whole(x: Tensor) -> Tensor:
    """The sum of all parts where there is one."""
    return x


class ShardedCheckpoint(ChangedCheckpoint):
    """One shard of a target's tensors: each is asked for by the shape of its part."""

    def __init__(self, tensors: Checkpoint, shard: Shard, spec: ModelSpec) -> None:
        super().__init__(tensors)
        self._shard, self._spec = shard, spec

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        shard = self._shard
        if re.search(f"{ADDED_ONCE}$", name):
            tensor = self._tensors.take(name, shape)
            return tensor if shard.rank == 0 else tensor.zero_()
        axis = axis_of(name)
        if axis is None:
            return self._tensors.take(name, shape)
        is_shared = re.search(r"\b[kv]_proj\.", name)
        num_parts = min(shard.size, self._spec.shape_of(name).num_kv_heads) if is_shared else shard.size
        full = [size * num_parts if index == axis else size for index, size in enumerate(shape)]
        return shard.part_of(self._tensors.take(name, (*full,)), axis, num_parts)


def axis_of(name: str) -> int | None:
    """Along which axis a tensor of this name is cut; None: along none."""
    return next((axis for pattern, axis in AXES if re.search(f"({pattern})$", name)), None)

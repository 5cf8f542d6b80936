"""The processes that hold one target's shards, and what they tell each other: commands through pipes, which wait without taking a
processor, and tensors through torch.distributed, which on GPUs never come to the host.

The first process schedules, drafts, chooses and answers as if it held the target alone. What it does with the target it has the
others do too: they know of passes, products and cache rows, and of no requests, trees or texts.
"""

import io
import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eagle_rt.batch import Batch
from eagle_rt.models.shard import Shard

# What processes wait for each other at most within a pass, the first of which compiles kernels.
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class MakePool:
    number: int
    num_slots: int


@dataclass(frozen=True)
class DropPool:
    number: int


@dataclass(frozen=True)
class Move:
    """`KVPool.move`."""

    pool: int
    sources: Tensor
    destinations: Tensor


@dataclass(frozen=True)
class Pass:
    """`Decoder.forward`; attention: the backend's name."""

    batch: Batch
    pool: int
    attention: str


@dataclass(frozen=True)
class OutputLayer:
    """The own part of the logits of hidden states [R, H]."""

    hidden: Tensor


@dataclass(frozen=True)
class OutputWeight:
    """The own part of the output layer's weight."""


Command = MakePool | DropPool | Move | Pass | OutputLayer | OutputWeight


class Group:
    """What this process has of the group."""

    def __init__(self, shard: Shard, device: str) -> None:
        self.shard, self.device = shard, device

    def join(self, file: str) -> None:
        """Meet the others by a file, and wait until all are there."""
        kind = "nccl" if self.device == "cuda" else "gloo"
        rank, size = self.shard.rank, self.shard.size
        dist.init_process_group(kind, f"file://{file}", rank=rank, world_size=size, timeout=TIMEOUT)

    def total(self, x: Tensor) -> Tensor:
        """The sum of everyone's, in place."""
        dist.all_reduce(x)
        return x

    def gathered(self, part: Tensor) -> list[Tensor]:
        """Everyone's parts, for the first; for the others there are none."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.shard.size)] if self.shard.rank == 0 else None
        dist.gather(part, parts)
        return parts or []

    def share(self, tensors: list[Tensor]) -> None:
        """Give the others these."""
        for kind in kinds_of([tensor.dtype for tensor in tensors]):
            dist.broadcast(torch.cat([tensor.flatten() for tensor in tensors if tensor.dtype == kind]), 0)

    def shared(self, descriptions: list[tuple[torch.dtype, torch.Size]]) -> list[Tensor]:
        """What the first one gives."""
        found: dict[int, Tensor] = {}
        for kind in kinds_of([dtype for dtype, _ in descriptions]):
            own = [index for index, (dtype, _) in enumerate(descriptions) if dtype == kind]
            sizes = [descriptions[index][1].numel() for index in own]
            together = torch.empty(sum(sizes), dtype=kind, device=self.device)
            dist.broadcast(together, 0)
            found |= zip(own, together.split(sizes), strict=True)
        return [found[index].view(shape) for index, (_, shape) in enumerate(descriptions)]


def kinds_of(dtypes: list[torch.dtype]) -> list[torch.dtype]:
    """Each once: tensors of one kind go together."""
    return list(dict.fromkeys(dtypes))


def packed(command: Command) -> tuple[bytes, list[Tensor]]:
    """A command without its tensors, and those."""
    stream = io.BytesIO()
    pickler = Pickler(stream)
    pickler.dump(command)
    descriptions = [(tensor.dtype, tensor.shape) for tensor in pickler.tensors]
    return pickle.dumps((descriptions, stream.getvalue())), pickler.tensors


class Pickler(pickle.Pickler):
    """Leaves tensors out."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class Unpickler(pickle.Unpickler):
    """Puts them back."""

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, index: int) -> Tensor:
        return self._tensors[index]

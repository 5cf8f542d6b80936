"""Attention over the cache as layers call it, openly or behind an operator that a compiler does not look into."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend, WholeLayers
from eagle_rt.attention.recurrence import CachedRecurrence
from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels.whole_pass import SeenRows


class CachedAttention:
    """Attention of one pass: each layer's keys and values go to the cache first. recurrence: of layers with memories instead."""

    def __init__(self, batch: Batch, pool: KVPool, backend: AttentionBackend) -> None:
        self._batch, self._pool, self._backend = batch, pool, backend
        self._plan = backend.plan(batch, pool)
        self.recurrence = CachedRecurrence(batch, pool.memories) if pool.memories else None

    @property
    def cache(self) -> tuple[KVPool, Tensor]:
        """The pool, and the slots [T] that this pass writes: for those that write keys and values themselves."""
        return self._pool, self._batch.slots

    @property
    def whole_layers(self) -> SeenRows | None:
        """What compiled functions need to run attention themselves, if they can."""
        return self._backend.whole_layers(self._plan) if isinstance(self._backend, WholeLayers) else None

    def __call__(
        self, layer: int, queries: Tensor, keys_and_values: Tensor | None, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """[T, heads, numbers of a value] from queries [T, heads, head_dim] and rows of the cache, [T, 2 or 1, kv heads, head_dim],
        None where those are cached already."""
        if keys_and_values is not None:
            self._pool.write(layer, self._batch.slots, keys_and_values)
        return self._backend.run(queries, layer, self._plan, window, sinks)


# As layers call it.
Attend = Callable[[int, Tensor, Tensor | None, int | None, Tensor | None], Tensor]

_current: list[Attend] = []


@contextmanager
def attending(attention: Attend) -> Iterator[None]:
    """Within this, `opaque_attend` is `attention`."""
    _current.append(attention)
    try:
        yield
    finally:
        _current.pop()


@torch.library.custom_op("eagle_rt::attend", mutates_args=())
def opaque_attend(
    layer: int, queries: Tensor, keys_and_values: Tensor | None, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """`CachedAttention` as an operator. That it also writes the cache is nothing that a compiler needs to know: no other
    operator reads it, and layers follow each other by what they return."""
    return _current[-1](layer, queries, keys_and_values, window, sinks).contiguous()


@opaque_attend.register_fake
def _(layer: int, queries: Tensor, keys_and_values: Tensor | None, window: int | None, sinks: Tensor | None = None) -> Tensor:
    return torch.empty_like(queries, memory_format=torch.contiguous_format)

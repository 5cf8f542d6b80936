"""What the layers of one pass share."""

from dataclasses import dataclass, replace

from torch import Tensor

from eagle_rt.attention.cached import Attend, CachedAttention
from eagle_rt.attention.recurrence import CachedRecurrence
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels import dispatch
from eagle_rt.kernels.whole_pass import Angles, ByWindow, WholePass, whole_pass
from eagle_rt.models.rope import Rope


@dataclass(frozen=True)
class PassContext:
    """What every layer of one pass shares: the positions' angles, cos and sin, and `attend(layer, queries, keys_and_values, window,
    sinks)`.

    cache: the pool, and the slots [T] of this pass, where one kernel turns queries and keys and writes to the cache; the layers
    then have no keys and values to hand to `attend`. whole: what functions for whole layers need, where there are such.
    recurrence: what layers with memories call, where there are such. query_scales: see `Rope.query_scales`; where there are some no
    whole layers are one function.
    """

    angles: ByWindow[Angles]
    attend: Attend
    cache: tuple[KVPool, Tensor] | None = None
    whole: WholePass | None = None
    recurrence: CachedRecurrence | None = None
    query_scales: Tensor | None = None


def pass_context(rope: Rope, positions: Tensor, attend: Attend, window_rope: Rope | None = None) -> PassContext:
    """window_rope: of layers with a window, if they have one of their own."""
    own, query_scales = rope.cos_sin(positions), rope.query_scales(positions)
    angles = ByWindow(own, window_rope.cos_sin(positions) if window_rope else own)
    if not isinstance(attend, CachedAttention):
        return PassContext(angles, attend, query_scales=query_scales)
    context = PassContext(angles, attend, recurrence=attend.recurrence, query_scales=query_scales)
    if not (dispatch.prefers_triton(positions) or dispatch.prefers_compiled(positions, own[0].dtype)):
        return context
    pool, slots = attend.cache
    is_alike = query_scales is None and len(pool.storages) == 1
    whole = whole_pass(angles, pool.storage, slots, attend.whole_layers) if is_alike else None
    return replace(context, cache=attend.cache, whole=whole)

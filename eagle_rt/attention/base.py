"""What a model asks of an attention implementation."""

from typing import Any, Protocol

from torch import Tensor

from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool


class AttentionBackend(Protocol):
    """Plan once a forward pass, then run once a layer.

    Some backends need lengths that the host knows (`HostRows`); one that serves captured steps takes `DeviceRows`, and its plan is
    then captured too.
    """

    def plan(self, batch: Batch, pool: KVPool) -> Any:
        """What all layers of this pass share: the cache, masks, lengths, work lists."""
        ...

    def run(self, queries: Tensor, layer: int, plan: Any, window: int | None) -> Tensor:
        """Attention of queries [T, query heads, head_dim] over their sequences' cached rows; the same shape comes back.

        The rows of this pass are already in the pool. Query heads share key heads in groups. `window` bounds how far back a
        query sees, itself included.
        """
        ...

"""What a model asks of an attention implementation."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import Tensor

from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels.whole_pass import SeenRows


class AttentionBackend(Protocol):
    """Plan once a forward pass, then run once a layer.

    Some backends need lengths that the host knows (`HostRows`); one that serves captured steps takes `DeviceRows`, and its plan is
    then captured too.

    name: what `attention_backend` knows it by.
    """

    name: str

    def plan(self, batch: Batch, pool: KVPool) -> Any:
        """What all layers of this pass share: the cache, masks, lengths, work lists."""
        ...

    def run(self, queries: Tensor, layer: int, plan: Any, window: int | None, sinks: Tensor | None = None) -> Tensor:
        """Attention of queries [T, query heads, head_dim] over their sequences' cached rows: [T, query heads, numbers of a value].

        The rows of this pass are already in the pool. Query heads share key heads in groups. `window` bounds how far back a
        query sees, itself included. `sinks` [query heads] float32 are logits beside those of what is seen: each takes a share of
        its head's softmax and adds nothing (OpenAI, gpt-oss model card, 2025; after Xiao et al., 2023).
        """
        ...


class WholeLayers(ABC):
    """A backend by whose plans compiled functions can run attention themselves, as one part of a layer."""

    @abstractmethod
    def whole_layers(self, plan: Any) -> SeenRows | None:
        """What they need of a plan; None if this pass has to go through `run`."""

"""What layers that do not look back at a text remember of it, in the stead of keys and values."""

import torch
from torch import Tensor

from eagle_rt.kernels.delta_net import DeltaNetShape, DeltaNetWeights, Lineage, Memory, delta_net


class Memories:
    """What L such layers remember of each of S running requests: the tensors of `kernels.delta_net.Memory`, layer by layer.

    A pass over texts changes it; one over trees does not, but notes what its rows would have written, until `keep` says which of
    them the texts go on with.
    """

    def __init__(self, num_layers: int, num_texts: int, shape: DeltaNetShape, dtype: torch.dtype, device: str) -> None:
        self.channels = torch.zeros(num_layers, num_texts, shape.taps - 1, shape.num_channels, dtype=dtype, device=device)
        matrices = num_layers, num_texts, shape.num_heads, shape.key_dim, shape.value_dim
        self.matrices = torch.zeros(*matrices, dtype=torch.float32, device=device)
        self._noted: list[tuple[int, Tensor, Tensor, DeltaNetWeights]] = []
        self._noted_of = torch.empty(0), torch.empty(0)

    @staticmethod
    def bytes_per_text(num_layers: int, shape: DeltaNetShape, dtype: torch.dtype) -> int:
        channels = (shape.taps - 1) * shape.num_channels * dtype.itemsize
        return num_layers * (channels + 4 * shape.num_heads * shape.key_dim * shape.value_dim)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """What is remembered of some texts [N] in every layer, to other rows [N]."""
        for own in (self.channels, self.matrices):
            own.index_copy_(1, targets, own.index_select(1, sources))

    def begin(self, rows: Tensor, is_new: Tensor) -> None:
        """A pass over trees begins, of the texts in these rows."""
        self._noted, self._noted_of = [], (rows, is_new)

    def note(self, layer: int, inputs: Tensor, rates: Tensor, weights: DeltaNetWeights) -> None:
        """What a layer has made of the trees; see `delta_net`."""
        self._noted.append((layer, inputs, rates, weights))

    def keep(self, paths: Tensor) -> None:
        """The texts go on with these rows of the last pass: paths [B, D], of each sequence in order, -1 past the last.

        These rows are read once more, one after the other: what is remembered then is what it would be had there been no tree.
        """
        rows, is_new = self._noted_of
        lengths = (paths >= 0).sum(dim=1)
        starts = torch.arange(len(paths), device=paths.device) * paths.shape[1]
        lineage, taken = Lineage.of_texts(starts, starts + lengths, paths.numel()), paths.clamp(min=0).flatten()
        for layer, inputs, rates, weights in self._noted:
            memory = Memory(self.channels[layer], self.matrices[layer], rows, is_new)
            delta_net(inputs[taken], rates[taken], weights, memory, lineage)
        self._noted = []

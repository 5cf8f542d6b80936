"""Layers with memories in one pass: which row comes before which, and what is remembered of whom."""

import torch
from torch import Tensor

from eagle_rt.batch import Batch, HostMask, MaskWords, to_device
from eagle_rt.cache.memories import Memories
from eagle_rt.kernels.delta_net import DeltaNetWeights, Lineage, Memory, delta_net

WORD_BITS = 64


class CachedRecurrence:
    """What such layers call; the pass is over texts where it has no tree mask."""

    def __init__(self, batch: Batch, memories: Memories) -> None:
        assert batch.state_rows is not None, "or there would be nowhere to remember anything"
        self._lineage, self._memories, self._rows = lineage_of(batch), memories, batch.state_rows
        self._is_new = batch.positions[self._lineage.starts] == 0
        if not self._lineage.is_text:
            memories.begin(self._rows, self._is_new)

    def __call__(self, layer: int, inputs: Tensor, rates: Tensor, weights: DeltaNetWeights) -> Tensor:
        """`delta_net` of the layer, which is the so-manieth with a memory."""
        memories = self._memories
        if not self._lineage.is_text:
            memories.note(layer, inputs, rates, weights)
        memory = Memory(memories.channels[layer], memories.matrices[layer], self._rows, self._is_new)
        return delta_net(inputs, rates, weights, memory, self._lineage)


def lineage_of(batch: Batch) -> Lineage:
    """Which row of a pass comes before which: in a text the one before it, in a tree the last that it sees."""
    starts, device, mask = batch.query_starts, batch.tokens.device, batch.tree_mask
    num_rows, size = starts[-1], starts[1]
    if starts == tuple(range(0, num_rows + 1, size)):  # nothing is copied to the device, as in captured steps nothing can be
        firsts = torch.arange(0, num_rows, size, device=device)
        stops = firsts + size
    else:
        firsts, stops = to_device(starts[:-1], device), to_device(starts[1:], device)
    if mask is None:
        parents = torch.arange(-1, num_rows - 1, device=device).index_fill(0, firsts, -1)
        return Lineage(firsts, stops, parents)
    if isinstance(mask, HostMask):
        visible = torch.from_numpy(mask.visible)
        first_of_each = firsts.repeat_interleave(stops - firsts)
        places = torch.arange(num_rows) - first_of_each
    else:
        visible = bits_of(mask) if isinstance(mask, MaskWords) else mask
        assert visible.shape[1] == visible.shape[2], "of a tree's nodes all are rows of the pass"
        places, first_of_each = torch.arange(size, device=device), firsts[:, None]
    columns = torch.arange(visible.shape[-1], device=visible.device)
    before = torch.where(visible & (columns < places[:, None]), columns, -1).amax(dim=-1).to(device)
    parents = torch.where(before < 0, -1, first_of_each + before).flatten()
    return Lineage(firsts, stops, parents, visible.flatten(0, -2).contiguous().to(device))


def bits_of(mask: MaskWords) -> Tensor:
    """[B, Q, C] bool."""
    bits = torch.arange(WORD_BITS, device=mask.words.device)
    return ((mask.words[..., None] >> bits) & 1).bool().flatten(2)[..., : mask.num_columns]

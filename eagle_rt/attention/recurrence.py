"""Layers with memories in one pass: which row comes before which, and what is remembered of whom."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from eagle_rt.batch import Batch, HostMask, MaskWords, to_device
from eagle_rt.cache.memories import Memories
from eagle_rt.kernels.delta_net import DeltaNetWeights, Lineage, Memory, delta_net

WORD_BITS = 64


@dataclass(frozen=True)
class Part:
    """Some rows [R] of a pass, of each sequence in order, with a `Lineage` of their own; and of which state rows what is remembered
    after them is to be saved, and where, [N] each. rows: None for all."""

    rows: Tensor | None
    lineage: Lineage
    state_rows: Tensor
    is_new: Tensor
    saved: tuple[Tensor, Tensor] | None = None


class CachedRecurrence:
    """What such layers call; the pass is over texts where it has no tree mask."""

    def __init__(self, batch: Batch, memories: Memories) -> None:
        assert batch.state_rows is not None, "or there would be nowhere to remember anything"
        lineage = lineage_of(batch)
        whole = Part(None, lineage, batch.state_rows, batch.positions[lineage.starts] == 0)
        self._memories, self._is_text = memories, lineage.is_text
        self._parts = parts_of(batch, whole) if batch.saves else [whole]
        if not lineage.is_text:
            memories.begin(whole.state_rows, whole.is_new)

    def __call__(self, layer: int, inputs: Tensor, rates: Tensor, weights: DeltaNetWeights) -> Tensor:
        """`delta_net` of a layer; layer: its number among those with memories."""
        memories = self._memories
        if not self._is_text:
            memories.note(layer, inputs, rates, weights)
        channels, matrices = memories.channels[layer], memories.matrices[layer]
        first = self._parts[0]
        if first.rows is None:
            return delta_net(inputs, rates, weights, Memory(channels, matrices, first.state_rows, first.is_new), first.lineage)
        outputs = inputs.new_empty(len(inputs), weights.shape.values_size)
        for part in self._parts:
            memory = Memory(channels, matrices, part.state_rows, part.is_new)
            outputs[part.rows] = delta_net(inputs[part.rows], rates[part.rows], weights, memory, part.lineage)
            if part.saved:
                sources, targets = part.saved
                for own in (channels, matrices):
                    own[targets] = own[sources]
        return outputs


def parts_of(batch: Batch, whole: Part) -> list[Part]:
    """Texts up to where what is remembered of them is to be saved first, then up to where next, and the rest."""
    device, starts = batch.tokens.device, batch.query_starts
    lengths = [stop - start for start, stop in pairwise(starts)]
    marks = [sorted((count, row) for own, count, row in batch.saves if own == b) for b in range(len(lengths))]
    begun, parts = [0] * len(lengths), []
    while any(count < length for count, length in zip(begun, lengths, strict=True)):
        rows, sequences, counts, saved = [], [], [], []
        for b, length in enumerate(lengths):
            stop, row = marks[b].pop(0) if marks[b] else (length, None)
            if stop > begun[b]:
                rows += range(starts[b] + begun[b], starts[b] + stop)
                sequences.append(b)
                counts.append(stop - begun[b])
            if row is not None:
                saved.append((b, row))
        own, ends = to_device(sequences, device, torch.int64), [0, *accumulate(counts)]
        lineage = Lineage.of_texts(to_device(ends[:-1], device), to_device(ends[1:], device), len(rows))
        is_new = whole.is_new[own] & to_device([begun[b] == 0 for b in sequences], device)
        copied = None
        if saved:
            owners, targets = (to_device(column, device) for column in zip(*saved, strict=True))
            copied = whole.state_rows[owners], targets
        parts.append(Part(to_device(rows, device), lineage, whole.state_rows[own], is_new, copied))
        for b, count in zip(sequences, counts, strict=True):
            begun[b] += count
    return parts


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
        return Lineage.of_texts(firsts, stops, num_rows)
    if isinstance(mask, HostMask):  # all on the host
        visible, bounds = torch.from_numpy(mask.visible), torch.tensor(starts)
        first_of_each = bounds[:-1].repeat_interleave(bounds.diff())
        places = torch.arange(num_rows) - first_of_each
    else:
        visible = bits_of(mask) if isinstance(mask, MaskWords) else mask
        assert visible.shape[1] == visible.shape[2], "of a tree's nodes all are rows of the pass"
        places, first_of_each = torch.arange(size, device=device), firsts[:, None]
    columns = torch.arange(visible.shape[-1], device=visible.device)
    before = torch.where(visible & (columns < places[:, None]), columns, -1).amax(dim=-1)
    parents = torch.where(before < 0, -1, first_of_each + before).flatten()
    return Lineage(firsts, stops, parents.to(device), visible.flatten(0, -2).contiguous().to(device))


def bits_of(mask: MaskWords) -> Tensor:
    """[B, Q, C] bool."""
    bits = torch.arange(WORD_BITS, device=mask.words.device)
    return ((mask.words[..., None] >> bits) & 1).bool().flatten(2)[..., : mask.num_columns]

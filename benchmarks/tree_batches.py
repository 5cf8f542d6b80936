"""Random trees for the benchmarks of attention."""

import torch

from eagle_rt.batch import Batch, HostRows


def tree_batch(contexts: list[int], num_nodes: int, device: str, is_run: bool = True) -> Batch:
    """Trees of so many nodes after texts of such lengths, the cached rows of each side by side or anywhere."""
    lengths = [context + num_nodes for context in contexts]
    order = torch.randperm(sum(lengths)).numpy()
    slots, first = [], 0
    for length in lengths:
        slots.append(range(first, first + length) if is_run else order[first : first + length])
        first += length
    mask = torch.rand(len(contexts), num_nodes, num_nodes, device=device).tril() < 0.3
    mask |= torch.eye(num_nodes, dtype=torch.bool, device=device)
    positions = torch.zeros(len(contexts) * num_nodes, dtype=torch.int64, device=device)
    starts = tuple(range(0, len(positions) + 1, num_nodes))
    return Batch(positions, positions, positions, starts, HostRows(tuple(lengths), tuple(slots)), mask)

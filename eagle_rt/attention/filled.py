"""The rows of sequences that go through attention together, filled up to the most queries and rows among them."""

import numpy as np
from numpy.typing import NDArray

from eagle_rt.kernels.compiled import compiled

Ints = NDArray[np.int64]


@compiled
def filled(
    members: Ints, query_starts: Ints, lengths: Ints, firsts: Ints, table: Ints, widths: Ints, seen: NDArray[np.bool_]
) -> tuple[Ints, Ints, Ints, Ints, NDArray[np.float32], bool]:
    """Of n members of a pass over B sequences, with Q queries and K rows at most:

    [n * Q] the queries, by row of the pass, each sequence's last one repeated; which of those are no fillings, and their rows;
    [n * K] slots, the last one repeated; [n, 1, Q, K] 0 where a query sees a row and -inf where it does not; and whether they all
    see everything.

    query_starts: [B + 1]; lengths: [B] rows of each; firsts: [B] their first slots, where they lie side by side, and of the others
    -1 less where theirs begin in the `table`. seen: [T, C] what queries see of the last widths [B] rows, see `HostMask`; C is 0
    where they are causal.
    """
    counts = query_starts[1:] - query_starts[:-1]
    num_queries, num_rows = counts[members].max(), lengths[members].max()
    queries = np.empty(len(members) * num_queries, dtype=np.int64)
    kept = np.empty(len(queries), dtype=np.int64)
    slots = np.empty(len(members) * num_rows, dtype=np.int64)
    bias = np.full((len(members), 1, num_queries, num_rows), -np.inf, dtype=np.float32)
    num_kept, all_seen, places = 0, True, np.arange(num_rows)
    for index, member in enumerate(members):
        start, count, length = query_starts[member], counts[member], lengths[member]
        own_slots, own_places = slots[index * num_rows : (index + 1) * num_rows], np.minimum(places, length - 1)
        own_slots[:] = firsts[member] + own_places if firsts[member] >= 0 else table[-1 - firsts[member] + own_places]
        for query in range(num_queries):
            sees = bias[index, 0, query]
            row = start + min(query, count - 1)
            queries[index * num_queries + query] = row
            if query < count:
                kept[num_kept] = index * num_queries + query
                num_kept += 1
            if seen.shape[1]:
                prefix = length - widths[member]
                sees[:prefix] = 0.0
                for column in range(widths[member]):
                    if seen[row, column]:
                        sees[prefix + column] = 0.0
                    else:
                        all_seen = False
            else:
                prefix = min(length - count + query + 1, length)
                sees[:prefix] = 0.0
                all_seen &= prefix == length
        all_seen &= length == num_rows
    kept = kept[:num_kept]
    return queries, kept, queries[kept], slots, bias, all_seen

"""Where drafts succeed and where they end, counted over the traces of many steps."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eagle_rt.trace import StepTrace

# Why a step gained no more. The last two may be had with other numbers for the tree, the others with another head only.
ENDS = ("none of the drafts below was right", "the tree's deepest level was right", "nothing was drafted below")


@dataclass
class DepthCounts:
    """Of one depth, from 1: num_reached steps whose path led to a node above, num_drafted of them had drafts below that, num_nodes
    altogether, and num_accepted of those were right; foreseen: as many as the head's probabilities promised, expected: as the
    policy did."""

    num_reached: int = 0
    num_drafted: int = 0
    num_nodes: int = 0
    num_accepted: int = 0
    foreseen: float = 0.0
    expected: float | None = None


@dataclass
class TreeSummary:
    """by_depth: from depth 1 on. ranks: of accepted nodes among their siblings, from 1, by score. ends: of ENDS, of steps with
    drafts. num_copied: of the nodes that texts have said before, and num_copied_right of these were accepted."""

    num_steps: int = 0
    num_drafted_steps: int = 0
    num_nodes: int = 0
    num_gained: int = 0
    num_copied: int = 0
    num_copied_right: int = 0
    by_depth: list[DepthCounts] = field(default_factory=list)
    ranks: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)


def summarize(traces: Iterable[StepTrace]) -> TreeSummary:
    summary = TreeSummary()
    for trace in traces:
        summary.num_steps += 1
        summary.num_nodes += len(trace.tokens)
        summary.num_gained += len(trace.choices)
        summary.num_copied += len(trace.copied)
        summary.num_copied_right += len(set(trace.copied).intersection(trace.path))
        if len(trace.tokens) == 1:
            continue
        summary.num_drafted_steps += 1
        below = children(trace)
        for place, node in enumerate(trace.path):
            following = trace.path[place + 1] if place + 1 < len(trace.path) else None
            if place == len(summary.by_depth):
                summary.by_depth.append(DepthCounts())
            add_node(summary.by_depth[place], trace, node, below[node], following)
            if following is not None:
                summary.ranks[rank_of(trace, following, below[node])] += 1
        summary.ends[end_of(trace, below)] += 1
    return summary


def children(trace: StepTrace) -> list[list[int]]:
    """Of every node, by number."""
    below: list[list[int]] = [[] for _ in trace.tokens]
    for node, parent in enumerate(trace.parents):
        if parent >= 0:
            below[parent].append(node)
    return below


def add_node(counts: DepthCounts, trace: StepTrace, node: int, drafts: Sequence[int], following: int | None) -> None:
    """A node that was reached, what was drafted below it, and which of that was right."""
    counts.num_reached += 1
    counts.num_drafted += bool(drafts)
    counts.num_nodes += len(drafts)
    counts.num_accepted += following is not None
    counts.foreseen += sum(probability(trace, draft) for draft in drafts)
    if trace.chances:
        counts.expected = (counts.expected or 0.0) + sum(trace.chances[draft] / trace.chances[node] for draft in drafts)


def probability(trace: StepTrace, node: int) -> float:
    """That the head gave a node, given its parent."""
    return math.exp(trace.scores[node] - trace.scores[trace.parents[node]])


def rank_of(trace: StepTrace, node: int, siblings: Sequence[int]) -> int:
    return 1 + sum(trace.scores[other] > trace.scores[node] for other in siblings)


def end_of(trace: StepTrace, below: Sequence[Sequence[int]]) -> str:
    """Which of ENDS a step with drafts had."""
    if below[trace.path[-1]]:
        return ENDS[0]
    depths = [0] * len(trace.tokens)
    for node, parent in enumerate(trace.parents[1:], start=1):
        depths[node] = depths[parent] + 1
    return ENDS[1] if depths[trace.path[-1]] == max(depths) else ENDS[2]

"""Trees for the requests that have asked to be told of them."""

from collections.abc import Sequence

import numpy as np

from eagle_rt.engine.request import Request
from eagle_rt.speculate.host_verifier import HostOutcome
from eagle_rt.speculate.step import StepOutcome
from eagle_rt.trace import StepTrace, Traces


def want_traces(requests: Sequence[Request]) -> bool:
    return any(request.sampling.speculative.trace for request in requests)


def traces_of_roots(requests: Sequence[Request], tokens: list[int]) -> Traces:
    """Where nothing was drafted, and each gained one token."""
    return {
        request.id: StepTrace(request.num_cached, [request.tokens[-1]], [-1], [0.0], None, [0], [token])
        for request, token in zip(requests, tokens, strict=True)
        if request.sampling.speculative.trace
    }


def traces_of_forest(requests: Sequence[Request], outcome: HostOutcome) -> Traces:
    """Of a step whose trees the host decided on."""
    if not want_traces(requests):
        return {}
    drafted = outcome.drafted
    if not drafted:
        return traces_of_roots(requests, [token for (token,) in outcome.tokens])
    trees, nodes = drafted.trees, drafted.nodes
    scores, chances = np.zeros(len(trees.owners)), np.ones(len(trees.owners))
    scores[trees.rows_of_chosen], chances[trees.rows_of_chosen] = nodes.scores, nodes.values
    copied = np.zeros(len(trees.owners), dtype=np.bool_)
    copied[trees.rows_of_chosen] = drafted.is_copied
    traces = {}
    for b, request in enumerate(requests):
        if request.sampling.speculative.trace:
            start, own = trees.starts[b], slice(*trees.starts[b : b + 2])
            traces[request.id] = StepTrace(
                position=request.num_cached,
                tokens=trees.tokens[own].tolist(),
                parents=np.maximum(trees.parents[own] - start, -1).tolist(),
                scores=scores[own].tolist(),
                chances=chances[own].tolist() if drafted.has_chances else None,
                path=[row - start for row in outcome.rows[b]],
                choices=outcome.tokens[b],
                copied=np.flatnonzero(copied[own]).tolist(),
            )
    return traces


def traces_of_trees(requests: Sequence[Request], outcome: StepOutcome, tokens: list[list[int]], first_copy: int) -> Traces:
    """Of a step with fixed shapes; without nodes that stand for none, where the head gave no numbers. From first_copy on nodes are
    copied."""
    if not want_traces(requests):
        return {}
    tree = outcome.tree
    columns = (tree.tokens, tree.parents, tree.scores, outcome.acceptance.path)
    traces = {}
    for request, gained, own, parents, scores, path in zip(requests, tokens, *(c.tolist() for c in columns), strict=True):
        if request.sampling.speculative.trace:
            real = [node for node, score in enumerate(scores) if score > -float("inf")]
            number = {-1: -1} | {node: place for place, node in enumerate(real)}
            traces[request.id] = StepTrace(
                position=request.num_cached,
                tokens=[own[node] for node in real],
                parents=[number[parents[node]] for node in real],
                scores=[scores[node] for node in real],
                chances=None,
                path=[number[node] for node in path if node >= 0],
                choices=gained,
                copied=[number[node] for node in real if node >= first_copy],
            )
    return traces

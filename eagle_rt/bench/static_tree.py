"""The best tree of every size for steps that all have the same one, by what a head gets right.

`python -m eagle_rt.bench.static_tree --num-draft-tokens 16 --output tree.json` takes the flags of the server, which
`--speculative-tree tree.json` then gives this tree. Replies are decoded with the whole beam of `--speculative-num-steps` and
`--speculative-eagle-topk`; at each depth it is counted how often the head's best, second best, ... child was right. How likely a
node is to be accepted is the product of these shares along its path, as if they were independent, and the likeliest nodes make the
tree. Source: Medusa (Cai et al., 2024, section 2.3.3), with shares by depth.
"""

import argparse
import heapq
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from eagle_rt.bench.tree_summary import children, rank_of
from eagle_rt.bench.trees import add_prompt_flags, replies_to, traces_in
from eagle_rt.bench.workload import load_workload
from eagle_rt.config import EngineConfig, add_flags, config_from_args, require
from eagle_rt.engine.engine import Engine
from eagle_rt.resolve import DEFAULT_BOUNDS, resolve_device
from eagle_rt.speculate.forest import Floats
from eagle_rt.trace import StepTrace
from eagle_rt.tree.paths import RankPath, shape_of, write_paths
from eagle_rt.tree_shape import num_tree_nodes


def whole_beam(config: EngineConfig) -> EngineConfig:
    """The same with all nodes verified that a beam scores, of which the accepted ones tell most."""
    steps, top_k, _ = DEFAULT_BOUNDS[config.device]
    steps, top_k = config.speculative_num_steps or steps, config.speculative_eagle_topk or top_k
    numbers = {"speculative_num_steps": steps, "speculative_eagle_topk": top_k}
    return replace(config, speculative_tree="fixed", speculative_num_draft_tokens=num_tree_nodes(steps, top_k), **numbers)


def shares_right(traces: Iterable[StepTrace], num_steps: int, top_k: int) -> Floats:
    """[D, K] of the steps that came to a node of depth 0, 1, ... with all its children how often each rank of these was right."""
    counts, num_reached = np.zeros((num_steps, top_k)), np.zeros((num_steps, 1))
    for trace in traces:
        below = children(trace)
        for depth, node in enumerate(trace.path):
            if len(below[node]) < top_k:
                break
            num_reached[depth] += 1
            if depth + 1 < len(trace.path):
                counts[depth, rank_of(trace, trace.path[depth + 1], below[node]) - 1] += 1
    return counts / np.maximum(num_reached, 1)


def likeliest(shares: Floats, most_nodes: int) -> list[tuple[RankPath, float]]:
    """So many nodes besides the root at most, the likeliest first, and how likely each is to be accepted; none that never is."""
    num_steps, top_k = shares.shape
    chosen: list[tuple[RankPath, float]] = []
    waiting: list[tuple[float, int, RankPath]] = [(-1.0, 0, ())]
    while waiting and len(chosen) <= most_nodes:
        chance, depth, path = heapq.heappop(waiting)
        chosen.append((path, -chance))
        for rank in range(top_k if depth < num_steps else 0):
            if shares[depth, rank] > 0:
                heapq.heappush(waiting, (chance * shares[depth, rank], depth + 1, (*path, rank)))
    return chosen[1:]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_rt.bench.static_tree", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-draft-tokens", type=int, default=16, help="nodes of the tree, the root included")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json", help="write the tree")
    add_prompt_flags(parser, num_prompts=20)
    add_flags(parser)
    args = parser.parse_args(arguments)
    args.speculative_algorithm = args.speculative_algorithm or "EAGLE3"
    try:
        require(args.num_draft_tokens >= 2, "num_draft_tokens", args.num_draft_tokens, "at least 2: the root and one draft")
        given = config_from_args(args)
        require(given.has_head, "speculative_algorithm", given.speculative_algorithm, "one with a head, whose drafts are counted")
        config = whole_beam(resolve_device(given))
        with Engine(config) as engine:
            prompts = load_workload(args.dataset, args.dataset_dir, engine.tokenizer, args.num_prompts).prompts
            replies = replies_to(prompts, engine, args)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    assert config.speculative_num_steps
    assert config.speculative_eagle_topk
    traces = [trace for reply in replies for trace in traces_in(reply)]
    shares = shares_right(traces, config.speculative_num_steps, config.speculative_eagle_topk)
    nodes = likeliest(shares, args.num_draft_tokens - 1)
    if not nodes:
        print(f"error: no draft was right in {len(traces)} steps: does the head fit? (python -m eagle_rt.doctor)", file=sys.stderr)
        return 1
    print_shares(shares)
    paths = [path for path, _ in nodes]
    write_paths(args.output, paths)
    expected = 1 + sum(chance for _, chance in nodes)
    print(f"wrote {args.output}, a tree {shape_of(paths)}: {expected:.2f} tokens a step are to be expected")
    print(f"use it: --speculative-algorithm {config.speculative_algorithm} --speculative-tree {args.output}")
    return 0


def print_shares(shares: Floats) -> None:
    print("depth  how often the head's best child was right, its second best, ...")
    for depth, row in enumerate(shares, start=1):
        print(f"{depth:5}  " + "  ".join(f"{share:4.0%}" for share in row))


if __name__ == "__main__":
    sys.exit(main())

"""Look at draft trees: what was drafted in each step, what the target made of it, and where drafts end.

`python -m eagle_rt.bench.trees --prompt "Why is the sky blue?"` takes the flags of the server. It shows the first trees and counts
over all steps: of those that came to a depth, how many had drafts there, how many of these were right, and how many of them should
have been by the head's probabilities, and as adaptive trees expected.
"""

import argparse
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from eagle_rt.bench.tree_summary import ENDS, TreeSummary, children, end_of, probability, summarize
from eagle_rt.bench.workload import load_workload
from eagle_rt.config import EngineConfig, add_flags, config_from_args
from eagle_rt.engine.engine import Engine
from eagle_rt.engine.load import model_info
from eagle_rt.models.tokenizer import question_tokens
from eagle_rt.trace import StepTrace

HTML_WIDTH = 160
NamesOf = Callable[[int], str]


def names_by(tokenizer: PreTrainedTokenizerBase) -> NamesOf:
    """What a token says, in quotation marks, with spaces and line ends to be seen."""
    return lambda token: json.dumps(str(tokenizer.decode([token])), ensure_ascii=False)


def tree_of(trace: StepTrace, name: NamesOf) -> Tree:
    """Confirmed nodes with a check mark, and below the last one what the target said itself."""
    below, confirmed, copied = children(trace), set(trace.path), set(trace.copied)

    def label(node: int) -> Text:
        if node == 0:
            return Text(name(trace.tokens[0]), style="bold")
        numbers = f"  {probability(trace, node):.2f}"
        if trace.chances:
            numbers += f"  chance {trace.chances[node] / trace.chances[trace.parents[node]]:.2f}"
        numbers += "  copied" if node in copied else ""
        is_right = node in confirmed
        said = (name(trace.tokens[node]), "bold green" if is_right else "")
        return Text.assemble(said, (numbers, "dim"), (" \N{CHECK MARK}" if is_right else "", "bold green"))

    def grow(branch: Tree, node: int) -> None:
        for child in sorted(below[node], key=lambda other: -trace.scores[other]):
            grow(branch.add(label(child)), child)
        if node == trace.path[-1]:
            branch.add(Text(f"-> {name(trace.choices[-1])}", style="bold blue"))

    root = Tree(label(0))
    grow(root, 0)
    return root


def print_steps(console: Console, traces: list[StepTrace], name: NamesOf, most: int | None = None) -> None:
    """Those with drafts, at most so many."""
    drafted = [(number, trace) for number, trace in enumerate(traces, start=1) if len(trace.tokens) > 1]
    for number, trace in drafted[:most]:
        gained, end = len(trace.choices), end_of(trace, children(trace))
        title = f"step {number}: {len(trace.tokens)} nodes, {gained} token{'s' * (gained > 1)} gained: {end}"
        console.print(title, style="bold", highlight=False)
        console.print(tree_of(trace, name), highlight=False)


def print_summary(console: Console, summary: TreeSummary) -> None:
    steps = max(1, summary.num_steps)
    console.print(
        f"{summary.num_steps} steps, {summary.num_drafted_steps} with drafts; {summary.num_nodes / steps:.1f} nodes verified and "
        f"{summary.num_gained / steps:.2f} tokens gained a step",
        highlight=False,
    )
    if not summary.num_drafted_steps:
        return
    has_chances = any(counts.expected is not None for counts in summary.by_depth)
    table = Table()
    for column in ("depth", "steps that came", "with drafts", "drafts each", "right", "by the head", *(["expected"] * has_chances)):
        table.add_column(column, justify="right")
    for depth, counts in enumerate(summary.by_depth, start=1):
        if not (drafted := counts.num_drafted):
            break  # below all trees
        shares = [counts.num_accepted, counts.foreseen, *([counts.expected or 0.0] * has_chances)]
        table.add_row(
            str(depth),
            str(counts.num_reached),
            f"{counts.num_drafted / counts.num_reached:.0%}",
            f"{counts.num_nodes / drafted:.1f}",
            *(f"{share / drafted:.0%}" for share in shares),
        )
    console.print(table)
    num_right = max(1, summary.ranks.total())
    ranks = "  ".join(f"{rank}: {count / num_right:.0%}" for rank, count in sorted(summary.ranks.items()))
    console.print(f"the right draft's place among its siblings:  {ranks}", highlight=False)
    if summary.num_copied:
        shares = f"{summary.num_copied / steps:.1f} nodes a step, {summary.num_copied_right / summary.num_copied:.0%} of them right"
        console.print(f"copied from the text:  {shares}", highlight=False)
    ends = "; ".join(f"{end} {summary.ends[end] / summary.num_drafted_steps:.0%}" for end in ENDS)
    console.print(f"steps ended because:  {ends}", highlight=False)


def write_html(file: Path, summary: TreeSummary, replies: list[dict[str, Any]], name: NamesOf) -> None:
    """All trees of all replies, and the counts."""
    console = Console(record=True, width=HTML_WIDTH, file=io.StringIO(), force_terminal=True)
    print_summary(console, summary)
    for number, reply in enumerate(replies, start=1):
        console.rule(f"reply {number}")
        console.print(Text(reply["text"]))
        print_steps(console, traces_in(reply), name)
    file.write_text(console.export_html())


def traces_in(reply: dict[str, Any]) -> list[StepTrace]:
    """Of a reply of `Engine.generate`, or of the server's /generate."""
    return [StepTrace(**trace) for trace in reply["meta_info"]["spec_trace"]]


def read_replies(file: Path) -> list[dict[str, Any]]:
    """Of the server's /generate, one a line, as `--json` writes them.

    Raises:
        ValueError: one of them is no reply with a trace.
    """
    replies = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            replies.append(json.loads(line))
            traces_in(replies[-1])
        except (ValueError, KeyError, TypeError) as error:
            wanted = 'a reply to a request with "speculative": {"trace": true} among its sampling parameters'
            raise ValueError(f"line {number} of {file} is not {wanted} ({error!r})") from None
    if not replies:
        raise ValueError(f"{file} holds no replies")
    return replies


def traced_replies(config: EngineConfig, args: argparse.Namespace) -> tuple[list[dict[str, Any]], NamesOf]:
    """One prompt after the other, so that each has its trees to itself."""
    if args.replies:
        return read_replies(args.replies), names_by(model_info(config).tokenizer)
    with Engine(config) as engine:
        if args.prompt is not None:
            prompts = [question_tokens(engine.tokenizer, args.prompt)]
        else:
            prompts = load_workload(args.dataset, args.dataset_dir, engine.tokenizer, args.num_prompts).prompts
        return replies_to(prompts, engine, args), names_by(engine.tokenizer)


def replies_to(prompts: list[list[int]], engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    sampling = {
        "temperature": args.temperature,
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "speculative": {"trace": True},
    }
    return [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in tqdm(prompts, unit="reply")]


def add_prompt_flags(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    """What is asked."""
    parser.add_argument("--dataset", default="builtin", help="builtin, a .jsonl file, or a name in --dataset-dir")
    parser.add_argument("--dataset-dir", type=Path, help="folder with prompt files")
    parser.add_argument("--num-prompts", type=int, default=num_prompts, help="at most")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampled replies")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_rt.bench.trees", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", help="what to ask; default: the prompts of --dataset")
    add_prompt_flags(parser, num_prompts=8)
    parser.add_argument("--replies", type=Path, metavar="FILE", help="look at these, from a server's /generate, one a line")
    parser.add_argument("--show", type=int, default=6, help="trees of the first reply to show")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write all trees as a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the replies with their traces as JSON lines")
    add_flags(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    args.speculative_algorithm = args.speculative_algorithm or "EAGLE3"
    try:
        replies, name = traced_replies(config_from_args(args), args)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console, summary = Console(), summarize(trace for reply in replies for trace in traces_in(reply))
    print_steps(console, traces_in(replies[0]), name, args.show)
    print_summary(console, summary)
    if args.html:
        write_html(args.html, summary, replies, name)
    if args.json:
        args.json.write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Looking at trees, and counting over them."""

import io
import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from engines import make_core
from rich.console import Console
from tree import brute_force

from eagle_rt.bench import trees
from eagle_rt.bench.tree_summary import ENDS, DepthCounts, summarize
from eagle_rt.engine.params import SamplingParams, SpeculativeParams
from eagle_rt.trace import StepTrace

# The root 5 has children 6 and 7, of which 7 is the head's favourite, 6 has 8 and 9, and 9 has 4.
TOKENS, PARENTS = [5, 6, 7, 8, 9, 4], [-1, 0, 0, 1, 1, 4]
SCORES = [0.0, -1.0, -0.5, -3.0, -1.5, -1.75]


def trace(path: list[int], chances: list[float] | None = None) -> StepTrace:
    return StepTrace(3, TOKENS, PARENTS, SCORES, chances, path, [*(TOKENS[node] for node in path[1:]), 99])


@pytest.mark.parametrize(
    ("path", "ranks", "end"),
    [([0], {}, ENDS[0]), ([0, 2], {1: 1}, ENDS[2]), ([0, 1, 4], {2: 1, 1: 1}, ENDS[0]), ([0, 1, 4, 5], {2: 1, 1: 2}, ENDS[1])],
    ids=str,
)
def test_where_one_step_ends(path: list[int], ranks: dict[int, int], end: str) -> None:
    summary = summarize([trace(path)])
    assert (summary.num_steps, summary.num_nodes, summary.num_gained) == (1, 6, len(path))
    assert summary.ranks == Counter(ranks)
    assert summary.ends == Counter({end: 1})


def test_counts_by_depth() -> None:
    chances = [1.0, 0.4, 0.5, 0.1, 0.2, 0.1]
    plain = StepTrace(3, [5], [-1], [0.0], None, [0], [7])
    summary = summarize([trace([0, 1], chances), plain, trace([0, 2], chances)])
    assert (summary.num_steps, summary.num_drafted_steps, summary.num_nodes, summary.num_gained) == (3, 2, 13, 5)
    first, second = summary.by_depth
    assert first == DepthCounts(2, 2, 4, 2, pytest.approx(1.9488, abs=1e-4), pytest.approx(1.8))
    assert second == DepthCounts(2, 1, 2, 0, pytest.approx(0.7419, abs=1e-4), pytest.approx(0.75))


def test_what_is_counted_is_what_the_engine_counts(built_in: Path) -> None:
    core = make_core(built_in / "target", built_in / "eagle3", (4, 3, 12))
    sampling = SamplingParams(
        temperature=0.5, seed=1, max_new_tokens=60, ignore_eos=True, speculative=SpeculativeParams(trace=True)
    )
    for index in range(4):
        core.submit(str(index), [10 * index + place for place in range(1, 9)], sampling)
    traces = []
    while core.has_work:
        traces += [event.trace for event in core.step() if event.trace]
    summary, metrics = summarize(traces), core.metrics
    assert (summary.num_drafted_steps, summary.num_nodes - summary.num_steps) == (metrics.num_drafts, metrics.num_draft_tokens)
    assert [counts.num_accepted for counts in summary.by_depth if counts.num_accepted] == metrics.accepted_per_position
    assert summary.ranks.total() == metrics.num_accepted_tokens > 0
    assert summary.ends.total() == summary.num_drafted_steps


def test_every_node_is_drawn_once_and_confirmed_ones_are_marked() -> None:
    rng = random.Random(0)
    for _ in range(20):
        parents = [-1] + [rng.randrange(node) for node in range(1, 12)]
        choice = [rng.choice([node for node in range(12) if parents[node] == own] or [99]) for own in range(12)]
        path = brute_force.walk(parents, list(range(12)), choice)
        own = StepTrace(
            0, list(range(12)), parents, [-0.1 * node for node in range(12)], None, path, [choice[node] for node in path]
        )
        console = Console(record=True, width=120, file=io.StringIO())
        trees.print_steps(console, [own], str)
        _, *lines = console.export_text().splitlines()
        nodes = {line.split("── ")[-1].split()[0]: line for line in lines if "->" not in line}
        assert sorted(nodes, key=int) == [str(node) for node in range(12)]
        assert [node for node in range(1, 12) if "✓" in nodes[str(node)]] == sorted(path[1:])
        (end,) = [line for line in lines if "->" in line]
        assert end.split("-> ")[1].split() == [str(choice[path[-1]])]


def test_copied_nodes_are_marked_and_counted() -> None:
    console, own = Console(record=True, width=120, file=io.StringIO()), replace(trace([0, 1, 4]), copied=[4, 5])
    trees.print_steps(console, [own], str)
    trees.print_summary(console, summarize([own, replace(trace([0]), copied=[3]), trace([0])]))
    lines = [line.strip(" │├└─") for line in console.export_text().splitlines()]
    assert "9  0.61  copied ✓" in lines
    assert "4  0.78  copied" in lines
    assert "6  0.37 ✓" in lines
    assert "copied from the text:  1.0 nodes a step, 33% of them right" in lines


def test_how_a_tree_is_drawn() -> None:
    chances = [1.0, 0.4, 0.5, 0.1, 0.2, 0.1]
    console = Console(record=True, width=120, file=io.StringIO())
    trees.print_steps(console, [trace([0, 1, 4], chances)], str)
    assert [line.rstrip() for line in console.export_text().splitlines()] == [
        "step 1: 6 nodes, 3 tokens gained: none of the drafts below was right",
        "5",
        "├── 7  0.61  chance 0.50",
        "└── 6  0.37  chance 0.40 ✓",
        "    ├── 9  0.61  chance 0.50 ✓",
        "    │   ├── 4  0.78  chance 0.50",
        "    │   └── -> 99",
        "    └── 8  0.14  chance 0.25",
    ]


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_the_command(target_dir: Path, head_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    numbers = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"]
    models = ["--model-path", str(target_dir), "--speculative-draft-model-path", str(head_dir), "--device", "cpu"]
    page, replies = tmp_path / "trees.html", tmp_path / "replies.jsonl"
    flags = [*models, *numbers, "--speculative-tree", kind, "--max-total-tokens", "4096", "--max-new-tokens", "12"]
    assert trees.main([*flags, "--num-prompts", "2", "--html", str(page), "--json", str(replies)]) == 0
    printed = capsys.readouterr().out
    assert "tokens gained a step" in printed
    first, second = map(json.loads, replies.read_text().splitlines())
    assert all(trees.traces_in(reply) for reply in (first, second))
    assert page.read_text().count("reply ") == 2
    if kind == "fixed":
        assert "step 1: 6 nodes" in printed
        assert page.read_text().count("6 nodes") == first["meta_info"]["spec_verify_ct"] + second["meta_info"]["spec_verify_ct"]
    assert trees.main([*models, "--replies", str(replies)]) == 0
    assert capsys.readouterr().out == printed
    assert trees.main([*flags, "--prompt", "a", "--show", "0", "--speculative-algorithm", "EAGLE3"]) == 0
    assert "step 1:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a", "meta_info": {}}', "line 1 of .* is not a reply to a request with .*trace"),
        ("{", "line 1 of"),
        ("[1]", "line 1 of"),
        ("", "holds no replies"),
    ],
)
def test_replies_without_trees(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "replies.jsonl"
    file.write_text(text)
    assert trees.main(["--model-path", str(target_dir), "--replies", str(file)]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_what_cannot_be_loaded_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trees.main(["--model-path", str(tmp_path / "none"), "--prompt", "a"]) == 1
    assert capsys.readouterr().err.startswith("error: ")

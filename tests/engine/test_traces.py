"""What requests are told of their trees, with every kind of step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import make_captured
from engines import Tree, load_target, make_core, random_prompts, text_logits
from head_layouts import Written, write_head
from models.slow_trees import slow_tree

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams, SpeculativeParams
from eagle_rt.engine.request import Request, TokenEvent
from eagle_rt.engine.traces import traces_of_trees
from eagle_rt.speculate.step import StepOutcome
from eagle_rt.trace import StepTrace
from eagle_rt.tree.draft_tree import DraftTree
from eagle_rt.tree.verify import walk

PROMPTS = random_prompts(4, seed=3, longest=30)
TRACED = SpeculativeParams(trace=True)
GREEDY = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
# The second asks for nothing, the last for a smaller tree.
SETTINGS = [
    replace(GREEDY, speculative=TRACED),
    GREEDY,
    SamplingParams(temperature=1.0, seed=5, max_new_tokens=9, ignore_eos=True, speculative=TRACED),
    replace(GREEDY, speculative=replace(TRACED, num_steps=2, num_draft_tokens=3)),
]


def run(core: EngineCore, settings: list[SamplingParams] = SETTINGS) -> list[list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    for index, setting in enumerate(settings):
        events[str(index)] = []
        core.submit(str(index), PROMPTS[index], setting)
    while core.has_work:
        for event in core.step():
            events[event.request_id].append(event)
    return list(events.values())


def paths_of(trace: StepTrace) -> list[tuple[int, ...]]:
    """Of every node the tokens below the root that lead to it."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(trace.tokens[1:], trace.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def check(prompt: list[int], events: list[TokenEvent], tree: Tree | None, *, copies: bool = False) -> int:
    """How many drafts were accepted. copies: trees have branches of what the text repeats, deeper than the head drafts."""
    num_steps, top_k, num_nodes = tree or (0, 0, 1)
    if copies:
        num_steps, top_k = num_nodes - 1, top_k + 1
    text, num_accepted = list(prompt), 0
    for event in events:
        trace = event.trace
        if trace:
            assert (trace.position, trace.tokens[0], trace.parents[0]) == (len(text) - 1, text[-1], -1)
            assert len(trace.tokens) == len(trace.parents) == len(trace.scores) <= num_nodes
            paths = paths_of(trace)
            assert len(set(paths)) == len(paths)
            assert max(map(len, paths)) <= num_steps
            assert all(trace.parents.count(node) <= top_k for node in range(len(paths)))
            assert all(trace.scores[node] <= trace.scores[trace.parents[node]] for node in range(1, len(paths)))
            # The path is what the target chose, for as long as that had been drafted.
            chosen = [tuple(trace.choices[:depth]) for depth in range(len(trace.choices) + 1)]
            assert [paths[node] for node in trace.path] == chosen[:-1]
            assert chosen[-1] not in paths
            assert event.tokens == trace.choices[: len(event.tokens)]
            assert event.finish_reason or len(event.tokens) == len(trace.choices)
            num_accepted += len(trace.path) - 1
            assert copies or not trace.copied
            for node in trace.copied:  # a chain that goes on below what a head has drafted, or the root
                assert trace.parents[node] == node - 1 or trace.parents[node] not in trace.copied
                assert trace.tokens[node] in text
        text += event.tokens
    return num_accepted


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (None, {}),
        ((3, 2, 6), {}),
        ((3, 2, 6), {"speculative_tree": "adaptive"}),
        ((3, 2, 6), {"chunked_prefill_size": 8, "max_total_tokens": 80, "page_size": 2}),  # of which someone has to give way
    ],
    ids=str,
)
def test_of_every_step(target_dir: Path, head_dir: Path, tree: Tree | None, options: dict[str, Any]) -> None:
    core = make_core(target_dir, head_dir, tree, **options)
    replies = run(core)
    smaller = (2, 2, 3)
    for index, (prompt, events) in enumerate(zip(PROMPTS, replies, strict=True)):
        check(prompt, events, smaller if tree and index == 3 else tree, copies="speculative_tree" in options)
    traces = [[event.trace for event in events if event.trace] for events in replies]
    assert not traces[1]
    for index in (0, 2, 3):  # all but the tokens that follow a prompt, or a text that was read again, came of a step
        stats = replies[index][-1].stats
        assert len(traces[index]) == stats.num_steps == len(replies[index]) - 1 - stats.num_preemptions
        assert sum(len(trace.tokens) - 1 for trace in traces[index]) == stats.num_drafted
    if "max_total_tokens" in options:
        assert core.scheduler.num_preemptions > 0
    quiet = run(make_core(target_dir), [replace(own, speculative=SpeculativeParams()) for own in SETTINGS])
    assert [[t for event in events for t in event.tokens] for events in replies] == [
        [t for event in events for t in event.tokens] for events in quiet
    ]


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_what_a_good_head_drafts_is_confirmed(built_in: Path, kind: str) -> None:
    core = make_core(built_in / "target", built_in / "eagle3", (5, 4, 16), speculative_tree=kind)
    settings = [replace(own, max_new_tokens=40) for own in SETTINGS[:3]]
    replies = run(core, settings)
    own, copies = zip(PROMPTS, replies, strict=False), kind == "adaptive"
    num_accepted = [check(prompt, events, (5, 4, 16), copies=copies) for prompt, events in own]
    for index in (0, 2):
        histogram = replies[index][-1].stats.accepted_histogram
        assert num_accepted[index] == sum(number * count for number, count in enumerate(histogram)) > 0
    traces = [event.trace for events in replies for event in events if event.trace and len(event.trace.tokens) > 1]
    assert traces
    for trace in traces:
        assert (trace.chances is not None) == (kind == "adaptive")
        for node, parent in list(enumerate(trace.parents))[1:] if trace.chances else []:
            assert 0 < trace.chances[node] <= trace.chances[parent] <= trace.chances[0] == 1


@pytest.fixture(scope="module")
def plain_head(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Written:
    return write_head("eagle3-yuhuili", tmp_path_factory.mktemp("heads") / "head", target_dir)


@pytest.mark.parametrize("is_captured", [False, True])
def test_trees_and_scores_are_the_heads_own(target_dir: Path, plain_head: Written, is_captured: bool) -> None:
    """As worked out without a cache; a batch with somebody who asks is not decoded by captured steps."""
    options = {"speculative_score_sharpness": 1.0}
    make, more = (make_captured, ((1, 4),)) if is_captured else (make_core, ())
    core = make(target_dir, plain_head.directory, (3, 2, 6), *more, **options)
    (events,) = run(core, SETTINGS[:1])
    check(PROMPTS[0], events, (3, 2, 6))
    text, num_compared = list(PROMPTS[0]), 0
    for event in events:
        if trace := event.trace:
            expected = slow_tree(plain_head, target_dir, text, (3, 2, 6))
            found = dict(zip(paths_of(trace), trace.scores, strict=True))
            assert found.pop(()) == 0.0
            assert found == pytest.approx(expected, abs=1e-3)
            num_compared += 1
        text += event.tokens
    assert num_compared == events[-1].stats.num_steps > 3
    logits = text_logits(load_target(target_dir), text)[len(PROMPTS[0]) - 1 : -1]
    assert logits.argmax(dim=1).tolist() == text[len(PROMPTS[0]) :]
    if is_captured:
        quiet = run(core, [GREEDY])[0]
        assert not any(event.trace for event in quiet)
        assert {"verify", "step"} <= set(core.runner.clock.seconds)


def test_nodes_that_stand_for_none_are_left_out() -> None:
    """As a head that gives no numbers below a node makes them."""
    none = -float("inf")
    tree = DraftTree(
        tokens=torch.tensor([[5, 6, 7, 8, 9]]),
        parents=torch.tensor([[-1, 0, 0, 2, 3]]),
        depths=torch.tensor([[0, 1, 1, 2, 3]]),
        scores=torch.tensor([[0.0, none, -1.0, -2.0, none]]),
    )
    acceptance = walk(tree, torch.tensor([[7, 0, 8, 9, 0]]), 3)
    outcome = StepOutcome(tree, acceptance, torch.empty(1, 5, 0), has_head=True)
    request = Request("a", [4, 5], replace(GREEDY, speculative=TRACED), seed=0)
    request.num_cached = 1
    own = StepTrace(1, [5, 7, 8], [-1, 0, 1], [0.0, -1.0, -2.0], None, [0, 1, 2], [7, 8, 9])
    assert traces_of_trees([request], outcome, [[7, 8, 9]], first_copy=5) == {"a": own}
    assert traces_of_trees([request], outcome, [[7, 8, 9]], first_copy=3) == {"a": replace(own, copied=[2])}

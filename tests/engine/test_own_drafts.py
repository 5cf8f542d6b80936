"""Engines in which a class of the user's drafts, without a head."""

import logging
import re
from math import log
from pathlib import Path
from typing import Any

import pytest
from engines import make_config, make_core, random_prompts, run

from eagle_rt.config import EngineConfig
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams, SpeculativeParams
from eagle_rt.resolve import resolve_tree, unused_options
from eagle_rt.speculate.own_drafts import OwnStepper
from eagle_rt.tree_shape import TreeShape

# Long ones, which say most pairs of tokens again.
PROMPTS = [prompt * 3 for prompt in random_prompts(4, seed=4, longest=50)]
SETTINGS = [SamplingParams(temperature=index % 2, seed=index, max_new_tokens=30, ignore_eos=True) for index in range(4)]
DOCS = Path(__file__).parents[2] / "docs"


def class_in_docs() -> str:
    (code,) = re.findall(r"```python\n(class Bigrams.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    return code


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return run(make_core(target), PROMPTS, SETTINGS)


def drafting(target: Path, folder: Path, code: str = "", **options: Any) -> EngineCore:
    (folder / "mine.py").write_text(class_in_docs() + code)
    name = f"{folder / 'mine.py'}:{'Mine' if code else 'Bigrams'}"
    return make_core(target, speculative_algorithm=name, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"speculative_num_draft_tokens": 3}, {"page_size": 4, "max_total_tokens": 400}],
    ids=["roomy", "two drafts", "crowded"],
)
def test_the_class_in_the_docs_changes_no_text(
    target: Path, plain: list[list[int]], tmp_path: Path, options: dict[str, Any]
) -> None:
    core = drafting(target, tmp_path, **options)
    assert run(core, PROMPTS, SETTINGS) == plain
    metrics = core.current_metrics()
    assert metrics.num_accepted_tokens > 0.1 * metrics.num_drafts > 0
    assert metrics.num_draft_tokens <= 2 * metrics.num_drafts or not options.get("speculative_num_draft_tokens")


def test_requests_may_want_less_and_large_batches_nothing(target: Path, plain: list[list[int]], tmp_path: Path) -> None:
    settings = [*SETTINGS[:3], SamplingParams(**{**vars(SETTINGS[3]), "speculative": SpeculativeParams(enabled=False)})]
    core = drafting(target, tmp_path, speculative_disable_by_batch_size=2)
    assert run(core, PROMPTS, settings) == plain
    assert core.current_metrics().num_drafts == core.current_metrics().num_undrafted
    assert run(core, PROMPTS[3:], settings[3:]) == plain[3:]
    assert core.current_metrics().num_drafts == core.current_metrics().num_undrafted
    assert run(core, PROMPTS[:1], settings[:1]) == plain[:1]
    assert core.current_metrics().num_drafts > core.current_metrics().num_undrafted


NOTING = """

class Mine(Bigrams):
    num_asked, gone = 0, []

    def draft(self, sequences):
        self.num_asked += 1
        return super().draft(sequences)

    def forget(self, sequence_id):
        self.gone.append(sequence_id)
        if "{broken}" in sequence_id:
            raise KeyError(sequence_id)
"""


def test_it_is_told_who_has_left(target: Path, plain: list[list[int]], tmp_path: Path) -> None:
    core = drafting(target, tmp_path, NOTING.replace("{broken}", "nobody"))
    stepper = core.runner.headless
    assert isinstance(stepper, OwnStepper)
    assert run(core, PROMPTS, SETTINGS) == plain
    assert sorted(stepper.drafter.gone[-4:]) == ["r0", "r1", "r2", "r3"]  # pyright: ignore[reportAttributeAccessIssue]
    assert not stepper.failure


TIRED = """

class Mine(Bigrams):
    num_left = {num_left}

    def draft(self, sequences):
        self.num_left -= 1
        return super().draft(sequences) if self.num_left >= 0 else [([10**6], [-1])]
"""


def test_one_that_fails_at_once_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--speculative-algorithm .*mine.py:Mine fails: Mine.draft: ValueError: token 1000000 is"):
        drafting(target, tmp_path, TIRED.format(num_left=0))


@pytest.mark.parametrize("code", [TIRED.format(num_left=15), NOTING.replace("{broken}", "r")], ids=["drafting", "forgetting"])
def test_one_that_fails_later_stops_nobody(
    target: Path, plain: list[list[int]], tmp_path: Path, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    core = drafting(target, tmp_path, code)
    with caplog.at_level(logging.ERROR):
        assert run(core, PROMPTS, SETTINGS) == plain
    assert caplog.text.count("nothing is drafted any more: Mine.") == 1
    before = core.current_metrics().num_drafts - core.current_metrics().num_undrafted
    assert run(core, PROMPTS, SETTINGS) == plain
    assert core.current_metrics().num_drafts - core.current_metrics().num_undrafted == before


SURE = """

class Mine:
    def draft(self, sequences):
        return [([5, 6, 7], [-1, 0, -1], [0.5, 0.25, 0.125])] * len(sequences)
"""


def test_what_is_drafted_is_traced(target: Path, tmp_path: Path) -> None:
    core = drafting(target, tmp_path, SURE)
    traced = SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True, speculative=SpeculativeParams(trace=True))
    core.submit("a", PROMPTS[0], traced)
    traces = []
    while core.has_work:
        traces += [event.trace for event in core.step() if event.trace]
    assert traces
    for trace in traces:
        assert (trace.tokens[1:], trace.parents) == ([5, 6, 7], [-1, 0, 1, 0])
        assert trace.scores == pytest.approx([0, log(0.5), log(0.125), log(0.125)])
        assert trace.chances is None
        assert not trace.copied


def test_what_goes_with_it(tmp_path: Path) -> None:
    name = "my_drafts:Mine"
    config = EngineConfig(speculative_algorithm=name, device="cuda", attention_backend="triton")
    assert not (config.captures_steps or config.sizes_trees or config.has_head)  # noqa: PT018
    assert resolve_tree(config, "cuda")[0] == TreeShape(0, 0, 1, num_copied=23)
    tokens = make_config(tmp_path, speculative_algorithm=name, speculative_num_draft_tokens=5, speculative_token_map="map.json")
    assert resolve_tree(tokens, "cpu")[0].num_nodes == 5
    assert unused_options(tokens) == [f"--speculative-token-map: --speculative-algorithm {name} drafts without a head"]
    for options, message in [
        ({"speculative_tree": "adaptive"}, f"--speculative-tree is adaptive, but must be left out with .*{name}"),
        ({"speculative_tree": "tree.json"}, f"--speculative-tree is tree.json, but must be left out with .*{name}"),
        ({"speculative_eagle_topk": 4}, f"--speculative-eagle-topk is 4, but must be left out with .*{name}"),
        ({"speculative_draft_model_path": "head"}, f"-draft-model-path is head, but must be left out with .*{name}"),
        ({"speculative_simulate_accept_length": 2.0}, f"-accept-length is 2.0, but must be left out with .*{name}"),
    ]:
        with pytest.raises(ValueError, match=message):
            EngineConfig(speculative_algorithm=name, **options)

"""Engines in which a class of the user's drafts from what it reads of the target's hidden states."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import load_target, make_core, random_prompts, run
from safetensors.torch import save_file

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.decoder import FINAL_NORM
from eagle_rt.models.reading import read_texts
from eagle_rt.speculate.own_drafts import OwnStepper

PROMPTS = random_prompts(4, seed=4, longest=50)
SETTINGS = [SamplingParams(temperature=index % 2, seed=index, max_new_tokens=30, ignore_eos=True) for index in range(4)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True)
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return run(make_core(target), PROMPTS, SETTINGS)


# Drafts that are right now and then, below a branch that is not, so that rows in the middle are confirmed; and often none.
READING = """
import torch


class Mine:
    feature_layers = {layers}

    def start(self, target):
        self.logits, self.texts, self.num_asked = target.logits, {{}}, 0

    def read(self, sequence_id, start, features):
        own = self.texts.setdefault(sequence_id, [])
        if start == 0:
            own.clear()
        assert start == sum(map(len, own))
        own.append(features)

    def draft(self, sequences):
        self.num_asked += 1
        for sequence in sequences:
            own = torch.cat(self.texts[sequence.id])
            assert len(own) == len(sequence.text) - 1
            if sequence.temperature == 0 and self.feature_layers == (-1,):
                assert self.logits(own[-1:]).argmax() == sequence.text[-1]
        return [self.guesses(own) if self.num_asked % 3 else ([], []) for own in sequences]

    def guesses(self, own):
        place = max((place for place, token in enumerate(own.text[:-1]) if token == own.text[-1]), default=0)
        tokens = own.text[place + 1 : place + 4]
        return [0, *tokens], [-1, -1, *range(1, len(tokens))]
"""


def reading(target: Path, folder: Path, code: str, **options: Any) -> EngineCore:
    (folder / "mine.py").write_text(code)
    return make_core(target, speculative_algorithm=f"{folder / 'mine.py'}:Mine", **options)


def drafter_of(core: EngineCore) -> Any:
    stepper = core.runner.headless
    assert isinstance(stepper, OwnStepper)
    assert not stepper.failure
    return stepper.drafter


@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 7}, {"page_size": 4, "max_total_tokens": 220}])
@pytest.mark.parametrize("layers", [(FINAL_NORM,), (0, 1, 2)], ids=["last", "several"])
def test_every_row_is_read_once_and_in_order(
    target: Path, plain: list[list[int]], tmp_path: Path, layers: tuple[int, ...], options: dict[str, Any]
) -> None:
    core = reading(target, tmp_path, READING.format(layers=layers), **options)
    for _ in range(2):  # the second time nothing is taken from the prefix cache
        assert run(core, PROMPTS, SETTINGS) == plain
        own = drafter_of(core)
        with torch.inference_mode():
            for index, (prompt, reply) in enumerate(zip(PROMPTS, plain, strict=True)):
                given = torch.cat(own.texts[f"r{index}"])
                text = [*prompt, *reply]
                expected = read_texts(load_target(target), [text], layers).features
                assert expected is not None
                num_rows = len(text) - 1
                assert len(given) >= num_rows
                torch.testing.assert_close(given[:num_rows], expected[:num_rows], atol=1e-4, rtol=1e-3)
    metrics = core.current_metrics()
    assert metrics.num_accepted_tokens > 0
    assert core.scheduler.num_preemptions > 0 or "max_total_tokens" not in options


@torch.enable_grad()
def write_heads(file: Path, target: Path, texts: list[list[int]], num_heads: int) -> None:
    """Heads for the class in the docs, which know these texts."""
    decoder = load_target(target)
    with torch.inference_mode():
        states = [read_texts(decoder, [text], ()).hidden for text in texts]
    tensors, output = {}, decoder.lm_head.weight.clone()
    for number in range(num_heads):
        hidden = torch.cat([own[: -2 - number] for own in states]).clone()
        wanted = torch.tensor([token for text in texts for token in text[2 + number :]])
        head = torch.zeros(hidden.shape[1], hidden.shape[1], requires_grad=True)
        optimizer = torch.optim.Adam([head], lr=0.02)
        for _ in range(150):
            logits = (hidden + torch.nn.functional.silu(hidden @ head.T)) @ output.T
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, wanted).backward()
            optimizer.step()
        tensors[f"heads.{number}.weight"] = head.detach()
    save_file(tensors, file)


def test_the_heads_in_the_docs_are_accepted(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(make_core(target), PROMPTS, GREEDY)
    write_heads(
        tmp_path / "heads.safetensors", target, [[*p, *reply] for p, reply in zip(PROMPTS, plain, strict=True)], num_heads=3
    )
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(import torch.*?class Medusa.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    core = reading(target, tmp_path, code.replace("class Medusa", "class Mine"))
    assert run(core, PROMPTS, GREEDY) == plain
    assert not drafter_of(core).last
    metrics = core.current_metrics()
    assert metrics.num_draft_tokens == 6 * metrics.num_drafts
    assert metrics.num_accepted_tokens > 1.5 * metrics.num_drafts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("(-1,)", "(99,)"), r"has feature_layers \(99,\): the head wants features of layer 99"),
        (("(-1,)", "('last',)"), r"has feature_layers \('last',\)"),
        (("def read", "def reed"), "has feature_layers and no method read"),
        (("self.logits, self.texts", "self.logits, self.target.texts"), "can't start: AttributeError"),
        (("assert start ==", "assert start <"), "fails: Mine.read: AssertionError"),
    ],
    ids=["layer", "no number", "no read", "start", "reading"],
)
def test_what_cannot_be_a_head_is_refused(target: Path, tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        reading(target, tmp_path, READING.format(layers=(-1,)).replace(*change))
    assert "--speculative-algorithm" in str(error.value)


def test_one_that_fails_to_read_later_stops_nobody(
    target: Path, plain: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = READING.format(layers=(-1,)).replace("own.append(features)", "own.append(features[: 20 - start])")
    core = reading(target, tmp_path, code)
    with caplog.at_level(logging.ERROR):
        assert run(core, PROMPTS, SETTINGS) == plain
    assert caplog.text.count("nothing is drafted any more: Mine.") == 1

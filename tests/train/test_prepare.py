"""Rows to train on: the target's own answers, turn by turn, however often the run is stopped."""

import json
from pathlib import Path

import checkpoints
import pytest
from engines import make_core, run

from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.tokenizer import chat_tokens, decode_tokens
from eagle_rt.train.dialogues import Dialogue, read_dialogues
from eagle_rt.train.prepare import Row, keep_answers, read_rows, regenerate

TOKENIZER = checkpoints.byte_tokenizer()
USER, SYSTEM = ({"role": role, "content": text} for role, text in (("user", "hi"), ("system", "be brief")))
DIALOGUES = [
    Dialogue("one", (USER,)),
    Dialogue("two", (SYSTEM, USER, {"role": "assistant", "content": "dropped"}, {"role": "user", "content": "and now?"})),
    *(Dialogue(f"more{index}", ({"role": "user", "content": "x" * index},)) for index in range(1, 6)),
]


def answer(target_dir: Path, output: Path, sampling: SamplingParams, dialogues: list[Dialogue] = DIALOGUES) -> list[Row]:
    core = make_core(target_dir, max_running_requests=2)
    regenerate(dialogues, core, TOKENIZER, sampling, output)
    return sorted(read_rows(output), key=lambda row: (row.id, row.turn))


def test_every_turn_is_answered_by_the_target(target_dir: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0, max_new_tokens=12)
    rows = {(row.id, row.turn): row for row in answer(target_dir, tmp_path / "rows.jsonl", sampling)}
    assert len(rows) == 8
    first, second = rows["two", 0], rows["two", 1]
    assert first.prompt == chat_tokens(TOKENIZER, [SYSTEM, USER])
    assert first.text == decode_tokens(TOKENIZER, first.answer)
    history = [SYSTEM, USER, {"role": "assistant", "content": first.text}, {"role": "user", "content": "and now?"}]
    assert second.prompt == chat_tokens(TOKENIZER, history)
    for row in rows.values():
        assert run(make_core(target_dir), [row.prompt], sampling) == [row.answer]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stopped_run_goes_on(target_dir: Path, tmp_path: Path, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, max_new_tokens=12)
    whole = answer(target_dir, tmp_path / "whole.jsonl", sampling)
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    for num_kept in (0, 1, 4, 7):
        file = tmp_path / f"{num_kept}.jsonl"
        file.write_text("".join(lines[:num_kept]) + lines[num_kept][:20])  # killed in the middle of a line
        assert answer(target_dir, file, sampling) == whole
        assert len(file.read_text().splitlines()) == 8


def test_what_cannot_be_answered_is_left_out(target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dialogues = [Dialogue("long", ({"role": "user", "content": "x" * 600},)), *DIALOGUES[:1]]
    rows = answer(target_dir, tmp_path / "rows.jsonl", SamplingParams(temperature=0, max_new_tokens=4), dialogues)
    assert [row.id for row in rows] == ["one"]
    assert "long left out: the prompt has" in capsys.readouterr().err


def test_given_answers_can_be_kept(tmp_path: Path) -> None:
    yes = {"role": "assistant", "content": "yes"}
    keep_answers([Dialogue("a", (USER, yes, USER, yes)), Dialogue("b", (USER,))], TOKENIZER, frozenset({3}), tmp_path / "rows")
    rows = read_rows(tmp_path / "rows")
    assert [(row.id, row.turn) for row in rows] == [("a", 0), ("a", 1)]
    for row, history in zip(rows, ([USER], [USER, yes, USER]), strict=True):
        assert row.prompt == chat_tokens(TOKENIZER, history)
        assert TOKENIZER.decode(row.answer) == "yes<|end|>"


def test_dialogues_in_every_form(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": 7},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"turns": ["a", "c"]},
        {"prompt": "a", "response": "b"},
        {"prompt": "a"},
    ]
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    dialogues = list(read_dialogues([file]))
    spoken = [[(message["role"][0], message["content"]) for message in dialogue.messages] for dialogue in dialogues]
    assert spoken == [
        [("u", "a"), ("a", "b")],
        [("u", "a"), ("a", "b")],
        [("u", "a"), ("u", "c")],
        [("u", "a"), ("a", "b")],
        [("u", "a")],
    ]
    assert len({dialogue.id for dialogue in dialogues}) == 5


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"messages": [{"role": "user"}]}', '{"conversations": [{"from": "dog", "value": "a"}]}']
)
def test_a_line_that_is_no_dialogue_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*bad\.jsonl is no dialogue"):
        list(read_dialogues([file]))


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match="line 1 of"):
        read_rows(file)

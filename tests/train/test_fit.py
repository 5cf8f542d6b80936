"""Fitting a head: the same step however it is divided, and the same weights however often it is stopped."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import load_target, make_core, random_prompts, run
from head_layouts import served_as
from torch import Tensor

from eagle_rt.engine.params import SamplingParams
from eagle_rt.train import __main__ as command
from eagle_rt.train.batches import BatchOrder, Text, counted_positions, padded, row_texts
from eagle_rt.train.export import export_head
from eagle_rt.train.fit import FitConfig, HeadTrainer
from eagle_rt.train.prepare import Row

CONFIG = FitConfig(
    kind="EAGLE3",
    num_steps=8,
    batch_size=6,
    micro_batch_size=6,
    num_unrolled=3,
    draft_vocab_size=120,
    learning_rate=1e-3,
    optimizer="adamw",
    precision=torch.float32,
    held_out_fraction=0.2,
    checkpoint_every=3,
)
TEXTS = [Text([*tokens, 9, 8, 7], max(1, len(tokens) // 2)) for tokens in random_prompts(40, seed=2, longest=30)]


def trainer(target_dir: Path, **changes: object) -> HeadTrainer:
    return HeadTrainer(load_target(target_dir), TEXTS, replace(CONFIG, **changes))


def weights(run_dir: Path) -> dict[str, Tensor]:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)["module"]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.parametrize("kind", ["EAGLE3", "PEAGLE", "DFLASH", "EAGLE"])
def test_a_step_is_the_same_in_one_pass_and_in_many(target_dir: Path, kind: str) -> None:
    gradients = []
    for micro_batch_size in (6, 2, 1):
        one = trainer(target_dir, kind=kind, micro_batch_size=micro_batch_size)
        # Noise is drawn per pass, so that it differs between divisions; what is left must not.
        one._noise = lambda shape, generator: torch.zeros(shape)  # type: ignore[method-assign]
        for part in range(6 // micro_batch_size):
            one.loss_at(5, part)[0].backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in one.trainee.parameters()]))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["EAGLE3", "EAGLE"])
def test_a_run_that_was_killed_ends_with_the_same_weights(target_dir: Path, tmp_path: Path, kind: str) -> None:
    trainer(target_dir, kind=kind).run(tmp_path / "whole")

    killed = trainer(target_dir, kind=kind)
    original = killed.loss_at

    def loss_at(step: int, part: int):
        if step == 7:
            raise KeyboardInterrupt
        return original(step, part)

    killed.loss_at = loss_at  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        killed.run(tmp_path / "killed")
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    trainer(target_dir, kind=kind).run(tmp_path / "killed")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def test_training_a_head_makes_it_foresee_more(target_dir: Path, tmp_path: Path) -> None:
    """On texts that it sees again and again: a random target's are not to be generalised from."""
    trainer(target_dir, num_steps=60, learning_rate=3e-3).run(tmp_path)
    log = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert float(log[-1]["loss"]) < 0.9 * float(log[0]["loss"])
    assert float(log[-1]["accept_0"]) > float(log[0]["accept_0"])


def test_batches_show_every_text_once_an_epoch() -> None:
    order = BatchOrder(TEXTS, 6, seed=1)
    assert order.batches_per_epoch == 6
    for epoch in range(2):
        seen = [id(text) for index in range(6) for text in order.at(epoch * 6 + index)]
        assert len(seen) == len(set(seen)) == 36
    assert [text.tokens for text in order.at(3)] == [text.tokens for text in BatchOrder(TEXTS, 6, seed=1).at(3)]
    with pytest.raises(ValueError, match="40 training rows are fewer than a batch of 50"):
        BatchOrder(TEXTS, 50, seed=1)


def test_rows_become_padded_texts() -> None:
    texts = row_texts([Row("a", 0, [1, 2, 3], [4, 5], ""), Row("b", 0, [1] * 9, [2], ""), Row("c", 0, [1], [2, 3, 4], "")], 5)
    assert [text.tokens for text in texts] == [[1, 2, 3, 4, 5], [1, 2, 3, 4]]
    counted = counted_positions(texts, 6, torch.device("cpu"))
    assert counted.tolist() == [[False, False, True, True, False, False], [True, True, True, False, False, False]]
    rows = [torch.ones(2, 3), torch.ones(1, 3)]
    assert padded(rows, 3)[:, :, 0].tolist() == [[1, 1, 0], [1, 0, 0]]


def command_line(tmp_path: Path, target_dir: Path, run_dir: Path, *more: str) -> list[str]:
    flags = {"--num-steps": 4, "--batch-size": 4, "--micro-batch-size": 2, "--num-unrolled": 2, "--draft-vocab-size": 100}
    numbers = [str(part) for pair in flags.items() for part in pair]
    rows = ["--rows", str(tmp_path / "rows.jsonl"), "--model-path", str(target_dir), "--device", "cpu"]
    return ["fit", *rows, "--run-dir", str(run_dir), *numbers, "--precision", "float32", *more]


def prepare(tmp_path: Path, target_dir: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "y" * (index + 1)}) + "\n" for index in range(12)))
    flags = ["--prompts", str(prompts), "--output", str(tmp_path / "rows.jsonl"), "--max-new-tokens", "10"]
    assert command.main(["prepare", *flags, "--model-path", str(target_dir), "--device", "cpu"]) == 0


@pytest.mark.parametrize("kind", ["EAGLE3", "PEAGLE", "DFLASH", "EAGLE"])
def test_from_prompts_to_a_head_that_serves(target_dir: Path, tmp_path: Path, kind: str) -> None:
    prepare(tmp_path, target_dir)
    assert command.main(command_line(tmp_path, target_dir, tmp_path / "run", "--kind", kind)) == 0
    assert command.main(["export", "--run-dir", str(tmp_path / "run"), "--output", str(tmp_path / "head")]) == 0
    sampling = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
    prompts = random_prompts(3)
    core = make_core(target_dir, tmp_path / "head", (2, 2, 6), speculative_algorithm=served_as(kind))
    assert run(core, prompts, sampling) == run(make_core(target_dir), prompts, sampling)


@pytest.mark.parametrize("kind", ["EAGLE3", "DFLASH", "EAGLE"])
def test_a_head_can_be_trained_further(target_dir: Path, tmp_path: Path, kind: str) -> None:
    first = trainer(target_dir, kind=kind)
    first.run(tmp_path / "run")
    export_head(first.trainee.config, first.trainee.state_dict(), tmp_path / "head", torch.float32)
    further = trainer(target_dir, kind=kind, start_from=tmp_path / "head", draft_vocab_size=7)
    assert same(first.trainee.state_dict(), further.trainee.state_dict())
    if kind == "EAGLE3":
        check_widened(target_dir, first.trainee.state_dict(), tmp_path / "head")

    other = "EAGLE" if kind == "EAGLE3" else "EAGLE3"
    with pytest.raises(ValueError, match=f"is no {other} head for this target"):
        trainer(target_dir, kind=other, start_from=tmp_path / "head")
    with pytest.raises(FileNotFoundError, match="--start-from takes a head"):
        trainer(target_dir, kind=kind, start_from=tmp_path / "run")


def test_an_eagle_3_head_can_learn_to_draft_in_parallel(target_dir: Path, tmp_path: Path) -> None:
    first = trainer(target_dir)
    first.run(tmp_path / "run")
    export_head(first.trainee.config, first.trainee.state_dict(), tmp_path / "head", torch.float32)
    further = trainer(target_dir, kind="PEAGLE", start_from=tmp_path / "head", num_layers=2, mask_token=17)
    assert same(first.trainee.state_dict(), further.trainee.state_dict())
    log_of = further.loss_at(0, 0)[1]["accept_0"], first.loss_at(0, 0)[1]["accept_0"]
    assert log_of[0] == log_of[1], "the second layer adds nothing yet"


def test_a_dflash_head_can_learn_what_a_token_says_of_the_next(target_dir: Path, tmp_path: Path) -> None:
    first = trainer(target_dir, kind="DFLASH")
    first.run(tmp_path / "run")
    export_head(first.trainee.config, first.trainee.state_dict(), tmp_path / "head", torch.float32)
    further = trainer(target_dir, kind="DFLASH", start_from=tmp_path / "head", markov_rank=4, num_steps=40, learning_rate=0.01)
    assert further.loss_at(0, 0)[0] == first.loss_at(0, 0)[0], "it says nothing yet"
    further.run(tmp_path / "further")
    export_head(further.trainee.config, further.trainee.state_dict(), tmp_path / "pairs", torch.float32)
    assert further.loss_at(0, 0)[0] < first.loss_at(0, 0)[0]
    core = make_core(target_dir, tmp_path / "pairs", (2, 2, 6), speculative_algorithm="DFLASH")
    head = core.runner.host_stepper.drafter.head
    assert head.block.pair_rank == 4
    logits = torch.zeros(3, 262)
    assert (head.after(torch.tensor([5, 6, 7]), logits) - logits).abs().max() > 1e-4


def test_numbers_that_no_head_has(target_dir: Path) -> None:
    with pytest.raises(ValueError, match="--num-layers 2 is for heads of other kinds"):
        trainer(target_dir, kind="EAGLE", num_layers=2)
    with pytest.raises(ValueError, match="--markov-rank 4 is for heads of kind DFLASH"):
        trainer(target_dir, kind="PEAGLE", markov_rank=4)
    for token in (-1, 262):
        with pytest.raises(ValueError, match=f"--mask-token-id {token} is no token: the target has 262"):
            trainer(target_dir, kind="PEAGLE", mask_token=token)


def check_widened(target_dir: Path, first: dict[str, torch.Tensor], head_dir: Path) -> None:
    """A larger draft vocabulary: what the head knew stays, and the rest begins as the target's output layer."""
    own, num_own = first["draft_tokens"].tolist(), len(first["draft_tokens"])
    wider = trainer(target_dir, kind="EAGLE3", start_from=head_dir, draft_vocab_size=num_own + 20).trainee.state_dict()
    lm_head = load_target(target_dir).lm_head.weight
    tokens = wider["draft_tokens"].tolist()
    assert set(own) < set(tokens)
    assert tokens == sorted(set(tokens))
    for row, token in zip(wider["lm_head.weight"], tokens, strict=True):
        assert torch.equal(row, first["lm_head.weight"][own.index(token)] if token in own else lm_head[token])


def test_two_processes_make_the_same_step(target_dir: Path, tmp_path: Path) -> None:
    prepare(tmp_path, target_dir)
    assert command.main(command_line(tmp_path, target_dir, tmp_path / "alone")) == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "eagle_rt.train"]
    arguments = [*launcher, *command_line(tmp_path, target_dir, tmp_path / "two")]
    for is_last in (False, True):
        launched = subprocess.run(arguments, timeout=240, capture_output=True, text=True)
        if "EADDRINUSE" not in launched.stderr or is_last:  # the port that was found free may be taken a moment later
            break
    assert launched.returncode == 0, launched.stderr[-4000:]
    alone, two = weights(tmp_path / "alone"), weights(tmp_path / "two")
    for name, weight in alone.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-5)
    log = [(tmp_path / folder / "held_out.csv").read_text() for folder in ("alone", "two")]
    assert log[0].count("\n") == log[1].count("\n") == 2


def test_errors_are_one_line(tmp_path: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["export", "--run-dir", str(tmp_path), "--output", str(tmp_path / "head")]) == 1
    assert "has not written a checkpoint" in capsys.readouterr().err
    assert command.main(command_line(tmp_path, target_dir, tmp_path / "run")) == 1
    assert "rows.jsonl" in capsys.readouterr().err

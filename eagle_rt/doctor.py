"""Does this head fit this target, and which tree pays here?

`python -m eagle_rt.doctor --model-path M --speculative-draft-model-path H` takes the flags of the server. It ends with exit code 0
if the head fits, and with 1 if it cannot be loaded, makes nothing of the target's hidden states, or would fit better if it were
read another way.
"""

import argparse
import sys
import time
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from eagle_rt.bench.sweep import Measurement, Setting, acceptance_by_depth, measure_once, rows
from eagle_rt.bench.workload import Workload
from eagle_rt.config import EngineConfig, add_flags, config_from_args, require
from eagle_rt.engine.fit import LOW_COVERAGE, PROMPTS, FitProbe, FitResult, layer_conventions, other_conventions
from eagle_rt.engine.load import LoadedModels, ModelInfo, load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.leave import run
from eagle_rt.models.decoder import FINAL_NORM
from eagle_rt.models.heads.base import Head
from eagle_rt.models.tokenizer import question_tokens
from eagle_rt.resolve import resolve_device
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

# From cheap to deep; the first ones are worth a try on a CPU, the last ones on a GPU.
TREES = [
    TreeShape(1, 1, 2),
    TreeShape(2, 2, 4),
    TreeShape(3, 2, 8),
    TreeShape(4, 1, 5),
    TreeShape(5, 4, 16),
    TreeShape(5, 8, 32),
    TreeShape(7, 10, 60),
]
NUM_TIMED_TOKENS = 48
# Enough text to tell neighbouring layers of a small target apart.
NUM_ANSWERS = 6
NUM_NEW_TOKENS = 128


def facts(models: LoadedModels, head: Head) -> list[tuple[str, str]]:
    """What target and head say of themselves, side by side where they could disagree."""
    spec, target = head.spec, models.spec
    layers = "the final norm's output" if spec.feature_layers == (FINAL_NORM,) else f"inputs of layers {spec.feature_layers}"
    num_known = len(head.token_map.target_ids)
    return [
        ("target", f"{target.architecture}, {target.num_layers} layers of {target.shape.hidden_size}"),
        ("head", f"{spec.kind}, {spec.num_layers} layer{'s' * (spec.num_layers > 1)} of {spec.shape.hidden_size}"),
        ("fed with", layers),
        ("draft vocabulary", f"{num_known} of the target's {target.vocab_size} tokens"),
        ("rope", f"head: {spec.rope.kind}, base {spec.rope.theta:g}; target: {target.rope.kind}, base {target.rope.theta:g}"),
        ("trained context", f"head: {spec.rope.max_position_embeddings}; target: {target.max_position_embeddings}"),
    ]


def fit_table(result: FitResult) -> Table:
    table = Table(title=f"share of {result.num_positions} positions where the head foresees the target's next token")
    table.add_column("read")
    table.add_column("right", justify="right")
    table.add_column("log-probability, standard errors above", justify="right")
    table.add_row("as configured", f"{result.acceptance:.1%}", "")
    for measured in result.others:
        table.add_row(measured.convention.description, f"{measured.acceptance:.1%}", f"{measured.z:+.1f}")
    table.add_row("with hidden states from elsewhere", f"{result.blind:.1%}", "")
    return table


def verdict(result: FitResult) -> list[str]:
    """What is wrong, one line each; empty if the head fits."""
    problems = []
    if result.better:
        problems.append(
            f"The head is read by the wrong convention: it foresees {result.acceptance:.1%}, and {result.better.acceptance:.1%} "
            f"with {result.better.convention.description}. Way out: {result.better.convention.remedy}."
        )
    elif result.is_blind:
        problems.append(
            f"The head foresees {result.acceptance:.1%}, and {result.blind:.1%} without the target's hidden states: it makes next "
            "to nothing of them. No other convention helps: it was made for another target, or its weights are damaged."
        )
    if result.coverage < LOW_COVERAGE:
        problems.append(f"The draft vocabulary holds only {result.coverage:.1%} of the tokens that the target writes.")
    return problems


def timed_trees(models: LoadedModels, config: EngineConfig, info: ModelInfo, seconds: float) -> list[Measurement]:
    """No speculation and as many trees as there is time for, one prompt at a time."""
    workload = Workload("doctor", [question_tokens(info.tokenizer, prompt) for prompt in PROMPTS])
    sampling = SamplingParams(temperature=0, max_new_tokens=NUM_TIMED_TOKENS)
    measurements = []
    start = time.perf_counter()
    for tree in (NO_SPECULATION, *models.fitting(TREES)):
        begin = time.perf_counter()
        measurement = Measurement(Setting(1, tree))
        measure_once(models, config, measurement, workload, sampling)
        measurements.append(measurement)
        now = time.perf_counter()
        if len(measurements) > 1 and now - start + (now - begin) > seconds:
            break
    return measurements


def tree_table(measured: list[dict[str, object]]) -> Table:
    table = Table(title="trees on this machine, greedy, one request at a time")
    for column in ("steps", "top-k", "draft tokens", "accepted a step", "tokens/s", "speed-up"):
        table.add_column(column, justify="right")
    for row in measured:
        names = ("steps", "topk", "num_draft_tokens", "mean_accepted_tokens", "tokens_per_second", "speedup")
        table.add_row(*(str(row[name]) for name in names))
    return table


def recommendation(measured: list[dict[str, object]]) -> str:
    best = max(measured, key=lambda row: float(str(row["speedup"])))
    if best["steps"] == 0:
        return "No tree is faster than no speculation here: leave --speculative-algorithm unset for single requests."
    return (
        f"Recommended here: --speculative-num-steps {best['steps']} --speculative-eagle-topk {best['topk']} "
        f"--speculative-num-draft-tokens {best['num_draft_tokens']} ({best['speedup']}x no speculation)"
    )


def examine(config: EngineConfig, console: Console, seconds: float) -> bool:
    """Print the report; whether the head fits."""
    require(config.has_head, "speculative_algorithm", config.speculative_algorithm, "one with a head, which is what is examined")
    info = model_info(config)
    models = load_models(config, info)
    head = models.head
    assert head is not None
    for name, value in facts(models, head):
        console.print(f"{name:>18}  {value}", highlight=False)
    for note in models.notes:
        console.print(f"{'note':>18}  {note}", highlight=False)

    conventions = [*layer_conventions(head, models.spec.num_layers), *other_conventions(head, models.spec)]
    result = FitProbe(models, config, info.tokenizer, num_answers=NUM_ANSWERS, num_new_tokens=NUM_NEW_TOKENS).measure(
        head, conventions
    )
    console.print(fit_table(result))
    problems = verdict(result)
    for problem in problems:
        console.print(f"[bold red]DOES NOT FIT[/] {problem}", highlight=False, soft_wrap=True)
    if problems:
        return False

    console.print(f"[bold green]FITS[/] {result.coverage:.1%} of the target's tokens are in the draft vocabulary.", highlight=False)
    measurements = timed_trees(models, config, info, seconds)
    deepest = max(measurements, key=lambda measurement: measurement.setting.tree.num_steps)
    by_depth = "  ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(acceptance_by_depth(deepest.metrics), start=1))
    console.print(f"steps that kept a draft at depth, tree {deepest.setting.tree}:  {by_depth}", highlight=False)
    measured = rows(measurements)
    console.print(tree_table(measured))
    console.print(recommendation(measured), highlight=False, soft_wrap=True)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_rt.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="for timing trees, about")
    add_flags(parser)
    args = parser.parse_args(arguments)
    args.speculative_algorithm = args.speculative_algorithm or "EAGLE3"
    try:
        config = replace(resolve_device(config_from_args(args)), disable_radix_cache=True)
        return 0 if examine(config, Console(), args.seconds) else 1
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    run(main)

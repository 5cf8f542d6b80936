"""How well the chances that drafted nodes are given foresee the target, and what an estimator's cold start is fitted to.

`python benchmarks/estimator.py --dataset-dir PROMPTS`. Prints the Brier scores of the head's own probabilities, as they are and
sharpened, of the cold start, and of the estimator as it learns while running, over the nodes of fixed trees for prompts that
nothing was fitted to; and weights fitted to those of the built-in prompts, which is what `acceptance.DEFAULT_WEIGHTS` are.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.drafting_run import parsed, write
from eagle_rt.bench.sweep import Setting, core_for
from eagle_rt.bench.workload import load_workload
from eagle_rt.config import EngineConfig
from eagle_rt.engine.core import run_to_end
from eagle_rt.engine.load import LoadedModels, load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.speculate.acceptance import SHARPNESS, AcceptanceEstimator, VerifiedNodes, most_probable
from eagle_rt.speculate.compiled import surprises_of
from eagle_rt.speculate.forest import Floats, Ints
from eagle_rt.speculate.policy import DraftPlan, FixedPolicy, StepRecord
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape

# How strongly a fit to thousands of nodes is held to where it begins, and how often it is improved.
NEARLY_FREE, NUM_ROUNDS = 0.01, 10


@dataclass(frozen=True)
class Step:
    """What one request has verified in a step: the nodes, and [M] the number of each one's parent among them, -1 for roots."""

    nodes: VerifiedNodes
    parents: Ints

    def chances(self, estimator: AcceptanceEstimator) -> Floats:
        """[M] that they will be accepted, whatever the request's others were."""
        nodes, chances = self.nodes, np.ones(len(self.parents))
        given = estimator.probabilities(inputs_of(nodes, estimator), np.zeros(len(chances)))
        for place, parent in enumerate(self.parents):
            chances[place] = given[place] * (chances[parent] if parent >= 0 else 1.0)
        return chances


def inputs_of(nodes: VerifiedNodes, estimator: AcceptanceEstimator) -> Floats:
    return estimator.inputs(nodes.log_probs, nodes.scores - nodes.log_probs, nodes.depths, nodes.temperatures)


class Recorder(FixedPolicy):
    """Drafts fixed trees, and remembers the nodes of every step of a batch of one."""

    def __init__(self) -> None:
        super().__init__(None)
        self.steps: list[Step] = []

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        plan = super().begin(sequences, num_missing)
        temperature = sequences[0].temperature

        def remember(record: StepRecord) -> None:
            kept, labels, head = record.candidates[record.kept], record.is_accepted(), np.exp(record.candidates.scores[record.kept])
            is_asked, _ = surprises_of(head, kept.owners, kept.parents, record.kept, labels, 1)
            temperatures = np.full(len(kept), temperature)
            parents = np.where(kept.parents < 0, -1, np.searchsorted(record.kept, kept.parents))
            self.steps.append(
                Step(VerifiedNodes(kept.log_probs, kept.scores, kept.depths, temperatures, head, labels, is_asked), parents)
            )

        plan.learn = remember  # type: ignore[method-assign]
        return plan


class Collection:
    """Nodes of fixed trees for prompts at temperatures, one request at a time."""

    def __init__(self, models: LoadedModels, config: EngineConfig, tree: TreeShape, args: argparse.Namespace) -> None:
        self.tree = tree
        self._models, self._config, self._args = models, config, args

    def steps(self, prompts: list[list[int]], temperature: float, sharpness: float = SHARPNESS) -> list[Step]:
        """sharpness: of the head's probabilities."""
        core = core_for(self._models, replace(self._config, speculative_score_sharpness=sharpness), Setting(1, self.tree))
        stepper = core.runner.host_stepper
        assert stepper
        stepper.policy = recorder = Recorder()
        seeds = range(self._args.seed, self._args.seed + len(prompts))
        settings = [SamplingParams(temperature, seed=seed, max_new_tokens=self._args.max_new_tokens) for seed in seeds]
        run_to_end(core, prompts, settings)
        return recorder.steps


def together(steps: Sequence[Step]) -> VerifiedNodes:
    return VerifiedNodes(*map(np.concatenate, zip(*(step.nodes for step in steps), strict=True)))


def fitted_weights(steps: Sequence[Step], max_depth: int) -> list[float]:
    """For the nodes whose parents were accepted, of an estimator for trees so deep."""
    estimator, nodes = AcceptanceEstimator(max_depth), together(steps)
    inputs, labels = inputs_of(nodes, estimator)[nodes.is_asked], nodes.labels[nodes.is_asked]
    weights, precision = estimator.weights, NEARLY_FREE * np.eye(len(estimator.weights))
    for _ in range(NUM_ROUNDS):
        weights = most_probable(inputs, labels, weights, estimator.weights, precision)
    return [round(weight, 2) for weight in weights.tolist()]


def while_running(steps: Sequence[Step], estimator: AcceptanceEstimator) -> Floats:
    """The chances that it gives the nodes of each step before it learns from them."""
    given = []
    for step in steps:
        given.append(step.chances(estimator))
        estimator.observe(step.nodes)
    return np.concatenate(given)


def brier(chances: Floats, nodes: VerifiedNodes) -> float:
    return round(float(((chances - nodes.labels) ** 2).mean()), 4)


def compare(
    collection: Collection, name: str, prompts: list[list[int]], temperature: float, weights: list[float]
) -> dict[str, Any]:
    """Brier scores over the nodes for some prompts: of the head's own probabilities, of the sharpened ones that all others start
    from, of the cold start, of what it learns from there on, and of weights that were fitted anew."""
    as_it_is, steps = together(collection.steps(prompts, temperature, 1.0)), collection.steps(prompts, temperature)
    nodes = together(steps)
    row: dict[str, Any] = {"dataset": name, "temperature": temperature, "nodes": len(nodes.labels)}
    row["head"], row["sharpened"] = brier(as_it_is.chances, as_it_is), brier(nodes.chances, nodes)
    max_depth = collection.tree.num_steps
    cold, new = AcceptanceEstimator(max_depth), AcceptanceEstimator(max_depth, weights)
    row["cold"] = brier(np.concatenate([step.chances(cold) for step in steps]), nodes)
    row["learning"] = brier(while_running(steps, cold), nodes)
    row["anew"] = brier(np.concatenate([step.chances(new) for step in steps]), nodes)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["gsm8k", "mt_bench", "humaneval"], help="to compare with")
    parser.add_argument("--num-prompts", type=int, default=40, help="of each")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--fit-temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.6, 1.0, 1.5, 2.0])
    parser.add_argument("--tree", default="5,4,12")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    args, config = parsed(parser)
    info = model_info(config)
    tree = TreeShape(*map(int, args.tree.split(",")))
    collection = Collection(load_models(config, info), config, tree, args)

    def prompts(name: str, count: int | None) -> list[list[int]]:
        return load_workload(name, args.dataset_dir, info.tokenizer, count).prompts

    built_in = prompts("builtin", None)
    to_fit = [step for temperature in args.fit_temperatures for step in collection.steps(built_in, temperature)]
    weights = fitted_weights(to_fit, tree.num_steps)
    print(f"fitted to {int(together(to_fit).is_asked.sum())} nodes: {weights}", flush=True)
    rows = []
    for name in args.datasets:
        own = prompts(name, args.num_prompts)
        for temperature in args.temperatures:
            rows.append(compare(collection, name, own, temperature, weights))
            print(rows[-1], flush=True)
    write("estimator", args, config, weights=weights, rows=rows)


if __name__ == "__main__":
    main()

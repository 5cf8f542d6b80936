"""An adaptive policy that is asked and told as an engine does, for tests of single decisions."""

import numpy as np
from step_costs import costs

from eagle_rt.speculate.acceptance import AcceptanceEstimator
from eagle_rt.speculate.adaptive import AdaptivePolicy
from eagle_rt.speculate.costs import Conditions, StepCosts
from eagle_rt.speculate.forest import Candidates
from eagle_rt.speculate.policy import RESTING, DraftPlan, Rests
from eagle_rt.speculate.prices import Pace, Price
from eagle_rt.speculate.promises import CommonPromises
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape

FREE, ONE = costs(start=0.0, level=50.0, node=0.1), Conditions(1, 64.0, is_sampled=False)


class Served(AdaptivePolicy):
    """With an estimator that takes the head at its word. rested: steps that it has not been told of."""

    def __init__(self, step_costs: StepCosts) -> None:
        super().__init__(step_costs, AcceptanceEstimator(4, [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]), None)
        self.rested: list[tuple[int, float]] = []

    def step(self, sequences: list[HostSequence], plain_ms: float = 10.0, between_ms: float = 0.0) -> DraftPlan:
        """One whose drafts, if any, are not recorded."""
        plan: DraftPlan = RESTING
        if not self.rests(len(sequences)):
            self.learn_rests(Rests(self.rested, between_ms))
            self.rested = []
            plan = self.begin(sequences, [1] * len(sequences))
        if not plan.drafters:
            self.rested.append((len(sequences), plain_ms))
        return plan


def start_that_nearly_pays(step_costs: StepCosts) -> float:
    """Milliseconds of a first level for which drafts at these costs would come to 0.9 of what they take."""
    return 10.0 * CommonPromises().utility(Price(step_costs, Pace(), ONE))[0] / 0.9


def step(adaptive: Served, name: str = "a", plain_ms: float = 10.0) -> DraftPlan:
    """One step of one sequence."""
    return adaptive.step([HostSequence(name, [0] * 64, range(0), 0.0, TreeShape(2, 2, 4))], plain_ms)


def plan_for(adaptive: Served, temperatures: list[float], may_draft: bool = True) -> DraftPlan:
    """may_draft: the last of them."""
    shapes = [TreeShape(4, 3, 24)] * (len(temperatures) - 1) + [TreeShape(4, 3, 24) if may_draft else None]
    sequences = [
        HostSequence(f"{number}", [0] * 64, range(0), own, shape)
        for number, (own, shape) in enumerate(zip(temperatures, shapes, strict=True))
    ]
    return adaptive.step(sequences)


def begun(adaptive: Served, temperatures: list[float]) -> DraftPlan:
    """Where all draft."""
    plan = plan_for(adaptive, temperatures)
    assert plan.drafters == list(range(len(temperatures)))
    return plan


def level(owners: np.ndarray, parents: np.ndarray, depth: int, chances: np.ndarray) -> Candidates:
    """Of nodes whose parents are sure."""
    logs = np.log(chances)
    return Candidates(owners, parents, parents, np.full(len(owners), depth), logs, logs, np.ones(len(owners)))

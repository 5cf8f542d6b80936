"""Adaptive trees against none and against fixed ones, where texts, drafts and times are made up, and the same each time."""

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from step_costs import no_candidates

from eagle_rt.kernels.packed_linear import AMX_TILES, NO_TILES, RowTiles
from eagle_rt.speculate import compiled, compiled_costs
from eagle_rt.speculate.acceptance import AcceptanceEstimator
from eagle_rt.speculate.adaptive import AdaptivePolicy
from eagle_rt.speculate.costs import Observation, PartCost, StepCosts, fitted_costs
from eagle_rt.speculate.forest import Candidates, Ints, joined
from eagle_rt.speculate.policy import RESTING, DraftPlan, FixedPolicy, Rests, StepRecord, TreePolicy, bounds_of
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape

BOUNDS = TreeShape(6, 4, 24)
FIXED = [TreeShape(1, 1, 2), TreeShape(2, 1, 3), TreeShape(3, 1, 4), TreeShape(3, 2, 8), TreeShape(4, 2, 6), TreeShape(5, 4, 16)]
TEXT_LENGTH = 60
# Rows and milliseconds of each part, and what a sequence adds: like a small model that reads its weights once a pass, like a tiny
# one, of which a second row takes nearly as long as the first, and like one whose products are made with whole tiles of rows.
TIMES = {
    "small": {
        "start": ([1, 12, 128, 1024], [7.5, 8.0, 12.0, 51.0], 0.12),
        "level": ([1, 16, 64, 256], [6.0, 7.0, 9.5, 20.0], 0.13),
        "verify": ([1, 8, 16, 17, 32, 64, 128, 1024], [60.0, 65.0, 71.0, 76.0, 91.0, 122.0, 175.0, 1100.0], 0.7),
    },
    "tiny": {
        "start": ([1, 4, 16, 64, 1024], [1.7, 2.6, 3.5, 6.0, 50.0], 0.4),
        "level": ([1, 4, 16, 64, 256], [1.9, 2.7, 3.5, 6.0, 16.0], 0.4),
        "verify": ([1, 2, 4, 8, 16, 32, 64, 1024], [4.6, 8.1, 8.2, 9.0, 11.0, 16.0, 26.0, 300.0], 0.5),
    },
    "tiled": {
        "start": ([1, 48, 64, 96, 1024], [13.0, 13.5, 16.0, 26.0, 220.0], 0.1),
        "level": ([1, 8, 16, 48, 64, 128], [12.0, 13.0, 14.0, 19.0, 23.0, 43.0], 0.1),
        "verify": ([1, 2, 8, 16, 48, 64, 128, 1024], [119.0, 120.0, 128.0, 142.0, 155.0, 194.0, 383.0, 3100.0], 1.0),
    },
    "shared": {
        "start": ([1, 16, 48, 64, 128, 256, 512, 1600], [3.4, 3.5, 4.2, 4.6, 6.0, 7.9, 10.7, 28.0], 0.09),
        "level": ([1, 16, 64], [3.2, 3.9, 5.2], 0.03),
        "verify": ([1, 16, 48, 64, 96], [9.0, 12.6, 16.0, 19.0, 25.0], 0.2),
    },
    "slow memory": {
        "start": ([1, 48, 1024], [5.5, 7.5, 120.0], 0.1),
        "level": ([1, 8, 16], [2.5, 3.0, 4.0], 0.1),
        "verify": ([1, 8, 12, 16, 32, 1024], [38.0, 39.0, 41.0, 45.0, 90.0, 2900.0], 0.0),
    },
}
# The same machine when nobody else uses its memory.
TIMES["fast memory"] = TIMES["slow memory"] | {"verify": ([1, 8, 12, 16, 32, 1024], [23.0, 28.0, 41.0, 45.0, 90.0, 2900.0], 0.0)}


@dataclass(frozen=True)
class Forest:
    """What a head drafts after one position: [M] nodes, parents before children, and the children of each and of the root, which
    is -1, best ones first."""

    depths: list[int]
    log_probs: list[float]
    is_right: list[float]
    children: dict[int, list[int]]


def made_up_forest(rng: np.random.Generator, sureness: float) -> Forest:
    """Four children a node; of a level the four likeliest have some. The head is off by some noise."""
    parents, depths, log_probs, is_right = [], [], [], []
    level = [(-1, True, 0.0)]
    for depth in range(1, BOUNDS.num_steps + 1):
        nodes = []
        for parent, parent_is_right, score in level:
            best = rng.beta(3 * sureness, 3 * (1 - sureness))
            chances = best * np.array([1.0, 0.0, 0.0, 0.0]) + (1 - best) * np.array([0.0, 0.4, 0.2, 0.1])
            drawn = int((rng.random() > chances.cumsum()).sum()) if parent_is_right else 4
            said = chances.clip(1e-3, 0.999)
            logits = np.log(said / (1 - said)) + 0.7 * rng.standard_normal(4)
            for rank, place in enumerate(np.argsort(-logits)):
                log_prob = -np.log1p(np.exp(-logits[place]))
                nodes.append((len(parents), bool(place == drawn), score + log_prob))
                parents.append(parent)
                depths.append(depth)
                log_probs.append(float(log_prob - 1e-9 * rank))
                is_right.append(float(place == drawn))
        level = sorted(nodes, key=lambda node: -node[2])[: BOUNDS.top_k]
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return Forest(depths, log_probs, is_right, children)


@cache
def made_up_texts(sureness: float) -> list[list[Forest]]:
    """Texts of which some are easier than others."""
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(12):
        own = float(np.clip(sureness + 0.15 * rng.standard_normal(), 0.03, 0.95))
        texts.append([made_up_forest(rng, own) for _ in range(TEXT_LENGTH)])
    return texts


def tiles_of(model: str) -> RowTiles:
    return AMX_TILES if model == "tiled" else NO_TILES


class Clock:
    def __init__(self, model: str, seed: int) -> None:
        self._times, self._rng = TIMES[model], np.random.default_rng(seed)
        self._tiles = tiles_of(model)

    def ms(self, part: str, batch_size: int, num_rows: int) -> float:
        """Other programs make a part a little longer than it would be, whatever its size."""
        rows, times, each = self._times[part]
        num_rows = self._tiles.filled_up(num_rows)
        noise = abs(self._rng.standard_normal())
        return float(np.interp(num_rows, rows, times)) + each * batch_size + 0.1 * noise * times[0]


class Replay:
    """A batch that is always full, served with the decisions of a policy."""

    def __init__(
        self,
        model: str,
        policy: TreePolicy,
        texts: list[list[Forest]],
        batch_size: int,
        bounds: TreeShape | None,
        seed: int = 7,
    ) -> None:
        self._policy, self._texts, self._bounds = policy, texts, bounds
        self._clock, self._num_begun, self._reading_ms = Clock(model, seed), 0, 0.0
        self._rests: list[tuple[int, float]] = []
        self._running = [self._next() for _ in range(batch_size)]
        for index, state in enumerate(self._running):
            state.position = 17 * index % TEXT_LENGTH

    def speed(self, num_tokens: int) -> float:
        """Tokens per millisecond."""
        gained, ms = 0, 0.0
        while gained < num_tokens:
            more, took = self._step()
            gained, ms = gained + more, ms + took + self._reading_ms
            self._reading_ms = 0.0
        return gained / ms

    def change_to(self, texts: list[list[Forest]]) -> None:
        """From the next request on."""
        self._texts = texts

    def move_to(self, model: str) -> None:
        """Steps take what they take there, from the next one on."""
        self._clock = Clock(model, seed=0)

    def _next(self) -> "Running":
        """Its prompt is read by the target, and by the head when it drafts."""
        self._num_begun += 1
        own = Running(f"{self._num_begun}", self._texts[self._num_begun % len(self._texts)])
        self._reading_ms += self._clock.ms("verify", 1, own.num_missing)
        return own

    def _step(self) -> tuple[int, float]:
        running, parts = self._running, []
        sequences = [HostSequence(own.id, [0] * (64 + own.position), range(0), 0.0, self._bounds) for own in running]
        num_missing = [own.num_missing for own in running]
        plan: DraftPlan = RESTING
        if not self._policy.rests(len(running)):
            self._policy.learn_rests(Rests(self._rests, between_ms=0.0))
            self._rests = []
            plan = self._policy.begin(sequences, num_missing)
        candidates, kept, labels = no_candidates(), np.zeros(0, dtype=np.int64), np.zeros(0)

        def spend(part: str, num_sequences: int, num_rows: int) -> None:
            parts.append(Observation(part, num_sequences, num_rows, self._clock.ms(part, num_sequences, num_rows)))

        if plan.drafters:
            spend("start", len(plan.drafters), sum(running[index].num_missing for index in plan.drafters))
            for index in plan.drafters:
                running[index].num_missing = 0
            roots = np.array(plan.drafters)
            levels, num_before = [self._children(roots, np.full(len(roots), -1), None)], 0
            while len(places := plan.expand(levels[-1])):
                chosen = levels[-1][places]
                spend("level", len(np.unique(chosen.owners)), len(places))
                deeper = self._children(chosen.owners, num_before + places, chosen)
                num_before += len(levels[-1])
                levels.append(deeper)
            candidates = joined(levels)
            kept = plan.keep(candidates)
            nodes = zip(candidates.owners[kept].tolist(), candidates.tokens[kept].tolist(), strict=True)
            labels = np.array([running[owner].forest.is_right[node] for owner, node in nodes])
        spend("verify", len(running), len(running) + len(kept))
        accepted = np.bincount(candidates.owners[kept], labels, len(running)).astype(np.int64).tolist()
        gained = len(running) + sum(accepted)
        if plan.drafters:
            plan.learn(StepRecord(candidates, kept, lambda: labels, gained, parts))
        else:
            self._rests.append((len(running), parts[0].ms))
        for index, own in enumerate(running):
            own.position += 1 + accepted[index]
            own.num_missing += 1 + accepted[index]
            if own.position >= TEXT_LENGTH:
                self._policy.forget(own.id)
                running[index] = self._next()
        return gained, sum(part.ms for part in parts)

    def _children(self, owners: Ints, numbers: Ints, parents: Candidates | None) -> Candidates:
        """Tokens are numbers of the forest's nodes. A node whose children were not made up has none."""
        widths = bounds_of((self._bounds,) * len(self._running)).top_ks
        columns: list[tuple[int, int, int, int, float, int]] = []
        for place, (owner, number) in enumerate(zip(owners.tolist(), numbers.tolist(), strict=True)):
            forest = self._running[owner].forest
            node = int(parents.tokens[place]) if parents else -1
            for child in forest.children.get(node, [])[: widths[owner]]:
                columns.append((owner, child, number, forest.depths[child], forest.log_probs[child], place))
        if not columns:
            return no_candidates()
        own, tokens, above, depths, log_probs, places = map(np.array, zip(*columns, strict=True))
        scores = log_probs + (parents.scores[places] if parents else 0.0)
        return Candidates(own, tokens, above, depths, log_probs, scores, parents.values[places] if parents else np.ones(len(own)))


@dataclass
class Running:
    """num_missing: a prompt, at first."""

    id: str
    text: list[Forest]
    position: int = 0
    num_missing: int = 64

    @property
    def forest(self) -> Forest:
        return self.text[self.position]


def measured_costs(model: str, wrongly: float = 1.0) -> StepCosts:
    """wrongly: steps without drafts seem to take so many times as long as they do."""
    clock, observations = Clock(model, 1), []
    for batch_size in (1, 4, 32):
        for part in TIMES[model]:
            for each in (1, 2, 4, 8):
                times = [clock.ms(part, batch_size, each * batch_size) for _ in range(3)]
                ratio = wrongly if part == "verify" and each == 1 else 1.0
                observations.append(Observation(part, batch_size, each * batch_size, ratio * float(np.median(times))))
    return fitted_costs(observations, tiles_of(model))


@pytest.mark.parametrize("sureness", [0.8, 0.6, 0.3, 0.05])
@pytest.mark.parametrize("batch_size", [1, 4, 16, 32])
@pytest.mark.parametrize("model", ["small", "tiny", "tiled"])
def test_adaptive_trees_pay(model: str, batch_size: int, sureness: float) -> None:
    """At least 0.97 times no speculation and the best fixed tree, from the first step on, and where drafts hardly pay: in the mean
    over several noises, since which drafts are made first is left to chance."""
    texts, num_tokens = made_up_texts(sureness), max(3000, 240 * batch_size)
    none = Replay(model, FixedPolicy(None), texts, batch_size, None).speed(num_tokens)
    fixed = max(Replay(model, FixedPolicy(None), texts, batch_size, tree).speed(num_tokens) for tree in FIXED)
    speeds = []
    for seed in range(7, 13):
        policy = AdaptivePolicy(measured_costs(model), AcceptanceEstimator(BOUNDS.num_steps), None)
        speeds.append(Replay(model, policy, texts, batch_size, BOUNDS, seed).speed(num_tokens))
    adaptive = sum(speeds) / len(speeds)
    assert adaptive > 0.97 * max(none, fixed), (adaptive / none, fixed / none)


def test_drafts_come_back() -> None:
    """After texts for which nothing paid, and where a first level pays only if all share it, soon enough to be near the best fixed
    tree over the next two hundred steps."""
    texts = made_up_texts(0.05), made_up_texts(0.8)

    def speed(policy: TreePolicy, bounds: TreeShape | None, seed: int = 7) -> float:
        replay = Replay("shared", policy, texts[0], 16, bounds, seed)
        replay.speed(6400)
        replay.change_to(texts[1])
        return replay.speed(3200)

    fixed = max(speed(FixedPolicy(None), tree) for tree in FIXED)
    speeds = []
    for seed in range(7, 19):
        policy = AdaptivePolicy(measured_costs("shared"), AcceptanceEstimator(BOUNDS.num_steps), None)
        speeds.append(speed(policy, BOUNDS, seed))
    assert sum(speeds) / len(speeds) > 0.96 * fixed


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("is_head_wrong", [True, False])
def test_what_is_believed_wrongly_is_soon_put_right(batch_size: int, is_head_wrong: bool) -> None:
    """A head that is sure of what is never right, or drafts that were measured to cost nothing: in the mean over noises."""
    texts, costs = made_up_texts(0.8 if is_head_wrong else 0.3), measured_costs("small")
    if is_head_wrong:
        texts = [[replace(forest, is_right=[0.0] * len(forest.is_right)) for forest in text] for text in texts]
    else:
        for part in ("start", "level"):
            costs.parts[part] = PartCost([1.0], [0.01], 0.0)
    none = Replay("small", FixedPolicy(None), texts, batch_size, None).speed(1000 * batch_size)
    speeds = []
    for seed in range(7, 11):
        policy = AdaptivePolicy(deepcopy(costs), AcceptanceEstimator(BOUNDS.num_steps), None)
        replay = Replay("small", policy, texts, batch_size, BOUNDS, seed)
        replay.speed(300 * batch_size)
        speeds.append(replay.speed(700 * batch_size))
    assert sum(speeds) / len(speeds) > 0.95 * none


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("sureness", [0.6, 0.3])
def test_plain_steps_that_were_measured_wrongly(batch_size: int, sureness: float) -> None:
    """As if a machine had been busy just then. Drafts seem to pay, and while they go on plain steps are hardly seen."""
    texts = made_up_texts(sureness)
    none = Replay("tiny", FixedPolicy(None), texts, batch_size, None).speed(1000 * batch_size)
    speeds = []
    for seed in range(7, 11):
        policy = AdaptivePolicy(measured_costs("tiny", 2.0), AcceptanceEstimator(BOUNDS.num_steps), None)
        replay = Replay("tiny", policy, texts, batch_size, BOUNDS, seed)
        replay.speed(1000 * batch_size)
        speeds.append(replay.speed(1000 * batch_size))
    assert sum(speeds) / len(speeds) > 0.95 * none


@pytest.mark.parametrize(("batch_size", "sureness", "least"), [(8, 0.6, 0.96), (8, 0.4, 0.96), (2, 0.6, 0.935)])
def test_memory_that_becomes_faster(batch_size: int, sureness: float, least: float) -> None:
    """Few rows wait for it, many for the processor: where drafts do not pay any more only plain steps show it, and where smaller
    trees pay only smaller trees. Over the next 600 tokens of each sequence."""
    texts = made_up_texts(sureness)

    def speed(policy: TreePolicy, bounds: TreeShape | None, seed: int = 7) -> float:
        replay = Replay("slow memory", policy, texts, batch_size, bounds, seed)
        replay.speed(600 * batch_size)
        replay.move_to("fast memory")
        return replay.speed(600 * batch_size)

    best, seeds = max(speed(FixedPolicy(None), tree) for tree in [None, *FIXED]), range(7, 13)
    policies = [AdaptivePolicy(measured_costs("slow memory"), AcceptanceEstimator(BOUNDS.num_steps), None) for _ in seeds]
    assert sum(map(speed, policies, [BOUNDS] * len(seeds), seeds)) / len(seeds) > least * best


def test_nothing_is_compiled_while_steps_run() -> None:
    """That would stop a server for seconds."""
    pytest.importorskip("numba")
    compiled.compile_all()
    own = [*vars(compiled).values(), *vars(compiled_costs).values()]
    functions = [value for value in own if hasattr(value, "signatures")]
    before = [list(function.signatures) for function in functions]
    assert sum(map(bool, before)) >= 9, "what is called from outside"
    policy = AdaptivePolicy(measured_costs("small"), AcceptanceEstimator(BOUNDS.num_steps), None)
    Replay("small", policy, made_up_texts(0.6), 4, BOUNDS).speed(600)
    assert before == [list(function.signatures) for function in functions]

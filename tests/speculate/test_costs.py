import json
import math
from dataclasses import replace

import numpy as np
import pytest

from eagle_rt.kernels.packed_linear import AMX_TILES, SMALL_TILES, RowTiles
from eagle_rt.speculate.costs import Conditions, Observation, PartCost, costs_from_json, fitted_cost, fitted_costs


def true_ms(batch_size: int, num_rows: int) -> float:
    return 2.0 + 0.1 * batch_size + 0.05 * num_rows + max(0, num_rows - 16) * 0.1


def when(batch_size: int, is_sampled: bool = False) -> Conditions:
    return Conditions(batch_size, 64.0, is_sampled)


def measured(part: str, noise: float = 0.0) -> list[Observation]:
    rng = np.random.default_rng(0)
    points = [(size, size * rows) for size in (1, 4, 16, 32) for rows in (1, 2, 4, 8, 16)]
    return [Observation(part, size, rows, true_ms(size, rows) * (1 + noise * rng.standard_normal())) for size, rows in points]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_fit_meets_what_was_measured_and_what_lies_between(noise: float) -> None:
    cost = fitted_cost(measured("verify", noise))
    for batch_size, num_rows in ((1, 1), (1, 3), (4, 20), (8, 8), (32, 300), (16, 100)):
        assert float(cost.ms(batch_size, num_rows, when(batch_size))) == pytest.approx(
            true_ms(batch_size, num_rows), rel=0.03 + 2 * noise
        )
    rising = cost.ms(4, np.arange(4.0, 600.0), when(4))
    assert (np.diff(rising) >= 0).all()


def test_one_measurement_is_enough() -> None:
    cost = fitted_cost([Observation("verify", 1, 1, 3.0)])
    assert float(cost.ms(1, 1, when(1))) == pytest.approx(3.0, rel=1e-3)
    assert float(cost.ms(1, 50, when(1))) > 0


@pytest.mark.parametrize("batch_sizes", [(1,), (1, 4, 16)])
def test_a_jump_between_two_numbers_of_rows_is_met(batch_sizes: tuple[int, ...]) -> None:
    """Products of one row and of two may be of different kinds. With one batch size, what a sequence adds cannot be told apart."""
    by_rows = {1: 5.2, 2: 7.8, 4: 7.8, 8: 8.4, 16: 9.7, 24: 12.0}
    points = [Observation("verify", size, rows, ms + 0.3 * size) for size in batch_sizes for rows, ms in by_rows.items()]
    cost = fitted_cost(points)
    for point in points:
        assert float(cost.ms(point.batch_size, point.num_rows, when(point.batch_size))) == pytest.approx(point.ms, rel=0.02)


def test_a_jump_after_a_known_number_of_rows_is_met() -> None:
    """Products of up to twelve rows go through the weight once. Neither neighbour tells what the other takes."""
    by_rows = {1: 34.0, 2: 35.0, 4: 36.0, 8: 39.0, 12: 39.0, 13: 48.0, 16: 50.0, 24: 67.0}
    points = [Observation("verify", 1, rows, ms) for rows, ms in by_rows.items()]
    cost = fitted_cost(points, jump_after=12)
    for rows, ms in by_rows.items():
        assert float(cost.ms(1, rows, when(1))) == pytest.approx(ms, rel=0.02)
    assert float(fitted_cost(points).ms(1, 12, when(1))) > 1.08 * by_rows[12]
    unmeasured = [point for point in points if point.num_rows != 13]
    assert fitted_cost(unmeasured, jump_after=12).knots == fitted_cost(unmeasured).knots
    costs = fitted_costs([*points, *(replace(point, part=part) for part in ("start", "level") for point in points)], jump_after=12)
    assert [13.0 in costs.parts[part].knots for part in ("start", "level", "verify")] == [False, False, True]


def test_rows_are_filled_up_to_whole_tiles() -> None:
    by_tiles = {1: 50.0, 16: 52.0, 48: 60.0, 64: 66.0, 128: 100.0}
    cost = fitted_cost([Observation("verify", 4, rows, ms) for rows, ms in by_tiles.items()], AMX_TILES)
    for num_rows, tiles in ((17, 48), (40, 48), (49, 64), (113, 128)):
        assert float(cost.ms(4, num_rows, when(4))) == pytest.approx(by_tiles[tiles], rel=0.02)
    assert float(cost.ms(4, 65, when(4))) == float(cost.ms(4, 80, when(4))) > 1.05 * by_tiles[64]


@pytest.mark.parametrize("tiles", [AMX_TILES, SMALL_TILES])
def test_tiles_are_kept_on_disk(tiles: RowTiles) -> None:
    costs = fitted_costs([*measured("start"), *measured("level"), *measured("verify")], tiles)
    again = costs_from_json(json.loads(json.dumps(costs.to_json())))
    assert again.filled_up(np.array([20.0])).tolist() == [tiles.filled_up(20)]


def test_it_follows_a_machine_that_slows_down() -> None:
    cost = fitted_cost(measured("verify"))
    for _ in range(60):
        cost.correct(Observation("verify", 4, 16, 1.5 * true_ms(4, 16)), when(4))
    assert float(cost.ms(4, 16, when(4))) == pytest.approx(1.5 * true_ms(4, 16), rel=0.03)
    # Other batch sizes and parts follow, whether they are measured or not.
    assert float(cost.ms(8, 16, when(8))) == pytest.approx(1.5 * true_ms(8, 16), rel=0.05)


def test_what_steps_show_is_learned_once_and_when_it_matters() -> None:
    costs, parts = (fitted_costs([*measured("start"), *measured("level"), *measured("verify")]) for _ in range(2))
    for ratio in (1.5, 1.2, 0.9):
        for part, rows in (("level", 8), ("verify", 16), ("verify", 32)):
            observation = Observation(part, 4, rows, ratio * true_ms(4, rows))
            costs.correct(observation, when(4))
            parts.parts[part].correct(observation, when(4))
        for part in ("start", "level", "verify", "verify"):
            asked = np.array([4.0, 16.0, 40.0])
            assert costs.ms(part, 4, asked, when(4)).tolist() == parts.parts[part].ms(4, asked, when(4)).tolist()


def test_what_was_slow_once_is_not_for_ever() -> None:
    """Drafts are measured only where something drafts: what they cost goes along with what other steps do."""
    costs = fitted_costs([*measured("start"), *measured("level"), *measured("verify")])
    for parts, ratio in ((("level", "verify"), 1.5), (("verify",), 1.0)):
        for _ in range(100):
            for part in parts:
                costs.correct(Observation(part, 4, 16, ratio * true_ms(4, 16)), when(4))
    for part in ("level", "verify"):
        assert float(costs.ms(part, 4, 16, when(4))) == pytest.approx(true_ms(4, 16), rel=0.2)


def test_conditions_that_take_turns_keep_their_own() -> None:
    cost = fitted_cost(measured("verify"))
    for _ in range(150):
        cost.correct(Observation("verify", 4, 16, 1.5 * true_ms(4, 16)), when(4))
        cost.correct(Observation("verify", 32, 64, true_ms(32, 64)), when(32))
    assert float(cost.ms(32, 64, when(32))) == pytest.approx(true_ms(32, 64), rel=0.05)
    assert float(cost.ms(4, 16, when(4))) == pytest.approx(1.5 * true_ms(4, 16), rel=0.05)


def test_a_machine_that_slows_down_makes_no_number_of_rows_look_cheap() -> None:
    """Those that are not met meanwhile go along, and keep what they differ by."""
    cost = fitted_cost(measured("verify"))
    for _ in range(60):
        for num_rows, ratio in ((16, 1.0), (48, 1.3)):
            cost.correct(Observation("verify", 4, num_rows, ratio * true_ms(4, num_rows)), when(4))
    for _ in range(200):
        cost.correct(Observation("verify", 4, 16, 1.5 * true_ms(4, 16)), when(4))
    for num_rows, ratio in ((16, 1.5), (48, 1.5 * 1.3)):
        assert float(cost.ms(4, num_rows, when(4))) == pytest.approx(ratio * true_ms(4, num_rows), rel=0.15)


def test_steps_that_draw_tokens_have_corrections_of_their_own_and_by_rows() -> None:
    """Noise for every token of the vocabulary costs by the row; greedy steps know nothing of it."""
    cost = fitted_cost(measured("verify"))
    for _ in range(40):
        for num_rows in (4, 64):
            cost.correct(Observation("verify", 4, num_rows, true_ms(4, num_rows) + 0.5 * num_rows), when(4, is_sampled=True))
    for num_rows in (4, 64):
        sampled = cost.ms(4, num_rows, when(4, is_sampled=True))
        assert float(sampled) == pytest.approx(true_ms(4, num_rows) + 0.5 * num_rows, rel=0.08)
    assert float(cost.ms(4, 4, when(4))) == pytest.approx(true_ms(4, 4), rel=0.03)
    assert float(cost.ms(4, 4, when(4))) < float(cost.ms(4, 4, when(4, is_sampled=True)))


def test_numbers_of_rows_that_lie_close_are_told_apart() -> None:
    """Tiles of rows: 48 may cost more than was thought, 64 less."""
    cost = fitted_cost(measured("verify"))
    ratios = {16: 1.0, 48: 1.3, 64: 1.1}
    for _ in range(60):
        for num_rows, ratio in ratios.items():
            cost.correct(Observation("verify", 4, num_rows, ratio * true_ms(4, num_rows)), when(4))
    for num_rows, ratio in ratios.items():
        assert float(cost.ms(4, num_rows, when(4))) == pytest.approx(ratio * true_ms(4, num_rows), rel=0.05)


def test_longer_contexts_begin_with_what_was_learned_of_shorter_ones() -> None:
    """What numbers of rows differ by, too, where batches are of the same size."""
    cost = fitted_cost(measured("verify"))
    for _ in range(40):
        for num_rows, ratio in ((4, 0.6), (32, 1.0)):
            cost.correct(Observation("verify", 4, num_rows, ratio * true_ms(4, num_rows)), when(4))
    longer, larger = replace(when(4), context=1000.0), when(16)
    for conditions, ratio in ((longer, 0.6), (larger, 1.0)):
        size = conditions.batch_size
        cost.correct(Observation("verify", size, 32, float(cost.ms(size, 32, conditions))), conditions)
        plain, tree = cost.ms(size, np.array([4.0, 32.0]), conditions) / [true_ms(size, 4), true_ms(size, 32)]
        assert plain / tree == pytest.approx(ratio, rel=0.1)


def test_what_numbers_of_rows_differ_by_is_known_of_all_contexts() -> None:
    """One that is met again knows what was learned in others meanwhile."""
    cost, longer = fitted_cost(measured("verify")), replace(when(4), context=1000.0)
    for ratio in (1.0, 0.7):
        cost.correct(Observation("verify", 4, 32, true_ms(4, 32)), longer)
        for _ in range(60):
            for num_rows, own in ((4, ratio), (32, 1.0)):
                cost.correct(Observation("verify", 4, num_rows, own * true_ms(4, num_rows)), when(4))
    plain, tree = cost.ms(4, np.array([4.0, 32.0]), longer) / [true_ms(4, 4), true_ms(4, 32)]
    assert plain / tree == pytest.approx(0.7, rel=0.1)


@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_three_measurements_are_enough_to_say_that_the_table_was_wrong(ratio: float) -> None:
    """For most of it, of a number of rows that was not measured before."""
    cost = fitted_cost(measured("verify"))
    for _ in range(100):
        cost.correct(Observation("verify", 4, 32, true_ms(4, 32)), when(4))
    for _ in range(3):
        for num_rows, part in ((4, ratio), *[(32, 1.0)] * 10):
            cost.correct(Observation("verify", 4, num_rows, part * true_ms(4, num_rows)), when(4))
    plain, tree = cost.ms(4, np.array([4.0, 32.0]), when(4)) / [true_ms(4, 4), true_ms(4, 32)]
    assert 0.7 < math.log(plain / tree) / math.log(ratio) < 1.0


def test_what_was_not_measured_lately_goes_along_with_its_neighbours() -> None:
    """Memory becomes faster: few rows wait for it, many for the processor. Of those between nothing is seen for some seconds."""
    cost = fitted_cost(measured("verify"))

    def measure(times: int, ratios: dict[int, float]) -> None:
        for _ in range(times):
            for num_rows, ratio in ratios.items():
                cost.correct(Observation("verify", 4, num_rows, 20.0 * ratio * true_ms(4, num_rows)), when(4))

    measure(40, {4: 1.0, 8: 1.0, 12: 1.0})
    measure(1, {4: 0.7})
    few, between, many = cost.ms(4, np.array([4.0, 8.0, 12.0]), when(4)) / [20.0 * true_ms(4, rows) for rows in (4, 8, 12)]
    assert abs(math.log(between / many)) < 0.02, "it was seen just now"
    measure(100, {4: 0.7, 12: 1.0})
    few, between, many = cost.ms(4, np.array([4.0, 8.0, 12.0]), when(4)) / [20.0 * true_ms(4, rows) for rows in (4, 8, 12)]
    assert (few, many) == (pytest.approx(0.7, rel=0.03), pytest.approx(1.0, rel=0.03))
    assert 0.8 < between < 0.93
    measure(4, {8: 0.72, 12: 1.0})
    assert float(cost.ms(4, 8, when(4))) == pytest.approx(20.0 * 0.72 * true_ms(4, 8), rel=0.06), "a few are enough then"


def test_a_machine_that_is_slow_for_a_second_is_slow_for_all_numbers_of_rows() -> None:
    """Where long plain steps are all that is seen drafts must not look cheap for it."""
    cost = fitted_cost([replace(point, ms=20.0 * point.ms) for point in measured("verify")])
    before = cost.ms(4, np.array([4.0, 64.0]), when(4))
    for ratio in [1.0] * 40 + [1.25] * 4:
        cost.correct(Observation("verify", 4, 4, ratio * before[0]), when(4))
    plain, tree = cost.ms(4, np.array([4.0, 64.0]), when(4)) / before
    assert plain == pytest.approx(1.25, rel=0.02)
    assert tree / plain > 0.95


def test_one_outlier_moves_it_little() -> None:
    cost = PartCost([1.0, 2.0], [1.0, 1.5], 0.1)
    before = float(cost.ms(1, 1, when(1)))
    cost.correct(Observation("level", 1, 1, 1e9), when(1))
    for _ in range(20):
        cost.correct(Observation("level", 1, 1, before), when(1))
    before = float(cost.ms(1, 1, when(1)))
    cost.correct(Observation("level", 1, 1, 1e9), when(1))
    assert float(cost.ms(1, 1, when(1))) < 1.4 * before


def test_costs_survive_a_file() -> None:
    costs = fitted_costs([*measured("start"), *measured("level"), *measured("verify")])
    document = json.loads(json.dumps(costs.to_json()))
    assert float(costs_from_json(document).ms("level", 4, 16, when(4))) == pytest.approx(float(costs.ms("level", 4, 16, when(4))))
    document["level"]["values"][0] = -1.0
    with pytest.raises(ValueError, match="the costs of level are no table"):
        costs_from_json(document)


def test_one_slow_measurement_says_little() -> None:
    """Code that is generated for a new number of rows is met once."""
    cost = fitted_cost(measured("verify"))
    before = float(cost.ms(4, 8, when(4)))
    cost.correct(Observation("verify", 4, 8, 4 * before), when(4))
    assert before < float(cost.ms(4, 8, when(4))) < 1.8 * before

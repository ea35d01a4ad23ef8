"""Bounds from measured durations: which samples count, and how micro-batches of a stage are pooled."""

from __future__ import annotations

import json

import numpy as np
import pytest

from timelyfreeze.errors import PlanError
from timelyfreeze.freeze.phases import MEASURE_LOWER, MEASURE_UPPER
from timelyfreeze.freeze.samples import BoundSamples, RecentSteps, shrunk_medians
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule

NONE_FROZEN = np.zeros(2, dtype=bool)
SECOND_FROZEN = np.array([False, True])
FIRST_FROZEN = np.array([True, False])
TINY = create_schedule("1f1b", num_ranks=2, num_microbatches=2)


def durations(**times: float) -> dict[Action, float]:
    return {Action.parse(name.lstrip("_")): time for name, time in times.items()}


def uniform(schedule: Schedule, forward: float, backward: float) -> dict[Action, float]:
    return {action: forward if action.kind is Kind.F else backward for action in schedule.actions}


def measured() -> BoundSamples:
    samples = BoundSamples()
    for _ in range(3):
        samples.add(uniform(TINY, 1.0, 4.0), MEASURE_UPPER, NONE_FROZEN)
    for frozen in (FIRST_FROZEN, SECOND_FROZEN, FIRST_FROZEN):
        # Whatever an unfrozen micro-batch takes in this phase is no lower bound, and no upper one either.
        step = {
            a: 1.0 if a.kind is Kind.F else (1.5 if frozen[a.microbatch] else 9.0) for a in TINY.actions
        }  # fmt: skip
        samples.add(step, MEASURE_LOWER, frozen)
    return samples


def test_each_bound_comes_from_its_own_steps_and_micro_batches() -> None:
    costs = measured().costs(TINY, [True, True])
    assert costs.upper_s == uniform(TINY, 1.0, 4.0)
    lower = {str(a): t for a, t in costs.lower_s.items() if a.kind is Kind.B}
    assert lower == {"0B0": 0.0, "0B1": 0.0, "1B0": 1.5, "1B1": 1.5}
    assert measured().medians()["lower"][Action.parse("1B1")].num_samples == 1


def test_the_lowest_stage_that_trains_has_a_lower_bound_of_0() -> None:
    costs = measured().costs(TINY, [False, True])
    assert costs.upper_s[Action.parse("0B0")] == 0.0
    assert costs.lower_s[Action.parse("1B0")] == 0.0
    nothing_to_freeze = measured().costs(TINY, [True, False])
    assert nothing_to_freeze.lower_s[Action.parse("1B1")] == nothing_to_freeze.upper_s[Action.parse("1B1")] == 4.0


def test_noise_cannot_put_a_lower_bound_above_its_upper_one() -> None:
    samples = BoundSamples()
    for _ in range(3):
        samples.add(uniform(TINY, 1.0, 2.0), MEASURE_UPPER, NONE_FROZEN)
        samples.add(uniform(TINY, 1.0, 2.1), MEASURE_LOWER, np.ones(2, dtype=bool))
    costs = samples.costs(TINY, [True, True])
    assert costs.lower_s[Action.parse("1B0")] == costs.upper_s[Action.parse("1B0")] == 2.0
    assert not costs.is_freezable(Action.parse("1B0"))


def test_what_was_not_measured_is_named() -> None:
    samples = BoundSamples()
    with pytest.raises(PlanError, match=r"not measured.*0F0, 0F1, 0B0.*\.\.\."):
        samples.costs(TINY, [True, True])
    samples.add(uniform(TINY, 1.0, 2.0), MEASURE_UPPER, NONE_FROZEN)
    samples.add(uniform(TINY, 1.0, 1.0), MEASURE_LOWER, FIRST_FROZEN)
    with pytest.raises(PlanError, match=r"got none of 1B1 \(frozen\)"):
        samples.costs(TINY, [True, True])


def test_samples_survive_json() -> None:
    again = BoundSamples.from_json(json.loads(json.dumps(measured().to_json())))
    assert again.costs(TINY, [True, True]) == measured().costs(TINY, [True, True])


# --- pooling ----------------------------------------------------------------------------------------------------


def test_equal_micro_batches_are_pooled() -> None:
    """Two samples each with 10 % noise: pooled medians are off by much less than each alone."""
    rng = np.random.default_rng(0)
    alone, pooled = [], []
    for _ in range(200):
        groups = 1.0 + 0.1 * rng.standard_normal((8, 2))
        alone.append(np.abs(np.median(groups, axis=1) - 1.0).mean())
        pooled.append(np.abs(np.array(shrunk_medians(groups.tolist())) - 1.0).mean())
    assert np.mean(pooled) < 0.65 * np.mean(alone)


def test_unequal_micro_batches_keep_their_difference() -> None:
    """The last one is half as large: averaging it in would put its bound 80 % too high."""
    rng = np.random.default_rng(1)
    sizes = np.array([1.0, 1.0, 1.0, 0.5])
    for _ in range(100):
        groups = sizes[:, None] * (1.0 + 0.03 * rng.standard_normal((4, 3)))
        found = np.array(shrunk_medians(groups.tolist()))
        assert np.abs(found / sizes - 1.0).max() < 0.12


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[3.0]], [3.0]),
        ([[3.0], [5.0]], [3.0, 5.0]),  # one sample each tells nothing of noise
        ([[2.0, 2.0], [2.0, 2.0]], [2.0, 2.0]),
        ([[1.0, 1.0], [4.0, 4.0]], [1.0, 4.0]),
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [0.0, 0.0, 0.0]),
        ([], []),
    ],
)
def test_pooling_at_the_edges(groups: list[list[float]], expected: list[float]) -> None:
    assert shrunk_medians(groups) == expected


def test_one_disturbed_sample_moves_nothing() -> None:
    calm = [[1.0, 1.01, 0.99, 1.0, 1.0] for _ in range(4)]
    disturbed = [list(group) for group in calm]
    disturbed[2][1] = 50.0
    assert shrunk_medians(disturbed) == pytest.approx(shrunk_medians(calm), rel=0.01)


# --- the last steps ---------------------------------------------------------------------------------------------


def test_recent_steps_keep_a_window() -> None:
    recent = RecentSteps(TINY, window=3)
    for time in (100.0, 1.0, 2.0, 3.0):
        assert not recent.full or time == 3.0
        recent.add({a: time for a in TINY.actions if str(a) != "0B1"})
    assert recent.full
    medians = recent.medians()
    assert medians[Action.parse("0F0")].median_s == 2.0
    assert Action.parse("0B1") not in medians  # it never ran
    assert recent.stage_medians_s().tolist() == [6.0, 8.0]
    again = RecentSteps(TINY, window=3)
    again.load_json(json.loads(json.dumps(recent.to_json())))
    for both in (recent, again):
        both.add(uniform(TINY, 7.0, 7.0))
    assert again.medians() == recent.medians()
    assert again.stage_medians_s().tolist() == recent.stage_medians_s().tolist()
    other_window = RecentSteps(TINY, window=5)
    other_window.load_json(recent.to_json())
    assert not other_window.full
    assert other_window.medians() == {}
    recent.clear()
    assert not recent.full

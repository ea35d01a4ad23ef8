"""Bounds of actions, their files, and how samples become bounds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.random_schedules import published_costs, random_costs, random_schedule
from timelyfreeze.cost import ActionCosts, Measured, summarize
from timelyfreeze.errors import PlanError
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule

F0, B0, B1 = (Action.parse(text) for text in ("0F0", "0B0", "1B0"))


def test_lower_defaults_to_upper() -> None:
    costs = ActionCosts({F0: 1.0, B0: 3.0, B1: 4.0}, {B1: 2.5})
    assert costs.lower_s == {F0: 1.0, B0: 3.0, B1: 2.5}
    assert [costs.is_freezable(action) for action in (F0, B0, B1)] == [False, False, True]


def test_only_weight_gradients_can_be_frozen() -> None:
    upper = {Action.parse(f"0{kind}0"): 2.0 for kind in "FBIW"}
    costs = ActionCosts(upper, dict.fromkeys(upper, 1.0))
    assert {str(action): costs.is_freezable(action) for action in upper} == {
        "0F0": False,
        "0B0": True,
        "0I0": False,
        "0W0": True,
    }


def test_values_become_float64_and_are_copied() -> None:
    upper = {F0: np.float32(0.1), B0: 2}
    costs = ActionCosts(upper, {B0: np.int64(1)}, transfer_s=np.float64(0.5))
    upper[F0] = np.float32(7)
    assert costs.upper_s[F0] == float(np.float32(0.1))
    assert [type(value) for value in (*costs.upper_s.values(), *costs.lower_s.values(), costs.transfer_s)] == [
        float
    ] * 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-9, "1", None, True, 10**400])
def test_bounds_are_finite_seconds(bad: object) -> None:
    with pytest.raises(ValueError, match=r"upper_s: expected finite seconds, at least 0, got 0B0: "):
        ActionCosts({F0: 1.0, B0: bad})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"lower_s: expected finite seconds"):
        ActionCosts({B0: 1.0}, {B0: bad})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"transfer_s: expected finite seconds"):
        ActionCosts({B0: 1.0}, transfer_s=bad)  # type: ignore[arg-type]


def test_every_fault_is_told() -> None:
    with pytest.raises(ValueError, match="2 problems") as caught:
        ActionCosts({B0: 1.0}, {B0: 1.5, B1: 0.0})
    assert "lower bounds above upper bounds: got 0B0: 1.5 > 1.0" in str(caught.value)
    assert "lower_s has actions that upper_s lacks: got 1B0" in str(caught.value)


def test_keys_are_actions() -> None:
    with pytest.raises(TypeError, match=r"keys of upper_s: expected Action, got '0F0'"):
        ActionCosts({"0F0": 1.0})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="lower_s: expected a mapping"):
        ActionCosts({F0: 1.0}, [1.0])  # type: ignore[arg-type]


def test_costs_are_those_of_the_schedule() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=1)
    published_costs(schedule, 1.0, 2.0, 1.0).check(schedule)
    with pytest.raises(ValueError, match="2 problems") as caught:
        ActionCosts({F0: 1.0, Action.parse("5B5"): 1.0}).check(schedule)
    assert "costs lack actions of the schedule: got 0B0, 1F0, 1B0 (1f1b)" in str(caught.value)
    assert "not in the schedule: got 5B5 (1f1b)" in str(caught.value)
    with pytest.raises(ValueError, match="below 2"):
        ActionCosts(dict.fromkeys(schedule.actions, 1.0), transfer_s={(1, 2): 1.0}).check(schedule)


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        costs = random_costs(random_schedule(draw), draw)
        costs.save(tmp_path / "costs.json")
        assert ActionCosts.load(tmp_path / "costs.json") == costs
        assert ActionCosts.from_json(json.loads(json.dumps(costs.to_json()))) == costs


def test_times_far_from_one_survive() -> None:
    """float16 turned 1 ms steps at 1 s into nothing, and anything above 65.5 s into infinity."""
    costs = ActionCosts({F0: 1.0009765625001, B0: 123456.789012345}, {B0: 1e-12})
    assert ActionCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "does not hold whole JSON"),
        ('{"format": "timelyfreeze-costs", "version": 1, "upp', "does not hold whole JSON"),
        ("[" * 100_000, "does not hold whole JSON"),
        ("[]", "not action costs"),
        ('{"format": "timelyfreeze-plan"}', "not action costs"),
        ('{"format": "timelyfreeze-costs", "version": 7}', "another version: expected 1, got 7"),
        ('{"format": "timelyfreeze-costs", "version": 1}', "lack a field: expected 'transfer_s'"),
        ('{"format": "timelyfreeze-costs", "version": 1, "transfer_s": 0, "upper_s": [], "lower_s": {}}', "damaged"),
        ('{"format": "timelyfreeze-costs", "version": 1, "transfer_s": 0, "upper_s": {"0F": 1}, "lower_s": {}}', "0F"),
        (
            '{"format": "timelyfreeze-costs", "version": 1, "transfer_s": {"a": 1}, "upper_s": {}, "lower_s": {}}',
            "damaged",
        ),
        (
            '{"format": "timelyfreeze-costs", "version": 1, "transfer_s": 0, "upper_s": {"0F0": NaN}, "lower_s": {}}',
            "nan",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        ActionCosts.load(path)
    assert str(path) in str(caught.value)
    assert wrong in str(caught.value)


def test_summary_is_median_and_interquartile_range() -> None:
    measured = summarize({F0: [5.0, 1.0, 2.0, 4.0, 3.0], B0: [7.0]})
    assert measured == {F0: Measured(3.0, 2.0, 5), B0: Measured(7.0, 0.0, 1)}


def test_one_disturbed_step_moves_nothing() -> None:
    calm = summarize({F0: [1.0, 1.1, 1.2, 1.3, 1.4]})[F0]
    disturbed = summarize({F0: [1.0, 1.1, 1.2, 1.3, 1000.0]})[F0]
    assert disturbed == calm


@pytest.mark.parametrize("bad", [[], [float("nan")], [1.0, -1.0], [float("inf")], [[1.0]]])
def test_samples_are_finite_seconds(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"samples: expected .* \(0B0\)"):
        summarize({F0: [1.0], B0: bad})


def test_the_same_times_for_every_microbatch() -> None:
    schedule = Schedule([["0F0", "0B0"], ["1F0", "1I0", "1W0"]])
    costs = ActionCosts.uniform(schedule, forward_s=[1.0, 1.5], backward_s=4.0, frozen_backward_s=2.5, transfer_s=0.1)
    assert {str(action): time for action, time in costs.upper_s.items()} == {
        **{"0F0": 1.0, "0B0": 4.0},
        **{"1F0": 1.5, "1I0": 2.5, "1W0": 1.5},
    }
    assert {str(action): time for action, time in costs.lower_s.items() if time != costs.upper_s[action]} == {
        "0B0": 0.0,
        "1W0": 0.0,
    }
    assert costs.transfer_s == 0.1
    with pytest.raises(ValueError, match="forward_s: expected one time or 2, one a stage, got 3 times"):
        ActionCosts.uniform(schedule, forward_s=[1.0, 1.0, 1.0], backward_s=4.0, frozen_backward_s=2.5)


def test_costs_for_another_number_of_microbatches_are_medians() -> None:
    small = create_schedule("1f1b", num_ranks=2, num_microbatches=3)
    large = create_schedule("1f1b", num_ranks=2, num_microbatches=5)
    times = {action: float(1 + action.microbatch**2) for action in small.actions}
    costs = ActionCosts(times, {Action.parse("1B0"): 0.5, Action.parse("1B1"): 0.75}).adapted(large)
    costs.check(large)
    assert set(costs.upper_s.values()) == {2.0}
    assert costs.lower_s[Action.parse("1B4")] == 0.75
    assert costs.lower_s[Action.parse("0B4")] == 2.0
    with pytest.raises(ValueError, match="the costs are of another model: expected 3 stages, got 2"):
        costs.adapted(create_schedule("1f1b", num_ranks=3, num_microbatches=2))


def test_whole_backwards_are_split_for_schedules_that_split_them() -> None:
    """In stage 0, whose lower bound says nothing of its input gradient, I takes the other stages' share."""
    whole = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    halves = Schedule([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    costs = ActionCosts.uniform(whole, forward_s=1.0, backward_s=[4.0, 8.0], frozen_backward_s=2.0).adapted(halves)
    assert {str(a): (costs.upper_s[a], costs.lower_s[a]) for a in halves.actions if a.kind is not Kind.F} == {
        **{"0I0": (1.0, 1.0), "0W0": (3.0, 0.0)},
        **{"1I0": (2.0, 2.0), "1W0": (6.0, 0.0)},
    }

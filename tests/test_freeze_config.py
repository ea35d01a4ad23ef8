"""FreezeConfig: what it refuses, and how it says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.freeze_machine import hand_made
from timelyfreeze.errors import PlanError
from timelyfreeze.freeze import FreezeConfig, FreezeController
from timelyfreeze.freeze.config import check_fits
from timelyfreeze.planner.options import PlanOptions
from timelyfreeze.schedule import Schedule, create_schedule

SCHEDULE = create_schedule("1f1b", num_ranks=2, num_microbatches=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_ratio": 1.5}, r"max_ratio: expected a number in \[0, 1\], got 1.5"),
        ({"max_ratio": float("nan")}, "max_ratio"),
        ({"max_ratio": "0.8"}, "max_ratio: expected a number"),
        ({"mode": "best"}, "unknown mode: expected one of cut, lp, got 'best'"),
        ({"stage_max_ratio": {0: 2.0}}, r"stage_max_ratio\[0\]: expected a number in \[0, 1\], got 2.0"),
        ({"weights": {0: -1.0}}, r"weights\[0\]"),
        ({"target_makespan_s": 0.0}, "target_makespan_s"),
        ({"min_live_ratio": 1.1}, "min_live_ratio"),
        ({"live_microbatches": 0}, "live_microbatches: expected a whole number from 1"),
        ({"live_microbatches": 2, "rescale": True}, "rescale and live_microbatches exclude each other"),
        ({"policy": "worst"}, "unknown policy: expected one of .*random.*, got worst"),
        ({"warmup_steps": -1}, "warmup_steps: expected at least 0 steps, got -1"),
        ({"measure_steps": 2}, r"at least settle_steps \+ 2 = 3.*got 2"),
        ({"switch_delay_steps": 0}, "switch_delay_steps: expected at least 1"),
        ({"replan_drift_ratio": 0.0}, "replan_drift_ratio: expected a number above 0, or None"),
        ({"replan_drift_ratio": float("inf")}, "replan_drift_ratio"),
        ({"max_ratio": -1, "ramp_steps": -1, "mode": "x"}, r"(?s)2 problems:.*max_ratio.*mode.*ramp_steps"),
    ],
)
def test_values_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FreezeConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage_max_ratio": 0.5}, "stage_max_ratio: expected a mapping"),
        ({"ramp_steps": 2.0}, "ramp_steps: expected a whole number of steps, got 2.0"),
        ({"warmup_steps": True}, "warmup_steps"),
        ({"rescale": 1}, "rescale: expected True or False, got 1"),
        ({"policy": None}, "policy: expected a name"),
        ({"plan": 3}, "plan: expected a Plan, the path of one, or None, got int"),
        ({"replan_drift_ratio": "x", "policy": 1}, r"(?s)2 problems:.*replan_drift_ratio.*policy"),
    ],
)
def test_values_of_another_type(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FreezeConfig(**arguments)


def test_how_plans_are_made_is_handed_on() -> None:
    config = FreezeConfig(
        max_ratio=0.4, mode="lp", stage_max_ratio={1: 0.2}, weights={0: 2.0}, target_makespan_s=3.0, min_live_ratio=0.5
    )
    assert config.plan_options == PlanOptions(0.4, "lp", {1: 0.2}, {0: 2.0}, 3.0, None, 0.5)
    assert FreezeConfig().plan_options == PlanOptions()
    assert FreezeConfig(live_microbatches=3).plan_options.live_microbatches == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"live_microbatches": 5}, "live_microbatches of at most 4, got 5"),
        ({"stage_max_ratio": {2: 0.5}}, "a stage of stage_max_ratio: expected 0 to 1, got 2"),
        ({"weights": {7: 0.5}}, "a stage of weights: expected 0 to 1, got 7"),
    ],
)
def test_options_for_another_schedule(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FreezeController(FreezeConfig(**arguments), SCHEDULE)


def test_a_plan_is_read_from_its_path(tmp_path: Path) -> None:
    plan = hand_made(SCHEDULE, 0.5)
    path = tmp_path / "plan.json"
    plan.save(path)
    for given in (path, str(path), plan):
        assert FreezeConfig(plan=given).fixed_plan == plan
    assert FreezeConfig().fixed_plan is None
    assert dataclasses.replace(FreezeConfig(plan=path), ramp_steps=0).fixed_plan == plan


def test_a_path_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the plan: No such file.*nowhere\.json"):
        FreezeConfig(plan=tmp_path / "nowhere.json")
    with pytest.raises(PlanError, match="cannot read the plan"):
        FreezeConfig(plan=tmp_path)
    (tmp_path / "half.json").write_text('{"format": "timelyfreeze-pl')
    with pytest.raises(PlanError, match=r"half\.json"):
        FreezeConfig(plan=tmp_path / "half.json")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (("1f1b", 3, 4), r"(?s)number of ranks.*number of stages: expected 3, got 2"),
        (("1f1b", 2, 6), "number of microbatches: expected 6, got 4"),
        (("gpipe", 2, 4), "another order of actions.*rank 0, action 2; plan for 1f1b"),
    ],
)
def test_a_plan_for_another_schedule(other: tuple[str, int, int], message: str) -> None:
    name, num_ranks, num_microbatches = other
    schedule = create_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    plan = hand_made(SCHEDULE, 0.5)
    with pytest.raises(PlanError, match=message):
        FreezeController(FreezeConfig(plan=plan), schedule)


def test_a_plan_fits_the_same_orders_under_another_name() -> None:
    check_fits(hand_made(SCHEDULE, 0.5), Schedule(SCHEDULE.ranks, name="mine"))

"""A saved and restored run goes on as if it had never stopped; damaged and foreign states are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.freeze_machine import SCHEDULE, InstantPlanner, Machine, all_live, events_of, hand_made, make_works
from timelyfreeze.errors import PlanError
from timelyfreeze.freeze import FreezeConfig, FreezeController
from timelyfreeze.planner import make_plan
from timelyfreeze.schedule import create_schedule

SHORT: dict[str, Any] = {
    "warmup_steps": 2,
    "measure_steps": 4,
    "ramp_steps": 4,
    "switch_delay_steps": 3,
    "replan_interval_steps": 25,
    "replan_window_steps": 5,
}


def make(seed: int = 3, **config: Any) -> Machine:
    settings = FreezeConfig(**(SHORT | config))
    works = make_works(2)
    controller = FreezeController(settings, SCHEDULE, seed, works, planner=InstantPlanner(SCHEDULE))
    return Machine(controller, works)


def state_through_file(controller: FreezeController, path: Path) -> dict[str, Any]:
    torch.save(controller.state_dict(), path)
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def through_drift(machine: Machine, steps: int) -> None:
    """Slower from step 40 on, so that a run goes through every phase twice."""
    for _ in range(steps):
        machine.slowdown = 1.7 if machine.controller.step >= 40 else 1.0
        machine.run(1)


@pytest.mark.parametrize("at", [0, 1, 3, 7, 10, 12, 15, 22, 47, 52, 56, 59, 61, 70])
def test_going_on_is_the_same_as_never_having_stopped(at: int, tmp_path: Path) -> None:
    whole = make()
    through_drift(whole, 80)
    assert [e["step"] for e in events_of(whole.controller, "measure_again")] != []

    first = make()
    through_drift(first, at)
    state = state_through_file(first.controller, tmp_path / "state.pt")
    second = make(seed=99)  # the saved seed counts
    second.controller.load_state_dict(state)
    second.controller.set_work(make_works(2, seed=5))  # measured anew by another clock: the saved ones stay
    through_drift(second, 80 - at)

    assert first.phases + second.phases == whole.phases
    for ours, theirs in zip(first.masks + second.masks, whole.masks, strict=True):
        assert all((a == b).all() for a, b in zip(ours.live, theirs.live, strict=True))
        assert (ours.planned_ratio == theirs.planned_ratio).all()
    assert second.controller.report() == whole.controller.report()
    assert second.controller.state_dict() == whole.controller.state_dict()


def test_the_state_is_plain_json() -> None:
    machine = make()
    through_drift(machine, 60)
    state = machine.controller.state_dict()
    again = json.loads(json.dumps(state))
    assert again == state
    other = make()
    other.controller.load_state_dict(again)
    assert other.controller.state_dict() == state


@pytest.mark.parametrize("done", [False, True])
def test_a_plan_in_the_making_is_saved(done: bool, tmp_path: Path) -> None:
    machine = make()
    planner = machine.controller._pending._planner
    assert isinstance(planner, InstantPlanner)
    planner.waiting = not done
    machine.run(11)
    assert events_of(machine.controller, "solve") == [{"step": 10, "switch_step": 13}]
    state = state_through_file(machine.controller, tmp_path / "state.pt")
    assert (state["pending"] is not None) == done
    resumed = make()
    other = resumed.controller._pending._planner
    assert isinstance(other, InstantPlanner)
    resumed.controller.load_state_dict(state)
    assert other.num_started == (0 if done else 1)
    resumed.run(3)
    assert resumed.phases == ["measure_lower", "measure_lower", "ramp"]
    assert [e["step"] for e in events_of(resumed.controller, "plan")] == [13]


@pytest.mark.parametrize("at", [1, 5, 7, 9])
def test_a_search_for_better_plans_goes_on_after_a_resume(at: int, tmp_path: Path) -> None:
    """Saved while the first plan is ramped to, while nothing is found, announced, and ramped to."""

    def make_with_planner() -> tuple[Machine, InstantPlanner]:
        machine = make(ramp_steps=4, switch_delay_steps=2)
        planner = machine.controller._pending._planner
        assert isinstance(planner, InstantPlanner)
        planner.max_ratio = 0.3
        return machine, planner

    def planned() -> tuple[Machine, InstantPlanner]:
        machine, planner = make_with_planner()
        machine.run_until("ramp")
        plan = machine.controller.plan
        assert plan is not None
        planner.better = [None, None, make_plan(SCHEDULE, plan.costs, 0.8, mode="lp")]
        return machine, planner

    whole, _ = planned()
    whole.run(20)
    first, planner = planned()
    first.run(at)
    state = state_through_file(first.controller, tmp_path / "state.pt")
    better = list(planner.better)
    assert state["improving"] == bool(better)
    second, other = make_with_planner()
    second.controller.load_state_dict(state)
    assert other.num_started == bool(better)
    # The search begins anew: first it finds the plan in force, where the other was asked when the state was taken.
    other.better = better
    second.run(20 - at)
    assert first.phases + second.phases == whole.phases
    assert second.controller.report() == whole.controller.report()
    assert [e["new_makespan_s"] for e in events_of(second.controller, "better_plan")] != []


def test_a_fixed_plan_repeats_from_run_to_run_and_over_a_resume(tmp_path: Path) -> None:
    plan = hand_made(SCHEDULE, 0.7)
    runs = [make(plan=plan) for _ in range(2)]
    for machine in runs:
        machine.run(30)
    resumed = make(plan=plan, seed=0)
    start = make(plan=plan)
    start.run(11)
    resumed.controller.load_state_dict(state_through_file(start.controller, tmp_path / "state.pt"))
    resumed.run(19)
    whole = [[live.tobytes() for masks in machine.masks for live in masks.live] for machine in runs]
    parts = [live.tobytes() for masks in start.masks + resumed.masks for live in masks.live]
    assert whole[0] == whole[1] == parts


def test_a_found_plan_can_be_fixed_on_resume_but_no_other(tmp_path: Path) -> None:
    machine = make()
    machine.run(30)
    state = machine.controller.state_dict()
    plan = machine.controller.plan
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    fixed = make(plan=tmp_path / "plan.json")
    fixed.controller.load_state_dict(state)
    fixed.run(40)
    assert set(fixed.phases) == {"steady"}
    other = make(plan=hand_made(SCHEDULE, 0.1))
    before = other.controller.state_dict()
    with pytest.raises(PlanError, match="another plan"):
        other.controller.load_state_dict(state)
    assert other.controller.state_dict() == before


def test_a_state_of_another_schedule_is_refused() -> None:
    state = make().controller.state_dict()
    other = FreezeController(FreezeConfig(), create_schedule("gpipe", num_ranks=2, num_microbatches=8))
    with pytest.raises(PlanError, match=r"another schedule.*gpipe.*rank 0"):
        other.load_state_dict(state)


def damages(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in a state, lists to their first two entries."""
    found = [path] if path else []
    if isinstance(state, dict):
        for key, value in list(state.items())[:30]:
            found += damages(value, (*path, key))
    elif isinstance(state, list):
        for index, value in enumerate(state[:2]):
            found += damages(value, (*path, index))
    return found


def test_a_damaged_state_is_refused_or_harmless_and_never_crashes() -> None:
    machine = make()
    machine.run(11)
    state = machine.controller.state_dict()
    refused = 0
    for path in damages(state):
        for wrong in (None, "x", -1, [], {}, float("nan")):
            broken = copy.deepcopy(state)
            holder = broken
            for key in path[:-1]:
                holder = holder[key]
            if type(holder[path[-1]]) is type(wrong):
                continue
            holder[path[-1]] = wrong
            target = make()
            before = target.controller.state_dict()
            try:
                target.controller.load_state_dict(broken)
            except PlanError:
                refused += 1
                assert target.controller.state_dict() == before
    assert refused > 300
    with pytest.raises(PlanError, match="not a saved freezing state"):
        make().controller.load_state_dict({})
    with pytest.raises(PlanError, match="another version"):
        make().controller.load_state_dict(state | {"version": 0})
    with pytest.raises(PlanError, match="lacks a field: expected 'work'"):
        make().controller.load_state_dict({k: v for k, v in state.items() if k != "work"})


def test_works_of_other_parameters_replace_the_saved_ones() -> None:
    machine = make()
    machine.run(30)
    resumed = make()
    resumed.controller.load_state_dict(machine.controller.state_dict())
    resumed.controller.forget_work()
    works = make_works(2, num_parameters=5)
    resumed.works, resumed.trainable = works, all_live(works)
    resumed.controller.set_work(works)
    resumed.run(1)
    assert resumed.masks[0].live[0].shape == (8, 5)
    assert np.isfinite(resumed.masks[0].freeze_ratio)

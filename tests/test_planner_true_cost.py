"""The true cost of ratios: upper, lower, or nothing; one set or many at once."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest

from tests.random_schedules import published_costs, random_costs, random_schedule
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import planned_durations, predict_makespans
from timelyfreeze.planner.live import least_live_shares, starved_places
from timelyfreeze.planner.model import CostModel
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule, simulate


def two_stages() -> tuple[Schedule, ActionCosts]:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    return schedule, published_costs(schedule, 15.0, 43.0, 20.0)


def ratios_of(**by_action: float) -> dict[Action, float]:
    return {Action.parse(name[1:]): ratio for name, ratio in by_action.items()}


def backward(schedule: Schedule, durations: Mapping[Action, float]) -> dict[str, float]:
    return {str(a): durations[a] for a in schedule.actions if a.kind is Kind.B}


def test_upper_lower_and_nothing() -> None:
    schedule, costs = two_stages()
    planned = planned_durations(schedule, costs, ratios_of(a0B0=0.5, a1B0=0.5, a0B1=1.0, a1B1=0.5))
    # Micro-batch 0 reaches stage 0: there half of 43 is left, above it 43 - 23 / 2. Micro-batch 1 is cut at stage 1.
    assert backward(schedule, planned.durations_s) == {"0B0": 21.5, "1B0": 31.5, "0B1": 0.0, "1B1": 21.5}
    assert planned.cuts == [0, 1]
    assert planned.skipped == {Action.parse("0B1")}
    assert all(planned.durations_s[a] == 15.0 for a in schedule.actions if a.kind is Kind.F)


def test_a_microbatch_that_trains_nothing() -> None:
    schedule, costs = two_stages()
    planned = planned_durations(schedule, costs, ratios_of(a0B0=1.0, a1B0=1.0))
    assert planned.cuts == [2, 0]
    assert planned.skipped == {Action.parse("0B0"), Action.parse("1B0")}
    assert backward(schedule, planned.durations_s) == {"0B0": 0.0, "1B0": 0.0, "0B1": 43.0, "1B1": 43.0}


def test_a_frozen_upper_stage_alone_cuts_nothing() -> None:
    schedule, costs = two_stages()
    planned = planned_durations(schedule, costs, ratios_of(a1B0=1.0))
    assert planned.cuts == [0, 0]
    assert planned.durations_s[Action.parse("1B0")] == 20.0


def test_shares_that_add_up_to_almost_one_are_one() -> None:
    schedule, costs = two_stages()
    planned = planned_durations(schedule, costs, ratios_of(a0B0=sum([0.1] * 10)))
    assert sum([0.1] * 10) < 1.0
    assert planned.cuts == [1, 0]


def test_a_stage_that_cannot_be_frozen_trains_something_unless_it_takes_no_time() -> None:
    schedule, costs = two_stages()
    upper, lower = dict(costs.upper_s), {Action.parse("1B0"): 20.0, Action.parse("1B1"): 20.0}
    stiff = ActionCosts(upper, lower)
    assert planned_durations(schedule, stiff, ratios_of(a1B0=1.0, a1B1=1.0)).cuts == [0, 0]
    idle = ActionCosts(upper | {Action.parse("0B0"): 0.0}, lower)
    planned = planned_durations(schedule, idle, ratios_of(a1B0=0.25))
    assert planned.cuts == [1, 0]
    assert planned.durations_s[Action.parse("1B0")] == 43.0 * 0.75


def test_split_backward_in_the_cut_stage() -> None:
    """Below the last live parameter neither half has anything to do: both I and W shrink with W's ratio."""
    schedule = Schedule([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    upper = dict.fromkeys(schedule.actions, 4.0)
    costs = ActionCosts(upper, {a: 0.0 for a in schedule.actions if a.kind is Kind.W})
    planned = planned_durations(schedule, costs, ratios_of(a0W0=1.0, a1W0=0.25))
    assert {str(a): t for a, t in planned.durations_s.items() if a.kind is not Kind.F} == {
        "0I0": 0.0,
        "0W0": 0.0,
        "1I0": 3.0,
        "1W0": 3.0,
    }
    assert {str(a) for a in planned.skipped} == {"0I0", "0W0"}


def test_ratios_are_checked() -> None:
    schedule, costs = two_stages()
    with pytest.raises(ValueError, match="2 problems") as caught:
        planned_durations(schedule, costs, ratios_of(a0F0=0.5, a9B9=0.5, a1B0=1.5, a1B1=float("nan")))
    assert "expected freezable actions (B or W with lower < upper), got 0F0, 9B9" in str(caught.value)
    assert "expected numbers in [0, 1], got 1B0: 1.5, 1B1: nan" in str(caught.value)


def plain_durations(
    schedule: Schedule, costs: ActionCosts, grid: np.ndarray
) -> tuple[dict[Action, float], set[Action], list[int]]:
    """The definition, action by action."""
    weight = {(a.stage, a.microbatch): a for a in schedule.actions if a.kind in (Kind.B, Kind.W)}
    durations, skipped, cuts = {}, set(), []
    for microbatch in range(schedule.num_microbatches):
        cut = 0
        while cut < schedule.num_stages:
            action = weight[cut, microbatch]
            if costs.is_freezable(action):
                if grid[cut, microbatch] < 1.0:
                    break
            elif costs.upper_s[action] > 0:
                break
            cut += 1
        cuts.append(cut)
    for action in schedule.actions:
        upper, lower = costs.upper_s[action], costs.lower_s[action]
        owner = weight[action.stage, action.microbatch]
        ratio = float(grid[action.stage, action.microbatch]) if costs.is_freezable(owner) else 0.0
        cut = cuts[action.microbatch]
        if action.kind is Kind.F:
            durations[action] = upper
        elif action.stage < cut:
            durations[action] = 0.0
            skipped.add(action)
        elif action.stage == cut:
            durations[action] = upper - upper * ratio
        else:
            durations[action] = upper - (upper - lower) * ratio if action is owner else upper
    return durations, skipped, cuts


def random_grid(draw: np.random.Generator, schedule: Schedule, num: int) -> np.ndarray:
    shape = (num, schedule.num_stages, schedule.num_microbatches)
    grid = draw.random(shape)
    grid[draw.random(shape) < 0.4] = 1.0
    grid[draw.random(shape) < 0.2] = 0.0
    return grid


def test_one_set_and_many_equal_the_definition_to_the_last_bit() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        schedule = random_schedule(draw)
        costs = random_costs(schedule, draw)
        grids = random_grid(np.random.default_rng(seed), schedule, 8)
        makespans = predict_makespans(schedule, costs, grids)
        for grid, makespan in zip(grids, makespans, strict=True):
            durations, skipped, cuts = plain_durations(schedule, costs, grid)
            ratios = {a: float(grid[a.stage, a.microbatch]) for a in schedule.actions if costs.is_freezable(a)}
            planned = planned_durations(schedule, costs, ratios)
            assert (planned.durations_s, planned.skipped, planned.cuts) == (durations, skipped, cuts), seed
            assert makespan == simulate(schedule, durations, costs.transfer_s, skipped).makespan_s, seed


def test_more_samples_than_fit_at_once() -> None:
    schedule, costs = two_stages()
    grids = random_grid(np.random.default_rng(0), schedule, 600)
    makespans = predict_makespans(schedule, costs, grids)
    assert makespans.shape == (600,)
    assert makespans[599] == predict_makespans(schedule, costs, grids[599:])[0]
    assert predict_makespans(schedule, costs, grids[:0]).shape == (0,)


def test_samples_are_checked() -> None:
    schedule, costs = two_stages()
    with pytest.raises(ValueError, match=r"shape of ratios_samples: expected \[num_samples, 2, 2\], got \(2, 2\)"):
        predict_makespans(schedule, costs, np.zeros((2, 2)))
    for bad in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"ratios_samples: expected numbers in \[0, 1\]"):
            predict_makespans(schedule, costs, np.full((1, 2, 2), bad))
    with pytest.raises(ValueError, match="costs lack actions"):
        predict_makespans(create_schedule("1f1b", num_ranks=2, num_microbatches=3), costs, np.zeros((1, 2, 3)))


def test_least_live_shares_by_hand() -> None:
    """Rows are stages, columns micro-batches. In the cut stage a middling ratio leaves the bottom frozen."""
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    model = CostModel(schedule, published_costs(schedule, 15.0, 43.0, 20.0))

    def shares(*rows: list[float]) -> list[float]:
        return least_live_shares(model, np.array(rows)).tolist()

    assert shares([0, 0, 0, 0], [0, 0, 0, 0]) == [1.0, 1.0]
    assert shares([0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]) == [0.0, 0.5]
    assert shares([1, 1, 0, 0], [0.5, 0.5, 0.5, 0.5]) == [0.5, 0.25]
    assert shares([1, 1, 0, 0], [0, 1, 0.5, 0.5]) == [0.5, 0.5]
    assert shares([1, 1, 1, 1], [1, 1, 1, 1]) == [0.0, 0.0]


def test_starving_ratios_are_mended() -> None:
    for seed in range(200):
        draw = np.random.default_rng(seed)
        schedule = create_schedule("1f1b", num_ranks=3, num_microbatches=6)
        model = CostModel(schedule, published_costs(schedule, 15.0, 43.0, 20.0))
        grid = random_grid(draw, schedule, 1)[0]
        cap = float(grid.mean(axis=1).max())
        floor = (1 - cap) / 2
        starved = starved_places(model, grid, np.full(3, floor * 6))
        mended = np.where(starved, 0.0, grid)
        assert least_live_shares(model, mended).min() >= floor - 1e-9

"""Passes: the same work in another order."""

from __future__ import annotations

import random

import pytest

from tests.random_schedules import random_schedule
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule, merge_backward, schedule_names, simulate
from timelyfreeze.schedule.passes import EQUAL_TIMES_S, keep_microbatches, split_backward


def equal_times(schedule: Schedule) -> dict[Action, float]:
    return {action: EQUAL_TIMES_S[action.kind] for action in schedule.actions}


def actions(text: str) -> list[Action]:
    return [Action.parse(part) for part in text.split()]


def test_split_leaves_weight_gradients_waiting() -> None:
    order = actions("0F0 0B0 0F1 0B1 0F2 0B2")
    assert split_backward(order, 0) == actions("0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2")
    assert split_backward(order, 1) == actions("0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2")
    assert split_backward(order, 9) == actions("0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2")


def test_keep_drops_the_last_microbatches() -> None:
    assert keep_microbatches([actions("0F0 0F1 0B0 0F2 0B1 0B2")], 2) == [actions("0F0 0F1 0B0 0B1")]


@pytest.mark.parametrize("name", schedule_names())
def test_a_schedule_without_some_microbatches_can_run(name: str) -> None:
    for num_ranks in (1, 3, 4):
        ranks = create_schedule(name, num_ranks=num_ranks, num_microbatches=9).ranks
        for number in range(1, 9):
            assert Schedule(keep_microbatches(ranks, number)).num_microbatches == number


def test_stage_0_merges_whatever_follows() -> None:
    merged = merge_backward(Schedule([["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]], name="mine"))
    assert merged == Schedule([["0F0", "0F1", "0B0", "0B1"]], name="mine")


def test_a_stage_that_another_rank_waits_for_is_not_merged() -> None:
    schedule = Schedule([["0F0", "0B0"], ["1F0", "1I0", "1W0"]])
    assert merge_backward(schedule) is schedule


def test_a_stage_whose_reader_is_busy_is_merged() -> None:
    """1W0 ends at 4; 0B0 starts at 4 anyway, since rank 0 does 0F3 first.

    rank 0 | 0F0 0F1 0F2 0F3 0B0
    rank 1 |     1F0 1I0 1W0
    """
    rest = ["0B1", "0B2", "0B3"], ["1F1", "1F2", "1F3", "1B1", "1B2", "1B3"]
    schedule = Schedule([["0F0", "0F1", "0F2", "0F3", "0B0", *rest[0]], ["1F0", "1I0", "1W0", *rest[1]]])
    assert merge_backward(schedule).ranks[1][:2] == actions("1F0 1B0")


def test_only_neighbours_of_one_microbatch_merge() -> None:
    schedule = Schedule([actions("0F0 0F1 0I0 0I1 0W0 0W1")])
    assert merge_backward(schedule) is schedule


def check_merge(schedule: Schedule) -> bool:
    """Whether anything was merged; no action may start later, end later, or leave its place."""
    merged = merge_backward(schedule)
    before, after = simulate(schedule, equal_times(schedule)), simulate(merged, equal_times(merged))
    assert after.makespan_s <= before.makespan_s
    assert all(new <= old for new, old in zip(after.idle_s, before.idle_s, strict=True))
    for action in merged.actions:
        is_new = action not in before.start_s
        first, last = (action._replace(kind=kind) if is_new else action for kind in (Kind.I, Kind.W))
        assert after.start_s[action] <= before.start_s[first]
        assert after.end_s[action] <= before.end_s[last]
    assert merge_backward(merged) is merged
    unmerged = [
        [
            half
            for a in order
            for half in ([a._replace(kind=Kind.I), a._replace(kind=Kind.W)] if is_split(a, schedule) else [a])
        ]
        for order in merged.ranks
    ]
    assert unmerged == schedule.ranks
    return merged is not schedule


def is_split(action: Action, schedule: Schedule) -> bool:
    return action.kind is Kind.B and action._replace(kind=Kind.I) in set(schedule.actions)


def test_merging_lengthens_nothing_and_loses_nothing() -> None:
    num_merged = sum(check_merge(random_schedule(random.Random(seed))) for seed in range(150))
    assert num_merged > 20


@pytest.mark.parametrize("name", schedule_names())
def test_merging_what_is_split_everywhere(name: str) -> None:
    """Splitting every B of a schedule where it stands and merging again lengthens nothing either."""
    for num_ranks, num_microbatches in ((1, 3), (2, 4), (3, 5), (4, 8)):
        schedule = create_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        assert check_merge(Schedule([split_backward(order, 0) for order in schedule.ranks]))


def test_merging_everywhere_would_cost_zb_h1_its_gain() -> None:
    """Why merging looks at who waits: with 1F1B split where it stands, the last rank's halves stay apart."""
    whole = create_schedule("1f1b", num_ranks=4, num_microbatches=8)
    split = Schedule([split_backward(order, 0) for order in whole.ranks])
    merged = merge_backward(split)
    assert simulate(whole, equal_times(whole)).makespan_s > simulate(merged, equal_times(merged)).makespan_s
    assert {action.kind for action in merged.ranks[0]} == {Kind.F, Kind.B}

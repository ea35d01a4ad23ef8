"""When everything starts and ends."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

import pytest

from tests.random_schedules import published_costs, random_costs, random_schedule
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule, data_dependencies, simulate


def times(schedule: Schedule, **by_kind: float) -> dict[Action, float]:
    return {action: by_kind[action.kind.value] for action in schedule.actions}


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "forward", "backward", "makespan"),
    [(2, 8, 15, 43, 522), (4, 8, 15, 43, 638), (4, 16, 15, 43, 1102), (2, 8, 33, 64, 873)],
)
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_known_makespans(
    name: str, num_ranks: int, num_microbatches: int, forward: float, backward: float, makespan: float
) -> None:
    schedule = create_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    timeline = simulate(schedule, times(schedule, F=forward, B=backward))
    assert timeline.makespan_s == makespan == (num_microbatches + num_ranks - 1) * (forward + backward)
    # Bubble of a flushed pipeline: (p - 1) / (m + p - 1).
    assert timeline.bubble_ratio == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1))
    assert timeline.busy_s == [num_microbatches * (forward + backward)] * num_ranks


def test_starts_by_hand() -> None:
    """
    rank 0 | 0F0 0F1         0B0 0B1
    rank 1 |     1F0 1B0--- 1F1 1B1---        (B takes 2, F takes 1, a transfer 0.5)
    """
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    timeline = simulate(schedule, times(schedule, F=1, B=2), transfer_s=0.5)
    assert {str(action): start for action, start in timeline.start_s.items()} == {
        "0F0": 0.0,
        "0F1": 1.0,
        "1F0": 1.5,
        "1B0": 2.5,
        "1F1": 4.5,
        "0B0": 5.0,
        "1B1": 5.5,
        "0B1": 8.0,
    }
    assert timeline.makespan_s == 10.0
    assert timeline.end_s[Action.parse("0B1")] == 10.0


def test_transfers_by_pair_of_stages() -> None:
    schedule = create_schedule("gpipe", num_ranks=3, num_microbatches=1)
    durations = times(schedule, F=1, B=1)
    assert simulate(schedule, durations, {(0, 1): 10.0}).makespan_s == 16.0
    assert simulate(schedule, durations, {(1, 0): 10.0, (2, 1): 5.0}).makespan_s == 21.0
    assert simulate(schedule, durations, {}).makespan_s == 6.0


def test_stages_on_one_rank_send_nothing() -> None:
    schedule = Schedule([["0F0", "1F0", "1B0", "0B0"]])
    assert simulate(schedule, times(schedule, F=1, B=1), transfer_s=100.0).makespan_s == 4.0


def test_input_and_weight_gradients() -> None:
    """The stage below goes on as soon as I is done; W fills the time.

    rank 0 | 0F0         0I0 0W0
    rank 1 |     1F0 1I0 1W0
    """
    schedule = Schedule([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    timeline = simulate(schedule, times(schedule, F=1, I=1, W=1))
    assert timeline.start_s[Action.parse("0I0")] == 3.0
    assert timeline.makespan_s == 5.0


def test_a_skipped_backward_takes_no_time_and_nothing_is_sent_to_it() -> None:
    """0B0 does not run; rank 0 passes it when 1B0 has ended, without the transfer of 3.

    rank 0 | 0F0 0F1         -       0B1
    rank 1 |     1F0 1B0 1F1 1B1
    """
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    skipped = [Action.parse("0B0"), Action.parse("0B1")]
    durations = times(schedule, F=1, B=1)
    timeline = simulate(schedule, durations, transfer_s=3.0, skipped=skipped[:1])
    assert timeline.start_s[skipped[0]] == timeline.end_s[skipped[0]] == timeline.end_s[Action.parse("1B0")] == 6.0
    assert timeline.makespan_s == 12.0
    assert timeline.busy_s == [3.0, 4.0]
    # With neither to run the step ends on rank 1, and their durations may be left out.
    forwards = {action: 1.0 for action in schedule.actions if action not in skipped}
    timeline = simulate(schedule, forwards, transfer_s=3.0, skipped=skipped)
    assert timeline.makespan_s == timeline.end_s[Action.parse("1B1")] == 8.0


def test_idle_time_counts_from_the_first_action_to_the_last() -> None:
    """Rank 1 starts at 1.5 and ends at 6.5, and is busy all along; rank 0 waits from 2 to 5 and from 7 to 8.

    rank 0 | 0F0 0F1         0B0 0B1
    rank 1 |     1F0 1B0--- 1F1 1B1---        (B takes 2, F takes 1, a transfer 0.5)
    """
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    timeline = simulate(schedule, times(schedule, F=1, B=2), transfer_s=0.5)
    assert timeline.idle_s == [4.0, 0.0]
    assert simulate(schedule, times(schedule, F=0, B=0)).idle_s == [0.0, 0.0]


def test_idle_time_where_a_rank_starts_late_and_ends_early() -> None:
    """Rank 1 holds the upper stages; what it waits before 1F0 and after 1B0 is not its own window."""
    schedule = Schedule([["0F0", "0B0"], ["1F0", "1B0"]])
    assert simulate(schedule, times(schedule, F=1, B=1)).idle_s == [2.0, 0.0]
    split = Schedule([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    assert simulate(split, times(split, F=1, I=1, W=5)).idle_s == [2.0, 0.0]


def plain_start_times(
    schedule: Schedule, durations: Mapping[Action, float], transfer: float | Mapping[tuple[int, int], float]
) -> dict[Action, float]:
    """Every edge, rank order included, applied again and again until nothing moves."""
    edges = [(e.before, e.after, e.transfer) for e in data_dependencies(schedule)]
    edges += [(a, b, False) for order in schedule.ranks for a, b in pairwise(order)]
    start = dict.fromkeys(schedule.actions, 0.0)
    for _ in schedule.actions:
        for before, after, sent in edges:
            pair = (before.stage, after.stage)
            delay = (transfer if isinstance(transfer, float) else transfer.get(pair, 0.0)) if sent else 0.0
            start[after] = max(start[after], start[before] + durations[before] + delay)
    return start


def test_equal_to_relaxing_every_edge() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        schedule = random_schedule(draw)
        costs = random_costs(schedule, draw)
        timeline = simulate(schedule, costs.upper_s, costs.transfer_s)
        expected = plain_start_times(schedule, costs.upper_s, costs.transfer_s)
        assert timeline.start_s == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert timeline.makespan_s == max(timeline.end_s.values())
        assert 0.0 <= timeline.bubble_ratio <= 1.0
        for order, busy, idle in zip(schedule.ranks, timeline.busy_s, timeline.idle_s, strict=True):
            window = timeline.end_s[order[-1]] - timeline.start_s[order[0]]
            assert busy + idle == pytest.approx(window, rel=1e-12, abs=1e-15)


def test_nothing_takes_no_time() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    timeline = simulate(schedule, times(schedule, F=0, B=0))
    assert (timeline.makespan_s, timeline.bubble_ratio) == (0.0, 0.0)


def test_all_faults_of_the_durations_are_told() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=1)
    durations = {Action.parse("0F0"): float("nan"), Action.parse("0B0"): -1.0, Action.parse("7F7"): 1.0}
    with pytest.raises(ValueError, match="3 problems") as caught:
        simulate(schedule, durations)
    for part in (
        "lacks actions of the schedule: got 1F0, 1B0",
        "not in the schedule: got 7F7",
        "0F0: nan",
        "0B0: -1.0",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -0.1, "1", None, 10**400])
def test_durations_are_finite_seconds(bad: object) -> None:
    schedule = create_schedule("gpipe", num_ranks=1, num_microbatches=1)
    with pytest.raises(ValueError, match="durations_s: expected finite seconds"):
        simulate(schedule, {Action.parse("0F0"): 1.0, Action.parse("0B0"): bad})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="transfer_s: expected finite seconds"):
        simulate(schedule, times(schedule, F=1, B=1), bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", [(0, 2), (1, 1), (-1, 0), (1, 2), "01", (0, 1, 2), (0.0, 1.0)])
def test_transfers_are_between_neighbours(pair: object) -> None:
    schedule = create_schedule("gpipe", num_ranks=2, num_microbatches=1)
    with pytest.raises(ValueError, match=r"expected \(stage, neighbouring stage\) below 2"):
        simulate(schedule, times(schedule, F=1, B=1), {pair: 1.0})  # type: ignore[dict-item]


def test_only_backwards_of_the_schedule_can_be_skipped() -> None:
    schedule = create_schedule("gpipe", num_ranks=2, num_microbatches=1)
    with pytest.raises(ValueError, match="skipped: expected backward actions of the schedule, got"):
        simulate(schedule, times(schedule, F=1, B=1), skipped=[Action(0, Kind.F, 0), Action(5, Kind.B, 0)])


def test_published_times_are_the_published_makespan() -> None:
    schedule = create_schedule("1f1b", num_ranks=4, num_microbatches=8)
    costs = published_costs(schedule, 15.0, 43.0, 20.0)
    assert simulate(schedule, costs.upper_s).makespan_s == 638.0

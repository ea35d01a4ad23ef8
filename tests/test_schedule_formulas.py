"""Idle time and memory of every schedule, against what its authors publish.

All with T_F = T_I = T_W = 1, a full backward B = 2, no transfers; idle time is the worst rank's, between the start of
its first action and the end of its last. ``p`` ranks, ``m`` micro-batches, times of one stage (a chunk of a rank's
layers where it holds several).
"""

from __future__ import annotations

import pytest

from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule, simulate
from timelyfreeze.schedule.passes import EQUAL_TIMES_S

SIZES = [(p, m) for p in (2, 4, 8, 16) for m in (8, 16, 32, 64)]


def sizes(least_per_rank: int) -> list[tuple[int, int]]:
    return [(p, m) for p, m in SIZES if m >= least_per_rank * p]


def worst_idle(schedule: Schedule) -> float:
    return max(simulate(schedule, {a: EQUAL_TIMES_S[a.kind] for a in schedule.actions}).idle_s)


def most_held(schedule: Schedule) -> list[int]:
    """For every rank the most (stage, micro-batch) pairs between forward and the end of backward at one time."""
    most = []
    for order in schedule.ranks:
        held, peak = 0, 0
        for action in order:
            held += {Kind.F: 1, Kind.I: 0, Kind.B: -1, Kind.W: -1}[action.kind]
            peak = max(peak, held)
        most.append(peak)
    return most


@pytest.mark.parametrize(("p", "m"), sizes(1))
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_flushed_pipelines(name: str, p: int, m: int) -> None:
    """(p - 1)(T_F + T_B), arXiv 2104.04473 section 2.2; 1F1B needs m >= p to fill."""
    assert worst_idle(create_schedule(name, num_ranks=p, num_microbatches=m)) == (p - 1) * 3


@pytest.mark.parametrize(("p", "m"), sizes(1))
@pytest.mark.parametrize("per_rank", [2, 3])
@pytest.mark.parametrize("name", ["looped_bfs", "interleaved_1f1b"])
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(name: str, per_rank: int, p: int, m: int) -> None:
    """(p - 1)(T_F + T_B) of one stage, 1/v of a rank's layers; m a multiple of p (arXiv 2104.04473, 2211.05953)."""
    schedule = create_schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=per_rank)
    assert worst_idle(schedule) == (p - 1) * 3


@pytest.mark.parametrize(("p", "m"), sizes(1))
def test_zb_h1(p: int, m: int) -> None:
    """(p - 1)(T_F + T_I - T_W), a third of 1F1B's; arXiv 2401.10241 table 2, for m >= p."""
    assert worst_idle(create_schedule("zb_h1", num_ranks=p, num_microbatches=m)) == (p - 1) * 1


@pytest.mark.parametrize(("p", "m"), sizes(1))
def test_interleaved_zb_is_below_interleaved_1f1b(p: int, m: int) -> None:
    """No closed form is published; (p - 1)(T_F + T_I - T_W) of one stage is what comes out, with v = 2, 3 too."""
    for per_rank in (2, 3):
        schedule = create_schedule("interleaved_zb", num_ranks=p, num_microbatches=m, stages_per_rank=per_rank)
        assert worst_idle(schedule) == (p - 1) * 1 < (p - 1) * 3


@pytest.mark.parametrize(("p", "m"), sizes(2))
def test_zbv(p: int, m: int) -> None:
    """None at all; arXiv 2405.15362 section 4, for m >= 2p - 1, which fills the V."""
    assert worst_idle(create_schedule("zbv", num_ranks=p, num_microbatches=m)) == 0


@pytest.mark.parametrize(("p", "m"), sizes(2))
def test_dualpipev(p: int, m: int) -> None:
    """(PP/2 - 1)(F&B + B - 3W) with PP = 2p stages, github.com/deepseek-ai/DualPipe, for m >= 2p.

    F&B is a forward and a backward run as one block, whose results leave it at its end: 3 where nothing overlaps. Run
    one after the other the forward's result leaves as soon as it is there; that is what ``simulate`` and the runtime
    do, and it halves the bubble.
    """
    schedule = create_schedule("dualpipev", num_ranks=p, num_microbatches=m)
    assert idle_in_blocks(schedule) == (p - 1) * (3 + 2 - 3 * 1)
    assert worst_idle(schedule) == (p - 1) * 1


def idle_in_blocks(schedule: Schedule) -> float:
    """The worst rank's idle time where an F and the full B of the rank's other stage behind it are one block.

    The first such pair of the last rank is none: it is run apart, to shorten the bubble.
    """
    last = schedule.num_ranks - 1
    blocks: list[list[list[Action]]] = []
    for rank, order in enumerate(schedule.ranks):
        row: list[list[Action]] = []
        num_pairs = 0
        for action in order:
            before = row[-1][0] if row and len(row[-1]) == 1 else action
            is_pair = (before.kind, action.kind) == (Kind.F, Kind.B) and before.stage != action.stage
            num_pairs += is_pair
            if is_pair and not (rank == last and num_pairs == 1):
                row[-1].append(action)
            else:
                row.append([action])
        blocks.append(row)
    return max(run_blocks(blocks, schedule.num_stages))


def run_blocks(blocks: list[list[list[Action]]], num_stages: int) -> list[float]:
    """Idle time of every rank, whose blocks start when all that they read is there and end as a whole."""
    end: dict[tuple[int, bool, int], float] = {}  # (stage, is forward, micro-batch), weight gradients aside
    at, clock, idle = [0] * len(blocks), [-1.0] * len(blocks), [0.0] * len(blocks)
    while any(position < len(row) for position, row in zip(at, blocks, strict=True)):
        before = list(at)
        for rank, row in enumerate(blocks):
            while at[rank] < len(row):
                block = row[at[rank]]
                needs = [need for action in block for need in needs_of(action, num_stages)]
                if any(need not in end for need in needs):
                    break
                ready = max([0.0, clock[rank], *(end[need] for need in needs)])
                idle[rank] += ready - clock[rank] if clock[rank] >= 0 else 0.0
                clock[rank] = ready + sum(EQUAL_TIMES_S[action.kind] for action in block)
                for stage, kind, microbatch in block:
                    if kind is not Kind.W:
                        end[stage, kind is Kind.F, microbatch] = clock[rank]
                at[rank] += 1
        assert at != before, "the blocks wait for each other"
    return idle


def needs_of(action: Action, num_stages: int) -> list[tuple[int, bool, int]]:
    stage, kind, microbatch = action
    if kind is Kind.F:
        return [(stage - 1, True, microbatch)] if stage > 0 else []
    if kind is Kind.W:
        return []
    return [(stage + 1, False, microbatch)] if stage + 1 < num_stages else []


@pytest.mark.parametrize(("p", "m"), sizes(2))
def test_activation_memory(p: int, m: int) -> None:
    """The most micro-batches (times stages) that a rank holds until their last gradient is done.

    1F1B: p - r on rank r. ZB-H1: p on every rank (arXiv 2401.10241 section 2.1). ZBV: 2p chunks, as much as 1F1B's p
    whole stages (arXiv 2405.15362). DualPipeV: PP + 1 chunks of the PP = 2p (its README).
    """
    by_name = {
        name: most_held(create_schedule(name, num_ranks=p, num_microbatches=m))
        for name in ("1f1b", "zb_h1", "zbv", "dualpipev")
    }
    assert by_name["1f1b"] == [p - rank for rank in range(p)]
    assert by_name["zb_h1"] == [p] * p
    assert max(by_name["zbv"]) == 2 * p
    assert max(by_name["dualpipev"]) == 2 * p + 1


@pytest.mark.parametrize(("p", "m"), sizes(1))
def test_interleaved_memory_does_not_grow_with_the_microbatches(p: int, m: int) -> None:
    """(v - 1)p + 2(p - 1 - r) forwards ahead and one more; with split backward half as far ahead."""
    held = most_held(create_schedule("interleaved_1f1b", num_ranks=p, num_microbatches=m))
    assert held == [min(2 * m, p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
    assert max(most_held(create_schedule("interleaved_zb", num_ranks=p, num_microbatches=m))) <= 2 * p

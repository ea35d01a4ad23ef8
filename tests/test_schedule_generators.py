"""Every schedule by name: pictures of small ones, and all counts."""

from __future__ import annotations

import pytest

from tests.random_schedules import can_run
from timelyfreeze.schedule import Kind, create_schedule, default_stages_per_rank, merge_backward, schedule_names
from timelyfreeze.schedule.passes import keep_microbatches

NAMES = ["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv", "dualpipev"]


def picture(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_looped_bfs_takes_all_microbatches_through_a_stage_first() -> None:
    assert str(create_schedule("looped_bfs", num_ranks=2, num_microbatches=2)) == picture("""
        rank 0 | 0F0 0F1 2F0 2F1         2B0 2B1 0B0 0B1
        rank 1 |     1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """)


def test_interleaved_1f1b_takes_as_many_microbatches_as_ranks_through_a_stage() -> None:
    assert str(create_schedule("interleaved_1f1b", num_ranks=2, num_microbatches=4)) == picture("""
        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
        rank 1 |     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """)


def test_interleaved_1f1b_with_an_incomplete_round() -> None:
    """The order for 4 micro-batches without the last one."""
    assert str(create_schedule("interleaved_1f1b", num_ranks=2, num_microbatches=3)) == picture("""
        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0     2B1 2F2 0B0 0B1     2B2     0B2
        rank 1 |     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2     1B2
    """)


def test_zb_h1_is_1f1b_whose_weight_gradients_wait() -> None:
    """On rank r for r more backwards; rank 0 waits for none and keeps its full backwards."""
    assert str(create_schedule("zb_h1", num_ranks=3, num_microbatches=4)) == picture("""
        rank 0 | 0F0 0F1 0F2         0B0 0F3 0B1         0B2     0B3
        rank 1 |     1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2 |         2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """)


def test_interleaved_zb() -> None:
    assert str(create_schedule("interleaved_zb", num_ranks=2, num_microbatches=2)) == picture("""
        rank 0 | 0F0 0F1 2F0 2F1     2B0     2B1     0B0     0B1
        rank 1 |     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """)


def test_zbv_comes_back_over_the_ranks() -> None:
    """Rank 0 holds stages 0 and 3. 3I0 is not merged with 3W0: rank 1 waits for it."""
    assert str(create_schedule("zbv", num_ranks=2, num_microbatches=4)) == picture("""
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 0F3 0B0 3F2 3B2 0B1     3F3 3B3 0B2     0B3
        rank 1 |     1F0 2F0 1F1 2F1 2B0 1F2 1B0 2F2 2B1 1F3 1I1 1W1 2F3 2B2 1I2 2I3 1I3 1W2 2W3 1W3
    """)


def test_dualpipev_pairs_a_forward_with_a_backward_of_the_other_stage() -> None:
    assert str(create_schedule("dualpipev", num_ranks=2, num_microbatches=4)) == picture("""
        rank 0 | 0F0 0F1 0F2 3F0 3B0 3F1 0F3 3B1 3F2 0B0 3B2     3F3 0B1 3B3 0B2     0B3
        rank 1 |     1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """)


def test_dualpipev_with_fewer_microbatches_than_stages() -> None:
    assert str(create_schedule("dualpipev", num_ranks=2, num_microbatches=2)) == picture("""
        rank 0 | 0F0 0F1     3F0 3I0 3W0 3F1 3B1 0B0     0B1
        rank 1 |     1F0 2F0 1F1 2F1 2B0 1B0     2I1 1I1 2W1 1W1
    """)


@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 6])
def test_zbv_with_too_few_microbatches_is_the_full_v_without_the_surplus(num_microbatches: int) -> None:
    def outline(number: int) -> list[list[tuple[int, bool, int]]]:
        schedule = create_schedule("zbv", num_ranks=4, num_microbatches=number)
        orders = keep_microbatches(schedule.ranks, num_microbatches)
        return [[(a.stage, a.kind is Kind.F, a.microbatch) for a in o if a.kind is not Kind.W] for o in orders]

    assert outline(num_microbatches) == outline(7)


def test_names_are_listed_from_simple_to_involved() -> None:
    assert schedule_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_case_and_dashes_do_not_matter(name: str) -> None:
    for spelling in (name.upper(), name.replace("_", "-"), name.replace("_", "")):
        schedule = create_schedule(spelling, num_ranks=2, num_microbatches=3)
        assert schedule.name == name
        assert default_stages_per_rank(spelling) == schedule.num_stages // 2


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", NAMES)
def test_every_count_of_ranks_and_microbatches(name: str, num_ranks: int, num_microbatches: int) -> None:
    own = default_stages_per_rank(name)
    for per_rank in (own, 3) if name.startswith(("looped", "interleaved")) else (own,):
        schedule = create_schedule(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=per_rank
        )
        assert (schedule.num_ranks, schedule.num_microbatches) == (num_ranks, num_microbatches)
        assert schedule.num_stages == num_ranks * per_rank
        assert can_run(schedule.ranks, schedule.num_stages)
        assert merge_backward(schedule) is schedule
        for stage in range(schedule.num_stages):
            for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
                done = [a.microbatch for a in schedule.actions if a.stage == stage and a.kind in kinds]
                assert done == list(range(num_microbatches))


@pytest.mark.parametrize("name", NAMES)
def test_placement(name: str) -> None:
    schedule = create_schedule(name, num_ranks=3, num_microbatches=2)
    rounds = {1: [0, 1, 2], 2: [0, 1, 2, 2, 1, 0] if name in ("zbv", "dualpipev") else [0, 1, 2, 0, 1, 2]}
    assert schedule.stage_to_rank == rounds[default_stages_per_rank(name)]


@pytest.mark.parametrize(
    ("name", "per_rank", "expected"),
    [
        ("gpipe", 2, "1"),
        ("zb_h1", 2, "1"),
        ("zbv", 1, "2"),
        ("zbv", 3, "2"),
        ("dualpipev", 4, "2"),
        ("looped_bfs", 1, "at least 2"),
        ("interleaved_1f1b", 1, "at least 2"),
        ("interleaved_zb", 1, "at least 2"),
    ],
)
def test_stages_per_rank_that_a_schedule_cannot_have(name: str, per_rank: int, expected: str) -> None:
    with pytest.raises(ValueError, match=f"stages_per_rank of schedule {name}: expected {expected}, got {per_rank}"):
        create_schedule(name, num_ranks=2, num_microbatches=2, stages_per_rank=per_rank)


def test_default_stages_of_an_unknown_schedule() -> None:
    with pytest.raises(ValueError, match=r"unknown schedule: expected one of gpipe, .*, got 'zigzag'"):
        default_stages_per_rank("zigzag")

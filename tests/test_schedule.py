"""Schedules as data: generators, pictures, edges, and what their arguments refuse."""

from __future__ import annotations

import pickle
import random

import pytest

from tests.random_schedules import can_run, is_ready, random_schedule
from timelyfreeze.schedule import (
    Action,
    Edge,
    Kind,
    Schedule,
    create_schedule,
    data_dependencies,
    register_schedule,
    schedule_names,
)
from timelyfreeze.schedule import registry as registry_module


def picture(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_gpipe_does_all_forwards_first() -> None:
    assert str(create_schedule("gpipe", num_ranks=3, num_microbatches=3)) == picture("""
        rank 0 | 0F0 0F1 0F2                 0B0 0B1 0B2
        rank 1 |     1F0 1F1 1F2         1B0 1B1 1B2
        rank 2 |         2F0 2F1 2F2 2B0 2B1 2B2
    """)


def test_1f1b_alternates_once_the_pipeline_is_full() -> None:
    assert str(create_schedule("1f1b", num_ranks=3, num_microbatches=4)) == picture("""
        rank 0 | 0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3
        rank 1 |     1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3
        rank 2 |         2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_1f1b_with_fewer_microbatches_than_stages_runs(num_microbatches: int) -> None:
    schedule = create_schedule("1f1b", num_ranks=4, num_microbatches=num_microbatches)
    assert can_run(schedule.ranks, 4)
    assert schedule.num_microbatches == num_microbatches
    assert len(schedule.actions) == 2 * 4 * num_microbatches


def test_1f1b_holds_at_most_as_many_microbatches_as_stages_below() -> None:
    """Its reason to be: activation memory does not grow with the number of micro-batches."""
    for stage, order in enumerate(create_schedule("1f1b", num_ranks=4, num_microbatches=9).ranks):
        held, most = 0, 0
        for action in order:
            held += 1 if action.kind is Kind.F else -1
            most = max(most, held)
        assert most == 4 - stage


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_backwards_go_in_order_of_microbatches_on_every_rank(name: str) -> None:
    for order in create_schedule(name, num_ranks=3, num_microbatches=5).ranks:
        assert [action.microbatch for action in order if action.kind is Kind.B] == [0, 1, 2, 3, 4]


def test_size_and_placement() -> None:
    schedule = Schedule([["0F0", "1F0", "1B0", "0B0"], ["2F0", "2B0"]], name="two stages on rank 0")
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 3, 1)
    assert schedule.stage_to_rank == [0, 0, 1]
    assert schedule.name == "two stages on rank 0"
    assert schedule.ranks[1] == [Action(2, Kind.F, 0), Action(2, Kind.B, 0)]


def test_name_is_forgiving() -> None:
    assert create_schedule("1F1B", num_ranks=2, num_microbatches=2) == create_schedule(
        "1f1b", num_ranks=2, num_microbatches=2
    )


def test_equality_hash_and_pickle() -> None:
    one = create_schedule("1f1b", num_ranks=2, num_microbatches=3)
    same = Schedule([[str(action) for action in order] for order in one.ranks], name="1f1b")
    assert one == same
    assert hash(one) == hash(same)
    assert one != create_schedule("gpipe", num_ranks=2, num_microbatches=3)
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one
    assert data_dependencies(copy) == data_dependencies(one)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected one of gpipe, 1f1b, .*, got 'zigzag'"):
        create_schedule("zigzag", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="unknown schedule"):
        create_schedule(None, num_ranks=2, num_microbatches=2)  # type: ignore[arg-type]


def test_all_bad_counts_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_ranks: expected at least 1, got 0[\s\S]*num_microbatches[\s\S]*unknown"):
        create_schedule("nothing", num_ranks=0, num_microbatches=-1)


@pytest.mark.parametrize("bad", [1.5, "4", None, True])
def test_counts_are_whole_numbers(bad: object) -> None:
    with pytest.raises(TypeError, match="num_microbatches: expected a whole number"):
        create_schedule("1f1b", num_ranks=2, num_microbatches=bad)  # type: ignore[arg-type]


def test_stages_per_rank_says_what_is_valid() -> None:
    with pytest.raises(ValueError, match="stages_per_rank of schedule 1f1b: expected 1, got 2"):
        create_schedule("1f1b", num_ranks=2, num_microbatches=2, stages_per_rank=2)


def test_absurd_counts_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="schedule too large"):
        create_schedule("gpipe", num_ranks=10**9, num_microbatches=10**9)


def test_registry_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_SCHEDULES", dict(registry_module._SCHEDULES))

    @register_schedule("onebyone")
    def one_by_one(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
        return [
            [Action(stage, kind, mb) for mb in range(num_microbatches) for kind in (Kind.F, Kind.B)]
            for stage in range(num_ranks)
        ]

    assert "onebyone" in schedule_names()
    assert str(create_schedule("onebyone", num_ranks=2, num_microbatches=2)) == picture("""
        rank 0 | 0F0         0B0 0F1         0B1
        rank 1 |     1F0 1B0         1F1 1B1
    """)


def test_actions_are_written_as_torch_writes_them() -> None:
    for text in ("0F0", "12B345", "3I1", "3W1"):
        assert str(Action.parse(text)) == text
    assert Action(1, Kind.W, 2) == (1, "W", 2)
    assert {Action.parse("1F2"): 1}[Action(1, Kind.F, 2)] == 1


@pytest.mark.parametrize(
    "text", ["", "F", "0F", "F1", "0X1", "-1F0", "0F1 ", "0f1", "0F1B0", "0F1\n", "٣F1", "9" * 5000 + "F1"]
)
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)


def test_edges_of_a_whole_and_a_split_backward() -> None:
    schedule = Schedule([["0F0", "1F0", "1I0", "1W0", "0B0"], ["2F0", "2B0"]])
    edges = {(str(e.before), str(e.after), e.transfer) for e in data_dependencies(schedule)}
    assert edges == {
        ("0F0", "1F0", False),
        ("1F0", "2F0", True),
        ("2F0", "2B0", False),
        ("2B0", "1I0", True),
        ("1F0", "1I0", False),
        ("1F0", "1W0", False),
        ("1I0", "1W0", False),
        ("1I0", "0B0", False),
        ("0F0", "0B0", False),
    }


def test_edges_are_what_a_worker_waits_for() -> None:
    """Taking the sources of all its edges away, and any one of them back, decides whether an action is ready."""
    for seed in range(50):
        schedule = random_schedule(random.Random(seed))
        everything = set(schedule.actions)
        for edge in data_dependencies(schedule):
            assert isinstance(edge, Edge)
            assert not is_ready(edge.after, everything - {edge.before}, schedule.num_stages)
        sources: dict[Action, set[Action]] = {action: set() for action in everything}
        for before, after, _ in data_dependencies(schedule):
            sources[after].add(before)
        assert all(is_ready(action, needed, schedule.num_stages) for action, needed in sources.items())

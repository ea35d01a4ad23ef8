"""Schedules that cannot run are refused, with a picture of where."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.random_schedules import can_run, random_schedule
from timelyfreeze.errors import ScheduleError
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule, schedule_names


def ranks_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def refused(text: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        Schedule(ranks_of(text))
    return str(caught.value)


def test_missing_action() -> None:
    message = refused("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1
    """)
    assert "1B1 is missing on rank 1, which does 1F1 (rank 1, position 2)" in message
    assert message.endswith(
        "rank 0 | 0F0 0F1     0B0 0B1\n"
        "rank 1 |     1F0 1B0 1F1\n"
        "                     ^^^"
    )  # fmt: skip


def test_doubled_action() -> None:
    message = refused("""
        0F0 0B0 0B0
        1F0 1B0
    """)
    assert "0B0 is there 2 times, first at rank 0, position 1 (rank 0, position 2)" in message
    assert "^^^" in message


def test_backward_before_its_forward() -> None:
    message = refused("""
        0F0 0B0
        1B0 1F0
    """)
    assert "1B0 comes before 1F0, which it needs (rank 1, position 0)" in message


def test_weight_gradient_before_its_input_gradient() -> None:
    assert "0W0 comes before 0I0" in refused("0F0 0W0 0I0")


def test_wrong_rank() -> None:
    message = refused("""
        0F0 0F1 0B0 0B1 1B1
        1F0 1F1 1B0
    """)
    assert "1B1 is on rank 0, but stage 1 is on rank 1 (rank 0, position 4)" in message
    arrow = message.splitlines()[-2]
    above = message.splitlines()[-3]
    assert above[arrow.index("^") :].startswith("1B1")


def test_ranks_that_wait_for_each_other() -> None:
    """Rank 1 waits for 0F1, which rank 0 does after 0B0, which waits for 1B0, which rank 1 does after 1F1."""
    message = refused("""
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
    """)
    assert "no rank can go on: " in message
    chain = message.split("no rank can go on: ")[1].split(" (")[0]
    assert chain == "0B0 waits for 1B0 waits for 1F1 waits for 0F1 waits for 0B0"
    assert "rank 0 | 0F0 0B0 0F1 0B1\n             ^^^" in message


def test_whole_and_half_backward_together() -> None:
    assert "0B0 is a whole backward, yet 0W0 is there too" in refused("0F0 0B0 0W0")


def test_half_a_backward() -> None:
    assert "0W0 is missing" in refused("0F0 0I0")
    assert "0I0 is missing" in refused("0F0 0W0")


def test_no_backward_at_all() -> None:
    assert "0B0 is missing" in refused("0F0")


def test_different_numbers_of_microbatches_are_explained() -> None:
    message = refused("""
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1B0 1F1 1B1
    """)
    assert "stage 1 has 2 micro-batches where 3 exist: no micro-batch 2; every stage needs every micro-batch" in message


def test_gaps_in_the_numbers() -> None:
    assert "stage 1 has no actions, though the stages go up to 2" in refused("0F0 2F0 2B0 0B0")
    assert "micro-batch 0 has no actions, though the micro-batches go up to 1" in refused("0F1 0B1")


def test_huge_numbers_do_not_hang() -> None:
    with pytest.raises(ScheduleError, match="micro-batch 1 has no actions"):
        Schedule([[Action(0, kind, number) for number in (0, 10**15) for kind in (Kind.F, Kind.B)]])


def test_every_fault_is_told() -> None:
    message = refused("""
        0F0 0F1 0B1
        1F0 1B0 1F1 1B1 1B1
    """)
    assert message.startswith("the schedule cannot run: 2 faults.")
    assert "0B0 is missing" in message
    assert "1B1 is there 2 times" in message


def test_many_faults_are_counted() -> None:
    orders = create_schedule("gpipe", num_ranks=2, num_microbatches=20).ranks
    with pytest.raises(ScheduleError, match="and 10 more"):
        Schedule([[a for a in order if a.kind is Kind.F or a.stage == 0] for order in orders])


def test_long_schedules_are_shown_around_the_fault() -> None:
    orders = [list(order) for order in create_schedule("1f1b", num_ranks=16, num_microbatches=64).ranks]
    orders[8].remove(Action(8, Kind.B, 30))
    with pytest.raises(ScheduleError, match="8B30 is missing") as caught:
        Schedule(orders)
    drawn = [line for line in str(caught.value).splitlines() if line.startswith("rank ")]
    assert [line.split()[1] for line in drawn] == ["5", "6", "7", "8", "9", "10", "11"]
    assert all(len(line) < 170 for line in drawn)


def test_empty_schedules() -> None:
    nothing: list[list[list[str]]] = [[], [[]], [[], []]]
    for ranks in nothing:
        with pytest.raises(ScheduleError, match="a schedule without actions"):
            Schedule(ranks)
    with pytest.raises(ScheduleError, match="rank 1 has no actions; leave it out"):
        Schedule([["0F0", "0B0"], []])
    with pytest.raises(ScheduleError, match="negative"):
        Schedule([[Action(0, Kind.F, -1), Action(0, Kind.B, -1)]])


@pytest.mark.parametrize(
    "bad", [None, 3, "0F0", [None], ["0F0"], [[None]], [[(0, "F")]], [[(0, "X", 1)]], [[(0.0, "F", 0)]]]
)
def test_what_is_no_schedule_is_a_type_error(bad: object) -> None:
    with pytest.raises(TypeError, match="expected"):
        Schedule(bad)  # type: ignore[arg-type]


def test_text_that_is_no_action_names_its_place() -> None:
    with pytest.raises(ValueError, match=r"got '0Q1'.*\(rank 1, position 0\)"):
        Schedule([["0F0", "0B0"], ["0Q1"]])


def test_input_and_weight_gradients_are_accepted() -> None:
    schedule = Schedule([["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]])
    assert schedule.num_stages == 2


def mutate(ranks: list[list[Action]], draw: random.Random) -> list[list[Action]]:
    """Swap two, drop one, double one, move one to another rank or place, or renumber one."""
    orders = [list(order) for order in ranks]
    rank = draw.randrange(len(orders))
    at, other = draw.randrange(len(orders[rank])), draw.randrange(len(orders[rank]))
    kind = draw.choice(["swap", "drop", "double", "move rank", "move place", "renumber"])
    if kind == "swap":
        orders[rank][at], orders[rank][other] = orders[rank][other], orders[rank][at]
    elif kind == "drop":
        del orders[rank][at]
    elif kind == "double":
        orders[rank].insert(other, orders[rank][at])
    elif kind == "move rank":
        target = orders[draw.randrange(len(orders))]
        target.insert(draw.randint(0, len(target)), orders[rank].pop(at))
    elif kind == "move place":
        orders[rank].insert(other, orders[rank].pop(at))
    else:
        old = orders[rank][at]
        changed = [
            old._replace(stage=other),
            old._replace(microbatch=other),
            old._replace(kind=draw.choice(list(Kind))),
        ]
        orders[rank][at] = draw.choice(changed)
    return orders


def is_runnable(orders: list[list[Action]], like: Schedule) -> bool:
    """The same actions on the same ranks, in an order in which workers that wait get to the end."""
    placed = [sorted(str(action) for action in order) for order in orders]
    return placed == [sorted(str(a) for a in order) for order in like.ranks] and can_run(orders, like.num_stages)


def attempt(orders: list[list[Action]]) -> tuple[Schedule | None, str]:
    """The schedule, or why there is none."""
    try:
        return Schedule(orders), ""
    except ScheduleError as error:
        return None, str(error)


def named_schedule(draw: random.Random) -> Schedule:
    return create_schedule(
        draw.choice(schedule_names()), num_ranks=draw.randint(1, 4), num_microbatches=draw.randint(1, 9)
    )


def check_mutants(seed: int) -> bool:
    """Whether the mutant of this seed was refused; fails where the validator and the executor disagree."""
    draw = random.Random(seed)
    schedule = named_schedule(draw) if draw.random() < 0.5 else random_schedule(draw)
    orders = mutate(schedule.ranks, draw)
    accepted, refusal = attempt(orders)
    if accepted is None:
        assert "fault" in refusal
        assert "^^^" in refusal or "has no actions; leave it out" in refusal or "without actions" in refusal
        # A schedule of other actions may be runnable too; of the same ones it must not be.
        assert not is_runnable(orders, schedule), (seed, refusal)
        return True
    assert can_run(accepted.ranks, accepted.num_stages), seed
    counts = [
        (a.stage, a.microbatch, "F" if a.kind is Kind.F else "grad") for a in accepted.actions if a.kind is not Kind.W
    ]
    assert len(set(counts)) == len(counts) == 2 * accepted.num_stages * accepted.num_microbatches
    homes = {(action.stage, rank) for rank, order in enumerate(accepted.ranks) for action in order}
    assert len(homes) == accepted.num_stages
    return False


def test_mutants_are_refused_exactly_where_workers_would_hang_or_miss_work() -> None:
    refused_mutants = sum(check_mutants(seed) for seed in range(600))
    assert refused_mutants > 300  # most mutations break a schedule; if none were refused the test would test nothing


def pointed_at(refusal: str) -> str:
    """The action above the arrow."""
    lines = refusal.splitlines()
    arrow = next(number for number, line in enumerate(lines) if line.strip() and not line.strip("^ "))
    return lines[arrow - 1][lines[arrow].index("^") :].split()[0]


def drop_one(orders: list[list[Action]], draw: random.Random) -> Action:
    order = draw.choice(orders)
    return order.pop(draw.randrange(len(order)))


def double_one(orders: list[list[Action]], draw: random.Random) -> Action:
    order = draw.choice(orders)
    action = draw.choice(order)
    order.insert(draw.randint(0, len(order)), action)
    return action


def put_on_another_rank(orders: list[list[Action]], draw: random.Random) -> Action:
    rank, other = draw.sample(range(len(orders)), 2)
    action = orders[rank].pop(draw.randrange(len(orders[rank])))
    orders[other].insert(draw.randint(0, len(orders[other])), action)
    return action


def swap_two(orders: list[list[Action]], draw: random.Random) -> Action | None:
    order = draw.choice(orders)
    at, other = draw.sample(range(len(order)), 2)
    order[at], order[other] = order[other], order[at]
    return None


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("change", [drop_one, double_one, put_on_another_rank, swap_two])
def test_every_mutant_of_every_schedule_is_refused_at_the_fault(
    name: str, change: Callable[[list[list[Action]], random.Random], Action | None]
) -> None:
    """The arrow points at the action itself, or where one is missing at another one of its stage and micro-batch."""
    draw = random.Random(name)
    num_refused = 0
    for _ in range(25):
        clean = create_schedule(name, num_ranks=draw.randint(2, 4), num_microbatches=draw.randint(2, 9))
        orders = [list(order) for order in clean.ranks]
        changed = change(orders, draw)
        accepted, refusal = attempt(orders)
        if changed is None and is_runnable(orders, clean):
            assert accepted is not None
            continue
        num_refused += 1
        assert accepted is None, changed
        at = Action.parse(pointed_at(refusal))
        if changed is None:
            assert f"{at} " in refusal.splitlines()[1]  # the first fault names it
        elif change is drop_one:
            assert (at.stage, at.microbatch) == (changed.stage, changed.microbatch)
        else:
            assert at == changed
    assert num_refused >= 8  # most swaps of two forwards of gpipe can run


@pytest.mark.long
@settings(max_examples=20_000)
@given(st.integers(min_value=0))
def test_mutants_long(seed: int) -> None:
    check_mutants(seed)


@settings(max_examples=200)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(-1, 3), st.sampled_from("FBIW"), st.integers(-1, 3)).map(
                lambda item: Action(item[0], Kind(item[1]), item[2])
            ),
            max_size=8,
        ),
        max_size=3,
    )
)
def test_any_actions_are_accepted_or_explained(orders: list[list[Action]]) -> None:
    schedule, refusal = attempt(orders)
    if schedule is None:
        assert refusal.startswith("the schedule cannot run")
        return
    assert can_run(schedule.ranks, schedule.num_stages)

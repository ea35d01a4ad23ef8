"""Refuse schedules that cannot run, and say where."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from timelyfreeze.errors import ScheduleError, problem
from timelyfreeze.schedule.actions import Action, Kind
from timelyfreeze.schedule.graph import Graph, link_actions
from timelyfreeze.schedule.grid import draw_grid

_SHOWN = 10  # faults in one message; a shuffled schedule of 2,048 actions can have thousands

Locate = Callable[[int, int], str]
_Cell = TypeVar("_Cell", bound=Hashable)


class CheckedRanks(NamedTuple):
    """The orders of a schedule that can run, and what follows from them."""

    ranks: list[list[Action]]
    num_microbatches: int
    stage_to_rank: list[int]
    graph: Graph


class Place(NamedTuple):
    """Where something stands in the orders of all ranks."""

    rank: int
    position: int


class Fault(NamedTuple):
    """What is wrong, and where."""

    text: str
    at: tuple[int, int] | None  # (rank, position)


def check_ranks(ranks: Iterable[Iterable[Action | str]], locate: Locate | None = None) -> CheckedRanks:
    """Check that every action is there once, on its stage's rank, and that none waits for itself.

    ``locate`` turns a (rank, position) into words for messages, such as a file's row and column.

    Raises:
        ScheduleError: with every fault, and the grid with an arrow at the first.
        TypeError, ValueError: something in ``ranks`` is not an action.
    """
    orders = _as_actions(ranks)
    locate = locate or (lambda rank, position: f"rank {rank}, position {position}")
    faults = _check_shape(orders)
    if not faults:
        places: dict[Action, list[Place]] = defaultdict(list)
        for rank, order in enumerate(orders):
            for position, action in enumerate(order):
                places[action].append(Place(rank, position))
        owner = _owners(orders)
        faults = _check_numbers(orders, places)
        faults += _check_once(places, owner, locate)
        faults += _check_owner(places, owner)
        faults += _check_own_order(places)
    if not faults:
        graph = link_actions(orders, len(owner))
        faults = describe_circle(graph.actions, graph.order, graph.previous, graph.data, places)
    if faults:
        raise ScheduleError(describe_faults(faults, orders, locate))
    num_microbatches = max(action.microbatch for order in orders for action in order) + 1
    return CheckedRanks(orders, num_microbatches, [owner[stage] for stage in range(len(owner))], graph)


def _as_actions(ranks: Iterable[Iterable[Action | str]]) -> list[list[Action]]:
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise TypeError(
            problem("not a schedule", expected="a list of actions for every rank", got=type(ranks).__name__)
        )
    orders: list[list[Action]] = []
    for rank, order in enumerate(ranks):
        if isinstance(order, (str, bytes)) or not isinstance(order, Iterable):
            raise TypeError(
                problem("not an order of actions", expected="a list", got=type(order).__name__, where=f"rank {rank}")
            )
        orders.append([_as_action(item, rank, position) for position, item in enumerate(order)])
    return orders


def _as_action(item: Action | str, rank: int, position: int) -> Action:
    where = f"rank {rank}, position {position}"
    if isinstance(item, str):
        try:
            return Action.parse(item)
        except ValueError as error:
            raise ValueError(f"{error} ({where})") from None
    if isinstance(item, tuple) and len(item) == 3:
        stage, kind, microbatch = item
        whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (stage, microbatch))
        if whole and isinstance(kind, str) and kind in {k.value for k in Kind}:
            return Action(stage, Kind(kind), microbatch)
    raise TypeError(problem("not an action", expected="an Action or a text such as '0F1'", got=repr(item), where=where))


def _check_shape(orders: Sequence[Sequence[Action]]) -> list[Fault]:
    if not any(orders):
        return [Fault("a schedule without actions", None)]
    faults = [Fault(f"rank {rank} has no actions; leave it out", None) for rank, o in enumerate(orders) if not o]
    for rank, order in enumerate(orders):
        for position, action in enumerate(order):
            if action.stage < 0 or action.microbatch < 0:
                faults.append(
                    Fault(f"{action} has a negative number; stages and micro-batches count from 0", (rank, position))
                )
    return faults


def _owners(orders: Sequence[Sequence[Action]]) -> dict[int, int]:
    """The rank of every stage: where most of its actions are."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    for rank, order in enumerate(orders):
        for action in order:
            votes[action.stage][rank] += 1
    return {stage: max(counter, key=lambda rank: (counter[rank], -rank)) for stage, counter in votes.items()}


def _check_numbers(orders: Sequence[Sequence[Action]], places: dict[Action, list[Place]]) -> list[Fault]:
    """Stages and micro-batches are 0, 1, 2, ... without a gap, and every stage has the same micro-batches."""
    faults = []
    by_stage: dict[int, set[int]] = defaultdict(set)
    first: dict[int, Place] = {}
    for action, where in places.items():
        by_stage[action.stage].add(action.microbatch)
        first.setdefault(action.stage, where[0])
    top = max(by_stage)
    if len(by_stage) <= top:
        gap = next(stage for stage in range(top) if stage not in by_stage)
        at = first[min(stage for stage in by_stage if stage > gap)]
        faults.append(Fault(f"stage {gap} has no actions, though the stages go up to {top}", at))
    everywhere = set().union(*by_stage.values())
    highest = max(everywhere)
    if len(everywhere) <= highest:
        gap = next(number for number in range(highest) if number not in everywhere)
        at = next(where[0] for action, where in places.items() if action.microbatch > gap)
        faults.append(Fault(f"micro-batch {gap} has no actions, though the micro-batches go up to {highest}", at))
    for stage, present in sorted(by_stage.items()):
        if len(present) < len(everywhere):
            missing = sorted(everywhere - present)
            faults.append(
                Fault(
                    f"stage {stage} has {len(present)} micro-batches where {len(everywhere)} exist: "
                    f"no {_some(missing)}; every stage needs every micro-batch",
                    first[stage],
                )
            )
    return faults


def _check_once(places: dict[Action, list[Place]], owner: dict[int, int], locate: Locate) -> list[Fault]:
    """Each (stage, micro-batch) has one F and either one B or one I and one W."""
    faults = []
    for action, where in places.items():
        if len(where) > 1:
            faults.append(Fault(f"{action} is there {len(where)} times, first at {locate(*where[0])}", where[-1]))
    for stage, microbatch in sorted({(action.stage, action.microbatch) for action in places}):
        there = [kind for kind in Kind if Action(stage, kind, microbatch) in places]
        at = places[Action(stage, there[-1], microbatch)][0]
        if Kind.B in there and len(there) > 1 + (Kind.F in there):
            halves = " and ".join(f"{stage}{kind}{microbatch}" for kind in there if kind in (Kind.I, Kind.W))
            faults.append(Fault(f"{stage}B{microbatch} is a whole backward, yet {halves} is there too", at))
        wanted = (Kind.F, Kind.I, Kind.W) if Kind.I in there or Kind.W in there else (Kind.F, Kind.B)
        for kind in wanted if Kind.B not in there else (Kind.F,):
            if kind not in there:
                text = f"{stage}{kind}{microbatch} is missing on rank {owner[stage]}"
                faults.append(Fault(f"{text}, which does {stage}{there[-1]}{microbatch}", at))
    return faults


def _check_owner(places: dict[Action, list[Place]], owner: dict[int, int]) -> list[Fault]:
    return [
        Fault(f"{action} is on rank {place.rank}, but stage {action.stage} is on rank {owner[action.stage]}", place)
        for action, where in places.items()
        for place in where
        if place.rank != owner[action.stage]
    ]


def _check_own_order(places: dict[Action, list[Place]]) -> list[Fault]:
    """F before B and I, and I before W, of one stage and micro-batch."""
    faults = []
    for action, where in places.items():
        earlier = Kind.I if action.kind is Kind.W else Kind.F
        if action.kind is Kind.F:
            continue
        source = places.get(Action(action.stage, earlier, action.microbatch))
        if source and source[0].rank == where[0].rank and source[0].position > where[0].position:
            faults.append(
                Fault(f"{action} comes before {action.stage}{earlier}{action.microbatch}, which it needs", where[0])
            )
    return faults


def describe_circle(
    cells: Sequence[_Cell],
    order: Sequence[int],
    previous: Sequence[int],
    data: Sequence[int],
    places: Mapping[_Cell, Sequence[Place]],
) -> list[Fault]:
    """The fault of orders whose topological order is not whole: some cells that wait for each other in a circle."""
    stuck = set(range(len(cells))) - set(order)
    if not stuck:
        return []
    # Every stuck node waits for a stuck node, so walking back from any of them must come round.
    node = min(stuck)
    path: dict[int, int] = {}
    while node not in path:
        path[node] = len(path)
        node = next(source for source in (data[node], previous[node]) if source in stuck)
    circle = [cells[step] for step, number in path.items() if number >= path[node]]
    names = [str(cell) for cell in circle]
    shown = names if len(names) <= _SHOWN else [*names[: _SHOWN - 1], f"({len(names) - _SHOWN + 1} more)"]
    text = "no rank can go on: " + " waits for ".join([*shown, names[0]])
    return [Fault(text, places[circle[0]][0])]


def describe_faults(faults: Sequence[Fault], orders: Sequence[Sequence[object]], locate: Locate) -> str:
    """Every fault, and the grid with an arrow at the first."""
    lines = [f"the schedule cannot run: {len(faults)} fault{'s' if len(faults) > 1 else ''}."]
    for number, fault in enumerate(faults[:_SHOWN], 1):
        where = f" ({locate(*fault.at)})" if fault.at is not None else ""
        lines.append(f"  {number}. {fault.text}{where}.")
    if len(faults) > _SHOWN:
        lines.append(f"  and {len(faults) - _SHOWN} more.")
    arrow = next((fault.at for fault in faults if fault.at is not None), None)
    if arrow is not None:
        lines.append(draw_grid(orders, arrow))
    return "\n".join(lines)


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5])
    return f"micro-batch {shown}" + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")

"""Sends and receives between ranks: which a schedule needs, in which order, and whether a given order can run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from timelyfreeze.errors import ScheduleError
from timelyfreeze.schedule.actions import Action, Kind
from timelyfreeze.schedule.graph import NOTHING, Graph, topological_order
from timelyfreeze.schedule.validate import CheckedRanks, Fault, Locate, Place, describe_circle, describe_faults

_PATTERN = re.compile(r"([0-9]{1,6})(SEND|RECV)_([FB])([0-9]{1,6})")


class Move(NamedTuple):
    """A send or a receive, written as torch.distributed.pipelining writes it: the stage is the rank's own.

    ``0SEND_F1`` sends what ``0F1`` made, ``1RECV_F1`` receives it for ``1F1``; F moves activations to the stage above,
    B gradients to the stage below.

    >>> str(Move.parse("0SEND_F1"))
    '0SEND_F1'
    """

    stage: int
    is_send: bool
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{'SEND' if self.is_send else 'RECV'}_{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Move | None:
        """Read a move from its text form; None if it is not one."""
        match = _PATTERN.fullmatch(text)
        return match and cls(int(match[1]), match[2] == "SEND", Kind(match[3]), int(match[4]))

    @property
    def partner(self) -> Move:
        """The receive of a send, the send of a receive."""
        is_up = (self.kind is Kind.F) == self.is_send
        return Move(self.stage + (1 if is_up else -1), not self.is_send, self.kind, self.microbatch)


Row = Sequence[Action | Move]


class _Need(NamedTuple):
    """A move that the schedule needs, and the action that makes its data (send) or reads it (receive)."""

    rank: int
    action: Action


def add_moves(graph: Graph) -> list[list[Action | Move]]:
    """Every rank's order with its sends and receives, for a graph without circles.

    All is placed by one clock on which every action takes one tick and data is sent at once when it is made. A send
    and its receive have the same place on that clock, so that between two ranks both are in the same order, and no
    rank waits in a circle, even where a send lasts until it is received.
    """
    by_time = [(level, 1, node) for node, level in enumerate(graph.levels)]
    for node, source in enumerate(graph.data):
        if graph.crosses_ranks[node]:
            by_time.append((graph.levels[source] + 1, 0, node))
    rows: list[list[Action | Move]] = [[] for _ in range(max(graph.rank) + 1)]
    for _, is_action, node in sorted(by_time):
        action = graph.actions[node]
        if is_action:
            rows[graph.rank[node]].append(action)
        else:
            receive = _receive_for(action)
            rows[graph.rank[graph.data[node]]].append(receive.partner)
            rows[graph.rank[node]].append(receive)
    return rows


def check_moves(rows: Sequence[Row], checked: CheckedRanks, locate: Locate) -> None:
    """Check a schedule's sends and receives: each that is needed once, at a place where it can run, and no other.

    A send returns at once; a receive waits for its send. Between two ranks messages arrive in the order in which they
    are sent, and are received in the order of the receives.

    Raises:
        ScheduleError: with every fault, and the grid with an arrow at the first.
    """
    places: dict[Action | Move, list[Place]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for position, cell in enumerate(row):
            places[cell].append(Place(rank, position))
    needs = _needs(checked.graph)
    faults = _check_found(places, needs, checked.stage_to_rank, locate) + _check_missing(places, needs)
    faults = faults or _check_pairs(rows, needs) or _check_circle(rows, places)
    if faults:
        raise ScheduleError(describe_faults(faults, rows, locate))


def _receive_for(action: Action) -> Move:
    return Move(action.stage, False, Kind.F if action.kind is Kind.F else Kind.B, action.microbatch)


def _needs(graph: Graph) -> dict[Move, _Need]:
    needs = {}
    for node, source in enumerate(graph.data):
        if graph.crosses_ranks[node]:
            receive = _receive_for(graph.actions[node])
            needs[receive] = _Need(graph.rank[node], graph.actions[node])
            needs[receive.partner] = _Need(graph.rank[source], graph.actions[source])
    return needs


def _check_found(
    places: dict[Action | Move, list[Place]], needs: dict[Move, _Need], stage_to_rank: list[int], locate: Locate
) -> list[Fault]:
    """No move that is not needed or on another rank, none twice, none too early or too late."""
    faults = []
    for move, where in places.items():
        if isinstance(move, Action):
            continue
        if move not in needs:
            faults.append(Fault(f"{move} is not needed: {_why_not(move, stage_to_rank)}", where[0]))
            continue
        rank, action = needs[move]
        faults += [
            Fault(f"{move} is on rank {place.rank}, but stage {move.stage} is on rank {rank}", place)
            for place in where
            if place.rank != rank
        ]
        if len(where) > 1:
            faults.append(Fault(f"{move} is there {len(where)} times, first at {locate(*where[0])}", where[-1]))
        at = places[action][0]
        if where[0].rank == rank and (where[0].position > at.position) != move.is_send:
            text = "comes before {}, which makes what it sends" if move.is_send else "comes after {}, which needs it"
            faults.append(Fault(f"{move} {text.format(action)}", where[0]))
    return faults


def _why_not(move: Move, stage_to_rank: list[int]) -> str:
    ends = (move.stage, move.partner.stage)
    if min(ends) < 0 or max(ends) >= len(stage_to_rank):
        return f"the stages go from 0 to {len(stage_to_rank) - 1}"
    if stage_to_rank[ends[0]] == stage_to_rank[ends[1]]:
        return f"stages {min(ends)} and {max(ends)} are both on rank {stage_to_rank[ends[0]]}"
    return "there is no such micro-batch"


def _check_missing(places: dict[Action | Move, list[Place]], needs: dict[Move, _Need]) -> list[Fault]:
    return [
        Fault(f"{move} is missing on rank {rank}, which does {action}", places[action][0])
        for move, (rank, action) in needs.items()
        if move not in places
    ]


def _check_pairs(rows: Sequence[Row], needs: dict[Move, _Need]) -> list[Fault]:
    """From one rank to another messages are received in the order in which they are sent."""
    sent: dict[tuple[int, int], list[Move]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[Move, Place]]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for position, move in enumerate(row):
            if isinstance(move, Action):
                continue
            other = needs[move.partner].rank
            if move.is_send:
                sent[rank, other].append(move)
            else:
                received[other, rank].append((move, Place(rank, position)))
    faults = []
    for ranks, receives in received.items():
        for send, (receive, place) in zip(sent[ranks], receives, strict=True):
            if receive.partner != send:
                text = f"{receive} is the next to be received from rank {ranks[0]}, which sends {send} first"
                faults.append(Fault(f"{text}; messages between two ranks keep their order", place))
                break
    return faults


def _check_circle(rows: Sequence[Row], places: dict[Action | Move, list[Place]]) -> list[Fault]:
    """Some order of all cells exists in which every rank goes on and every receive follows its send."""
    cells = [cell for row in rows for cell in row]
    node_of = {cell: node for node, cell in enumerate(cells)}
    previous = [
        node - 1 if position else NOTHING for node, position in enumerate(p for row in rows for p in range(len(row)))
    ]
    sends = [node_of[cell.partner] if isinstance(cell, Move) and not cell.is_send else NOTHING for cell in cells]
    order = topological_order(previous, sends)
    return describe_circle(cells, order, previous, sends, places)

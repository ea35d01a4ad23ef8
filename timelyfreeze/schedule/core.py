"""A schedule: for every rank, what it does in which order. Data only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from os import PathLike

from timelyfreeze.errors import ScheduleError
from timelyfreeze.schedule.actions import Action
from timelyfreeze.schedule.communication import Move, add_moves, check_moves
from timelyfreeze.schedule.csv_form import read_cells, write_rows
from timelyfreeze.schedule.grid import draw_grid
from timelyfreeze.schedule.validate import CheckedRanks, Locate, check_ranks


class Schedule:
    """The order of actions on every rank, checked when it is made.

    Args:
        ranks: for each rank, its actions in order: tuples ``(stage, kind, microbatch)`` or texts such as ``"0F1"``.
        name: what to call it in messages and files.

    Attributes:
        ranks: the checked orders, ``list[list[Action]]``; treat them as read-only.
        num_ranks, num_stages, num_microbatches: its size.
        stage_to_rank: the rank of every stage.

    Raises:
        ScheduleError: an action is missing, doubled or on the wrong rank, or some actions wait for each other in a
            circle. The message lists every fault and draws the grid with an arrow at the first one.
        TypeError: ``ranks`` is not made of actions.

    >>> print(Schedule([["0F0", "0B0"], ["1F0", "1B0"]], name="tiny"))
    rank 0 | 0F0         0B0
    rank 1 |     1F0 1B0
    """

    __slots__ = (
        "__weakref__",
        "_graph",
        "_key",
        "name",
        "num_microbatches",
        "num_ranks",
        "num_stages",
        "ranks",
        "stage_to_rank",
    )

    def __init__(self, ranks: Iterable[Iterable[Action | str]], *, name: str = "custom") -> None:
        self._adopt(check_ranks(ranks), name)

    def _adopt(self, checked: CheckedRanks, name: str) -> None:
        self.name = name
        self.ranks: list[list[Action]] = checked.ranks
        self.num_ranks = len(checked.ranks)
        self.num_stages = len(checked.stage_to_rank)
        self.num_microbatches = checked.num_microbatches
        self.stage_to_rank: list[int] = checked.stage_to_rank
        self._graph = checked.graph
        self._key = tuple(checked.graph.actions), tuple(checked.graph.rank)

    @classmethod
    def from_csv(cls, path: str | PathLike[str], *, name: str | None = None) -> Schedule:
        """Read torch.distributed.pipelining's CSV form: one row a rank, cells such as ``0F1``.

        Both of its forms are read. In the one with communication (``0SEND_F1``, ``1RECV_F1``) every transfer that the
        actions need must be there once, at a place where all ranks get to their ends; the schedule itself holds the
        actions alone. A pair ``(0F1;1B0)OVERLAP_F_B`` is the two actions one after the other. Idle slots and cells
        about sharded weights (``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD``) are left out. ``name`` defaults to the
        file's stem.

        Raises:
            ScheduleError: naming the file, and row and column of every cell at fault.
            OSError: the file cannot be read.

        Example::

            Schedule.from_csv("zbv.csv")
        """
        cells = read_cells(path)
        rows = [[cell for cell, _ in row] for row in cells]
        columns = [[column for _, column in row] for row in cells]
        action_columns = [[column for cell, column in row if isinstance(cell, Action)] for row in cells]
        try:
            orders = [[cell for cell in row if isinstance(cell, Action)] for row in rows]
            checked = check_ranks(orders, _locate_in(action_columns))
            if any(isinstance(cell, Move) for row in rows for cell in row):
                check_moves(rows, checked, _locate_in(columns))
        except ScheduleError as error:
            raise ScheduleError(f"{os.fspath(path)}: {error}") from None
        schedule = cls.__new__(cls)
        schedule._adopt(checked, os.path.splitext(os.path.basename(path))[0] if name is None else name)
        return schedule

    def to_csv(self, path: str | PathLike[str], *, communication: bool = False) -> None:
        """Write the form that ``from_csv`` and torch.distributed.pipelining read, whole or not at all.

        Args:
            path: the file.
            communication: add the sends and receives (torch's form ``compute_comms``), in an order that cannot
                deadlock; else the actions alone (``compute_only``).
        """
        write_rows(add_moves(self._graph) if communication else self.ranks, path)

    @property
    def actions(self) -> Sequence[Action]:
        """Every action, rank by rank."""
        return self._graph.actions

    def __str__(self) -> str:
        return draw_grid(self.ranks)

    def __repr__(self) -> str:
        return (
            f"Schedule(name={self.name!r}, num_ranks={self.num_ranks}, num_stages={self.num_stages}, "
            f"num_microbatches={self.num_microbatches})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self.name == other.name and self._key == other._key

    def __hash__(self) -> int:
        return hash((self.name, self._key))


def _locate_in(columns: Sequence[Sequence[int]]) -> Locate:
    """Words for a (rank, position) in a file whose cells come from these columns."""
    return lambda rank, position: f"row {rank + 1}, column {columns[rank][position]}"

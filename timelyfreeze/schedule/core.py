"""A schedule: for every rank, what it does in which order. Data only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from os import PathLike

from timelyfreeze.errors import ScheduleError
from timelyfreeze.schedule.actions import Action
from timelyfreeze.schedule.csv_form import read_cells, write_ranks
from timelyfreeze.schedule.grid import draw_grid
from timelyfreeze.schedule.validate import CheckedRanks, check_ranks


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
        """Read torch.distributed.pipelining's compute-only CSV form: one row a rank, cells such as ``0F1``.

        Empty cells are idle slots and are left out. ``name`` defaults to the file's stem.

        Raises:
            ScheduleError: naming the file, and row and column of every cell at fault.
            OSError: the file cannot be read.
        """
        cells = read_cells(path)

        def locate(rank: int, position: int) -> str:
            return f"row {rank + 1}, column {cells[rank][position][1]}"

        try:
            checked = check_ranks([[action for action, _ in row] for row in cells], locate)
        except ScheduleError as error:
            raise ScheduleError(f"{os.fspath(path)}: {error}") from None
        schedule = cls.__new__(cls)
        schedule._adopt(checked, os.path.splitext(os.path.basename(path))[0] if name is None else name)
        return schedule

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the form that ``from_csv`` and torch.distributed.pipelining read, whole or not at all."""
        write_ranks(self.ranks, path)

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

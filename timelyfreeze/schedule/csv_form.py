"""The text form of a schedule that torch.distributed.pipelining reads and writes: one row a rank, cells such as 0F1."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from os import PathLike

from timelyfreeze.errors import ScheduleError, problem
from timelyfreeze.files import write_atomically
from timelyfreeze.schedule.actions import Action

_SHOWN = 10
_MOVES = ("SEND_", "RECV_", "UNSHARD", "RESHARD", "REDUCE_GRAD")


def read_cells(path: str | PathLike[str]) -> list[list[tuple[Action, int]]]:
    """Read the file's actions: for every rank its actions in order, each with its column (counted from 1).

    Raises:
        ScheduleError: naming row and column of every cell that is not an action.
        OSError: the file cannot be read.
    """
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            rows = list(csv.reader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ScheduleError(
                problem(f"cannot read {os.fspath(path)}: it is not a CSV text ({error})", hint=_HINT)
            ) from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    cells: list[list[tuple[Action, int]]] = []
    faults: list[str] = []
    for number, row in enumerate(rows, 1):
        order = []
        for column, cell in enumerate(row, 1):
            text = cell.strip()
            if not text:  # an idle slot
                continue
            try:
                order.append((Action.parse(text), column))
            except ValueError:
                faults.append(f"row {number}, column {column}: {_explain(text)}")
        cells.append(order)
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        listed = "\n".join(f"  {fault}" for fault in [*faults[:_SHOWN], *more])
        raise ScheduleError(f"cannot read {os.fspath(path)}. {_HINT}\n{listed}")
    return cells


def write_ranks(ranks: Sequence[Sequence[Action]], path: str | PathLike[str]) -> None:
    """Write one row a rank, without idle slots."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for order in ranks:
        writer.writerow([str(action) for action in order])
    write_atomically(path, text.getvalue())


_HINT = "Every row is a rank, every cell an action {stage}{F|B|I|W}{micro-batch} such as 0F1, or empty."


def _explain(text: str) -> str:
    shown = repr(text[:40])
    if "OVERLAP" in text:
        return f"{shown} is a pair of overlapped actions; write the two one after the other"
    if any(move in text for move in _MOVES):
        return f"{shown} moves data; export the compute-only form, transfers follow from it"
    return f"{shown} is not an action"

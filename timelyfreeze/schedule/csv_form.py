"""The text form of a schedule that torch.distributed.pipelining reads and writes: one row a rank, cells such as 0F1."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence
from os import PathLike

from timelyfreeze.errors import ScheduleError, problem
from timelyfreeze.files import write_atomically
from timelyfreeze.schedule.actions import Action, Kind
from timelyfreeze.schedule.communication import Move

_SHOWN = 10
_HINT = (
    "Every row is a rank, every cell an action {stage}{F|B|I|W}{micro-batch} such as 0F1, a transfer such as 0SEND_F1, "
    "or empty."
)
# A forward and a backward that torch's runtime may overlap; here they run one after the other.
_OVERLAPPED = re.compile(r"\((?P<forward>[^();]*);(?P<backward>[^();]*)\)OVERLAP_F_B")
# When sharded weights are gathered and freed and gradients reduced (FSDP): no work of a stage.
_SHARDING = re.compile(r"[0-9]{1,6}(UNSHARD|RESHARD|REDUCE_GRAD)")


def read_cells(path: str | PathLike[str]) -> list[list[tuple[Action | Move, int]]]:
    """Read the file's actions and transfers: for every rank in order, each with its column (counted from 1).

    Raises:
        ScheduleError: naming row and column of every cell that is neither.
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
    cells: list[list[tuple[Action | Move, int]]] = []
    faults: list[str] = []
    for number, row in enumerate(rows, 1):
        order: list[tuple[Action | Move, int]] = []
        for column, cell in enumerate(row, 1):
            try:
                order += [(item, column) for item in _parse(cell.strip())]
            except ValueError as error:
                faults.append(f"row {number}, column {column}: {error}")
        cells.append(order)
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        listed = "\n".join(f"  {fault}" for fault in [*faults[:_SHOWN], *more])
        raise ScheduleError(f"cannot read {os.fspath(path)}. {_HINT}\n{listed}")
    return cells


def write_rows(rows: Sequence[Sequence[Action | Move]], path: str | PathLike[str]) -> None:
    """Write one row a rank, without idle slots."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([str(cell) for cell in row])
    write_atomically(path, text.getvalue())


def _parse(text: str) -> Sequence[Action | Move]:
    """What a cell stands for: one action or move, an overlapped pair, or nothing (an idle slot, sharding)."""
    if not text or _SHARDING.fullmatch(text):
        return []
    if move := Move.parse(text):
        return [move]
    try:
        if pair := _OVERLAPPED.fullmatch(text):
            forward, backward = Action.parse(pair["forward"].strip()), Action.parse(pair["backward"].strip())
            if forward.kind is Kind.F and backward.kind in (Kind.B, Kind.I):
                return [forward, backward]
        else:
            return [Action.parse(text)]
    except ValueError:
        pass
    shown = repr(text[:40])
    if "OVERLAP" in text:
        raise ValueError(f"{shown} is not a forward and a backward such as (0F1;1B0)OVERLAP_F_B")
    raise ValueError(f"{shown} is not an action")

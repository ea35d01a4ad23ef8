"""Reads the folder of a job that may still run, be half-written or damaged, as far as it can be read. No torch."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.folder import RunFolder
from timelyfreeze.cli.measured import MeasuredRun, read_measured
from timelyfreeze.cli.metrics import StepRow
from timelyfreeze.cli.table import FREEZE
from timelyfreeze.errors import TimelyFreezeError, problem
from timelyfreeze.files import read_json
from timelyfreeze.planner import MODES, Plan

FINISHED, RUNNING, STOPPED = "finished", "running", "stopped"

T = TypeVar("T")


@dataclass(frozen=True)
class JobState:
    """How far a job is.

    Attributes:
        folder: where it lies.
        status: ``"finished"``, ``"running"`` or ``"stopped"``.
        options: as config.json has them; of another version some may be missing.
        rows: of every run, in the order of the runs, its steps in order.
        plans: by run.
        measured: by run.
        faults: what could not be read, in the package's error form.
    """

    folder: RunFolder
    status: str
    options: Mapping[str, Any]
    rows: dict[str, list[StepRow]]
    plans: dict[str, Plan]
    measured: dict[str, MeasuredRun]
    faults: list[str] = field(default_factory=list)

    def count(self, option: str) -> int | None:
        """An option that is a whole number; None where this version of the folder has none."""
        value = self.options.get(option)
        return value if type(value) is int else None


def read_job(path: str) -> JobState:
    """Read all that the folder has.

    Raises:
        CommandError: it is no folder of a job, or its options cannot be read; what else is damaged becomes a fault.
    """
    folder = RunFolder(Path(path))
    options = _read_options(folder)
    faults: list[str] = []
    rows = _read_rows(folder.metrics, faults)
    plans = {}
    for run, file in {FREEZE: folder.plan, **{mode: folder.plan_of_mode(mode) for mode in MODES}}.items():
        plan = _try(Plan.load, file, faults) if file.exists() else None
        if plan is not None:
            plans[run] = plan
    measured = _try(read_measured, folder.measured, faults) or []
    return JobState(folder, _status(folder), options, rows, plans, {run.name: run for run in measured}, faults)


def _read_options(folder: RunFolder) -> Mapping[str, Any]:
    try:
        data = read_json(folder.config)
    except (FileNotFoundError, NotADirectoryError) as error:
        is_there = folder.root.exists()
        raise CommandError(
            problem(
                "there is no job to show",
                expected="a folder that `timelyfreeze train --out` wrote",
                got="no config.json" if is_there else "no such folder",
                where=f"'{folder.root}'",
                hint="Check the path for a typo.",
            )
        ) from error
    except (OSError, TimelyFreezeError) as error:
        raise CommandError(problem("the job's options cannot be read", got=str(error))) from error
    options = data.get("options") if isinstance(data, dict) else None
    if not isinstance(options, dict):
        raise CommandError(
            problem(
                "the job's options cannot be read",
                expected='an object with "options"',
                where=f"'{folder.config}'",
                hint="Another command may have written the file; name the folder of a job.",
            )
        )
    return options


def _read_rows(path: Path, faults: list[str]) -> dict[str, list[StepRow]]:
    """Rows by run; a last line that is being written does not count as a fault."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}  # the job reads its text before its first step
    except OSError as error:
        faults.append(problem("the metrics cannot be read", got=error.strerror or str(error), where=f"'{path}'"))
        return {}
    lines = text.split(b"\n")
    rows: dict[str, list[StepRow]] = {}
    bad = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = StepRow.from_json(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            bad.append(f"line {number}: {error}")
        else:
            rows.setdefault(row.run, []).append(row)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        faults.append(problem("some metrics cannot be read", got=bad[0] + more, where=f"'{path}'"))
    return rows


def _try(read: Callable[[Path], T], path: Path, faults: list[str]) -> T | None:
    """What ``read`` makes of a file; None with a fault noted where it cannot."""
    try:
        return read(path)
    except (CommandError, TimelyFreezeError) as error:
        faults.append(str(error))
    except OSError as error:
        faults.append(problem("a file cannot be read", got=error.strerror or str(error), where=f"'{path}'"))
    return None


def _status(folder: RunFolder) -> str:
    """Running jobs hold the folder's lock; finished ones have written their table."""
    try:
        with open(folder.root / ".lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # and let go at once: this only asks
    except BlockingIOError:
        return RUNNING
    except OSError:
        pass  # no lock: an older version's folder, or one that was copied
    return FINISHED if folder.table.exists() else STOPPED

"""metrics.jsonl: one line a step, and what the end of a run reads from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from timelyfreeze.cli.errors import CommandError
from timelyfreeze.errors import problem
from timelyfreeze.files import write_atomically

_BY_STAGE = ("drift", "updates", "skipped_updates")


@dataclass(frozen=True)
class StepRow:
    """One step of one run; a step 0 holds what was measured before the first.

    Attributes:
        run: ``plain``, ``timelyfreeze`` or ``fewer``; ``paci`` or ``pipedream`` where the pipeline is not flushed.
        step: steps done, this one included.
        loss: mean over the step's batch, nats a byte.
        step_time_s: the whole step: batch, pipeline, clipping, optimizer.
        pipeline_time_s: the pipeline's part of it, which a plan predicts.
        elapsed_s: training time so far: the sum of ``step_time_s``.
        phase: the pipeline's phase in this step.
        freeze_ratio: mean over stages and micro-batches of the share of weight-gradient work left out.
        tokens_per_s: of this step.
        validation_loss: where it was measured after this step.
        predicted_s: what the plan in force says ``pipeline_time_s`` is at its full ratios.
        saved_bytes: where it was counted in this step: most bytes kept for backward at once.
        drift: without a flush, for every stage, the most updates between forward and backward of a micro-batch.
        updates, skipped_updates: where it was drained after this step, of every stage since it was drained before;
            skipped ones were left out because a gradient was not finite.
        weight_copies: likewise, how many a stage's weights were copied.
    """

    run: str
    step: int
    loss: float | None = None
    step_time_s: float | None = None
    pipeline_time_s: float | None = None
    elapsed_s: float = 0.0
    phase: str = ""
    freeze_ratio: float | None = None
    tokens_per_s: float | None = None
    validation_loss: float | None = None
    predicted_s: float | None = None
    saved_bytes: int | None = None
    drift: tuple[int, ...] | None = None
    updates: tuple[int, ...] | None = None
    skipped_updates: tuple[int, ...] | None = None
    weight_copies: int | None = None

    @property
    def timed(self) -> bool:
        """Whether the step's time may go into a median: counting saved bytes slows a step down."""
        return self.step > 0 and self.saved_bytes is None

    @classmethod
    def from_json(cls, data: object) -> StepRow:
        """Check and read one line's object; ValueError says what is wrong with it."""
        if not isinstance(data, Mapping) or data.keys() != {f.name for f in fields(cls)}:
            raise ValueError("its fields are not a step's")
        row = cls(**{**data, **{name: _counts(data[name]) for name in _BY_STAGE}})
        for name in ("run", "phase"):
            if not isinstance(getattr(row, name), str):
                raise ValueError(f"{name} is no text")
        if type(row.step) is not int or row.step < 0:
            raise ValueError("step is no count")
        others = {"run", "phase", "step", "elapsed_s", *_BY_STAGE}
        optional = [getattr(row, f.name) for f in fields(cls) if f.name not in others]
        for value in [row.elapsed_s, *(v for v in optional if v is not None)]:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{value!r} is no number")
        return row


class MetricsLog:
    """Rows of all runs, in memory and, with a path, in a file that grows by a line a row."""

    def __init__(self, path: Path | None = None, rows: Iterable[StepRow] = ()) -> None:
        """Start with ``rows``, which become the whole content of the file."""
        self.rows = list(rows)
        self._file: TextIO | None = None
        if path is not None:
            write_atomically(path, "".join(_line(row) for row in self.rows))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def append(self, row: StepRow) -> None:
        """Add a row; it is in the system's hands when this returns, and on the disk after ``sync``."""
        self.rows.append(row)
        if self._file is not None:
            self._file.write(_line(row))
            self._file.flush()

    def sync(self) -> None:
        """Make all rows durable. A checkpoint comes after it, so it never knows more steps than the file."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def of(self, run: str) -> list[StepRow]:
        """The rows of one run, in order."""
        return [row for row in self.rows if row.run == run]


def read_rows(path: Path, done: Sequence[tuple[str, int]]) -> list[StepRow]:
    """Rows of a file up to a checkpoint; what came after it is left out.

    Args:
        path: the metrics.jsonl.
        done: for every run that the checkpoint knows, in order, its name and the steps done.

    Raises:
        CommandError: a row that the checkpoint counts on is missing, doubled or damaged.
    """
    wanted = {(run, step) for run, num_steps in done for step in range(num_steps + 1)}
    rows: list[StepRow] = []
    faults: list[str] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from error
    for number, line in enumerate(lines, 1):
        try:
            row = StepRow.from_json(json.loads(line))
        except ValueError as error:  # also a line that a kill cut short, which no checkpoint counts on
            faults.append(f"line {number}: {error}")
            continue
        if (row.run, row.step) in wanted:
            rows.append(row)
            wanted.discard((row.run, row.step))
    if wanted:
        run, step = min(wanted)
        raise _damaged(path, faults[0] if faults else f"step {step} of run {run!r} is missing")
    return rows


def _damaged(path: Path, what: str) -> CommandError:
    return CommandError(
        problem(
            "the metrics of the run to resume are damaged",
            expected="a line for every step up to the checkpoint",
            got=what,
            where=f"'{path}'",
            hint="Start a new run with another --out; checkpoint.pt still holds the weights.",
        )
    )


def _line(row: StepRow) -> str:
    return json.dumps(asdict(row)) + "\n"


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """Value at ``at`` on the line through ``points`` (sorted by their first number); None outside of them.

    >>> interpolate([(0.0, 6.0), (10.0, 2.0), (20.0, 1.0)], 15.0)
    1.5
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= at <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    if len(points) == 1 and points[0][0] == at:
        return points[0][1]
    return None


def validation_curve(rows: Iterable[StepRow]) -> list[tuple[float, float]]:
    """(training seconds, validation loss) wherever it was measured."""
    return [(row.elapsed_s, row.validation_loss) for row in rows if row.validation_loss is not None]


def _counts(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(count) is int and count >= 0 for count in value):
        raise ValueError(f"{value!r} are no counts")
    return tuple(value)


def as_text(data: Any) -> str:
    """JSON for people to read: indented, one value a line."""
    return json.dumps(data, indent=2) + "\n"

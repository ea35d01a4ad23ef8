"""What a person sees while a run goes on: a live bar on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from timelyfreeze.cli.metrics import StepRow

_LINE_INTERVAL_S = 5.0
_TEXT_WIDTH = 78  # of a live line without its bar
_RATE_STEPS = 10  # steps that the shown tokens/s look back over: one step's rate jumps too much to be read


class Reporter(Protocol):
    """Shows a job's runs one after the other."""

    def begin_run(self, run: str, num_steps: int, done: int) -> None:
        """A run begins, or goes on after ``done`` steps."""

    def show(self, row: StepRow) -> None:
        """A step is done."""

    def note(self, text: str) -> None:
        """Something happened that should stay on the screen."""

    def end_run(self) -> None:
        """The run is over, or has been broken off."""


class SilentReporter:
    """For processes that another one speaks for."""

    def begin_run(self, run: str, num_steps: int, done: int) -> None:
        pass

    def show(self, row: StepRow) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def end_run(self) -> None:
        pass


def make_reporter(console: Console) -> Reporter:
    """A live bar where ``console`` is a terminal, else lines."""
    return LiveReporter(console) if console.is_terminal else LineReporter(console)


class _Rate:
    """Tokens/s over the last steps."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._tokens: list[float] = []

    def add(self, row: StepRow) -> float:
        step_time_s = row.step_time_s or 0.0
        self._times_s = [*self._times_s[1 - _RATE_STEPS :], step_time_s]
        self._tokens = [*self._tokens[1 - _RATE_STEPS :], (row.tokens_per_s or 0.0) * step_time_s]
        total_s = sum(self._times_s)
        return sum(self._tokens) / total_s if total_s else 0.0


def describe(row: StepRow, tokens_per_s: float) -> str:
    """Phase, loss, tokens/s and freeze ratio of a step, or its largest drift and what was skipped.

    >>> describe(StepRow("plain", 3, loss=2.5, phase="steady", freeze_ratio=0.0), 4000.0)
    'steady        loss 2.500   4,000 tok/s   0% frozen'
    >>> describe(StepRow("paci", 3, loss=2.5, phase="stream", drift=(1, 0), skipped_updates=(2, 2)), 4000.0)
    'stream        loss 2.500   4,000 tok/s  drift 1  updates skipped: 4'
    """
    loss = f"{row.loss:.3f}" if row.loss is not None else "-"
    text = f"{row.phase:<13} loss {loss} {tokens_per_s:>7,.0f} tok/s "
    if row.drift is None:
        return text + f"{100 * (row.freeze_ratio or 0.0):3.0f}% frozen"
    num_skipped = sum(row.skipped_updates or ())
    return text + f" drift {max(row.drift)}" + (f"  updates skipped: {num_skipped}" if num_skipped else "")


class LiveReporter:
    """A bar that stays on its line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rate = _Rate()
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def begin_run(self, run: str, num_steps: int, done: int) -> None:
        self._rate = _Rate()
        self._progress = Progress(
            TextColumn("{task.fields[run]}"),
            BarColumn(bar_width=max(2, min(40, self._console.width - _TEXT_WIDTH))),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=done, run=run)
        self._progress.start()

    def show(self, row: StepRow) -> None:
        if self._progress is not None:
            text = describe(row, self._rate.add(row))
            self._progress.update(self._task, completed=row.step, description=text)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def end_run(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class LineReporter:
    """A line every few seconds, at the first and last step, and where the phase changes, a loss was validated or an
    update was skipped."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._rate = _Rate()
        self._run, self._num_steps = "", 0
        self._phase = ""
        self._shown_s = 0.0

    def begin_run(self, run: str, num_steps: int, done: int) -> None:
        self._run, self._num_steps, self._phase = run, num_steps, ""
        self._rate = _Rate()

    def show(self, row: StepRow) -> None:
        tokens_per_s = self._rate.add(row)
        now_s = self._clock()
        due = row.phase != self._phase or row.step == self._num_steps or row.validation_loss is not None
        due = due or any(row.skipped_updates or ())
        if due or now_s - self._shown_s >= _LINE_INTERVAL_S:
            self._phase, self._shown_s = row.phase, now_s
            text = f"{self._run:<12}  {row.step:>{len(str(self._num_steps))}}/{self._num_steps}  "
            text += describe(row, tokens_per_s)
            if row.validation_loss is not None:
                text += f"  validation {row.validation_loss:.4f}"
            self.note(text)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def end_run(self) -> None:
        self._run = ""

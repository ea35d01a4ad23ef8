"""The table at the end: what each run took, what was predicted, and the loss it reached."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from timelyfreeze.cli.metrics import StepRow, interpolate, validation_curve

PLAIN = "plain"
FREEZE = "timelyfreeze"
FEWER = "fewer"

_ABSENT = "-"
_UNDISTURBED = 0.15  # on quiet machines plain is within 0.06 of its bounds
_TIE = 0.02  # nats a byte: four seeds of the default model, 60 steps of 4 micro-batches, deviate by 0.016


@dataclass(frozen=True)
class RunSummary:
    """One row. Times are medians over the steady steps; None where there was nothing to measure.

    Attributes:
        run: its name.
        num_microbatches: of each step.
        step_s: the whole step: batch, pipeline, clipping, optimizer.
        pipeline_s: the pipeline's part, measured.
        predicted_s: the pipeline's part, as the plan has it.
        tokens_per_s: tokens of a step over ``step_s``.
        num_steps: steps done.
        elapsed_s: training time in all, without validation and checkpoints.
        freeze_ratio: mean over the steady steps.
        curve: (training seconds, validation loss), where measured.
        saved_bytes: most bytes kept for backward at once, in one steady step.
    """

    run: str
    num_microbatches: int
    step_s: float | None
    pipeline_s: float | None
    predicted_s: float | None
    tokens_per_s: float | None
    num_steps: int
    elapsed_s: float
    freeze_ratio: float | None
    curve: list[tuple[float, float]]
    saved_bytes: int | None

    @property
    def final_loss(self) -> float | None:
        """Validation loss after the last step."""
        return self.curve[-1][1] if self.curve else None


def steady_steps(rows: Sequence[StepRow]) -> set[int]:
    """Steps of the TimelyFreeze run whose times count: in the steady phase, and not slowed by counting bytes."""
    return {row.step for row in rows if row.phase == "steady" and row.timed}


def summarize_run(
    rows: Sequence[StepRow],
    steady: set[int],
    *,
    num_microbatches: int,
    tokens_per_step: int,
    predicted_s: float | None = None,
) -> RunSummary:
    """Sum up the rows of one run over the steps ``steady``, the same for all runs.

    Args:
        rows: of one run, in order, at least one.
        steady: steps to take medians over.
        num_microbatches: of each step.
        tokens_per_step: bytes of text in each step.
        predicted_s: prediction for the pipeline's part; by default the rows' own.
    """
    chosen = [row for row in rows if row.step in steady and row.timed]
    step_s = _median([row.step_time_s for row in chosen])
    return RunSummary(
        run=rows[0].run,
        num_microbatches=num_microbatches,
        step_s=step_s,
        pipeline_s=_median([row.pipeline_time_s for row in chosen]),
        predicted_s=_median([row.predicted_s for row in chosen]) if predicted_s is None else predicted_s,
        tokens_per_s=None if step_s is None else tokens_per_step / step_s,
        num_steps=rows[-1].step,
        elapsed_s=rows[-1].elapsed_s,
        freeze_ratio=_mean([row.freeze_ratio for row in chosen]),
        curve=validation_curve(rows),
        saved_bytes=max((row.saved_bytes for row in rows if row.saved_bytes is not None), default=None),
    )


def comparison_times(runs: Sequence[RunSummary]) -> list[float]:
    """Training times to compare losses at: where the fastest run ended, then the next; none but the slowest is left."""
    return sorted({run.elapsed_s for run in runs})[: max(1, len(runs) - 1)] if len(runs) > 1 else []


def build_table(runs: Sequence[RunSummary]) -> Table:
    """The runs as rows. The first is what the others are compared with, if it is the plain one."""
    plain = runs[0] if runs[0].run == PLAIN else None
    times = comparison_times(runs)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    names = labels(runs)
    table.add_column("run", no_wrap=True)
    headings = ["step\nms", "speed-\nup", "tokens\n/s", "pipe\nms", "predicted\nms"]
    headings.append(f"loss at\n{max(run.num_steps for run in runs)} st.")
    headings += [f"loss at\n{seconds(time)} s" for time in times]
    headings.append("kept\nMB")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, run in zip(names, runs, strict=True):
        cells = [milliseconds(run.step_s), _speedup(plain, run), number(run.tokens_per_s, 0)]
        cells += [milliseconds(run.pipeline_s), _prediction(run), number(run.final_loss, 3)]
        cells += [number(interpolate(run.curve, time), 3) for time in times]
        cells.append(number(None if run.saved_bytes is None else run.saved_bytes / 1e6, 1))
        table.add_row(name, *cells)
    return table


def labels(runs: Sequence[RunSummary]) -> list[str]:
    """The runs' names in the table, with the number of micro-batches where it is not the first run's."""
    names = {PLAIN: PLAIN, FREEZE: FREEZE, FEWER: PLAIN}
    return [
        names.get(run.run, f"mode {run.run}")
        + (f", M = {run.num_microbatches}" if run.num_microbatches != runs[0].num_microbatches else "")
        for run in runs
    ]


def notes(runs: Sequence[RunSummary], num_steady: int) -> list[str]:
    """What the table's numbers mean, a line each."""
    names = labels(runs)
    if num_steady:
        lines = [f"Times: medians over the same {num_steady} steady steps of each run."]
    else:
        lines = ["No times: the run ended before its steady phase. Give it more --steps."]
    lines.append("step: all of it, with clipping and optimizer. pipe: the pipeline alone, beside it what")
    lines.append("  the plan predicts for it and how far that is off.")
    lines.append("loss: on held-out text, nats a byte, after equal steps and after equal training time,")
    lines.append("  which leaves out validation and checkpoints and is read between two validations.")
    lines += [
        f"  {seconds(time)} s: {next(n for n, run in zip(names, runs, strict=True) if run.elapsed_s == time)} ended."
        for time in comparison_times(runs)
    ]
    lines.append("kept: the most bytes held for backward at once, in one steady step.")
    for name, run in zip(names, runs, strict=True):
        if run.run == FEWER:
            lines.append(f"{name}: with so few micro-batches that each parameter gets as many gradients as under")
            lines.append("  the freeze cap; the same steps, so less text.")
    disturbed = _disturbance(runs)
    if disturbed is not None:
        lines.append(
            f"CAUTION: plain took {100 * disturbed:+.0f}% against the same job's measured bounds: was something"
        )
        lines.append("  else running meanwhile? Then speed-ups mean nothing; run it again on a quiet machine.")
    return lines


def _disturbance(runs: Sequence[RunSummary]) -> float | None:
    """How far plain's time is off what the bounds give it, if that is more than predictions that are well ever are."""
    for run in runs:
        if run.run == PLAIN and run.pipeline_s is not None and run.predicted_s:
            off = run.pipeline_s / run.predicted_s - 1
            return off if abs(off) > _UNDISTURBED else None
    return None


def verdict(runs: Sequence[RunSummary], live_microbatches: int | None = None) -> str | None:
    """Whether freezing paid, from the numbers of these runs alone; None where there is nothing to compare.

    With ``live_microbatches`` no gradient is given up, so what counts is the pipeline's time. Else gradients are given
    up for time, as by a smaller batch, and what counts is the loss after equal training time: when the fastest ended.
    """
    named = dict(zip(labels(runs), runs, strict=True))
    frozen = {name: run for name, run in named.items() if run.run not in (PLAIN, FEWER)}
    plain = next((run for run in runs if run.run == PLAIN), None)
    if plain is None or not frozen:
        return None
    if live_microbatches is not None:
        return "\n".join(_sooner(name, run, plain, live_microbatches) for name, run in frozen.items())
    time = min(run.elapsed_s for run in runs)
    losses = {name: loss for name, run in named.items() if (loss := interpolate(run.curve, time)) is not None}
    ranked = sorted(losses, key=losses.__getitem__)
    if len(ranked) < len(runs):
        return None
    best, other = (next(name for name in ranked if (name in frozen) == freezes) for freezes in (True, False))
    if abs(losses[best] - losses[other]) <= _TIE:
        said = f"{best} and {other} are within {_TIE}, which another seed may turn round"
    elif best == ranked[0]:
        said = "here freezing pays"
    elif named[other].run == FEWER:
        said = "here a smaller batch pays more than freezing"
    else:
        said = "here freezing does not pay"
    ranks = "; ".join(f"{name} {losses[name]:.3f}" for name in ranked)
    return f"After equal training time ({seconds(time)} s), best loss first: {ranks}: {said}."


def _sooner(name: str, run: RunSummary, plain: RunSummary, live_microbatches: int) -> str:
    """How much sooner steps with the same gradients end."""
    text = f"{name}: every parameter gets {live_microbatches} micro-batches' gradients a step, as in plain"
    if run.pipeline_s and plain.pipeline_s:
        text += f"; the pipeline's step is {plain.pipeline_s / run.pipeline_s:.2f}x as fast"
        if run.predicted_s and plain.predicted_s:
            text += f", {plain.predicted_s / run.predicted_s:.2f}x planned"
    if run.final_loss is not None and plain.final_loss is not None:
        text += f"; loss after {run.num_steps} steps {run.final_loss:.3f}, plain {plain.final_loss:.3f}"
    return text + "."


def render(runs: Sequence[RunSummary], num_steady: int, live_microbatches: int | None = None) -> str:
    """Table, verdict and notes as plain text, the table never wrapped nor cut: it is about 80 columns wide."""
    table = as_lines(build_table(runs))
    said = verdict(runs, live_microbatches) if num_steady else None
    lines = [] if said is None else [*(part for line in said.splitlines() for part in textwrap.wrap(line, 88)), ""]
    return "\n".join([*table, "", *lines, *notes(runs, num_steady)]) + "\n"


def as_lines(table: Table) -> list[str]:
    """The table as plain text, whatever the terminal's width."""
    console = Console(file=io.StringIO(), width=250, color_system=None, force_terminal=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def _speedup(plain: RunSummary | None, run: RunSummary) -> str:
    if plain is None or plain.step_s is None or run.step_s is None:
        return _ABSENT
    return f"{plain.step_s / run.step_s:.2f}x"


def _prediction(run: RunSummary) -> str:
    if run.predicted_s is None or not run.pipeline_s:
        return milliseconds(run.predicted_s)
    return f"{milliseconds(run.predicted_s)} {100 * (run.predicted_s / run.pipeline_s - 1):+.1f}%"


def milliseconds(value: float | None) -> str:
    """A time in seconds, in milliseconds."""
    if value is None:
        return _ABSENT
    return f"{1e3 * value:.0f}" if value >= 0.1 else f"{1e3 * value:.2f}"


def seconds(value: float) -> str:
    """A time that a person waits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def number(value: float | None, digits: int) -> str:
    """With so many decimals; "-" where there is none."""
    return _ABSENT if value is None else f"{value:,.{digits}f}"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

"""The summary of ``timelyfreeze show``: how far a job is, what its steps take, and how far plans are off."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean, median

from rich.console import Console

from timelyfreeze.cli.deviations import Deviation, Deviations, find_deviations
from timelyfreeze.cli.metrics import StepRow
from timelyfreeze.cli.plan_text import milliseconds, new_table, percent, print_timelines, say
from timelyfreeze.cli.run_reader import RUNNING, STOPPED, JobState
from timelyfreeze.cli.stream_counts import stage_counts, streaming_steps
from timelyfreeze.cli.table import FEWER, FREEZE, PLAIN, steady_steps
from timelyfreeze.schedule.asynchronous import STREAM_SCHEDULES
from timelyfreeze.viz import Track

_FAINT = "bright_black"
_ABSENT = "-"
_UNDISTURBED = 0.15  # share that a step is off its plan; 0.06 at most on a quiet machine
_NUM_RECENT = 20  # steps whose median is shown before any is steady
_WIDE = 78  # columns from which on all numbers are shown
# By whether the pipeline is flushed after every step.
_WHICH_STEPS = {True: "the steady steps", False: "the steps in the middle of a stream"}
_NOTES = {
    True: "pipe: the pipeline alone, which plans predict.",
    False: "drift: the most updates of a stage between a micro-batch's forward and backward. updates, skipped: of all "
    "stages together, up to where they were drained last.",
}


def print_job(console: Console, job: JobState, tracks: Sequence[Track]) -> None:
    """Print all that is known of a job, as wide as the console."""
    say(console, status_line(job), style="bold")
    say(console, _what(job))
    if not job.rows:
        say(console, "No step is done yet.")
    else:
        console.print()
        _print_runs(console, job)
        for run, rows in job.rows.items():
            if run not in (PLAIN, FEWER, *STREAM_SCHEDULES):
                say(console, f"Phases of {run}: {phases(rows)}.")
    for run, plan in job.plans.items():
        measured = job.measured.get(run)
        found = None if measured is None else find_deviations(measured, plan)
        if found is not None and measured is not None:
            console.print()
            say(console, f"{run_name(job, run)}, step {measured.step}: planned beside measured", style="bold")
            _print_deviations(console, found)
    if tracks:
        print_timelines(console, tracks)


def status_line(job: JobState) -> str:
    """Where the job stands."""
    text = f"{job.folder.root}: {job.status}"
    if job.status == RUNNING and job.rows:
        run, rows = list(job.rows.items())[-1]
        text += f", step {rows[-1].step} of {run}"
    if job.status == STOPPED and job.folder.checkpoints.exists():
        text += f"; go on with: timelyfreeze train --resume {shlex.quote(str(job.folder.root))}"
    return text


def phases(rows: Sequence[StepRow]) -> str:
    """Which steps were in which phase.

    >>> phases([StepRow("timelyfreeze", n, phase="warmup" if n < 3 else "ramp") for n in range(1, 6)])
    'warmup 1-2, ramp 3-5'
    """
    parts = []
    for phase, group in groupby((row for row in rows if row.step > 0), key=lambda row: row.phase):
        steps = [row.step for row in group]
        parts.append(f"{phase} {steps[0]}" + (f"-{steps[-1]}" if steps[-1] > steps[0] else ""))
    return ", ".join(parts) or "none yet"


def run_name(job: JobState, run: str) -> str:
    """The run's name for people."""
    if run != FEWER:
        return run if run in (PLAIN, FREEZE, *STREAM_SCHEDULES) else f"mode {run}"
    measured = job.measured.get(run)
    return "plain, fewer" if measured is None else f"plain, M = {measured.schedule.num_microbatches}"


def _what(job: JobState) -> str:
    options = job.options
    parts = [
        str(options.get("schedule", "?")),
        f"{options.get('stages', '?')} stages × {options.get('microbatches', '?')} micro-batches",
    ]
    if stream_of(job) is not None:
        accumulation = options.get("accumulation") or options.get("microbatches", "?")
        return ", ".join([*parts, f"an update of a stage after every {accumulation} backwards"])
    parts.append(f"mode {options.get('mode', '?')}")
    live = options.get("live_microbatches")
    parts.append(f"cap {options.get('max_ratio', '?')}" if live is None else f"{live} live micro-batches")
    return ", ".join(parts)


def stream_of(job: JobState) -> str | None:
    """The name of the job's run without a flush, if it is to have one."""
    name = job.options.get("schedule")
    return name if name in STREAM_SCHEDULES else None


def _print_runs(console: Console, job: JobState) -> None:
    is_wide = console.width >= _WIDE
    stream = stream_of(job)
    steady = steady_steps(job.rows.get(FREEZE, [])) if stream is None else streaming_steps(job.rows.get(stream, []))
    own = ["pipe\nms", "planned\nms", "frozen"] if stream is None else ["drift", "updates", "skipped"]
    headings = ["steps", "step\nms", "speed-\nup", *own, "loss", "valid."]
    table = new_table("run", *(headings if is_wide else [*headings[:3], "loss"]))
    plain_s = _time(job.rows.get(PLAIN, []), steady, "step_time_s")
    total = job.count("steps")
    for run, rows in job.rows.items():
        step_s = _time(rows, steady, "step_time_s")
        cells = [run_name(job, run), f"{rows[-1].step}" + ("" if total is None else f"/{total}"), milliseconds(step_s)]
        cells.append(f"{plain_s / step_s:.2f}x" if plain_s and step_s else _ABSENT)
        validated = [row.validation_loss for row in rows if row.validation_loss is not None]
        frozen = [row.freeze_ratio for row in _timed(rows, steady) if row.freeze_ratio is not None]
        if is_wide and stream is not None:
            cells += _stream_cells(rows)
        elif is_wide:
            cells += [milliseconds(_time(rows, steady, "pipeline_time_s")), milliseconds(rows[-1].predicted_s)]
            cells.append(percent(fmean(frozen)) if frozen else _ABSENT)
        cells.append(_loss(rows[-1].loss))
        cells += [_loss(validated[-1] if validated else None)] if is_wide else []
        table.add_row(*cells)
    console.print(table)
    which = _WHICH_STEPS[stream is None] if steady else f"the last {_NUM_RECENT} steps of each run: none is steady yet"
    note = f"Times: medians over {which}. loss: of the last step."
    if is_wide:
        note += f" {_NOTES[stream is None]} valid.: on held-out text."
    say(console, note, style=_FAINT)


def _stream_cells(rows: Sequence[StepRow]) -> list[str]:
    """Largest drift, updates and skipped ones of all stages."""
    if not any(row.drift is not None for row in rows):
        return [_ABSENT] * 3
    counts = stage_counts(rows, accumulation=1)
    totals = sum(one.updates for one in counts), sum(one.skipped for one in counts)
    return [str(max(one.drift for one in counts)), *map(str, totals)]


def _timed(rows: Sequence[StepRow], steady: set[int]) -> list[StepRow]:
    """The steps whose times count: the steady ones, or the last ones where a run has none of them yet."""
    timed = [row for row in rows if row.timed]
    return [row for row in timed if row.step in steady] or timed[-_NUM_RECENT:]


def _time(rows: Sequence[StepRow], steady: set[int], name: str) -> float | None:
    times = [time for row in _timed(rows, steady) if (time := getattr(row, name)) is not None]
    return median(times) if times else None


def _loss(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:.3f}"


def _print_deviations(console: Console, found: Deviations) -> None:
    step = found.step
    table = new_table("", "actions", "planned\nms", "measured\nms", "off\nms", "off\n%")
    for one in [*found.groups, step]:
        table.add_row(*_deviation_cells(one), style="bold" if one is step else "")
    console.print(table)
    worst = ", ".join(
        f"{one.name} {milliseconds(one.planned_s)} → {milliseconds(one.measured_s)}" for one in found.largest
    )
    say(console, f"Farthest off, planned → measured in ms: {worst}.")
    say(console, "Masks are drawn anew for every step, so single actions scatter around the plan.", style=_FAINT)
    if step.planned_s > 0 and abs(step.difference_s) > _UNDISTURBED * step.planned_s:
        say(
            console,
            "CAUTION: the step is far off its plan: was something else running when this or the bounds were timed?",
        )


def _deviation_cells(one: Deviation) -> list[str]:
    name = one.name if one.name == "step" else f"stage {one.name[:-1]} {one.name[-1]}"
    off = f"{100 * one.difference_s / one.planned_s:+.1f}" if one.planned_s > 0 else _ABSENT
    sign = "-" if one.difference_s < 0 else "+"
    difference = f"{sign}{milliseconds(abs(one.difference_s))}"
    return [name, str(one.num_actions), milliseconds(one.planned_s), milliseconds(one.measured_s), difference, off]

"""``timelyfreeze show``: a finished or running job, summed up and as a page. Nothing here needs torch."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from timelyfreeze.cli.deviations import measured_durations
from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.measured import MeasuredRun
from timelyfreeze.cli.output import make_console
from timelyfreeze.cli.plan_options import unwritable
from timelyfreeze.cli.plan_text import milliseconds, say
from timelyfreeze.cli.run_reader import JobState, read_job
from timelyfreeze.cli.show_text import print_job, run_name, stream_of
from timelyfreeze.errors import raise_all
from timelyfreeze.viz import StepPoint, Track, View, tracks_of_plan, write_html, write_png, write_trace


def show(parsed: argparse.Namespace, *, console: Console | None = None) -> int:
    """Sum up a job and write its page.

    Returns:
        the exit code: 0, or 1 where a part of the folder could not be read, which is said on standard error.

    Raises:
        CommandError: there is no job, or an output cannot lie where it was asked for.
        OSError: a file cannot be written.
    """
    faults = [
        fault
        for option, path in (("--html", parsed.html), ("--png", parsed.png), ("--trace", parsed.trace))
        for fault in unwritable(option, path)
    ]
    raise_all(CommandError, faults)
    job = read_job(parsed.run_dir)
    console = console or make_console()
    tracks = job_tracks(job)
    print_job(console, job, tracks)
    view = View(f"Job {job.folder.root.resolve().name}", _facts(job), tracks, _points(job))
    page = Path(parsed.html or job.folder.root / "timeline.html")
    write_html(view, page)
    say(console, f"\nPage: {page}")
    for write, path in ((write_png, parsed.png), (write_trace, parsed.trace)):
        if path is not None:
            write(view, path)
    if parsed.open and not webbrowser.open(page.resolve().as_uri()):
        say(console, "No browser could be opened here; open the page yourself.")
    for fault in job.faults:
        print(f"timelyfreeze: error: {fault}", file=sys.stderr)
    return 1 if job.faults else 0


def job_tracks(job: JobState) -> list[Track]:
    """For every run what was planned, with measured durations beside it, and what was measured."""
    tracks = []
    for run in dict.fromkeys([*job.measured, *job.plans]):
        plan, measured = job.plans.get(run), job.measured.get(run)
        name = run_name(job, run)
        if plan is not None:
            plain, planned = tracks_of_plan(plan)
            if not job.measured:
                tracks.append(plain)
            beside = None
            if measured is not None and measured.ratios and measured.schedule == plan.schedule:
                beside = measured_durations(measured)
            tracks.append(replace(planned, name=f"{name}, planned", measured_s=beside))
        if measured is not None:
            tracks.append(_measured_track(name, measured))
    return tracks


def _measured_track(name: str, run: MeasuredRun) -> Track:
    label = f"{name}, measured in step {run.step} ({run.phase})"
    cuts = run.cuts if run.skipped else None
    return Track(label, run.schedule, run.start_s, run.end_s, run.ratios, cuts, run.skipped)


def _facts(job: JobState) -> list[tuple[str, str]]:
    facts = [("folder", str(job.folder.root)), ("status", job.status)]
    names = ("schedule", "mode", "max_ratio") if stream_of(job) is None else ("schedule", "accumulation", "memory")
    facts += [(name, str(job.options[name])) for name in names if job.options.get(name) is not None]
    for run, plan in job.plans.items():
        facts.append((f"{run_name(job, run)}, planned", f"{milliseconds(plan.makespan_s)} ms"))
        facts.append((f"{run_name(job, run)}, nothing frozen", f"{milliseconds(plan.unfrozen_makespan_s)} ms"))
    facts += [(f"{run_name(job, run)}, measured", _span(measured)) for run, measured in job.measured.items()]
    return facts


def _span(run: MeasuredRun) -> str:
    return f"{milliseconds(max(run.end_s.values()))} ms"


def _points(job: JobState) -> list[StepPoint]:
    return [
        StepPoint(
            run_name(job, run), row.step, row.loss, row.phase, row.step_time_s, row.validation_loss, row.freeze_ratio
        )
        for run, rows in job.rows.items()
        for row in rows
    ]

"""``timelyfreeze plan``: from stage times to a plan, printed and written. Nothing here needs torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.status import Status

from timelyfreeze.cli.compare import compare
from timelyfreeze.cli.compare_text import print_comparison
from timelyfreeze.cli.output import make_console
from timelyfreeze.cli.plan_answer import PlanAnswer, answer
from timelyfreeze.cli.plan_case import PlanCase, read_case
from timelyfreeze.cli.plan_options import STANDARD_OUTPUT, Outputs, PlanRequest, read_request
from timelyfreeze.cli.plan_text import headline, milliseconds, percent, print_answer, verdict
from timelyfreeze.files import write_atomically
from timelyfreeze.planner import planned_durations
from timelyfreeze.schedule import simulate
from timelyfreeze.viz import Track, View, tracks_of_plan, write_html, write_png, write_trace


def plan(parsed: argparse.Namespace, *, console: Console | None = None) -> int:
    """Make the plan or the comparison that was asked for, and show it; returns the exit code 0.

    Raises:
        CommandError: an option, a file or a wish is wrong; names all that is.
        OSError: a file cannot be written.
    """
    request = read_request(parsed)
    case = read_case(request)
    console = console or make_console()
    if request.compare:
        with _progress() as progress:
            comparison = compare(case, request, progress.update)
        if _write_json(request.outputs, comparison.to_json()):
            print_comparison(console, comparison)
        return 0
    with _progress() as progress:
        progress.update("planning")
        found = answer(case, request)
    tracks = plan_tracks(case, found)
    if _write_json(request.outputs, found.to_json()):
        print_answer(console, found, tracks)
    _write_files(request, found, tracks)
    return 0


def plan_tracks(case: PlanCase, found: PlanAnswer) -> list[Track]:
    """The plain step and the planned one; where live micro-batches were asked for, plain has only those."""
    before, after = tracks_of_plan(found.plan)
    if case.schedule != found.plan.schedule:
        planned = planned_durations(case.schedule, case.costs, {})
        line = simulate(case.schedule, planned.durations_s, case.costs.transfer_s, planned.skipped)
        name = f"plain, M = {case.schedule.num_microbatches}"
        before = Track(name, case.schedule, line.start_s, line.end_s, {}, None, planned.skipped)
    return [before, after]


def _facts(found: PlanAnswer) -> list[tuple[str, str]]:
    facts = []
    for step in found.steps:
        bubble = "" if step.bubble_ratio is None else f", bubble {percent(step.bubble_ratio)}"
        name = f"plain, M = {step.num_microbatches}" if step.name == "fewer" else step.name
        facts.append((name, f"{milliseconds(step.makespan_s)} ms{bubble}"))
    return [*facts, ("at equal gradients", verdict(found))]


def _write_json(outputs: Outputs, data: dict[str, Any]) -> bool:
    """Write the JSON that was asked for; whether the text is wanted, too."""
    text = json.dumps(data, indent=1) + "\n"
    if outputs.json == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return False
    if outputs.json is not None:
        write_atomically(outputs.json, text)
    return True


def _write_files(request: PlanRequest, found: PlanAnswer, tracks: list[Track]) -> None:
    outputs = request.outputs
    view = View(headline(found.plan), _facts(found), tracks)
    for write, path in ((write_html, outputs.html), (write_png, outputs.png), (write_trace, outputs.trace)):
        if path is not None:
            write(view, path)
    if outputs.save is not None:
        found.plan.save(outputs.save)


@contextmanager
def _progress() -> Iterator[Status]:
    """A moving line on standard error while planning takes its time; nothing where that is no terminal."""
    with Status("planning", console=Console(stderr=True)) as status:
        yield status

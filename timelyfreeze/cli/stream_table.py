"""The table at the end of a job without a flush: beside 1F1B with one, and beside 1F1B without its bubble."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise

from rich.table import Table

from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.metrics import StepRow, interpolate
from timelyfreeze.cli.plan_text import new_table
from timelyfreeze.cli.stream_counts import StageCounts, stage_counts, streaming_steps
from timelyfreeze.cli.table import (
    PLAIN,
    RunSummary,
    as_lines,
    comparison_times,
    milliseconds,
    number,
    seconds,
    summarize_run,
)


def render_stream(config: TrainConfig, rows: dict[str, list[StepRow]]) -> str:
    """Both tables and what they say as plain text.

    Args:
        rows: by run; the run without a flush, and, if there is one, the plain run before it.
    """
    own = rows[config.schedule]
    middle = streaming_steps(own)
    steady = middle or {row.step for row in own if row.timed}
    tokens = config.batch_size * config.sequence_length
    runs = [
        summarize_run(rows[name], steady, num_microbatches=config.microbatches, tokens_per_step=tokens)
        for name in (PLAIN, config.schedule)
        if name in rows
    ]
    counts = stage_counts(own, config.num_accumulated)
    lines = [*as_lines(_runs(config, runs)), "", *as_lines(_stages(counts)), ""]
    if len(runs) > 1:
        lines += [*textwrap.wrap(sooner(config, *runs), 88), ""]
    return "\n".join([*lines, _times_note(config, len(middle), len(steady)), *_notes(config, runs, own)]) + "\n"


def reached_s(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """When a validation loss was reached, on straight lines between validations; None: never.

    >>> reached_s([(0.0, 5.0), (10.0, 3.0), (20.0, 2.0)], 2.5)
    15.0
    """
    for (begin_s, before), (end_s, after) in pairwise(curve):
        if before > loss >= after:
            return begin_s + (end_s - begin_s) * (before - loss) / (before - after)
    return curve[0][0] if curve and curve[0][1] <= loss else None


def sooner(config: TrainConfig, flushed: RunSummary, own: RunSummary) -> str:
    """When the run without a flush had the final validation loss of the one with it."""
    name, loss = config.schedule, flushed.final_loss
    assert loss is not None
    assert own.final_loss is not None
    at_s = reached_s(own.curve, loss)
    goal = f"{config.flushed_schedule}'s final validation loss ({loss:.3f})"
    if at_s is None:
        beside = interpolate(flushed.curve, own.elapsed_s)
        then = "" if beside is None else f", when {config.flushed_schedule}'s was {beside:.3f}"
        return f"{name} did not reach {goal}: its own is {own.final_loss:.3f} after {seconds(own.elapsed_s)} s{then}."
    text = f"{name} reached {goal} after {seconds(at_s)} s of {seconds(flushed.elapsed_s)} s"
    text += f": {flushed.elapsed_s / at_s:.2f}x sooner" if at_s else ""
    return f"{text}; after {own.num_steps} steps its own is {own.final_loss:.3f}."


def _runs(config: TrainConfig, runs: Sequence[RunSummary]) -> Table:
    num_steps = max(run.num_steps for run in runs)
    headings = ["batch\nms", "against\nflush", "of\nideal", "tokens\n/s", "total\ns", f"loss at\n{num_steps} st."]
    times = comparison_times(runs)
    headings += [f"loss at\n{seconds(time)} s" for time in times]
    table = new_table("run", *headings, "kept\nMB")
    flush_s = runs[0].step_s if runs[0].run == PLAIN else None
    efficiency = config.microbatches / (config.microbatches + config.stages - 1)
    for run in runs:
        name = f"{config.flushed_schedule}, flush" if run.run == PLAIN else run.run
        speed = flush_s / run.step_s if flush_s and run.step_s else None
        cells = [milliseconds(run.step_s), *(("-", "-") if speed is None else _ratios(speed, efficiency))]
        cells += [number(run.tokens_per_s, 0), seconds(run.elapsed_s), number(run.final_loss, 3)]
        cells += [number(interpolate(run.curve, time), 3) for time in times]
        cells.append(number(None if run.saved_bytes is None else run.saved_bytes / 1e6, 1))
        table.add_row(name, *cells)
    return table


def _ratios(speed: float, efficiency: float) -> tuple[str, str]:
    return f"{speed:.2f}x", f"{100 * speed * efficiency:.0f}%"


def _stages(counts: Sequence[StageCounts]) -> Table:
    table = new_table("stage", "drift", "bound", "updates", "skipped")
    for stage, one in enumerate(counts):
        table.add_row(str(stage), *map(str, (one.drift, one.bound, one.updates, one.skipped)))
    return table


def _times_note(config: TrainConfig, num_middle: int, num_timed: int) -> str:
    """Which batches' times count."""
    if not num_timed:
        return "No times: of such a short run bytes were counted in all batches. Give it more --steps."
    which = "in the middle of a stream" if num_middle else "drained so often that none is in the middle of a stream"
    return f"batch: median over the same {num_middle or num_timed} batches of each run, {config.schedule}'s {which}."


def _notes(config: TrainConfig, runs: Sequence[RunSummary], own: Sequence[StepRow]) -> list[str]:
    name = config.schedule
    drains = sum(row.updates is not None for row in own)
    lines = []
    if len(runs) > 1:
        share = f"{config.microbatches}/({config.microbatches} + {config.stages} - 1)"
        lines.append(f"ideal: the flushed run without its bubble, {share} of its time.")
    lines += [
        f"total: all batches, with the {drains} times that {name} was drained, to validate, save and count.",
        "loss: on held-out text, nats a byte, after equal steps and after equal training time. kept: the most bytes",
        "  held for backward at once.",
        f"drift: updates of a stage between a micro-batch's forward and backward; one is made every "
        f"{config.num_accumulated} backwards.",
        f"Copies of a stage's weights that were made: {sum(row.weight_copies or 0 for row in own)}.",
    ]
    return lines

"""The comparison of ``timelyfreeze plan --compare`` for people."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from timelyfreeze.cli.compare import PLAIN, Comparison, Row
from timelyfreeze.cli.plan_text import milliseconds, number, percent, say

_FAINT = "bright_black"
_WIDE = 80  # columns from which on all numbers are shown
_TIE = 1.005  # gains below half a percent are none


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the table, what its columns mean, what was refused, and which row is best."""
    reference = comparison.reference
    console.print(_table(comparison, console.width >= _WIDE))
    say(
        console,
        f"Groups of equal caps see about as many gradients. speed: against a plain {reference} step in which every "
        "parameter sees as many micro-batches (live; between whole numbers of them on a straight line). * best at "
        "its cap.",
        style=_FAINT,
    )
    if any(row.stages_per_rank != comparison.rows[0].stages_per_rank for row in comparison.rows):
        say(console, "A rank holds the same part of the model in every row, whatever its stages.", style=_FAINT)
    for name, reason in comparison.refused.items():
        say(console, f"Left out: {name}, {reason}", style=_FAINT)
    console.print()
    say(console, conclusion(comparison), style="bold")
    say(console, gains(comparison))


def conclusion(comparison: Comparison) -> str:
    """Which row is best for these costs, and when freezing pays and when a smaller batch does."""
    groups = [cap for cap in comparison.groups() if cap != 0]
    winners = [comparison.best(cap) for cap in groups]
    frozen = [row for row in winners if row.mode != PLAIN and row.speed_at_equal_gradients >= _TIE]
    if not frozen:
        first = max(winners, key=lambda row: round(row.speed_at_equal_gradients, 6))
        speed = first.speed_at_equal_gradients
        gain = f" of {first.schedule}, {speed:.2f}x at equal gradients" if speed >= _TIE else ""
        return (
            f"Best for these costs: a plain step{gain}. No plan is faster than a plain step in which every parameter "
            "sees as many gradients: where a step is too long, take a smaller batch."
        )
    best = max(frozen, key=lambda row: row.speed_at_equal_gradients)
    text = f"Best for these costs: {_describe(best)}, {best.speed_at_equal_gradients:.2f}x at equal gradients. "
    if len(frozen) == len(winners):
        return text + "Freezing pays here" + (", at every cap shown." if len(winners) > 1 else ".")
    pays = ", ".join(number(row.cap) for row in frozen)
    return text + f"Freezing pays at cap {pays}; at the others a smaller batch, plain with fewer micro-batches, does."


def gains(comparison: Comparison) -> str:
    """What freezing gains in each schedule, beside the bubble that it has to fill."""
    parts = []
    for name in dict.fromkeys(row.schedule for row in comparison.rows):
        rows = [row for row in comparison.rows if row.schedule == name]
        plain = next(row for row in rows if row.mode == PLAIN)
        parts.append(f"{max(row.gain for row in rows):.2f}x in {name} (bubble {percent(plain.step.bubble_ratio)})")
    return (
        f"Over plain steps of the same schedule with as many gradients, freezing gains at most {', '.join(parts)}: it "
        "fills bubbles, so it gains with more ranks and fewer micro-batches, has less to give where a schedule has no "
        "bubble, and beyond a moderate cap loses to the smaller batch."
    )


def _describe(row: Row) -> str:
    what = "plain" if row.mode == PLAIN else f"mode {row.mode}" + ("" if row.cap is None else f" at cap {row.cap:g}")
    return f"{row.schedule}, {what}, M = {row.step.num_microbatches}"


def _table(comparison: Comparison, is_wide: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1 if is_wide else 0, 0, 0))
    table.add_column("schedule", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    headings = ["cap", "M", "live", "step\nms", "ms a\nlive", "against\nplain", "speed", "bubble"]
    for heading in headings if is_wide else [*headings[:4], "speed"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for cap, rows in comparison.groups().items():
        best = comparison.best(cap) if cap != 0 else None  # with nothing frozen there is nothing to choose
        for row in rows:
            table.add_row(*_cells(row, row is best, is_wide), style="bold" if row is best else "")
        table.add_section()
    return table


def _cells(row: Row, is_best: bool, is_wide: bool) -> list[str]:
    name = row.schedule if row.stages_per_rank == 1 else f"{row.schedule} ({row.stages_per_rank})"
    cells = [name, row.mode, "-" if not row.cap else number(row.cap), str(row.step.num_microbatches), number(row.live)]
    cells.append(milliseconds(row.step.makespan_s))
    speed = f"{'*' if is_best else ''}{row.speed_at_equal_gradients:.2f}x" if row.equal_time_s is not None else "-"
    if not is_wide:
        return [*cells, speed]
    return [*cells, milliseconds(row.time_per_live_s), f"{row.speed:.2f}x", speed, percent(row.step.bubble_ratio)]

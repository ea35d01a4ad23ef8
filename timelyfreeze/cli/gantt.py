"""A timeline as text: one row a rank, as wide as the terminal, true to time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from timelyfreeze.schedule import Action, Kind
from timelyfreeze.viz.view import Track

# Fill and colour of what an action does. The fills alone tell it, for logs and for those who see no colours.
_FORWARD = ("░", "blue")
_WHOLE = ("█", "green")
_PART = ("▓", "yellow")
_INPUT = ("▒", "cyan")
_WEIGHT = ("▚", "magenta")
_SKIPPED = ("×", "red")
_IDLE = ("·", "bright_black")
_MEANINGS = {
    _FORWARD: "forward",
    _WHOLE: "backward",
    _PART: "backward, partly frozen",
    _INPUT: "input gradient only",
    _WEIGHT: "weight gradient",
    _SKIPPED: "no backward: below the cut",
    _IDLE: "idle",
}
_BETWEEN = ":"  # stage and micro-batch in a label

_MIN_COLUMNS = 16
_MAX_RANKS = 32
_TICK_COLUMNS = 12  # at least, between two numbers of the axis


def draw_gantt(track: Track, *, width: int, span_s: float) -> list[Text]:
    """Draw a timeline, a line a rank and one for the axis; every line ends with the share of time that is idle.

    An action begins with its micro-batch's number where there is room; where ranks hold several stages, with
    ``stage:micro-batch``, and every other stage of a rank is bright. What lasts less than half a column may vanish.

    Args:
        width: columns in all.
        span_s: seconds from the left edge to the right, the same for timelines that are to be compared.
    """
    num_ranks = track.schedule.num_ranks
    shown = range(min(num_ranks, _MAX_RANKS))
    label_width = len(f"rank {num_ranks - 1}")
    num_columns = max(_MIN_COLUMNS, width - label_width - 9)
    column_s = max(span_s, 1e-9) / num_columns
    lines = []
    for rank in shown:
        line = Text(f"{f'rank {rank}':<{label_width}} ", no_wrap=True)
        line.append("│", style="bright_black")
        line.append_text(_row(track, rank, num_columns, column_s))
        line.append("│", style="bright_black")
        line.append(f"{100 * _idle_ratio(track, rank):4.0f}%", style="bright_black")
        lines.append(line)
    if num_ranks > _MAX_RANKS:
        lines.append(Text(f"and {num_ranks - _MAX_RANKS} more ranks; --html shows all", style="bright_black"))
    lines.append(Text(" " * (label_width + 2) + _axis(num_columns, column_s) + "  idle", style="bright_black"))
    return lines


def gantt_legend(drawn: Sequence[Text], width: int) -> list[Text]:
    """What the fills in lines of ``draw_gantt`` mean, in lines of ``width``; those that do not occur are left out."""
    there = set().union(*(line.plain for line in drawn))
    lines = [Text()]
    for (fill, colour), meaning in _MEANINGS.items():
        if fill in there:
            entry = Text(2 * fill, style=colour)
            entry.append(f" {meaning}   ", style="default")
            if lines[-1] and lines[-1].cell_len + entry.cell_len - 3 > width:
                lines.append(Text())
            lines[-1].append_text(entry)
    if any(_BETWEEN in line.plain for line in drawn):
        lines.append(Text(f"1{_BETWEEN}2 stage 1, micro-batch 2; every other stage of a rank is bright"))
    for line in lines:
        line.rstrip()
    return lines


def _look(track: Track, action: Action) -> tuple[str, str]:
    if action in track.skipped:
        return _SKIPPED
    if action.kind is Kind.F:
        return _FORWARD
    if action.kind is Kind.I:
        return _INPUT
    ratio = track.ratios.get(action, 0.0)
    if ratio <= 0:
        return _WHOLE if action.kind is Kind.B else _WEIGHT
    return _PART if ratio < 1 else _INPUT


def _row(track: Track, rank: int, num_columns: int, column_s: float) -> Text:
    last = min(num_columns, round(track.makespan_s / column_s))
    stages = sorted({action.stage for action in track.schedule.ranks[rank]})
    cells = [_IDLE] * last + [(" ", "")] * (num_columns - last)
    for action in track.schedule.ranks[rank]:
        if action not in track.start_s:
            continue
        fill, colour = _look(track, action)
        colour = f"bright_{colour}" if stages.index(action.stage) % 2 else colour
        begin = min(round(track.start_s[action] / column_s), num_columns)
        end = min(round(track.end_s[action] / column_s), num_columns)
        if action in track.skipped:
            # It takes no time: the mark goes where it is passed, or where its rank waited for that.
            place = next((column for column in (begin, begin - 1) if 0 <= column < last), None)
            if place is not None and cells[place] == _IDLE:
                cells[place] = (fill, colour)
            continue
        cells[begin:end] = [(fill, colour)] * (end - begin)
        label = str(action.microbatch)
        if len(stages) > 1 and end - begin > len(f"{action.stage}{_BETWEEN}{label}"):
            label = f"{action.stage}{_BETWEEN}{label}"
        if end - begin > len(label):
            cells[begin : begin + len(label)] = [(character, f"{colour} reverse") for character in label]
    row = Text()
    for character, style in cells:
        row.append(character, style=style)
    return row


def _idle_ratio(track: Track, rank: int) -> float:
    busy_s = sum(
        track.end_s[action] - track.start_s[action]
        for action in track.schedule.ranks[rank]
        if action in track.start_s and action not in track.skipped
    )
    return max(0.0, 1 - busy_s / track.makespan_s) if track.makespan_s > 0 else 0.0


def _axis(num_columns: int, column_s: float) -> str:
    """Milliseconds at round numbers, the unit behind the last."""
    step_ms = next(
        mantissa * 10.0**power
        for power in range(-9, 12)
        for mantissa in (1, 2, 5)
        if mantissa * 10.0**power >= _TICK_COLUMNS * column_s * 1e3
    )
    axis = ""
    for number in range(num_columns):
        column = round(number * step_ms / (column_s * 1e3))
        label = f"{number * step_ms:g}"
        if column + len(label) + 3 > num_columns:
            break
        axis = axis.ljust(column) + label
    return (axis + " ms").ljust(num_columns)

"""The page's pictures as a PNG, drawn by matplotlib without its global state."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from timelyfreeze.errors import problem
from timelyfreeze.files import write_atomically
from timelyfreeze.schedule import Action, Schedule
from timelyfreeze.viz.layout import lay_out
from timelyfreeze.viz.palette import light_palette
from timelyfreeze.viz.png_panels import draw_heat, draw_losses
from timelyfreeze.viz.png_track import draw_track
from timelyfreeze.viz.view import View

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_WIDTH, _LEFT, _RIGHT, _TOP, _LINE, _LEGEND = 14.0, 0.85, 0.3, 0.3, 0.24, 0.3
_TITLE, _X_LABELS, _PHASES = 0.5, 0.45, 0.3
_DPI = 120
_LEGEND_COLUMNS = 7
_FACTS_PER_LINE = 150  # letters


@dataclass(frozen=True)
class _Panel:
    """One part of the picture: its plot with what it needs above and below, in inches; ``draw`` is given its axes."""

    above: float
    height: float
    below: float
    draw: Callable[[Axes], None]


def write_png(view: View, path: str | PathLike[str]) -> None:
    """Write tracks, heat map and loss curves as one picture, whole or not at all.

    Raises:
        ImportError: matplotlib is not installed; it comes with ``pip install timelyfreeze[viz]``.
        OSError: the file cannot be written.

    ::

        write_png(View("My plan", [("cap", "0.3")], tracks_of_plan(plan)), "plan.png")
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "Install it: pip install 'timelyfreeze[viz]'."
        raise ImportError(problem("a PNG needs matplotlib, which is not installed", hint=hint)) from error
    facts = "     ".join(f"{name}: {value}" for name, value in view.facts)
    lines = textwrap.wrap(facts, _FACTS_PER_LINE)
    panels = _panels(view)
    legend = _legend(view) if view.tracks else []
    header = _TOP + _LINE + len(lines) * _LINE + -(-len(legend) // _LEGEND_COLUMNS) * _LEGEND
    height = header + sum(panel.above + panel.height + panel.below for panel in panels) + _TOP
    figure = Figure(figsize=(_WIDTH, height), facecolor=light_palette()["page"])
    FigureCanvasAgg(figure)  # the figure keeps it
    _draw_header(figure, view, lines, legend)
    top = height - header
    for panel in panels:
        top -= panel.above + panel.height
        plot = (_LEFT / _WIDTH, top / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, panel.height / height)
        panel.draw(figure.add_axes(plot))
        top -= panel.below
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor=figure.get_facecolor())
    write_atomically(path, buffer.getvalue())


def _panels(view: View) -> list[_Panel]:
    panels = []
    longest_s = max((track.makespan_s for track in view.tracks), default=0.0)
    plot_width = _WIDTH - _LEFT - _RIGHT
    drawn: list[tuple[Schedule, Mapping[Action, float]]] = []
    heats = []
    for track in view.tracks:
        layout = lay_out(track)
        is_last = track is view.tracks[-1]
        row = min(0.32, max(0.09, 4.0 / track.schedule.num_ranks))
        size = (plot_width, row)
        draw = partial(draw_track, track=track, layout=layout, longest_s=longest_s, size=size, is_last=is_last)
        panels.append(_Panel(_TITLE, track.schedule.num_ranks * row, _X_LABELS if is_last else 0.0, draw))
        # A measured step mostly has its plan's ratios.
        if track.ratios and (track.schedule, track.ratios) not in drawn:
            drawn.append((track.schedule, track.ratios))
            height = track.schedule.num_stages * min(0.24, max(0.05, 3.2 / track.schedule.num_stages))
            heats.append(
                _Panel(_TITLE, height, _X_LABELS, partial(draw_heat, track=track, layout=layout, height=height))
            )
    panels += heats
    if view.steps:
        panels.append(_Panel(_TITLE + _PHASES, 2.6, _X_LABELS, partial(draw_losses, steps=view.steps)))
    return panels


def _draw_header(figure: Figure, view: View, lines: list[str], legend: list[tuple[str, Artist]]) -> None:
    palette = light_palette()
    height = figure.get_figheight()
    left = 0.3 / _WIDTH

    def write(text: str, below: float, **style: Any) -> None:
        # parse_math: a dollar sign in a title is a dollar sign.
        figure.text(left, 1 - below / height, text, va="top", parse_math=False, **style)

    write(view.title, _TOP, fontsize=15, fontweight="bold", color=palette["ink"])
    for number, line in enumerate(lines):
        write(line, _TOP + 0.42 + number * _LINE, fontsize=9.5, color=palette["muted"])
    if legend:
        _draw_legend(figure, legend, 1 - (_TOP + 0.46 + len(lines) * _LINE) / height)


def _legend(view: View) -> list[tuple[str, Artist]]:
    """What occurs in the timelines, in words with a sample each."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    palette = light_palette()
    kinds = {action.kind.value for track in view.tracks for action in track.schedule.actions}
    entries: list[tuple[str, str, Artist]] = [
        ("F", "forward", Patch(facecolor=palette["forward"])),
        ("B", "backward, all trained", Patch(facecolor=palette["backward-live"])),
        ("B", "backward, all frozen", Patch(facecolor=palette["backward-frozen"])),
        ("I", "input gradient", Patch(facecolor=palette["input"])),
        ("W", "weight gradient, all trained", Patch(facecolor=palette["weight-live"])),
        ("W", "weight gradient, all frozen", Patch(facecolor=palette["weight-frozen"])),
    ]
    shown: list[tuple[str, Artist]] = [(label, handle) for kind, label, handle in entries if kind in kinds]
    if any(track.schedule.num_stages > track.schedule.num_ranks for track in view.tracks):
        shown.append(("lower bar: later stage of its rank", Patch(facecolor="none")))
    if any(track.cuts is not None and any(track.cuts) for track in view.tracks):
        shown.append(("cut: no backward below", Line2D([], [], color=palette["cut"], linewidth=3)))
    if any(track.skipped for track in view.tracks):
        ring = Line2D([], [], color=palette["skipped"], marker="o", markerfacecolor=palette["page"], linestyle="none")
        shown.append(("skipped", ring))
    shown.append(("critical path", Line2D([], [], color=palette["accent"], linewidth=2)))
    return shown


def _draw_legend(figure: Figure, legend: list[tuple[str, Artist]], top: float) -> None:
    rows = -(-len(legend) // _LEGEND_COLUMNS)
    labels, handles = zip(*legend, strict=True)
    figure.legend(
        *(handles, labels),
        loc="upper left",
        bbox_to_anchor=(0.3 / _WIDTH, top),
        ncols=-(-len(legend) // rows),
        frameon=False,
        fontsize=9,
        labelcolor=light_palette()["muted"],
        borderpad=0,
        borderaxespad=0,
        handlelength=1.4,
        columnspacing=1.8,
    )

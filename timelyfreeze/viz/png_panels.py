"""The PNG's heat map and loss curves."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from timelyfreeze.viz.layout import Layout
from timelyfreeze.viz.palette import light_palette
from timelyfreeze.viz.view import StepPoint, Track

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh


def draw_heat(axes: Axes, track: Track, layout: Layout, height: float) -> None:
    """Freeze ratios by stage and micro-batch with the line of the cuts, on axes ``height`` inches high."""
    from matplotlib.colors import LinearSegmentedColormap

    palette = light_palette()
    num_stages, num_microbatches = track.schedule.num_stages, track.schedule.num_microbatches
    grid = np.full((num_stages, num_microbatches), np.nan)
    for action, ratio in zip(layout.graph.actions, layout.ratio, strict=True):
        if np.isfinite(ratio):
            grid[action.stage, action.microbatch] = ratio
    colours = LinearSegmentedColormap.from_list("freeze", [palette["backward-live"], palette["backward-frozen"]])
    edges = np.arange(num_microbatches + 1) - 0.5, np.arange(num_stages + 1) - 0.5
    gap: dict[str, Any] = (
        {"edgecolors": palette["page"], "linewidth": 1.0} if num_microbatches <= 64 and num_stages <= 32 else {}
    )
    mesh = axes.pcolormesh(*edges, grid, cmap=colours, vmin=0.0, vmax=1.0, **gap)
    axes.set_ylim(num_stages - 0.5, -0.5)
    if track.cuts is not None:
        heights = np.array(track.cuts) - 0.5
        axes.stairs(heights, edges[0], baseline=None, color=palette["cut"], linewidth=1.6, clip_on=False)
    _style(axes, f"freeze ratio, {track.name}", "micro-batch", "stage")
    for axis, count in ((axes.xaxis, num_microbatches), (axes.yaxis, num_stages)):
        axis.set_ticks(range(0, count, max(1, -(-count // 16))))
    _draw_scale(axes, mesh, height)


def _draw_scale(axes: Axes, mesh: QuadMesh, height: float) -> None:
    """What the shades mean: at the right of the title's line."""
    palette = light_palette()
    place = (0.83, 1 + 0.12 / height, 0.09, 0.11 / height)  # of the plot's width and height
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes that are drawn have one
    figure.colorbar(mesh, cax=axes.inset_axes(place), orientation="horizontal", ticks=[]).outline.set_visible(False)
    style: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 8.5, "color": palette["muted"], "va": "center"}
    axes.text(place[0] - 0.006, place[1] + place[3] / 2, "0 %", ha="right", **style)
    axes.text(place[0] + place[2] + 0.006, place[1] + place[3] / 2, "100 % frozen", ha="left", **style)


def draw_losses(axes: Axes, steps: list[StepPoint]) -> None:
    """Loss over steps of every run, validation losses as rings, phases of the run that has most as bands."""
    palette = light_palette()
    runs: dict[str, list[StepPoint]] = {}
    for point in sorted(steps, key=lambda point: point.step):
        runs.setdefault(point.run, []).append(point)
    looks = [("muted", "-"), ("backward-live", "-"), ("weight-live", "--"), ("input", ":"), ("ink", "-.")]
    for number, (name, points) in enumerate(runs.items()):
        colour, dash = looks[number % len(looks)]
        style: dict[str, Any] = {"color": palette[colour], "linewidth": 1.3}
        losses = [np.nan if point.loss is None else point.loss for point in points]
        # A leading underscore would keep a run out of the legend.
        (line,) = axes.plot([point.step for point in points], losses, linestyle=dash, **style)
        line.set_label(f"\u200b{name}")
        seen = [(point.step, point.validation_loss) for point in points if point.validation_loss is not None]
        if seen:
            (rings,) = axes.plot(*zip(*seen, strict=True), "o:", mfc=palette["page"], markersize=4.5, **style)
            rings.set_label(f"\u200b{name}, validation")
    _draw_phases(axes, list(runs.values()))
    _style(axes, "loss and phase over steps", "step", "loss", pad=26)
    axes.grid(axis="y", color=palette["rule"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0)
    legend = axes.legend(frameon=False, fontsize=9, labelcolor=palette["muted"], loc="upper right")
    for label in legend.get_texts():
        label.set_parse_math(False)


def _draw_phases(axes: Axes, runs: list[list[StepPoint]]) -> None:
    """Every second phase is shaded. Names of neighbours stand on different lines, so that short ones have room too."""
    palette = light_palette()
    phases = [[(phase, list(group)) for phase, group in groupby(run, key=lambda point: point.phase)] for run in runs]
    bands = max(phases, key=len)
    for number, (phase, points) in enumerate(bands):
        first = points[0].step
        last = bands[number + 1][1][0].step if number + 1 < len(bands) else points[-1].step
        if phase and number % 2 == 0:
            axes.axvspan(first, last, color=palette["lane"], zorder=0, linewidth=0)
        text: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "va": "bottom", "color": palette["muted"]}
        height = 1.01 + 0.06 * (number % 2)
        axes.text(first, height, phase.replace("_", " "), fontsize=8, parse_math=False, **text)


def _style(axes: Axes, title: str, x_label: str, y_label: str, pad: float = 6) -> None:
    palette = light_palette()
    # y: else it would move above whatever stands on its line.
    axes.set_title(title, loc="left", fontsize=10.5, color=palette["ink"], pad=pad, y=1.0, parse_math=False)
    axes.set_xlabel(x_label, fontsize=9, color=palette["muted"])
    axes.set_ylabel(y_label, fontsize=9, color=palette["muted"])
    axes.tick_params(length=0, labelsize=8.5, labelcolor=palette["muted"])
    axes.spines[:].set_visible(False)

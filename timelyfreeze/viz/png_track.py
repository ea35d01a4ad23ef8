"""The PNG's timelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from timelyfreeze.viz.layout import Floats, Layout
from timelyfreeze.viz.palette import Palette, light_palette
from timelyfreeze.viz.text import format_duration, format_ratio, time_unit
from timelyfreeze.viz.view import Track

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HALF = 0.42  # of a row: half a bar's height
_MANY = 4000  # actions of a track; from here on the edges and rings of single ones would only blur
# Inches.
_LETTER = 0.068  # width of a label's letter
_LABELLED_ROW = 0.17  # rows lower than this have no labels


def draw_track(
    axes: Axes, track: Track, layout: Layout, longest_s: float, size: tuple[float, float], is_last: bool
) -> None:
    """Draw one track.

    Args:
        longest_s: the end of the time axis that all tracks share, seconds.
        size: width of the plot and height of a row, inches.
        is_last: whether the time axis is written below it.
    """
    from matplotlib.collections import PolyCollection

    palette = light_palette()
    unit, per_s = time_unit(longest_s)
    num_ranks = track.schedule.num_ranks
    longest = (longest_s * per_s) or 1.0
    axes.set_xlim(0.0, longest)
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.barh(range(num_ranks), longest, height=2 * _HALF, color=palette["lane"], zorder=0)
    rank = np.array(layout.graph.rank, dtype=np.float64)
    start, end = layout.start_s * per_s, layout.end_s * per_s
    runs = ~layout.is_skipped
    top = _HALF - 2 * _HALF * layout.height  # rows grow downwards
    outline = ((start, top), (end, top), (end, _HALF), (start, _HALF))
    corners = np.stack([np.stack([x, rank + y], axis=-1) for x, y in outline], axis=1)
    fills = palette.fills([action.kind for action in layout.graph.actions], layout.ratio)
    edge: dict[str, Any] = {"edgecolors": palette["page"], "linewidths": 0.5 if len(rank) < _MANY else 0.0}
    axes.add_collection(PolyCollection(list(corners[runs]), facecolors=fills[runs], zorder=1, **edge))
    _draw_marks(axes, layout, rank, start, end, palette)
    width, row = size
    if row >= _LABELLED_ROW:
        _label_bars(axes, layout, start, end, fills, width / longest)
    axes.axvline(track.makespan_s * per_s, color=palette["muted"], linewidth=0.8, linestyle=(0, (3, 3)))
    duration, bubble = format_duration(track.makespan_s, longest_s), format_ratio(track.bubble_ratio)
    title = f"{track.name}     {duration}     bubble {bubble}"
    axes.set_title(title, loc="left", fontsize=10.5, color=palette["ink"], pad=6, parse_math=False)
    axes.set_yticks(range(0, num_ranks, max(1, -(-num_ranks // 16))))
    axes.set_ylabel("rank", fontsize=9, color=palette["muted"])
    axes.set_xlabel(f"time ({unit})" if is_last else "", fontsize=9, color=palette["muted"])
    axes.tick_params(length=0, labelsize=8.5, labelcolor=palette["muted"], labelbottom=is_last)
    axes.spines[:].set_visible(False)


def _draw_marks(axes: Axes, layout: Layout, rank: Floats, start: Floats, end: Floats, palette: Palette) -> None:
    """Cuts, skipped actions and, along the lower edge of the bars, the critical path."""
    cut, skipped, path = layout.ends_backward, layout.is_skipped, layout.path
    axes.vlines(end[cut], rank[cut] - _HALF, rank[cut] + _HALF, color=palette["cut"], linewidth=2.2, zorder=3)
    if len(rank) < _MANY:
        ring: dict[str, Any] = {"facecolor": palette["page"], "edgecolor": palette["skipped"], "linewidth": 1.0}
        axes.scatter(start[skipped], rank[skipped], s=14, zorder=3, **ring)
    times = np.stack([start[path], end[path]], axis=-1).ravel()
    axes.plot(times, np.repeat(rank[path] + 0.9 * _HALF, 2), color=palette["accent"], linewidth=1.6, zorder=4)


def _label_bars(axes: Axes, layout: Layout, start: Floats, end: Floats, fills: Floats, inches_per_unit: float) -> None:
    """Names on the bars that have room for them: the action's, or else its micro-batch's."""
    palette = light_palette()
    for node, action in enumerate(layout.graph.actions):
        room = (end[node] - start[node]) * inches_per_unit
        texts = [text for text in (str(action), str(action.microbatch)) if len(text) * _LETTER + 0.06 <= room]
        if texts and not layout.is_skipped[node]:
            middle = float(start[node] + end[node]) / 2
            colour = palette.label(fills[node])
            row = layout.graph.rank[node] + _HALF * (1 - layout.height[node])
            axes.text(middle, row, texts[0], ha="center", va="center", fontsize=7.5, color=colour)

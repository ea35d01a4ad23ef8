"""A view as the JSON value that the page's scripts read: arrays instead of objects, whole numbers where they do."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import numpy as np

from timelyfreeze.viz.layout import bar_heights, lay_out
from timelyfreeze.viz.text import time_unit
from timelyfreeze.viz.view import StepPoint, Track, View

# Times are whole 1e-9 s, ratios whole 1e-4: both beyond what can be seen or is shown.
_TICKS_PER_S = 1e9
_RATIO_STEPS = 1e4
_NONE = -1


def page_data(view: View) -> dict[str, Any]:
    """Everything that the page draws.

    >>> page_data(View("empty", [], []))["tracks"]
    []
    """
    longest_s = max((track.makespan_s for track in view.tracks), default=0.0)
    unit, per_s = time_unit(longest_s)
    return {
        "unit": unit,
        "ticks_per_unit": _TICKS_PER_S / per_s,
        "tracks": [_track(track) for track in view.tracks],
        "runs": _runs(view.steps),
    }


def _track(track: Track) -> dict[str, Any]:
    layout = lay_out(track)
    actions = layout.graph.actions
    measured = track.measured_s
    return {
        "name": track.name,
        "num_stages": track.schedule.num_stages,
        "num_microbatches": track.schedule.num_microbatches,
        "bar_heights": bar_heights(track.schedule),  # by stage
        "makespan_s": track.makespan_s,
        "bubble_ratio": track.bubble_ratio,
        # By action, rank after rank; rank_sizes says how many of them each rank has.
        "rank_sizes": [len(order) for order in track.schedule.ranks],
        "stage": [action.stage for action in actions],
        "kind": "".join(action.kind.value for action in actions),
        "microbatch": [action.microbatch for action in actions],
        "start": _whole(layout.start_s, _TICKS_PER_S),
        "length": _whole(layout.end_s - layout.start_s, _TICKS_PER_S),
        "ratio": _whole(layout.ratio, _RATIO_STEPS),
        "measured": None
        if measured is None
        else _whole(np.array([measured.get(action, np.nan) for action in actions]), _TICKS_PER_S),
        # Indices of actions.
        "skipped": np.flatnonzero(layout.is_skipped).tolist(),
        "cut_here": np.flatnonzero(layout.ends_backward).tolist(),
        "path": layout.path,
        "cuts": None if track.cuts is None else list(track.cuts),
    }


def _whole(values: np.ndarray[Any, np.dtype[np.float64]], per_unit: float) -> list[int]:
    """Whole multiples of 1 / per_unit; -1 for NaN."""
    scaled = np.where(np.isnan(values), _NONE, np.rint(values * per_unit))
    # Python's own whole numbers: times of any size fit.
    return [int(value) for value in scaled.tolist()]


def _runs(steps: list[StepPoint]) -> list[dict[str, Any]]:
    """The points of every run, in the order of steps; runs in the order in which they first appear."""
    runs: dict[str, list[StepPoint]] = {}
    for point in steps:
        runs.setdefault(point.run, []).append(point)
    result = []
    for name, points in runs.items():
        points.sort(key=lambda point: point.step)
        phases = [(phase, list(group)) for phase, group in groupby(points, key=lambda point: point.phase)]
        result.append(
            {
                "name": name,
                "step": [point.step for point in points],
                "loss": [_number(point.loss) for point in points],
                "validation_loss": [_number(point.validation_loss) for point in points],
                "step_time_s": [_number(point.step_time_s) for point in points],
                "freeze_ratio": [_number(point.freeze_ratio) for point in points],
                "phases": [[phase, group[0].step, group[-1].step] for phase, group in phases if phase],
            }
        )
    return result


def _number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity: a diverged loss is a gap in its line."""
    return value if value is not None and math.isfinite(value) else None

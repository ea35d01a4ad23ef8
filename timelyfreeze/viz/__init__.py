"""Timelines to look at: as one self-contained HTML page, as a PNG and as a trace for Perfetto. No torch."""

from __future__ import annotations

from timelyfreeze.viz.critical import critical_path
from timelyfreeze.viz.page import write_html
from timelyfreeze.viz.png import write_png
from timelyfreeze.viz.trace import write_trace
from timelyfreeze.viz.view import StepPoint, Track, View, tracks_of_plan

__all__ = [
    "StepPoint",
    "Track",
    "View",
    "critical_path",
    "tracks_of_plan",
    "write_html",
    "write_png",
    "write_trace",
]

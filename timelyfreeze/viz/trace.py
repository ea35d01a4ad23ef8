"""Timelines as Chrome trace JSON, which Perfetto and Chrome's own viewer open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from typing import Any

from timelyfreeze.files import write_atomically
from timelyfreeze.schedule.graph import NOTHING
from timelyfreeze.viz.layout import Layout, lay_out
from timelyfreeze.viz.view import Track, View

_US_PER_S = 1e6
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def write_trace(view: View, path: str | PathLike[str]) -> None:
    """Write the tracks in the Trace Event Format, whole or not at all. ui.perfetto.dev opens the file.

    A track is a process, a rank its thread. An action is a complete event (``ts`` and ``dur`` in microseconds) with
    kind, stage, micro-batch (``mb``) and freeze ratio among its ``args``; a skipped action is an instant event; data
    that goes from rank to rank is a flow. Facts are in ``otherData``.

    Raises:
        OSError: the file cannot be written.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "trace.json"
    >>> write_trace(View("nothing", [], []), path)
    >>> json.loads(path.read_text())["traceEvents"]
    []
    """
    events = [event for number, track in enumerate(view.tracks, 1) for event in _events(track, number)]
    data = {
        "displayTimeUnit": "ms",
        "otherData": {"title": view.title, **dict(view.facts)},
        "traceEvents": events,
    }
    write_atomically(path, json.dumps(data, separators=(",", ":")) + "\n")


def _events(track: Track, process: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": track.name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for rank in range(track.schedule.num_ranks):
        thread = {"ph": "M", "pid": process, "tid": rank}
        yield thread | {"name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield thread | {"name": "thread_sort_index", "args": {"sort_index": rank}}
    layout = lay_out(track)
    critical = set(layout.path)
    for node, action in enumerate(layout.graph.actions):
        event = {
            "pid": process,
            "tid": layout.graph.rank[node],
            "name": str(action),
            "cat": _NAMES[action.kind.value],
            "ts": layout.start_s[node] * _US_PER_S,
            "args": {"kind": action.kind.value, "stage": action.stage, "mb": action.microbatch},
        }
        if action in track.ratios:
            event["args"]["ratio"] = track.ratios[action]
        if layout.is_skipped[node]:
            yield event | {"ph": "i", "s": "t", "name": f"{action} skipped"}
            continue
        event["args"] |= {"is_critical": node in critical, "is_cut_here": bool(layout.ends_backward[node])}
        if track.measured_s is not None and action in track.measured_s:
            event["args"]["measured_ms"] = track.measured_s[action] * 1e3
        yield event | {"ph": "X", "dur": (layout.end_s[node] - layout.start_s[node]) * _US_PER_S}
    yield from _flows(layout, process)


def _flows(layout: Layout, process: int) -> Iterator[dict[str, Any]]:
    """An arrow for everything that is sent: nothing is sent to a skipped action."""
    graph = layout.graph
    for node, source in enumerate(graph.data):
        if source == NOTHING or not graph.crosses_ranks[node] or layout.is_skipped[node] or layout.is_skipped[source]:
            continue
        start, end = layout.start_s[source] * _US_PER_S, layout.end_s[source] * _US_PER_S
        flow = {"pid": process, "id": f"{process}.{node}", "name": "transfer", "cat": "transfer"}
        # A flow starts from the slice that is open at its time: a little before the end, since at the end the next
        # action of that rank may have begun.
        yield flow | {"ph": "s", "tid": graph.rank[source], "ts": max(start, end - min(1.0, (end - start) / 2))}
        yield flow | {"ph": "f", "bp": "e", "tid": graph.rank[node], "ts": layout.start_s[node] * _US_PER_S}

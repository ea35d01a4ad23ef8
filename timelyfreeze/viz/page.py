"""The self-contained HTML page: static text and tables, compressed data, and the scripts that draw them."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from importlib.resources import files
from os import PathLike

from timelyfreeze.files import write_atomically
from timelyfreeze.viz.page_data import page_data
from timelyfreeze.viz.text import format_duration, format_ratio
from timelyfreeze.viz.view import Track, View

# One scope, in this order; see bundle/README.md for echarts.js.
_SCRIPTS = ("data", "theme", "tip", "bars", "timeline", "keys", "heat", "steps", "table", "main")
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def write_html(view: View, path: str | PathLike[str]) -> None:
    """Write one HTML file that needs nothing else: no network, no server; a browser of 2023 or later draws it.

    It shows the tracks above each other on one time axis, the freeze ratios by stage and micro-batch, and loss and
    phase over steps; what the view lacks is left out. Facts and the summary are plain HTML, the rest comes from
    compressed data and needs JavaScript.

    Raises:
        OSError: the file cannot be written.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "page.html"
    >>> write_html(View("1 < 2", [], []), path)
    >>> "<title>1 &lt; 2</title>" in path.read_text()
    True
    """
    write_atomically(path, _page(view))


def _page(view: View) -> str:
    library = _asset("echarts.js")
    # Names are shared between the files of the page and hidden from everything else.
    program = "(() => {\n" + "\n".join(_asset(f"page/{name}.js") for name in _SCRIPTS) + "\n})();\n"
    data = json.dumps(page_data(view), separators=(",", ":"), allow_nan=False)
    slots = {
        "title": html.escape(view.title),
        "facts": "\n".join(_fact(name, value) for name, value in view.facts),
        "summary": _summary(view.tracks),
        "style": _asset("page/page.css"),
        "library": library,
        "program": program,
        "hashes": " ".join(f"'sha256-{_sha256(script)}'" for script in (library, program)),
        # Base64: no character of it means anything in HTML.
        "data": base64.b64encode(zlib.compress(data.encode("utf-8"), 9)).decode("ascii"),
    }
    # One pass over the skeleton: what is put in is never searched for slots.
    return _SLOT.sub(lambda slot: slots[slot[1]], _asset("page/page.html"))


def _asset(name: str) -> str:
    return (files("timelyfreeze.viz") / "assets" / name).read_text(encoding="utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _fact(name: str, value: str) -> str:
    return f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"


def _summary(tracks: list[Track]) -> str:
    """A table with a row a track; empty text where there are none."""
    if not tracks:
        return ""
    first = tracks[0]
    longest_s = max(track.makespan_s for track in tracks)
    num_stages = max(track.schedule.num_stages for track in tracks)
    # So many columns fit beside each other; the page's table of actions has the rest.
    stages = range(num_stages) if num_stages <= 16 else range(0)
    others = [f"Speed-up over {first.name}"] if len(tracks) > 1 else []
    heads = ["Step", "Time", "Bubble", *others, *(f"Stage {stage}" for stage in stages)]
    rows = []
    for track in tracks:
        ratios = track.stage_ratios()
        cells = [format_duration(track.makespan_s, longest_s), format_ratio(track.bubble_ratio)]
        if others:
            has_ratio = track is not first and track.makespan_s > 0
            cells.append(f"{first.makespan_s / track.makespan_s:.2f} ×" if has_ratio else "–")
        cells += [format_ratio(ratios[stage]) if stage < len(ratios) else "" for stage in stages]
        name = f'<th scope="row">{html.escape(track.name)}</th>'
        rows.append(f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    columns = "".join(f'<th scope="col">{html.escape(head)}</th>' for head in heads)
    group = f'<th colspan="{len(stages)}" scope="colgroup">Frozen share</th>'
    group = f'<tr><td colspan="{len(heads) - len(stages)}"></td>{group}</tr>' if stages else ""
    return f"<table><thead>{group}<tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table>"

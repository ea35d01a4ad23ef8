"""The files that are written: traces, pictures and the page as text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.viz_views import HOSTILE, cut_plan, full_view, looped_track, measured_track, split_track, training_steps
from timelyfreeze.schedule import Action, data_dependencies
from timelyfreeze.viz import Track, View, tracks_of_plan, write_html, write_png, write_trace

ASSETS = Path(__file__).resolve().parent.parent / "timelyfreeze" / "viz" / "assets"


def hostile_view() -> View:
    plan = cut_plan(2, 4)
    tracks = [replace(track, name=f"{track.name} {HOSTILE}") for track in tracks_of_plan(plan)]
    steps = [replace(point, phase=f"{point.phase} {HOSTILE}") for point in training_steps((HOSTILE, "_hidden"))]
    return View(HOSTILE, [(HOSTILE, HOSTILE)], tracks, steps)


def trace_of(view: View, path: Path) -> list[dict[str, Any]]:
    write_trace(view, path)
    return json.loads(path.read_text())["traceEvents"]


def test_trace_has_every_action_where_it_ran(tmp_path: Path) -> None:
    view = full_view()
    events = trace_of(view, tmp_path / "trace.json")
    for process, track in enumerate(view.tracks, 1):
        own = [event for event in events if event["pid"] == process]
        names = {event["name"]: event["args"] for event in own if event["ph"] == "M" and event.get("tid", 0) == 0}
        assert names["process_name"] == {"name": track.name}
        assert names["thread_name"] == {"name": "rank 0"}
        complete = {event["name"]: event for event in own if event["ph"] == "X"}
        assert complete.keys() == {str(a) for a in track.schedule.actions if a not in track.skipped}
        for text, event in complete.items():
            action = Action.parse(text)
            assert event["tid"] == track.schedule.stage_to_rank[action.stage]
            assert event["ts"] == pytest.approx(1e6 * track.start_s[action])
            assert event["dur"] == pytest.approx(1e6 * (track.end_s[action] - track.start_s[action]), abs=1e-6)
            args = event["args"]
            assert (args["stage"], args["kind"], args["mb"]) == (action.stage, action.kind.value, action.microbatch)
            assert args.get("ratio") == track.ratios.get(action)
        instants = {event["name"] for event in own if event["ph"] == "i"}
        assert instants == {f"{action} skipped" for action in track.skipped}


def test_trace_has_an_arrow_for_every_transfer(tmp_path: Path) -> None:
    track = tracks_of_plan(cut_plan(4, 8, transfer_s=0.001))[1]
    events = trace_of(View("", [], [track]), tmp_path / "trace.json")
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    sent = [
        (edge.before, edge.after)
        for edge in data_dependencies(track.schedule)
        if edge.transfer and not {edge.before, edge.after} & track.skipped
    ]
    assert begins.keys() == ends.keys()
    assert len(begins) == len(sent)
    slices = [event for event in events if event["ph"] == "X"]

    def slice_at(event: dict[str, Any]) -> Action:
        """The slice that a viewer ties a flow event to: the one of its thread that is open at its time."""
        at = [s for s in slices if s["tid"] == event["tid"] and s["ts"] <= event["ts"] + 1e-9 < s["ts"] + s["dur"]]
        assert len(at) == 1
        return Action.parse(at[0]["name"])

    assert sorted((slice_at(begins[key]), slice_at(ends[key])) for key in begins) == sorted(sent)
    assert all(begins[key]["ts"] <= ends[key]["ts"] for key in begins)
    assert all(event["bp"] == "e" for event in ends.values())


def test_trace_keeps_texts_as_they_are(tmp_path: Path) -> None:
    write_trace(hostile_view(), tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data["otherData"] == {"title": HOSTILE, HOSTILE: HOSTILE}


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


@pytest.mark.parametrize(
    "view", [full_view(), hostile_view(), View("split", [], [split_track()])], ids=["full", "odd", "split"]
)
def test_png_is_drawn(view: View, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_png(view, tmp_path / "view.png")
    width, height = png_size(tmp_path / "view.png")
    assert width == 14 * 120
    assert height > 300


def test_png_grows_with_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    view = full_view()
    heights = []
    for name, part in (("all", view), ("no-steps", replace(view, steps=[])), ("facts", View("t", view.facts, []))):
        write_png(part, tmp_path / f"{name}.png")
        heights.append(png_size(tmp_path / f"{name}.png")[1])
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == 3


def test_png_shows_colours_of_what_happened(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    track = measured_track(cut_plan(4, 8))
    accent = (0xC4 / 255, 0x3E / 255, 0x00 / 255)
    frozen = (0xD5 / 255, 0xE4 / 255, 0xF3 / 255)

    def counts(shown: Track) -> list[int]:
        write_png(View("", [], [shown]), tmp_path / "one.png")
        pixels = image.imread(tmp_path / "one.png")[170:, :, :3]  # below the legend
        return [int((abs(pixels - colour).max(axis=-1) < 0.02).sum()) for colour in (accent, frozen)]

    path, pale = counts(track)
    assert path > 1000
    assert pale > 1000
    assert counts(replace(track, ratios={}))[1] < pale / 10


def test_png_tells_the_stages_of_a_rank_apart(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    write_png(View("", [], [looped_track()]), tmp_path / "one.png")
    pixels = image.imread(tmp_path / "one.png")[:, :, :3]
    forward = abs(pixels - (0xB9 / 255, 0xC0 / 255, 0xC8 / 255)).max(axis=-1) < 0.02
    heights = forward[200:].sum(axis=0)  # below the legend; of the two forwards, and little else
    first, second = (int(heights[round(share * len(heights))]) for share in (0.1, 0.28))
    assert second == pytest.approx(0.62 * first, abs=2)


def test_png_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = (
        "import sys, matplotlib\n"
        "before = matplotlib.rcParams.copy()\n"
        "from timelyfreeze.viz import View, write_png\n"
        f"write_png(View('t', [], []), {str(tmp_path / 'view.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.rcParams.copy() == before\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_png_without_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=re.escape("pip install 'timelyfreeze[viz]'")):
        write_png(full_view(), tmp_path / "view.png")
    assert list(tmp_path.iterdir()) == []


def test_html_escapes_every_text(tmp_path: Path) -> None:
    write_html(hostile_view(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    # Markup and scripts of our own hold neither; the rest of the texts lies in base64.
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert "&lt;/script&gt;&lt;img src=x onerror=&quot;" in page
    assert "&amp;amp; {{data}}" in page


def test_html_asks_for_nothing(tmp_path: Path) -> None:
    write_html(full_view(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in page
    without_comments = re.sub(r"/\*.*?\*/", "", page, flags=re.DOTALL)
    assert re.findall(r"""(?:src|href|url|@import)\s*[=(]\s*["']?(?!data:,)[\w./]+:""", without_comments) == []
    assert "//" not in re.sub(r"//.*", "", re.sub(r"<script.*?</script>", "", without_comments, flags=re.DOTALL))


def test_bundled_scripts_carry_their_licences() -> None:
    bundle = (ASSETS / "echarts.js").read_text()
    head = bundle[: bundle.index("*/")]
    for words in ("Apache License", "The Apache Software Foundation", "Copyright (c) 2017, Baidu Inc.", "Mike Bostock"):
        assert words in head, words
    version = json.loads((ASSETS / "bundle" / "package.json").read_text())["dependencies"]["echarts"]
    assert f"Apache ECharts {version} " in head


def test_pages_are_small(tmp_path: Path) -> None:
    write_html(View("big", [], tracks_of_plan(cut_plan(64, 256))), tmp_path / "big.html")
    library = (ASSETS / "echarts.js").stat().st_size
    # 65,536 bars: their values alone would be 2.6 MB as five 8-byte numbers.
    assert (tmp_path / "big.html").stat().st_size < library + 500_000


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    for write in (write_html, write_png, write_trace):
        with pytest.raises(OSError, match="missing"):
            write(View("t", [], []), tmp_path / "missing" / "file")
    assert list(tmp_path.iterdir()) == []

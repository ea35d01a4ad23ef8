"""`timelyfreeze show`: finished, running, half-written and damaged jobs, from folders written here. Nothing trains."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.deviations import find_deviations
from timelyfreeze.cli.main import main
from timelyfreeze.cli.measured import MeasuredRun, write_measured
from timelyfreeze.cli.metrics import StepRow
from timelyfreeze.cli.run_reader import read_job
from timelyfreeze.cli.show import job_tracks
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import Plan, make_plan, planned_durations
from timelyfreeze.schedule import Action, Schedule, create_schedule, simulate

PHASES = {1: "warmup", 2: "measure_upper", 3: "measure_lower", 4: "ramp"}
NUM_STEPS = 9
SLOW = Action.parse("1B3")


def schedule_of(num_microbatches: int) -> Schedule:
    return create_schedule("1f1b", num_ranks=2, num_microbatches=num_microbatches)


def costs_of(schedule: Schedule) -> ActionCosts:
    return ActionCosts.uniform(schedule, forward_s=0.015, backward_s=0.043, frozen_backward_s=0.020)


def plan_of() -> Plan:
    schedule = schedule_of(8)
    return make_plan(schedule, costs_of(schedule), 0.5)


def measured_of(name: str, schedule: Schedule, ratios: dict[Action, float]) -> MeasuredRun:
    """A step that goes as planned, but that its 1B3 takes 10 ms longer."""
    costs = costs_of(schedule)
    planned = planned_durations(schedule, costs, ratios)
    line = simulate(schedule, planned.durations_s | {SLOW: planned.durations_s[SLOW] + 0.010}, 0.0, planned.skipped)
    return MeasuredRun(name, schedule, 7, "steady", line.start_s, line.end_s, planned.skipped, ratios)


def rows_of(run: str, step_s: float, num_steps: int = NUM_STEPS) -> list[StepRow]:
    rows = [StepRow(run, 0, phase="start", validation_loss=5.5)]
    for step in range(1, num_steps + 1):
        phase = PHASES.get(step, "steady") if run == "timelyfreeze" else "steady"
        rows.append(
            StepRow(
                run=run,
                step=step,
                loss=5.0 / step,
                step_time_s=step_s,
                pipeline_time_s=0.9 * step_s,
                elapsed_s=step * step_s,
                phase=phase,
                freeze_ratio=0.4 if run == "timelyfreeze" and phase == "steady" else 0.0,
                validation_loss=2.25 if step == num_steps else None,
                predicted_s=0.342 if run == "timelyfreeze" else None,
            )
        )
    return rows


def write_rows(path: Path, *runs: list[StepRow]) -> None:
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for rows in runs for row in rows))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished job."""
    monkeypatch.setenv("COLUMNS", "80")
    root = tmp_path / "job"
    root.mkdir()
    config = TrainConfig(steps=NUM_STEPS, max_ratio=0.5)
    (root / "config.json").write_text(json.dumps({"options": config.to_json()}))
    write_rows(root / "metrics.jsonl", rows_of("plain", 0.6), rows_of("timelyfreeze", 0.4), rows_of("fewer", 0.3))
    plan = plan_of()
    plan.save(root / "plan.json")
    runs = [measured_of("plain", plan.schedule, {}), measured_of("timelyfreeze", plan.schedule, plan.ratios)]
    write_measured(root / "measured.json", [*runs, measured_of("fewer", schedule_of(4), {})])
    (root / "table.txt").write_text("done\n")
    (root / ".lock").touch()
    return root


def show(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> tuple[str, str]:
    assert main(["show", *map(str, arguments)]) == code
    return tuple(capsys.readouterr())  # type: ignore[return-value]


def test_a_finished_job_is_summed_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, errors = show(capsys, folder)
    assert errors == ""
    lines = [line.split() for line in text.splitlines()]
    assert f"{folder}: finished" in text.replace("\n", "")
    assert ["plain", "9/9", "600.0", "1.00x", "540.0", "-", "0.0%", "0.556", "2.250"] in lines
    assert ["timelyfreeze", "9/9", "400.0", "1.50x", "360.0", "342.0", "40.0%", "0.556", "2.250"] in lines
    assert ["plain,", "M", "=", "4", "9/9", "300.0", "2.00x", "270.0", "-", "0.0%", "0.556", "2.250"] in lines
    assert "warmup 1, measure_upper 2, measure_lower 3, ramp 4, steady 5-9." in " ".join(text.split())
    assert text.count("rank 1 │") == 4  # plain, planned, measured, fewer
    assert (folder / "timeline.html").read_text().startswith("<!doctype html>")


def test_planned_and_measured_are_compared_by_stage_kind_and_action(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = read_job(str(folder))
    plan = job.plans["timelyfreeze"]
    found = find_deviations(job.measured["timelyfreeze"], plan)
    assert found is not None
    assert found.largest[0].name == "1B3"
    assert found.largest[0].difference_s == pytest.approx(0.010)
    by_group = {one.name: one for one in found.groups}
    assert list(by_group) == ["0F", "0B", "1F", "1B"]
    assert by_group["1B"].difference_s == pytest.approx(0.010)
    assert by_group["0F"].difference_s == pytest.approx(0.0)
    assert by_group["0B"].num_actions == sum(cut == 0 for cut in plan.cuts)
    text, _ = show(capsys, folder)
    before, after = f"{1e3 * found.largest[0].planned_s:.1f}", f"{1e3 * found.largest[0].measured_s:.1f}"
    assert f"1B3 {before} → {after}" in " ".join(text.split())
    assert find_deviations(job.measured["plain"], plan) is None  # it followed no plan


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_summary_fits_its_width(
    columns: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(folder.parent)
    text, _ = show(capsys, "job")
    assert max(len(line) for line in text.splitlines()) <= columns
    assert "…" not in text


def test_tracks_show_planned_beside_measured(folder: Path) -> None:
    tracks = job_tracks(read_job(str(folder)))
    assert [track.name for track in tracks] == [
        "plain, measured in step 7 (steady)",
        "timelyfreeze, planned",
        "timelyfreeze, measured in step 7 (steady)",
        "plain, M = 4, measured in step 7 (steady)",
    ]
    beside = tracks[1].measured_s
    assert beside is not None
    assert beside[SLOW] == pytest.approx(tracks[1].end_s[SLOW] - tracks[1].start_s[SLOW] + 0.010)


def test_files_go_where_they_are_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def note(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", note)
    paths = [tmp_path / name for name in ("a.html", "a.png", "a.json")]
    text, _ = show(capsys, folder, "--html", paths[0], "--png", paths[1], "--trace", paths[2], "--open")
    assert all(path.stat().st_size > 0 for path in paths)
    assert opened == [paths[0].as_uri()]
    assert not (folder / "timeline.html").exists()
    assert f"Page: {paths[0]}" in text.replace("\n", " ").replace("Page:  ", "Page: ")
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    text, _ = show(capsys, folder, "--open")
    assert "No browser could be opened" in text


def test_a_running_job_is_told_by_its_lock(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "table.txt").unlink()
    write_rows(folder / "metrics.jsonl", rows_of("plain", 0.6), rows_of("timelyfreeze", 0.4, num_steps=3))
    with open(folder / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text, _ = show(capsys, folder)
    flat = " ".join(text.split())
    assert "running, step 3 of timelyfreeze" in flat
    assert "none is steady yet" in flat
    text, _ = show(capsys, folder)
    assert ": stopped" in " ".join(text.split())
    assert "--resume" not in text  # there is no checkpoint
    (folder / "checkpoints").mkdir()
    text, _ = show(capsys, folder)
    assert f"timelyfreeze train --resume {folder}" in text.replace("\n", "").replace("train--", "train --")


def test_a_job_may_have_hardly_begun(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics.jsonl", "plan.json", "measured.json", "table.txt", ".lock"):
        (folder / name).unlink()
    text, errors = show(capsys, folder)
    assert errors == ""
    assert "No step is done yet." in text
    assert (folder / "timeline.html").exists()


def test_without_measured_steps_the_plan_is_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "measured.json").unlink()
    text, _ = show(capsys, folder)
    assert "\nplain: 522.0 ms\n" in text
    assert "\ntimelyfreeze, planned: " in text


def test_a_line_that_is_being_written_is_no_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"run": "fewer", "step": 10, "lo')
    assert show(capsys, folder)[1] == ""


def old_plan(text: str) -> str:
    return re.sub(r'"version": \d+', '"version": 0', text, count=1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("plan.json", lambda text: text[:100], "it does not hold whole JSON text"),
        ("plan.json", old_plan, "a plan of another version"),
        ("measured.json", lambda text: text[:-50], "the measured steps cannot be read"),
        (
            "measured.json",
            lambda text: text.replace('"0F0": 0.0', '"0F0": -1.0', 1),
            "the measured steps cannot be read",
        ),
        ("metrics.jsonl", lambda text: "[]\n" + text, "some metrics cannot be read: got line 1: "),
        ("metrics.jsonl", lambda text: text.replace('"loss"', '"los"'), "and 29 more"),
        ("metrics.jsonl", lambda text: text.replace('"step": 3', '"step": NaN', 1), "line 4: step is no count"),
    ],
)
def test_what_is_damaged_is_named_and_the_rest_is_shown(
    name: str, change: Any, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / name
    path.write_text(change(path.read_text()))
    text, errors = show(capsys, folder, code=1)
    assert errors.startswith("timelyfreeze: error: ")
    assert message in errors
    assert str(path) in errors
    assert ": finished" in " ".join(text.split())
    assert (folder / "timeline.html").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no job to show: expected a folder that `timelyfreeze train --out` wrote, got no config.json"),
        ("{", "the job's options cannot be read"),
        ("[1]", 'expected an object with "options"'),
        ('{"options": 3}', 'expected an object with "options"'),
    ],
)
def test_without_options_there_is_no_job(
    content: str | None, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    _, errors = show(capsys, folder, code=2)
    assert message in errors
    assert str(folder) in errors


def test_wrong_paths_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such folder" in show(capsys, folder / "typo", code=2)[1]
    assert "there is no job to show" in show(capsys, folder / "config.json", code=2)[1]
    _, errors = show(capsys, folder, "--html", folder, "--png", "no/such/x.png", code=2)
    assert "--html names a folder" in errors
    assert "--png lies in no folder that exists" in errors


def test_options_of_another_version_do_not_matter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text('{"options": {"steps": "many", "new": 1}}')
    text, errors = show(capsys, folder)
    assert errors == ""
    assert "timelyfreeze      9  400.0" in text


def test_showing_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from timelyfreeze.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "show", str(folder)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()

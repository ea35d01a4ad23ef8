"""`timelyfreeze train` from end to end, on sizes that take a moment."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli_job import (
    MICROBATCHES,
    PLANNED_STEPS,
    STEPS,
    TINY,
    Killed,
    kill,
    rows,
    run,
    save_plan,
    saved,
    saved_weights,
    when,
    write_text,
)
from timelyfreeze.cli.measured import read_measured
from timelyfreeze.planner import Plan, planned_durations
from timelyfreeze.schedule import Schedule, create_schedule


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plan(tmp_path_factory.mktemp("plan") / "plan.json")


def losses(folder: Path) -> dict[tuple[str, int], Any]:
    """(run, step) -> what must not depend on clocks."""
    kept = ("loss", "phase", "freeze_ratio", "validation_loss", "predicted_s")
    found = {(row["run"], row["step"]): tuple(row[name] for name in kept) for row in rows(folder)}
    assert len(found) == len(rows(folder)), "a step is there twice"
    return found


def all_steps(steps: int = STEPS) -> set[tuple[str, int]]:
    return {(name, step) for name in ("plain", "timelyfreeze", "fewer") for step in range(steps + 1)}


@pytest.fixture(scope="module")
def whole(text: Path, plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run under a fixed plan that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(*TINY, "--text", text, "--plan", plan, "--out", folder) == 0
    return folder


def test_a_run_leaves_its_files_and_prints_its_table(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, folder = PLANNED_STEPS, tmp_path / "deep" / "run"
    assert run(*TINY, "--text", text, "--out", folder, steps=steps) == 0
    assert {p.name for p in folder.iterdir()} == {
        *("config.json", "metrics.jsonl", "plan.json", "measured.json", "table.txt", "checkpoints", ".lock")
    }
    table = (folder / "table.txt").read_text()
    assert capsys.readouterr().out.endswith(f"{table}\nTimelines of these runs: timelyfreeze show {folder}\n")
    for line, name in zip(table.splitlines()[3:6], ("plain ", "timelyfreeze ", "plain, M = 2 "), strict=True):
        assert line.startswith(name)
    assert "No times" not in table
    found = losses(folder)
    assert set(found) == all_steps(steps)
    assert found["plain", 0] == found["timelyfreeze", 0], "the runs start from different weights"
    assert [found["plain", s][0] for s in (1, 2)] == [found["timelyfreeze", s][0] for s in (1, 2)], "or batches"
    phases = [found["timelyfreeze", step][1] for step in range(1, steps + 1)]
    assert phases[0] == "warmup"
    assert phases[-1] == "steady"
    assert max(found["timelyfreeze", step][2] for step in range(1, steps + 1)) > 0.2
    assert all(found["plain", step][2] == 0 for step in range(1, steps + 1))
    assert found["plain", steps][0] < found["plain", 1][0]
    by_run = {name: [row for row in rows(folder) if row["run"] == name][1:] for name in ("plain", "fewer")}
    for name, tokens in (("plain", 32), ("fewer", 16)):
        last = by_run[name][-1]
        assert last["tokens_per_s"] * last["step_time_s"] == pytest.approx(tokens)
        assert last["elapsed_s"] == pytest.approx(sum(row["step_time_s"] for row in by_run[name]))
        assert last["saved_bytes"] > 0
        assert all(row["saved_bytes"] is None for row in by_run[name][:-1])
    config = json.loads((folder / "config.json").read_text())
    assert config["options"]["text"] == [str(text)]
    assert config["text"]["num_files"] == 40


def test_no_compare_runs_freezing_alone(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, "--text", text, "--no-compare", "--out", tmp_path, steps=2) == 0
    assert {row["run"] for row in rows(tmp_path)} == {"timelyfreeze"}
    assert "plain" not in capsys.readouterr().out
    assert [run.name for run in read_measured(tmp_path / "measured.json")] == ["timelyfreeze"]


def test_without_a_folder_no_page_is_offered(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, "--text", text, "--no-compare", steps=2) == 0
    assert "timelyfreeze show" not in capsys.readouterr().out


def test_of_every_run_the_median_step_is_kept_to_be_looked_at(whole: Path, plan: Path) -> None:
    runs = read_measured(whole / "measured.json")
    assert [run.name for run in runs] == ["plain", "timelyfreeze", "fewer"]
    assert [run.schedule.num_microbatches for run in runs] == [MICROBATCHES, MICROBATCHES, MICROBATCHES // 2]
    fixed = Plan.load(plan)
    planned = planned_durations(fixed.schedule, fixed.costs, fixed.ratios)
    assert planned.skipped, "the plan cuts nothing"
    for kept in runs:
        own = [row for row in rows(whole) if row["run"] == kept.name and row["step"]]
        own = [row for row in own if row["phase"] == own[-2]["phase"] and row["saved_bytes"] is None]
        times_s = sorted(row["pipeline_time_s"] for row in own)
        assert max(kept.end_s.values()) == times_s[(len(times_s) - 1) // 2]
        assert own[-1]["phase"] == kept.phase
        assert any(row["step"] == kept.step and row["pipeline_time_s"] == max(kept.end_s.values()) for row in own)
    assert (runs[0].phase, runs[0].ratios, runs[0].skipped) == ("steady", {}, frozenset())


def test_the_split_is_balanced_once_and_kept(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(*args: Any, **kwargs: Any) -> list[float]:
        measured.append(args)
        return [1.0, 1.0, 1.0, 9.0]  # embedding, two blocks, head

    monkeypatch.setattr("timelyfreeze.runtime.assembly.measure_children_s", measure)
    with monkeypatch.context() as patch:
        when(patch, ("plain", 1), lambda: os.kill(os.getpid(), signal.SIGINT))
        assert run(*TINY, "--text", text, "--out", tmp_path, steps=2) == 130
    assert run("--resume", tmp_path, steps=None) == 0
    assert len(measured) == 1
    assert saved(tmp_path).split == [3]


@pytest.mark.parametrize(
    "options",
    [
        ("--tied",),
        ("--dtype", "bfloat16"),
        ("--schedule", "gpipe"),
        ("--stages", "4"),
        ("--stages", "1"),
        ("--max-ratio", "0"),
        ("--max-ratio", "1"),
        ("--microbatches", "1"),
    ],
)
def test_options_run(text: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, "--text", text, *options, steps=2) == 0
    out = capsys.readouterr().out
    fewer = "plain, M = " in out
    assert fewer == (options not in (("--max-ratio", "0"), ("--microbatches", "1")))


@pytest.mark.parametrize(
    "at", [("plain", 1), ("plain", STEPS), ("timelyfreeze", 1), ("timelyfreeze", 4), ("fewer", 2), ("fewer", STEPS)]
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    text: Path,
    plan: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: tuple[str, int],
) -> None:
    folder, own_plan = tmp_path / "run", tmp_path / "plan.json"
    shutil.copy(plan, own_plan)
    with monkeypatch.context() as patch:
        when(patch, at, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert run(*TINY, "--text", text, "--plan", own_plan, "--out", folder) == 130
    assert f"stopped after step {at[1]} of {at[0]}" in capsys.readouterr().err
    assert saved(folder).done[-1] == at
    own_plan.unlink()  # the folder holds all that resuming needs
    before = {(row["run"], row["step"]): row for row in rows(folder)}
    torch.manual_seed(99)
    assert run("--resume", folder, steps=None) == 0
    assert losses(folder) == losses(whole)
    after = {(row["run"], row["step"]): row for row in rows(folder)}
    assert {key: after[key] for key in before} == before, "finished steps were run again"
    for name in ("plain", "timelyfreeze", "fewer"):
        own = [row for row in rows(folder) if row["run"] == name]
        assert own[-1]["elapsed_s"] == pytest.approx(sum(row["step_time_s"] or 0.0 for row in own))
    assert [kept.name for kept in read_measured(folder / "measured.json")] == ["plain", "timelyfreeze", "fewer"]
    there, here = saved_weights(whole), saved_weights(folder)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)


@pytest.mark.parametrize("at", [("plain", 3), ("timelyfreeze", 0), ("timelyfreeze", 5), ("fewer", 1)])
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(
    text: Path, plan: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: tuple[str, int]
) -> None:
    with monkeypatch.context() as patch:
        when(patch, at, kill)
        with pytest.raises(Killed):
            run(*TINY, "--text", text, "--plan", plan, "--out", tmp_path)
    (tmp_path / ".plan.json.0123.tmp").write_bytes(b"half a plan")
    (tmp_path / "checkpoints" / ".step-000009.tmp-0123").mkdir()
    assert run("--resume", tmp_path, steps=None) == 0
    assert losses(tmp_path) == losses(whole)
    assert list(tmp_path.glob(".*.tmp")) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{STEPS:06d}"]


def test_a_plan_that_training_finds_is_kept_when_it_goes_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        when(patch, ("timelyfreeze", PLANNED_STEPS), lambda: os.kill(os.getpid(), signal.SIGINT))
        assert run(*TINY, "--text", text, "--out", tmp_path, "--no-compare", steps=PLANNED_STEPS + 10) == 130
    found = (tmp_path / "plan.json").read_bytes()
    assert run("--resume", tmp_path, steps=None) == 0
    assert (tmp_path / "plan.json").read_bytes() == found
    assert {row["phase"] for row in rows(tmp_path)[PLANNED_STEPS:]} == {"steady"}, "it measured again"


def test_a_finished_run_prints_its_table_again(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    table = (folder / "table.txt").read_text()
    (folder / "table.txt").unlink()
    assert run("--resume", folder, steps=None) == 0
    assert (folder / "table.txt").read_text() == table
    assert table in capsys.readouterr().out
    assert read_measured(folder / "measured.json") == read_measured(whole / "measured.json")
    assert losses(folder) == losses(whole)


def test_ctrl_c_saves_and_ends_with_130(text: Path, plan: Path, whole: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "timelyfreeze", "train", *TINY, "--text", str(text), "--plan", str(plan)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--steps", "1000000", "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("plain"):
            process.send_signal(signal.SIGINT)
            break
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Stopping after this step" in out
    assert re.search(r"stopped after step \d+ of plain; .* timelyfreeze train --resume", error)
    assert saved(tmp_path / "run").done[-1][1] >= 1


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, "--text", text, "--out", tmp_path, "--checkpoint-every", 1]
    assert run(*arguments, "--learning-rate", "1e38", steps=50) == 1
    error = capsys.readouterr().err
    step = int(re.search(r"This was in step (\d+) of plain", error)[1])  # type: ignore[index]
    assert "stage 1" in error
    assert "micro-batch 0" in error
    assert "Traceback" not in error
    assert saved(tmp_path).done == [("plain", step - 1)]


def test_a_schedule_from_a_file(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder = tmp_path / "mine.csv", tmp_path / "run"
    create_schedule("gpipe", num_ranks=2, num_microbatches=3).to_csv(source)
    arguments = [*TINY[:10], "--text", text, "--schedule", source, "--out", folder]
    assert run(*arguments, "--stages", 3) == 2
    assert "--stages and the schedule disagree: expected 2" in capsys.readouterr().err
    assert run(*arguments, steps=2) == 0
    assert {row["run"] for row in rows(folder)} == {"plain", "timelyfreeze"}
    source.unlink()
    assert Schedule.from_csv(folder / "schedule.csv").num_microbatches == 3
    assert run("--resume", folder, steps=None) == 0


def test_a_plan_for_another_schedule_is_refused_at_once(
    text: Path, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, "--text", text, "--plan", plan, "--out", tmp_path / "run"]
    assert run(*arguments, "--microbatches", 3) == 2
    assert "micro" in capsys.readouterr().err
    assert run(*arguments, "--max-ratio", 0.25) == 2
    assert "--max-ratio and the plan disagree: expected 0.5" in capsys.readouterr().err
    assert run(*arguments, "--mode", "lp") == 2
    assert "--mode and the plan disagree: expected cut, as the plan has it, got lp" in capsys.readouterr().err
    assert run(*arguments, "--stage-max-ratio", "0=0.1") == 2
    assert "--stage-max-ratio and the plan disagree: expected default" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(
    text: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    assert run(*TINY, "--text", text, "--out", whole) == 2
    assert "--out holds a run already" in capsys.readouterr().err
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_made_is_named(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(*TINY, "--text", text, "--out", tmp_path / "file" / "run") == 2
    assert "the folder cannot be written" in capsys.readouterr().err


def test_a_full_disk_is_said_and_the_old_checkpoint_stays(
    text: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        when(patch, ("plain", 3), lambda: patch.setattr(os, "fsync", full))
        assert run(*TINY, "--text", text, "--plan", plan, "--out", tmp_path) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert saved(tmp_path).done == [("plain", 2)]

"""`timelyfreeze plan`: figures, pictures, files, and how wrong use is answered. Torch is never needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plan_command import TIMES, refuse, run, run_json
from timelyfreeze.cli.main import main
from timelyfreeze.cli.plan_answer import PlainSteps
from timelyfreeze.cli.plan_case import PlanCase
from timelyfreeze.cli.plan_options import StageTimes
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import Plan, make_plan
from timelyfreeze.schedule import (
    Action,
    Schedule,
    create_schedule,
)


@pytest.fixture
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    columns = int(getattr(request, "param", 80))
    monkeypatch.setenv("COLUMNS", str(columns))
    return columns


def step(answer: Any, name: str) -> Any:
    return next(step for step in answer["steps"] if step["name"] == name)


# Figures


def test_published_times_give_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, *TIMES, "--ranks", "4", "--microbatches", "8", "--max-ratio", "0.5")
    assert step(answer, "plain")["makespan_s"] == pytest.approx(0.638)
    assert step(answer, "plain")["bubble_ratio"] == pytest.approx(3 / 11)
    assert (step(answer, "fewer")["num_microbatches"], step(answer, "fewer")["makespan_s"]) == (4, pytest.approx(0.406))
    assert step(answer, "planned")["makespan_s"] == pytest.approx(0.3905, rel=0.005)
    assert step(answer, "planned")["live_microbatches"] == pytest.approx(4)
    assert step(answer, "all frozen")["makespan_s"] == pytest.approx(0.365)
    assert 0.35 < answer["bound_s"] <= step(answer, "planned")["makespan_s"]
    assert answer["speed_at_equal_gradients"] == pytest.approx(0.406 / step(answer, "planned")["makespan_s"])
    assert all(stage["mean_ratio"] <= 0.5 + 1e-9 for stage in answer["stages"])


def test_lp_mode_states_the_optimum_that_knows_no_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, *TIMES, "--max-ratio", "0.8", "--mode", "lp")
    assert answer["bound_s"] == pytest.approx(0.4018, rel=1e-3)
    assert "LP's optimum" in run(capsys, *TIMES, "--mode", "lp")


def test_live_microbatches_are_compared_with_a_plain_step_of_as_many(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, *TIMES, "--live-microbatches", "4")
    assert step(answer, "plain")["makespan_s"] == pytest.approx(0.406)
    planned = step(answer, "planned")
    assert (planned["num_microbatches"], planned["live_microbatches"]) == (6, pytest.approx(4))
    assert planned["makespan_s"] == pytest.approx(0.3564, rel=0.005)
    text = run(capsys, *TIMES, "--live-microbatches", "4")
    assert "Same gradients, sooner" in text
    assert "plain, M = 4: 406.0 ms" in text
    capped = run_json(capsys, *TIMES, "--live-microbatches", "4", "--microbatches", "5")
    assert step(capped, "planned")["num_microbatches"] == 5


def test_target_takes_the_least_freezing_that_reaches_it(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, *TIMES, "--target-ms", "500")
    assert step(answer, "planned")["makespan_s"] == pytest.approx(0.5, rel=1e-3)
    assert step(answer, "planned")["live_microbatches"] > 5.7  # the cap alone would leave 5.6


def test_caps_of_stages_and_prices_reach_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, *TIMES, "--stage-max-ratio", "3=0,1=0.1", "--weights", "2=5")
    assert answer["stages"][3]["mean_ratio"] == 0
    assert answer["stages"][1]["mean_ratio"] <= 0.1 + 1e-9
    plan = Plan.from_json(answer["plan"])
    assert plan.options.weights == {2: 5.0}


def test_times_by_stage_and_transfers_count(capsys: pytest.CaptureFixture[str]) -> None:
    times = ("--forward-ms", "10,20", "--backward-ms", "30,40", "--frozen-backward-ms", "15,15")
    answer = run_json(capsys, *times, "--ranks", "2", "--microbatches", "1", "--transfer-ms", "5", "--max-ratio", "0")
    assert step(answer, "plain")["makespan_s"] == pytest.approx((10 + 20 + 40 + 30 + 2 * 5) / 1e3)


def test_verdict_says_when_a_smaller_batch_does_better(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Freezing pays here" in run(capsys, *TIMES, "--max-ratio", "0.3")
    assert "A smaller batch does better here" in run(capsys, *TIMES, "--max-ratio", "0.8")
    assert "The plan freezes nothing" in run(capsys, *TIMES, "--max-ratio", "0")
    assert "no gradient at all" in run(capsys, *TIMES, "--max-ratio", "1", "--min-live-ratio", "0")


def case_of(times: StageTimes, num_microbatches: int, name: str = "1f1b") -> PlanCase:
    schedule = create_schedule(name, num_ranks=2, num_microbatches=num_microbatches)
    return PlanCase(schedule, times.costs(schedule), True, times)


def test_plain_steps_between_whole_microbatches_lie_on_a_line() -> None:
    steps = PlainSteps(case_of(StageTimes([1.0], [2.0], [1.0]), 8))  # (M + 1) * 3 ms
    assert [steps.time_s(live) for live in (1.0, 2.0, 2.5, 8.0)] == pytest.approx([0.006, 0.009, 0.0105, 0.027])
    assert steps.time_s(0.25) == pytest.approx(0.006)  # no step is smaller than one of a micro-batch
    assert steps.time_s(0.0) is None


# Text


@pytest.mark.parametrize("width", [60, 80, 120], indirect=True)
@pytest.mark.parametrize("extra", [(), ("--compare",), ("--ranks", "8", "--microbatches", "16", "--mode", "lp")])
def test_text_fits_its_width_and_nothing_is_cut_short(
    width: int, extra: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, *TIMES, *extra)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert "\x1b" not in text  # no colours where there is no terminal


def test_text_tells_steps_stages_cuts_and_timelines(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *TIMES, "--max-ratio", "0.5")
    lines = [line.split() for line in text.splitlines()]
    assert ["plain", "638.0", "1.00x", "27.3%", "8", "8"] in lines
    assert ["plain,", "M", "=", "4", "406.0", "1.57x", "42.9%", "4", "4"] in lines
    assert ["all", "frozen", "365.0", "1.75x", "34.2%", "8", "none"] in lines
    planned = next(line for line in lines if line[:1] == ["planned"])
    assert 389 < float(planned[1]) < 392.5
    assert sum(line[:2] == [str(stage), "0.5"] for stage in range(4) for line in lines) == 4
    assert "Cuts: no backward below stage" in text
    assert text.count("rank 3 │") == 2
    assert width == 80


# Files


def test_files_hold_what_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "html", "png", "trace", "save")}
    options = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    text = run(capsys, *TIMES, "--ranks", "2", "--microbatches", "3", *options)
    assert "proven bound" in text  # with a FILE the text is printed as well
    answer = json.loads(paths["json"].read_text())
    assert Plan.load(paths["save"]) == Plan.from_json(answer["plan"])
    assert paths["html"].read_text().startswith("<!doctype html>")
    assert "2 ranks × 3 micro-batches" in paths["html"].read_text()
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(paths["trace"].read_text())["traceEvents"]
    assert {"0F0", "1B2"} <= {event["name"].split()[0] for event in events}


@pytest.mark.parametrize("kind", ["folder", "plan", "costs"])
def test_costs_come_from_a_run_a_plan_or_a_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = create_schedule("gpipe", num_ranks=2, num_microbatches=4)
    costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=2.0, frozen_backward_s=1.0)
    make_plan(schedule, costs, 0.5).save(tmp_path / "plan.json")
    costs.save(tmp_path / "costs.json")
    path = {"folder": tmp_path, "plan": tmp_path / "plan.json", "costs": tmp_path / "costs.json"}[kind]
    answer = run_json(capsys, "--costs", str(path))
    assert answer["plan"]["schedule"]["name"] == ("1f1b" if kind == "costs" else "gpipe")
    assert step(answer, "plain")["makespan_s"] == pytest.approx(15.0)
    larger = run_json(capsys, "--costs", str(path), "--microbatches", "8", "--schedule", "1f1b", "--transfer-ms", "1e3")
    assert step(larger, "plain")["makespan_s"] > 27.0
    assert larger["plan"]["costs"]["transfer_s"] == 1.0


def test_a_schedule_of_a_file_has_no_smaller_sibling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    create_schedule("1f1b", num_ranks=2, num_microbatches=4).to_csv(path)
    text = run(capsys, *TIMES, "--schedule", str(path))
    assert "no sibling with fewer micro-batches" in text
    error = refuse(capsys, *TIMES, "--schedule", str(path), "--ranks", "3", "--compare")
    assert "--ranks and the schedule disagree: expected 2" in error
    assert "--compare needs other numbers of micro-batches" in error
    make_plan(Schedule.from_csv(path), case_of(StageTimes([1.0], [2.0], [1.0]), 4).costs).save(tmp_path / "plan.json")
    assert "mine, 2 ranks" in run(capsys, "--costs", str(tmp_path))


# Wrong use


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ((), ["--forward-ms, --backward-ms, --frozen-backward-ms missing"]),
        (("--forward-ms", "1", "--costs", "x"), ["--costs and --forward-ms exclude each other"]),
        (("--costs", "nowhere.json"), ["No such file or directory ('nowhere.json')"]),
        (("--costs", "."), ["--costs names a folder without a plan"]),
        ((*TIMES, "--ranks", "0", "--max-ratio", "nan"), ["2 problems", "--ranks is out of", "--max-ratio is out of"]),
        ((*TIMES, "--max-ratio", "0.3,0.5"), ["--max-ratio: expected one cap, got 2. Several need --compare."]),
        ((*TIMES, "--stage-max-ratio", "9=0.2"), ["a stage of --stage-max-ratio: expected 0 to 3, got 9"]),
        ((*TIMES, "--stage-max-ratio", "0=2"), ["--stage-max-ratio is out of range: expected shares in [0, 1]"]),
        ((*TIMES, "--weights", "0=-1"), ["--weights is out of range"]),
        ((*TIMES, "--target-ms", "0"), ["--target-ms is out of range"]),
        ((*TIMES, "--target-ms", "100"), ["--target-ms cannot be reached within the caps: expected at least 0.45"]),
        ((*TIMES, "--live-microbatches", "4", "--max-ratio", "0.5"), ["--live-microbatches and --max-ratio exclude"]),
        ((*TIMES, "--live-microbatches", "9", "--microbatches", "4"), ["--live-microbatches"]),
        ((*TIMES, "--compare", "--html", "x.html"), ["--compare and --html exclude each other"]),
        ((*TIMES, "--html", "no/such/x.html"), ["--html lies in no folder that exists ('no/such/x.html')"]),
        ((*TIMES, "--png", "."), ["--png names a folder"]),
        ((*TIMES, "--schedule", "zigzag"), ["unknown schedule", "'zigzag'"]),
        ((*TIMES, "--schedule", "zigzag", "--compare"), ["unknown schedule"]),
        ((*TIMES, "--schedule", "no.csv"), ["no.csv"]),
        ((*TIMES, "--ranks", "9999", "--microbatches", "9999"), ["schedule too large"]),
        (("--forward-ms", "1,2", *TIMES[2:]), ["--forward-ms: expected one time, or 4, one a stage, got 2 times"]),
        (
            (*TIMES[:4], "--frozen-backward-ms", "50"),
            ["--frozen-backward-ms: expected at most --backward-ms, 43, got 50"],
        ),
        (("--forward-ms", "0", "--backward-ms", "0", "--frozen-backward-ms", "0"), ["there is nothing to plan"]),
    ],
)
def test_wrong_use_is_named(
    arguments: tuple[str, ...],
    messages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refuse(capsys, *arguments)
    assert error.startswith("timelyfreeze: error: ")
    assert [message for message in messages if message not in error] == []


@pytest.mark.parametrize("option", [("--forward-ms", "a"), ("--stage-max-ratio", "0.2"), ("--weights", "0=1,0=2")])
def test_what_is_no_number_is_named(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *option])
    assert f"argument {option[0]}: not numbers" in capsys.readouterr().err


def test_costs_of_another_form_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    for text, message in (("[]", "not a plan"), ("{", "whole JSON"), ('{"format": "timelyfreeze-costs"}', "version")):
        path.write_text(text)
        error = refuse(capsys, "--costs", str(path))
        assert message in error
        assert str(path) in error
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=1)
    ActionCosts.uniform(schedule, forward_s=1.0, backward_s=2.0, frozen_backward_s=1.0).save(path)
    assert "another model: expected 3 stages, got 2" in refuse(capsys, "--costs", str(path), "--ranks", "3")


def test_a_plan_without_a_flush_counts_from_batch_to_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 1 takes 60 ms of a micro-batch, 50 with half of its weights frozen; stage 0 stays as it is."""
    options = ("--ranks", "2", "--microbatches", "4", "--forward-ms", "10,20", "--backward-ms", "20,40")
    options += ("--frozen-backward-ms", "10,20", "--max-ratio", "0.5", "--goal", "period", "--mode", "lp")
    found = run_json(capsys, *options)
    assert {step["name"]: round(step["makespan_s"], 9) for step in found["steps"]} == {
        "plain": 0.24,
        "planned": 0.2,
        "all frozen": 0.16,
    }
    assert [round(stage["mean_ratio"], 6) for stage in found["stages"]] == [0.0, 0.5]
    assert found["plan"]["options"]["goal"] == "period"
    text = " ".join(run(capsys, *options).split())
    assert "A batch takes 200.0 ms instead of 240.0, 1.20x as fast" in text
    assert "Nothing is frozen in stages 0." in text
    assert "--goal period and --target-ms exclude each other" in refuse(capsys, *options, "--target-ms", "9")
    assert "--compare and --goal period exclude each other" in refuse(capsys, *options, "--compare")


def test_planning_starts_without_torch(tmp_path: Path) -> None:
    """Torch made impossible to import: the commands run all the same."""
    code = (
        "import sys; sys.modules['torch'] = None; from timelyfreeze.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "plan", *TIMES, "--html", str(tmp_path / "x.html"), "--max-ratio", "0.5"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "rank 0 |0--" in done.stdout


def test_measured_costs_of_the_own_schedule_are_taken_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=2.0, frozen_backward_s=1.0)
    slow = {**costs.upper_s, Action.parse("1B2"): 9.0}
    make_plan(schedule, ActionCosts(slow, costs.lower_s), 0.5).save(tmp_path / "plan.json")
    rows = run_json(capsys, "--costs", str(tmp_path), "--compare", "--max-ratio", "0.5")["rows"]
    plain = {row["schedule"]: row["makespan_s"] for row in rows if row["max_ratio"] == 0 and row["mode"] == "plain"}
    assert plain["1f1b"] == pytest.approx(22.0)
    assert plain["gpipe"] == pytest.approx(15.0)  # other schedules take medians

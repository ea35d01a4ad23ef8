"""What the options of freezing do to a job, and which step of it is kept to be looked at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli_job import PLANNED_STEPS, TINY, rows, run, save_plan, write_text
from timelyfreeze.cli.measured import read_measured
from timelyfreeze.planner import Plan, planned_durations

CAPS = ("--stage-max-ratio", "1=0", "--min-live-ratio", "0.125")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def test_the_other_mode_is_a_row_of_its_own(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, "--text", text, "--compare-modes", "--out", tmp_path, steps=PLANNED_STEPS) == 0
    assert list(dict.fromkeys(row["run"] for row in rows(tmp_path))) == ["plain", "timelyfreeze", "lp", "fewer"]
    assert "\nmode lp " in capsys.readouterr().out
    assert Plan.load(tmp_path / "plan.json").mode == "cut"
    assert Plan.load(tmp_path / "plan-lp.json").mode == "lp"


def test_caps_of_single_stages_bind(text: Path, tmp_path: Path) -> None:
    assert run(*TINY, "--text", text, "--no-compare", *CAPS, "--out", tmp_path, steps=PLANNED_STEPS) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.stage_max_ratio == {1: 0.0}
    assert (plan.mode, plan.options.max_ratio, plan.options.min_live_ratio) == ("cut", 0.5, 0.125)
    assert {ratio for action, ratio in plan.ratios.items() if action.stage == 1} <= {0.0}


def test_a_time_that_no_plan_reaches_is_said(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, "--text", text, "--no-compare", "--target-ms", "1e-6", steps=PLANNED_STEPS) == 0
    assert re.search(r"\ntimelyfreeze: no plan\b.*target", capsys.readouterr().out)


def test_a_steady_step_is_kept_with_its_ratios_and_cuts(text: Path, tmp_path: Path) -> None:
    plan = save_plan(tmp_path / "given.json")
    assert run(*TINY, "--text", text, "--plan", plan, "--no-compare", "--out", tmp_path, steps=16) == 0
    kept = read_measured(tmp_path / "measured.json")[0]
    fixed = Plan.load(plan)
    assert kept.phase == "steady"
    assert kept.ratios == fixed.ratios
    planned = planned_durations(fixed.schedule, fixed.costs, fixed.ratios).skipped
    assert planned, "the plan cuts nothing"
    assert kept.skipped >= planned  # a draw may leave out all of a stage that is to train a little
    assert all(cut >= least for cut, least in zip(kept.cuts, fixed.cuts, strict=True))

"""`timelyfreeze train` and `show` with every schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli_job import MICROBATCHES, TINY, rows, run, write_text
from timelyfreeze.cli.main import main
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import make_plan
from timelyfreeze.schedule import create_schedule, default_stages_per_rank, schedule_names


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_trains_plans_and_is_shown(
    name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a plan that is given, so that something is frozen within a few steps."""
    num_chunks = default_stages_per_rank(name)
    schedule = create_schedule(name, num_ranks=2, num_microbatches=MICROBATCHES)
    costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=2.0, frozen_backward_s=1.0)
    plan = make_plan(schedule, costs, max_ratio=0.5)
    plan.save(tmp_path / "plan.json")
    options = ("--schedule", name, "--stages", 2 * num_chunks, "--plan", tmp_path / "plan.json")
    folder = tmp_path / "run"
    assert run(*TINY, "--text", text, *options, "--out", folder, steps=4) == 0
    frozen = [row["freeze_ratio"] for row in rows(folder) if row["run"] == "timelyfreeze" and row["step"]]
    assert max(frozen) > 0.05
    capsys.readouterr()
    assert main(["show", str(folder), "--trace", str(tmp_path / "trace.json")]) == 0
    assert name in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kinds = {event["args"]["kind"] for event in events if event["ph"] == "X"}
    assert kinds == {action.kind.value for action in schedule.actions}


@pytest.mark.parametrize("name", ["zbv", "interleaved_zb"])
def test_by_default_two_ranks_hold_as_many_stages_as_the_schedule_asks(
    name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run(*TINY, "--text", text, "--schedule", name, "--out", folder, "--no-compare", steps=2) == 0
    assert json.loads((folder / "config.json").read_text())["options"]["stages"] == 4
    assert run("--resume", folder, steps=None) == 0


def test_the_number_of_microbatches_is_chosen_for_several_stages_a_rank(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*TINY[:8], "--validation-sequences", "8", "--schedule", "looped_bfs", "--live-microbatches", "2")
    assert run(*options, "--text", text, "--out", tmp_path / "run", "--device", "cpu", steps=2) == 0
    assert "of which every parameter sees 2" in capsys.readouterr().out

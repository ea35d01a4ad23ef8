"""measured.json: comes back as it was, and is refused when it is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.measured import MeasuredRun, read_measured, write_measured
from timelyfreeze.schedule import Action, create_schedule, simulate

SCHEDULE = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
TIMELINE = simulate(SCHEDULE, dict.fromkeys(SCHEDULE.actions, 0.1))
PLAIN = MeasuredRun("plain", SCHEDULE, 7, "steady", TIMELINE.start_s, TIMELINE.end_s, frozenset(), {})
FROZEN = replace(
    PLAIN,
    name="timelyfreeze",
    skipped=frozenset([Action.parse("0B1")]),
    ratios={Action.parse("0B1"): 1.0, Action.parse("1B0"): 1 / 3},
)


def test_runs_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    assert read_measured(path) == []
    write_measured(path, [PLAIN, FROZEN])
    assert read_measured(path) == [PLAIN, FROZEN]


def test_cuts_are_where_the_lowest_backward_ran() -> None:
    assert PLAIN.cuts == [0, 0]
    assert FROZEN.cuts == [0, 1]
    nothing = replace(FROZEN, skipped=frozenset(map(Action.parse, ("0B0", "1B0", "0B1"))))
    assert nothing.cuts == [2, 1]


def change(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["runs"][0].update(values)


def drop(data: dict[str, Any]) -> None:
    del data["runs"][0]["end_s"]["1B1"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data.update(format="else"), "not measured steps"),
        (lambda data: data.update(version=2), "another version: expected 1, got 2"),
        (lambda data: data.pop("runs"), "no field 'runs'"),
        (lambda data: data.update(runs=[1]), "not subscriptable"),
        (lambda data: data["runs"][0].pop("phase"), "no field 'phase'"),
        (change(name=5), "a name: expected text, got 5"),
        (change(step=-1), "step: expected a count"),
        (change(step=True), "step: expected a count"),
        (change(start_s=[]), "has no attribute"),
        (change(start_s={"x": 1.0}), "not an action"),
        (change(schedule={"name": "s", "ranks": ["0F0"]}), "0B0"),
        (drop, "end_s: expected exactly the schedule's actions, got other by 1B1"),
        (lambda data: data["runs"][0]["end_s"].update({"0F0": -1.0}), "end_s: expected finite seconds, at least 0"),
        (lambda data: data["runs"][0]["end_s"].update({"0F0": "1"}), "end_s: expected finite seconds, at least 0"),
        (lambda data: data["runs"][0]["end_s"].update({"1B1": 0.0}), "no action to end before it starts, got 1B1"),
        (change(skipped=["0F0"]), "skipped: expected backward actions, got 0F0"),
        (change(skipped=["0B9"]), "skipped: expected backward actions, got 0B9"),
        (change(ratios={"0B0": 1.5}), r"ratios: expected numbers in \[0, 1\], got 0B0: 1.5"),
        (change(ratios={"0F0": 0.5}), "ratios: expected backward actions, got 0F0"),
    ],
)
def test_damaged_steps_are_refused(tmp_path: Path, spoil: Callable[[dict[str, Any]], None], message: str) -> None:
    path = tmp_path / "measured.json"
    write_measured(path, [PLAIN, FROZEN])
    data = json.loads(path.read_text())
    spoil(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CommandError, match=message) as caught:
        read_measured(path)
    assert str(path) in str(caught.value)


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    write_measured(path, [PLAIN])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CommandError, match="does not hold whole JSON text"):
        read_measured(path)


def test_looking_at_a_run_needs_no_torch() -> None:
    names = ("config", "folder", "measured", "metrics", "table")
    program = "import sys\n" + "".join(f"import timelyfreeze.cli.{name}\n" for name in names)
    done = subprocess.run(
        [sys.executable, "-c", program + "assert 'torch' not in sys.modules"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

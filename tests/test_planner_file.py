"""Plans as files, and files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.random_schedules import published_costs, random_costs, random_schedule, scattered_costs
from timelyfreeze.errors import PlanError
from timelyfreeze.files import open_atomically, read_json, write_atomically
from timelyfreeze.planner import Plan, make_plan
from timelyfreeze.schedule import create_schedule


@pytest.fixture
def plan() -> Plan:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    return make_plan(schedule, scattered_costs(schedule, seed=2), 0.6)


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        schedule = random_schedule(draw)
        plan = make_plan(schedule, random_costs(schedule, draw), draw.random())
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).to_json() == plan.to_json()


def test_a_person_can_read_it(tmp_path: Path) -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    plan = make_plan(schedule, published_costs(schedule, 15, 43, 20), 0.5)
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert '"0F0 0F1 0B0 0B1"' in text
    assert f'"makespan_s": {plan.makespan_s!r}' in text
    assert '"max_ratio": 0.5' in text
    assert '"1B0": ' in text


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nowhere.json")


def change(data: dict[str, Any], path: str, value: object) -> None:
    """Set data["a"]["b"] for "a/b"; a value of None deletes it."""
    *folders, name = path.split("/")
    for folder in folders:
        data = data[folder]
    if value is None:
        del data[name]
    else:
        data[name] = value


@pytest.mark.parametrize(
    ("path", "value", "wrong"),
    [
        ("format", "timelyfreeze-costs", "not a plan"),
        ("version", 99, "another version: expected 2, got 99"),
        ("ratios", None, "lacks a field: expected 'ratios'"),
        ("ratios/1B0", None, "ratios lack freezable actions: got 1B0"),
        ("ratios/1B0", 1.5, "[0, 1]"),
        ("ratios/1B0", "much", "damaged plan"),
        ("ratios/1F0", 0.5, "freezable actions"),
        ("ratios/5B0", 0.5, "freezable actions"),
        ("options/max_ratio", 0.01, "mean ratio: expected at most 0.01"),
        ("options/max_ratio", 1.5, "max_ratio: expected a number in [0, 1]"),
        ("options/stage_max_ratio", {"0": 0.1}, "mean ratio: expected at most 0.1"),
        ("options/stage_max_ratio", {"first": 0.1}, "damaged plan"),
        ("options/colour", "red", "unknown options of the plan: got colour"),
        ("options", [], "damaged plan"),
        ("makespan_s", 1.0, "makespan_s does not follow from the ratios"),
        ("makespan_s", "soon", "damaged plan"),
        ("unfrozen_makespan_s", 1e9, "unfrozen_makespan_s does not follow"),
        ("objective_s", 1e9, "objective_s: expected between"),
        ("cuts", [0, 0], "cuts do not follow from the ratios"),
        ("cuts", 3, "damaged plan"),
        ("start_s/0F1", 0.0, "start_s does not follow from the ratios"),
        ("start_s/0F1", None, "start_s: expected exactly the actions"),
        ("schedule", [], "damaged plan"),
        ("schedule/ranks", ["0F0 0B0"], "costs have actions that are not in the schedule"),
        ("schedule/ranks", ["0F0 0F0"], "the schedule cannot run"),
        ("schedule/ranks", 7, "damaged plan"),
        ("costs/upper_s/0B0", -1, "upper_s: expected finite seconds"),
        ("costs/upper_s/0B0", None, "damaged action costs"),
        ("costs", {}, "not action costs"),
        ("objective_s", 10**400, "damaged plan"),
    ],
)
def test_damaged_plans_are_named(tmp_path: Path, plan: Plan, path: str, value: object, wrong: str) -> None:
    data = plan.to_json()
    change(data, path, value)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        Plan.load(file)
    assert str(file) in str(caught.value)
    assert wrong in str(caught.value)


def test_cut_off_or_scrambled_files_are_plan_errors(tmp_path: Path, plan: Plan) -> None:
    plan.save(tmp_path / "plan.json")
    raw = (tmp_path / "plan.json").read_bytes()
    draw = random.Random(0)
    for _ in range(150):
        at = draw.randrange(len(raw) - 2)
        damaged = raw[:at] if draw.random() < 0.5 else raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]
        (tmp_path / "damaged.json").write_bytes(damaged)
        refusal = None
        try:
            loaded = Plan.load(tmp_path / "damaged.json")
        except PlanError as error:
            refusal = str(error)
        if refusal is None:  # the byte did not matter (a blank, the schedule's name) or moved a number within rounding
            assert loaded.makespan_s == pytest.approx(plan.makespan_s, rel=1e-8)
        else:
            assert "damaged.json" in refusal


@pytest.mark.parametrize("text", ["", "null", "[1, 2]", '"plan"', "{}", "nan", "\x00"])
def test_foreign_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "foreign.json").write_text(text)
    with pytest.raises(PlanError, match=r"foreign\.json"):
        Plan.load(tmp_path / "foreign.json")


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    write_atomically(path, b"old")

    def write_half() -> None:
        with open_atomically(path) as file:
            file.write(b"half of the new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.bin"]


def test_the_name_appears_only_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    with open_atomically(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"


def test_text_is_utf8_and_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to("real.txt")
    write_atomically(link, "naïve — 步")
    assert link.is_symlink()
    assert (tmp_path / "real.txt").read_text(encoding="utf-8") == "naïve — 步"
    assert sorted(os.listdir(tmp_path)) == ["link.txt", "real.txt"]


def test_permissions_are_those_of_any_other_file(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("")
    write_atomically(tmp_path / "ours.txt", "")
    assert (tmp_path / "ours.txt").stat().st_mode == (tmp_path / "plain.txt").stat().st_mode


def test_writing_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "no" / "file.txt", "")


def test_reading_what_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes(b'"\xe9"')
    with pytest.raises(PlanError, match="does not hold whole JSON"):
        read_json(tmp_path / "latin.json")

"""`timelyfreeze plan` over schedules: side by side, and each by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan_command import TIMES, refuse, run, run_json
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import Plan
from timelyfreeze.schedule import (
    Action,
    Kind,
    create_schedule,
    default_stages_per_rank,
    register_schedule,
    registry,
    schedule_names,
)


@pytest.fixture
def two_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only GPipe and 1F1B are known."""
    few = {name: registry._SCHEDULES[name] for name in ("gpipe", "1f1b")}
    monkeypatch.setattr(registry, "_SCHEDULES", few)


def test_comparison_has_every_schedule_with_as_many_stages_as_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--compare", "--max-ratio", "0.5", "--microbatches", "4")
    table = run_json(capsys, *TIMES, *options)
    assert table["refused"] == {}
    stages = {row["schedule"]: row["stages_per_rank"] for row in table["rows"]}
    assert stages == {name: default_stages_per_rank(name) for name in schedule_names()}
    plain = {row["schedule"]: row["makespan_s"] for row in table["rows"] if row["max_ratio"] == 0}
    assert plain["1f1b"] == pytest.approx((4 + 3) * 0.058)
    assert plain["interleaved_zb"] == min(plain.values()) == pytest.approx(0.262)
    text = " ".join(run(capsys, *TIMES, *options).split())
    assert "Best for these costs: a plain step of interleaved_zb, 1.63x at equal gradients. No plan is faster" in text
    assert "zbv (2)" in text


@pytest.mark.usefixtures("two_schedules")
def test_comparison_sets_modes_and_caps_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = run_json(capsys, *TIMES, "--compare")
    assert {row["schedule"] for row in table["rows"]} | set(table["refused"]) == set(schedule_names())
    own = [row for row in table["rows"] if row["schedule"] == "1f1b"]
    figures = {(row["mode"], row["max_ratio"]): row["makespan_s"] for row in own}
    assert figures["plain", 0.0] == pytest.approx(0.638)
    assert [figures["plain", cap] for cap in (0.3, 0.5, 0.8)] == pytest.approx([0.522, 0.406, 0.290])
    assert [figures["cut", cap] for cap in (0.3, 0.5, 0.8)] == pytest.approx([0.4536, 0.3905, 0.3168], rel=0.005)
    for row in own:
        assert row["time_per_live_microbatch_s"] == pytest.approx(row["makespan_s"] / row["live_microbatches"])
        if row["mode"] == "plain":
            assert row["speed_at_equal_gradients"] == pytest.approx(1.0)
            assert row["speed_against_plain"] == pytest.approx(1.0)
        else:
            assert row["speed_against_plain"] == pytest.approx(0.638 / row["makespan_s"])
    best = {row["max_ratio"]: (row["schedule"], row["mode"]) for row in table["best"]}
    assert best[0.3] == ("1f1b", "cut")
    assert best[0.8][1] == "plain"
    monkeypatch.setenv("COLUMNS", "80")
    text = " ".join(run(capsys, *TIMES, "--compare").split())
    assert "Best for these costs: 1f1b, mode cut at cap 0.3, M = 8, 1.10x at equal gradients." in text
    assert "Freezing pays at cap 0.3, 0.5; at the others a smaller batch" in text


@pytest.mark.usefixtures("two_schedules")
def test_comparison_of_live_microbatches_keeps_gradients_equal(capsys: pytest.CaptureFixture[str]) -> None:
    table = run_json(capsys, *TIMES, "--compare", "--live-microbatches", "4")
    assert {round(row["live_microbatches"], 6) for row in table["rows"]} == {4}
    assert max(row["speed_at_equal_gradients"] for row in table["rows"]) == pytest.approx(0.406 / 0.3564, rel=0.005)


def test_comparison_says_when_nothing_pays(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *TIMES, "--compare", "--ranks", "1", "--max-ratio", "0.5")
    assert "Best for these costs: a plain step." in text


def test_new_schedules_show_up_or_say_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def split(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
        """GPipe with every backward in two halves; two stages a rank."""
        if stages_per_rank != 2:
            raise ValueError("needs 2 stages a rank")
        stages = [[rank, 2 * num_ranks - 1 - rank] for rank in range(num_ranks)]
        numbers = range(num_microbatches)
        return [
            [Action(stage, Kind.F, mb) for stage in own for mb in numbers]
            + [Action(stage, kind, mb) for stage in reversed(own) for mb in numbers for kind in (Kind.I, Kind.W)]
            for own in stages
        ]

    def picky(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
        raise ValueError("picky: wants a full moon")

    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))
    register_schedule("split", stages_per_rank=2)(split)
    register_schedule("picky")(picky)
    table = run_json(capsys, *TIMES, "--compare", "--ranks", "2", "--microbatches", "4", "--max-ratio", "0.5")
    assert table["refused"] == {"picky": "picky: wants a full moon"}
    rows = [row for row in table["rows"] if row["schedule"] == "split"]
    assert {(row["mode"], row["stages_per_rank"]) for row in rows} == {("plain", 2), ("lp", 2), ("cut", 2)}
    # Each rank still holds as much: 4 micro-batches of 58 ms, and the bubble on top.
    assert 0.232 < rows[0]["makespan_s"] < 0.4
    text = run(capsys, *TIMES, "--compare", "--ranks", "2", "--microbatches", "4", "--max-ratio", "0.5")
    assert "split (2)" in text
    assert "Left out: picky, picky: wants a full moon" in text


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_is_planned_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, *TIMES, "--schedule", name, "--ranks", "2", "--microbatches", "4")
    plan = Plan.from_json(answer["plan"])
    assert plan.schedule == create_schedule(name, num_ranks=2, num_microbatches=4)
    assert plan.makespan_s < plan.unfrozen_makespan_s
    text = run(capsys, *TIMES, "--schedule", name, "--ranks", "2", "--microbatches", "4")
    assert ("stages" in text.splitlines()[0]) == (plan.schedule.num_stages > 2)


def test_stages_of_costs_are_dealt_out_to_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = create_schedule("1f1b", num_ranks=4, num_microbatches=4)
    path = tmp_path / "costs.json"
    ActionCosts.uniform(measured, forward_s=1.0, backward_s=2.0, frozen_backward_s=1.0).save(path)
    plan = Plan.from_json(run_json(capsys, "--costs", str(path), "--schedule", "zbv")["plan"])
    assert (plan.schedule.num_ranks, plan.schedule.num_stages) == (2, 4)
    wrong = refuse(capsys, "--costs", str(path), "--schedule", "looped_bfs", "--stages-per-rank", "3")
    assert "the costs are of 4 stages: expected a multiple of 3, the stages that a rank holds under looped_bfs" in wrong
    assert "--stages-per-rank of schedule zbv: expected 2, got 1" in refuse(
        capsys, *TIMES, "--schedule", "zbv", "--stages-per-rank", "1"
    )


def test_costs_of_split_backwards_serve_whole_ones() -> None:
    split = create_schedule("zb_h1", num_ranks=3, num_microbatches=6)
    whole = create_schedule("1f1b", num_ranks=3, num_microbatches=6)
    times = {"forward_s": 15.0, "backward_s": 43.0, "frozen_backward_s": 20.0}
    assert ActionCosts.uniform(split, **times).adapted(whole) == ActionCosts.uniform(whole, **times)

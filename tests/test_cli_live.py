"""`timelyfreeze train --live-microbatches K`: as many gradients a parameter as in plain steps of K, from more."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli_job import PLANNED_STEPS, saved
from timelyfreeze.cli import calibrate
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import read_corpus, training_batch
from timelyfreeze.cli.main import main
from timelyfreeze.cli.measured import read_measured
from timelyfreeze.cli.model import build_model, byte_loss
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import Plan, choose_microbatches, make_plan
from timelyfreeze.schedule import create_schedule

LIVE = 3
SIZE = 2
SIZES = TrainConfig(width=16, layers=2, heads=2, sequence_length=8).model
# Published LLaMA-8B times (ms): with them, more than three micro-batches are worth their forwards.
COSTS = ActionCosts.uniform(
    create_schedule("1f1b", num_ranks=2, num_microbatches=LIVE), forward_s=15, backward_s=43, frozen_backward_s=20
)
CHOSEN = choose_microbatches("1f1b", COSTS, live_microbatches=LIVE).schedule.num_microbatches


def arguments(text: Path, folder: Path, *more: str) -> list[str]:
    sizes = ["--width", "16", "--layers", "2", "--heads", "2", "--sequence-length", "8", "--microbatch-size", str(SIZE)]
    training = ["--steps", str(PLANNED_STEPS), "--seed", "3", "--validation-sequences", "8", "--device", "cpu"]
    paths = ["--text", str(text), "--out", str(folder), "--live-microbatches", str(LIVE)]
    return ["train", *sizes, *training, *paths, *more]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 50)
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put literal costs in the place of what a clock says; a list that grows with every measurement."""
    calls = []
    measure = calibrate._measure

    def literal(*args: Any) -> tuple[ActionCosts, list[int]]:
        calls.append("measured")
        costs, split = measure(*args)
        assert costs.upper_s.keys() == COSTS.upper_s.keys()
        return COSTS, split

    monkeypatch.setattr(calibrate, "_measure", literal)
    return calls


def rows(folder: Path, run: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["run"] == run]


def plain_losses(text: Path, num_steps: int) -> list[float]:
    """Plain training by hand on the first K micro-batches of each step's batch."""
    corpus = read_corpus([text], sequence_length=8)
    model = build_model(SIZES, seed=3)
    decayed, norms = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], fused=True
    )
    losses = []
    for step in range(1, num_steps + 1):
        x, y = training_batch(corpus.train, batch_size=CHOSEN * SIZE, sequence_length=8, seed=3, step=step)
        loss = byte_loss(model(x[: LIVE * SIZE]), y[: LIVE * SIZE])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = TrainConfig().learning_rate_at(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_job_chooses_its_microbatches_and_says_what_they_bring(
    text: Path, tmp_path: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert CHOSEN > LIVE
    assert main(arguments(text, tmp_path)) == 0
    out = capsys.readouterr().out
    assert f"mode cut: {CHOSEN} micro-batches, of which every parameter sees {LIVE}" in out
    assert re.search(r"That took \d+\.\d s, which no run's times include", out)
    assert f"\ntimelyfreeze, M = {CHOSEN} " in out
    assert "plain, M =" not in out
    assert f"x planned; loss after {PLANNED_STEPS} steps" in " ".join(out.split())

    plain = rows(tmp_path, "plain")[1:]
    assert [row["loss"] for row in plain[:8]] == pytest.approx(plain_losses(text, 8), rel=1e-4)
    frozen = rows(tmp_path, "timelyfreeze")[1:]
    assert frozen[0]["loss"] != plain[0]["loss"], "not the larger batch"
    steady = [row["freeze_ratio"] for row in frozen if row["phase"] == "steady"]
    assert steady
    assert sum(steady) / len(steady) == pytest.approx(1 - LIVE / CHOSEN, abs=0.1)
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.live_microbatches, plan.schedule.num_microbatches) == (LIVE, CHOSEN)
    assert [run.schedule.num_microbatches for run in read_measured(tmp_path / "measured.json")] == [LIVE, CHOSEN]


def test_resuming_keeps_what_was_chosen(
    text: Path, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        seen = []

        def interrupt(costs: ActionCosts, schedule: Any) -> float:
            seen.append(schedule)
            os.kill(os.getpid(), signal.SIGINT)
            return 1.0

        patch.setattr(calibrate, "plain_makespan_s", interrupt)  # the last of the choice: a first step is done then
        assert main(arguments(text, tmp_path)) == 130
        assert seen
    checkpoint = saved(tmp_path)
    assert checkpoint.chosen == {"cut": CHOSEN}
    assert checkpoint.done == [("plain", 1)]
    assert main(["train", "--resume", str(tmp_path)]) == 0
    assert measured == ["measured"], "it measured again"
    assert Plan.load(tmp_path / "plan.json").schedule.num_microbatches == CHOSEN
    assert [row["loss"] for row in rows(tmp_path, "plain")[1:9]] == pytest.approx(plain_losses(text, 8), rel=1e-4)


def test_both_modes_choose_for_themselves(
    text: Path, tmp_path: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(text, tmp_path, "--compare-modes")) == 0
    of_lp = choose_microbatches("1f1b", COSTS, live_microbatches=LIVE, mode="lp").schedule.num_microbatches
    assert saved(tmp_path).chosen == {"cut": CHOSEN, "lp": of_lp}
    assert f"mode lp: {of_lp} micro-batches" in capsys.readouterr().out
    assert Plan.load(tmp_path / "plan-lp.json").schedule.num_microbatches == of_lp


def test_stopping_while_it_measures_says_that_nothing_is_saved(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = calibrate.Trainer.update

    def interrupted(self: Any, step: int) -> Any:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, step)

    monkeypatch.setattr(calibrate.Trainer, "update", interrupted)
    assert main(arguments(text, tmp_path / "run")) == 130
    assert "stopped before the first step; nothing is saved yet" in capsys.readouterr().err


def test_what_cannot_be_measured_ends_the_job(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "_MOST_STEPS", 5)
    assert main(arguments(text, tmp_path)) == 1
    error = capsys.readouterr().err
    assert "the number of micro-batches cannot be chosen: got no plan within 5 steps" in error
    assert "Traceback" not in error


def test_a_given_plan_with_live_microbatches_is_set_beside_that_many(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=5)  # 5 * (1 - (1 - 4 / 5)) is above 4 in floats
    make_plan(schedule, COSTS.adapted(schedule), live_microbatches=4).save(tmp_path / "plan.json")
    typed = arguments(text, tmp_path / "run")[:-2]
    assert main([*typed, "--plan", str(tmp_path / "plan.json"), "--microbatches", "5"]) == 0
    assert "\nplain, M = 4 " in capsys.readouterr().out

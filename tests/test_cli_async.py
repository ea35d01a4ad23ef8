"""`timelyfreeze train --schedule paci`: streams of batches beside 1F1B with a flush, on sizes that take a moment."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cli_job import Killed, kill, rows, run, saved, saved_weights, when, write_text
from timelyfreeze.asynchronous import updates
from timelyfreeze.cli import stream_trainer, trainer
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.drains import Drains, shortest_stream
from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.launch import Launch
from timelyfreeze.cli.main import main
from timelyfreeze.cli.metrics import StepRow
from timelyfreeze.cli.setup import check_world
from timelyfreeze.cli.stream_counts import streaming_steps
from timelyfreeze.cli.stream_table import reached_s, render_stream

STEPS = 64
MICROBATCHES = 4
# Drained after 30, 60, 62 (before the batches of which bytes are counted) and 64 steps.
DRAINED = (30, 60, 62, 64)
SIZES = (
    *("--width", "16", "--layers", "2", "--heads", "2", "--sequence-length", "8", "--microbatch-size", "1"),
    *("--microbatches", str(MICROBATCHES), "--validation-sequences", "8", "--seed", "3", "--learning-rate", "0.01"),
    *("--learning-rate-warmup", "40", "--device", "cpu"),
)
TINY = (*SIZES, "--evaluate-every", "30", "--schedule")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(*TINY, "paci", "--accumulation", 2, "--text", text, "--out", folder, steps=STEPS) == 0
    return folder


def numbers(folder: Path, name: str = "paci") -> list[dict[str, Any]]:
    """A run's rows without what depends on clocks."""
    clocked = ("step_time_s", "pipeline_time_s", "elapsed_s", "tokens_per_s", "saved_bytes")
    return [{k: v for k, v in row.items() if k not in clocked} for row in rows(folder) if row["run"] == name]


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def test_every_batch_has_a_row_and_stages_are_counted_where_they_are_drained(whole: Path) -> None:
    own = [row for row in rows(whole) if row["run"] == "paci"]
    plain = [row for row in rows(whole) if row["run"] == "plain"]
    assert [row["step"] for row in own] == [row["step"] for row in plain] == list(range(STEPS + 1))
    assert own[0]["validation_loss"] == plain[0]["validation_loss"], "the runs start from different weights"
    assert own[STEPS]["loss"] != plain[STEPS]["loss"]
    assert [row["step"] for row in own if row["validation_loss"] is not None] == [0, 30, 60, 64]
    assert {row["step"]: (row["updates"], row["skipped_updates"]) for row in own if row["updates"]} == {
        step: ([2 * (step - before)] * 2, [0, 0]) for before, step in zip((0, *DRAINED[:-1]), DRAINED, strict=True)
    }
    assert [row["drift"] for row in own[1:]] == [[1, 0]] * STEPS
    assert own[-1]["elapsed_s"] == pytest.approx(sum(row["step_time_s"] for row in own[1:]))
    assert all(row["tokens_per_s"] * row["step_time_s"] == pytest.approx(32) for row in own[1:])
    assert [row["step"] for row in own if row["saved_bytes"]] == [63, 64]
    assert own[-1]["saved_bytes"] == pytest.approx(plain[-1]["saved_bytes"], rel=0.02)


def test_drained_after_every_batch_it_is_training_with_a_flush(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (trainer, stream_trainer):  # which goes by an earlier norm in one, and by the batch's in the other
        monkeypatch.setattr(module, "CLIP_NORM", 1e9)
    assert run(*SIZES, "--evaluate-every", 1, "--schedule", "paci", "--text", text, "--out", tmp_path, steps=8) == 0
    own, plain = numbers(tmp_path), numbers(tmp_path, "plain")
    for name in ("loss", "validation_loss"):
        assert [row[name] for row in own[1:]] == pytest.approx([row[name] for row in plain[1:]], rel=1e-5), name
    assert {tuple(row["drift"]) for row in own[1:]} == {(0, 0)}


def test_the_table_and_the_summary_are_printed(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    table = (folder / "table.txt").read_text()
    (folder / "table.txt").unlink()
    assert run("--resume", folder, steps=None) == 0
    assert (folder / "table.txt").read_text() == table
    assert capsys.readouterr().out.endswith(f"{table}\nMore of these runs: timelyfreeze show {folder}\n")
    lines = table.splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["1f1b,", "paci"]
    assert lines[8:10] == ["0          1      1      128        0", "1          0      0      128        0"]
    assert "Copies of a stage's weights that were made: 0." in lines
    assert "1f1b's final validation loss" in table
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "paci, 2 stages × 4 micro-batches, an update of a stage after every 2 backwards" in shown
    assert re.search(r"^paci +64/64 .* 1 +256 +0 ", shown, re.MULTILINE)
    assert re.search(r"^plain +64/64 .* - +- +- ", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("at", "stopped_at"), [(("plain", 5), ("plain", 5)), (("paci", 3), ("paci", 30)), (("paci", 45), ("paci", 60))]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_ends_drained_and_goes_on_bit_for_bit(
    text: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: tuple[str, int],
    stopped_at: tuple[str, int],
    number: int,
) -> None:
    arguments = (*TINY, "paci", "--accumulation", 2, "--text", text, "--out", tmp_path)
    with monkeypatch.context() as patch:
        when(patch, at, lambda: interrupt(number))
        assert run(*arguments, steps=STEPS) == 128 + number
    captured = capsys.readouterr()
    assert "Stopping after this step, in paci where it is drained next (30 batches at the most)" in captured.out
    assert f"stopped after step {stopped_at[1]} of {stopped_at[0]}; the last checkpoint is kept" in captured.err
    assert saved(tmp_path).done[-1] == stopped_at
    torch.manual_seed(99)
    assert run("--resume", tmp_path, steps=None) == 0
    for name in ("plain", "paci"):
        assert numbers(tmp_path, name) == numbers(whole, name)
    there, here = saved_weights(whole), saved_weights(tmp_path)
    assert all(torch.equal(there[name], here[name]) for name in there)


@pytest.mark.parametrize("at", [1, 31, 59, 62, 63])
def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    arguments = (*TINY, "paci", "--accumulation", 2, "--text", text, "--out", tmp_path)
    with monkeypatch.context() as patch:
        when(patch, ("paci", at), kill)
        with pytest.raises(Killed):
            run(*arguments, steps=STEPS)
    expected = {1: ("plain", STEPS), 31: ("paci", 30), 59: ("paci", 30), 62: ("paci", 60), 63: ("paci", 60)}
    assert saved(tmp_path).done[-1] == expected[at]
    assert run("--resume", tmp_path, steps=None) == 0
    assert numbers(tmp_path) == numbers(whole)


@pytest.mark.parametrize("options", [("paci", "--memory", "recompute"), ("pipedream", "--accumulation", "3")])
def test_what_is_resumed_has_the_same_numbers_whatever_the_options(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Checkpoints more often change nothing either: they wait for a drain that the other options call for."""
    arguments = (*TINY, *options, "--no-compare", "--stages", "3", "--text", text)
    assert run(*arguments, "--out", tmp_path / "whole", steps=STEPS) == 0
    arguments = (*arguments, "--checkpoint-every", "1", "--out", tmp_path / "part")
    with monkeypatch.context() as patch:
        when(patch, (options[0], 61), interrupt)
        assert run(*arguments, steps=STEPS) == 130
    assert run("--resume", tmp_path / "part", "--checkpoint-every", "7", steps=None) == 0
    assert numbers(tmp_path / "part", options[0]) == numbers(tmp_path / "whole", options[0])
    copies = sum(row["weight_copies"] or 0 for row in rows(tmp_path / "part"))
    assert (copies > 0) == (options[0] == "pipedream")
    assert {row["run"] for row in rows(tmp_path / "part")} == {options[0]}


@pytest.mark.parametrize(
    ("options", "drift"),
    [
        (("--dtype", "bfloat16"), ["1", "0"]),
        (("--stages", "1"), ["0"]),
        (("--microbatches", "1", "--stages", "4"), ["3", "2", "1", "0"]),
        (("--accumulation", "9"), ["1", "0"]),
    ],
)
def test_options_run(
    text: Path, options: tuple[str, ...], drift: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SIZES, "--schedule", "paci", *options, "--no-compare", "--text", text, steps=9) == 0
    stages = capsys.readouterr().out.partition("\nstage ")[2].splitlines()[2:]
    assert [stage.split()[1:3] for stage in stages[: len(drift)]] == [[one, one] for one in drift]


def test_a_loss_that_stays_not_finite_ends_the_run_and_keeps_the_checkpoint(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (*TINY, "paci", "--no-compare", "--text", text, "--out", tmp_path, "--learning-rate", "1e38")
    assert run(*arguments, steps=STEPS) == 1
    error = capsys.readouterr().err
    assert "updates in a row are NaN or infinite" in error
    assert "Lower the learning rate" in error
    assert re.search(r"This was after step \d+ of paci; the last checkpoint is kept, and goes on with:", error)
    assert "Traceback" not in error
    assert saved(tmp_path).done == [("paci", 0)]
    assert None in [row["loss"] for row in rows(tmp_path)[1:]], "no loss was NaN"


def test_updates_that_are_skipped_are_counted_and_shown(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def finite(grads: list[torch.Tensor]) -> bool:
        asked.append(grads)
        return len(asked) != 7

    monkeypatch.setattr(updates, "all_finite", finite)
    assert run(*TINY, "paci", "--no-compare", "--text", text, "--out", tmp_path, steps=STEPS) == 0
    counted = [row for row in rows(tmp_path) if row["updates"]]
    assert sorted(counted[0]["skipped_updates"]) == [0, 1]
    assert sorted(counted[0]["updates"]) == [29, 30]
    assert [row["skipped_updates"] for row in counted[1:]] == [[0, 0]] * 3
    assert re.search(r"^paci +30/64 .* drift 1  updates skipped: 1  validation", capsys.readouterr().out, re.MULTILINE)
    assert re.search(r"^[01] .* 63 +1$", (tmp_path / "table.txt").read_text(), re.MULTILINE)


def test_ctrl_c_twice_stops_at_once(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "timelyfreeze", "train", *TINY, "paci", "--no-compare", "--text", str(text)]
    command += ["--evaluate-every", "1000000", "--microbatches", "1", "--stages", "4", "--steps", "1000000"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("paci", "Stopping")):
            process.send_signal(signal.SIGINT)
        if line.startswith("Stopping"):
            break
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped at once; the last checkpoint stays as it is" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-ratio", "0.3"), "--max-ratio does not go with --schedule paci, where nothing is frozen. Leave it out"),
        (("--plan", "p.json", "--mode", "lp"), "2 problems"),
        (("--live-microbatches", "4"), "--live-microbatches does not go with --schedule paci"),
        (("--compare-modes",), "--compare-modes does not go with --schedule paci"),
        (
            ("--stages-per-rank", "1"),
            "--stages-per-rank does not go with --schedule paci, where every stage has a rank",
        ),
        (("--data-parallel", "2"), "--data-parallel does not go with --schedule paci, which has no replicas"),
        (("--tied",), "--tied does not go with --schedule paci"),
        (("--accumulation", "0"), "--accumulation is out of range: expected at least 1, got 0"),
        (("--stages", "9"), "more stages than parts of the model"),
        (("--schedule", "1f1b", "--accumulation", "2"), "--accumulation needs a schedule without a flush: expected"),
        (("--schedule", "gpipe", "--memory", "recompute"), "--memory needs a schedule without a flush: expected"),
        (("--schedule", "pasta"), "unknown schedule: expected one of gpipe, 1f1b,"),
        (("--schedule", "pasta"), "paci, pipedream, got 'pasta'"),
        (("--schedule", "pipedream", "--predict-weights"), "--predict-weights does not go with --schedule pipedream"),
        (("--schedule", "1f1b", "--predict-weights"), "--predict-weights needs a schedule without a flush"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--schedule", "PACI", *options, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused() -> None:
    config = TrainConfig(schedule="paci")
    with pytest.raises(CommandError, match="--schedule paci under torchrun: expected one process"):
        check_world(config, config.sized_schedule(8), Launch(0, 2))


def test_a_run_does_not_go_on_with_another_number_of_stages(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--resume", whole, "--stages", "3", steps=None) == 2
    assert "--stages: 2 there, 3 here" in capsys.readouterr().err
    assert not TrainConfig(schedule="paci", compare=False).can_be_resized


def test_defaults_are_an_update_a_batch_and_streams_worth_the_name() -> None:
    config = TrainConfig(schedule="paci")
    assert (config.num_accumulated, config.flushed_schedule, config.evaluation_interval) == (8, "1f1b", 22)
    assert replace(config, accumulation=3).num_accumulated == 3
    assert replace(config, steps=20).evaluation_interval == 13
    assert replace(config, steps=20, evaluate_every=2).evaluation_interval == 2
    assert TrainConfig(steps=20).evaluation_interval == 2
    assert TrainConfig.from_json(config.to_json()) == config


@given(
    num_steps=st.integers(1, 300),
    interval=st.integers(1, 400),
    stages=st.integers(1, 8),
    microbatches=st.integers(1, 8),
    accumulation=st.integers(1, 16),
)
def test_drains_follow_from_the_options(
    num_steps: int, interval: int, stages: int, microbatches: int, accumulation: int
) -> None:
    shortest = shortest_stream(stages, microbatches, accumulation)
    assert shortest * microbatches >= 100 * (stages - 1)
    assert shortest * microbatches % accumulation == 0 or stages == 1 or accumulation == 1
    drains = Drains(num_steps, interval, shortest, num_counted=2)
    ends = [0]
    while ends[-1] < num_steps:
        ends.append(drains.next_after(ends[-1]))
    assert ends[-1] == num_steps
    assert set(range(0, num_steps, interval)) <= set(ends), "validated in the middle of a stream"
    assert all(0 < end - begin <= drains.longest for begin, end in pairwise(ends))
    assert all(drains.next_after(step) in ends for step in range(num_steps)), "depends on where one begins"


def literal_rows(name: str, step_s: float, losses: tuple[float, ...]) -> list[StepRow]:
    """Eight batches, validated before the first, after the fourth and the last; drained after those and the sixth."""
    made = [StepRow(name, 0, validation_loss=losses[0])]
    is_stream = name == "paci"
    for step in range(1, 9):
        drained = is_stream and step in (4, 6, 8)
        made.append(
            StepRow(
                name,
                step,
                loss=4.0,
                step_time_s=step_s * (1.5 if drained else 1),
                elapsed_s=step * step_s,
                validation_loss={4: losses[1], 8: losses[2]}.get(step),
                saved_bytes=3_000_000 if step == 8 else None,
                drift=(1, step % 2, 0) if is_stream else None,
                updates=(2, 2, 2) if drained else None,
                skipped_updates=(0, 1, 0) if drained else None,
                weight_copies=1 if drained else None,
            )
        )
    return made


def test_the_whole_table_from_literal_rows() -> None:
    config = TrainConfig(schedule="paci", stages=3, microbatches=4, microbatch_size=1, sequence_length=25, steps=8)
    plain, own = literal_rows("plain", 0.6, (5.0, 3.0, 2.5)), literal_rows("paci", 0.5, (5.0, 3.0, 2.0))
    assert streaming_steps(own) == {2, 3}
    assert render_stream(config, {"plain": plain, "paci": own}).splitlines()[:15] == [
        "             batch  against     of  tokens  total  loss at  loss at  kept",
        "run             ms    flush  ideal      /s      s    8 st.      4 s    MB",
        "─" * 73,
        "1f1b, flush    600    1.00x    67%     167    4.8    2.500    2.667   3.0",
        "paci           500    1.20x    80%     200      4    2.000    2.000   3.0",
        "",
        "stage  drift  bound  updates  skipped",
        "─" * 37,
        "0          1      1        6        0",
        "1          1      1        6        3",
        "2          0      0        6        0",
        "",
        # Its loss falls from 3 at 2 s to 2 at 4 s.
        "paci reached 1f1b's final validation loss (2.500) after 3 s of 4.8 s: 1.60x sooner;",
        "after 8 steps its own is 2.000.",
        "",
    ]
    alone = render_stream(config, {"paci": own})
    assert alone.splitlines()[3].split()[:5] == ["paci", "500", "-", "-", "200"]
    assert "sooner" not in alone
    slow = render_stream(config, {"plain": plain, "paci": literal_rows("paci", 0.5, (5.0, 3.0, 2.75))})
    assert "paci did not reach 1f1b's final validation loss (2.500): its own is 2.750 after 4 s," in slow
    assert "when 1f1b's was 2.667." in slow


@pytest.mark.parametrize(
    ("timed", "note"),
    [
        ((1, 2, 3, 4), "batch: median over the same 2 batches of each run, paci's in the middle of a stream."),
        ((1, 4), "batch: median over the same 2 batches of each run, paci's drained so often that none is in the mid"),
        ((), "No times: of such a short run bytes were counted in all batches. Give it more --steps."),
    ],
)
def test_it_says_which_times_count(timed: tuple[int, ...], note: str) -> None:
    config = TrainConfig(schedule="paci", stages=3, steps=4)
    own = [replace(row, saved_bytes=None if row.step in timed else 1) for row in literal_rows("paci", 0.5, (5, 3, 2))]
    lines = render_stream(config, {"paci": own[:5]}).splitlines()
    assert any(line.startswith(note) for line in lines)


def test_a_loss_is_reached_where_it_is_first_crossed() -> None:
    curve = [(0.0, 5.0), (1.0, 3.0), (2.0, 3.5), (3.0, 2.0)]
    assert [reached_s(curve, loss) for loss in (6.0, 5.0, 4.0, 3.0, 2.75, 1.0)] == [0.0, 0.0, 0.5, 1.0, 2.5, None]
    assert reached_s([], 1.0) is None

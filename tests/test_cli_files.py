"""Checkpoints and metrics: whole or not at all, and refused when they are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from timelyfreeze import FreezingPipeline
from timelyfreeze.cli.checkpoint import Checkpoint
from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.metrics import MetricsLog, StepRow, read_rows

STATE = Checkpoint(
    config={"steps": 9},
    corpus="abc",
    done=[("plain", 9), ("timelyfreeze", 4)],
    elapsed_s=6.0,
    split=[3],
    chosen={"cut": 6},
)


def a_pipeline(seed: int) -> tuple[FreezingPipeline, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipe = FreezingPipeline(model, 2, 2, loss_fn=nn.functional.mse_loss, split_points=[1])
    return pipe, torch.optim.AdamW(pipe.parameters())


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    pipe, optimizer = a_pipeline(0)
    x = torch.ones(4, 3)
    with pipe:
        pipe.step(x, target=x)
        optimizer.step()
        STATE.save(tmp_path, pipe, optimizer)
    assert Checkpoint.load(tmp_path) == STATE
    other, others = a_pipeline(1)
    with other:
        STATE.restore(tmp_path, other, others)
    for mine, its in zip(pipe.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert torch.equal(optimizer.state[mine]["exp_avg"], others.state[its]["exp_avg"])


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    pipe, optimizer = a_pipeline(0)
    with pipe:
        STATE.save(tmp_path, pipe, optimizer)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with (
        FreezingPipeline(model, 2, 2, loss_fn=nn.functional.mse_loss) as other,
        pytest.raises(CommandError, match="cannot resume from the checkpoint"),
    ):
        STATE.restore(tmp_path, other, torch.optim.AdamW(other.parameters()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weights": 1}, "its entries are not a checkpoint's"),
        ({"format": 2, **dict.fromkeys(Checkpoint.__dataclass_fields__, 1)}, "format 2, this version reads 3"),
        ({"format": 3, **dict.fromkeys(Checkpoint.__dataclass_fields__, 1)}, "wrong types"),
    ],
)
def test_foreign_entries_are_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoint.from_json(content)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no complete checkpoint"):
        Checkpoint.load(tmp_path / "checkpoints")


def row(run: str, step: int) -> StepRow:
    return StepRow(run, step, loss=1.0 / 3 + step, step_time_s=0.1, elapsed_s=0.1 * step, phase="steady")


def test_rows_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for run, last in (("plain", 3), ("timelyfreeze", 5)):
        for step in range(last + 1):
            log.append(row(run, step))
    log.close()
    with open(path, "a") as file:
        file.write('{"run": "timelyfreeze", "st')  # a kill in the middle of a line
    rows = read_rows(path, [("plain", 3), ("timelyfreeze", 2)])
    assert rows == [*(row("plain", step) for step in range(4)), *(row("timelyfreeze", step) for step in range(3))]
    log = MetricsLog(path, rows)
    log.append(row("timelyfreeze", 3))
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["run"][0], line["step"]) for line in lines] == [("p", s) for s in range(4)] + [
        ("t", s) for s in range(4)
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[:1] + lines[2:], "step 1 of run 'plain' is missing"),
        (lambda lines: [lines[0], lines[1][:20], lines[2]], "line 2:"),
        (lambda lines: [lines[0], "[]", lines[2]], "line 2: its fields are not a step's"),
        (lambda lines: [lines[0], lines[1].replace("0.1,", '"fast",'), lines[2]], "line 2: 'fast' is no number"),
        (lambda lines: [lines[0], lines[1].replace("0.1,", "NaN,"), lines[2]], "line 2: nan is no number"),
        (lambda lines: [lines[0], lines[1].replace('"plain"', "7"), lines[2]], "line 2: run is no text"),
        (lambda lines: [lines[0], "\xff", lines[2]], "line 2:"),
    ],
)
def test_damaged_rows_that_are_needed_are_refused(tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, [row("plain", step) for step in range(3)])
    log.close()
    lines = path.read_text().splitlines()
    path.write_text("\n".join(damage(lines)) + "\n", encoding="latin-1")
    with pytest.raises(CommandError, match=message):
        read_rows(path, [("plain", 2)])


def test_missing_metrics_are_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file"):
        read_rows(tmp_path / "metrics.jsonl", [("plain", 2)])

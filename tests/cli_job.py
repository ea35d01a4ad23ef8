"""What the tests of `timelyfreeze train` share: a job that takes a moment, and what it left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from timelyfreeze.cli import metrics
from timelyfreeze.cli.checkpoint import Checkpoint
from timelyfreeze.cli.main import main
from timelyfreeze.cost import ActionCosts
from timelyfreeze.distributed import export_state_dict
from timelyfreeze.planner import make_plan
from timelyfreeze.schedule import create_schedule

MICROBATCHES = 4
STEPS = 6
# Enough for a plan found while training, on a busy machine too: a solve of some 60 steps' time is in force at step 79.
PLANNED_STEPS = 120
TINY = (
    *("--width", "16", "--layers", "2", "--heads", "2", "--sequence-length", "8", "--microbatch-size", "1"),
    *("--microbatches", str(MICROBATCHES), "--max-ratio", "0.5", "--validation-sequences", "8", "--seed", "3"),
    *("--learning-rate", "0.01", "--learning-rate-warmup", "2", "--evaluate-every", "2", "--device", "cpu"),
)


def write_text(root: Path) -> Path:
    """Forty files of text in ``root``, so that some are held out."""
    root.mkdir(exist_ok=True)
    for index in range(40):
        (root / f"{index}.txt").write_text("the quick brown fox jumps over the lazy dog " * (index + 1))
    return root


def save_plan(path: Path) -> Path:
    """A plan for ``TINY``: backward takes twice a forward, and half of it when frozen."""
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=MICROBATCHES)
    costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=2.0, frozen_backward_s=1.0)
    make_plan(schedule, costs, max_ratio=0.5).save(path)
    return path


def run(*arguments: object, steps: int | None = STEPS) -> int:
    """``timelyfreeze train`` with these arguments; its exit code."""
    length = () if steps is None else ("--steps", str(steps))
    return main(["train", *map(str, arguments), *length])


def saved(folder: Path) -> Checkpoint:
    """Where the last checkpoint of a run's folder stands."""
    return Checkpoint.load(folder / "checkpoints")


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The whole model's weights in it."""
    return export_state_dict(folder / "checkpoints")


def saved_file(folder: Path, name: str) -> Path:
    """A file of the only checkpoint of a run's folder."""
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    return checkpoint / name


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Killed(BaseException):
    """Stands for SIGKILL."""


def when(monkeypatch: pytest.MonkeyPatch, at: tuple[str, int], act: Callable[[], None]) -> None:
    """Call ``act`` when the row of a step is written down."""
    append = metrics.MetricsLog.append

    def watched(self: metrics.MetricsLog, row: metrics.StepRow) -> None:
        append(self, row)
        if (row.run, row.step) == at:
            act()

    monkeypatch.setattr(metrics.MetricsLog, "append", watched)


def kill() -> None:
    raise Killed

"""What a step of `timelyfreeze train` does, against a loop written by hand, and what it does when numbers break."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli_job import saved, saved_weights
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import read_corpus, training_batch, validation_batch
from timelyfreeze.cli.main import main
from timelyfreeze.cli.model import build_model, byte_loss

STEPS = 6
CONFIG = TrainConfig(
    width=16,
    layers=2,
    heads=2,
    sequence_length=8,
    microbatch_size=2,
    microbatches=4,
    max_ratio=0.5,
    validation_sequences=13,
    learning_rate=0.05,
    learning_rate_warmup=3,
    weight_decay=0.5,
    steps=STEPS,
    seed=5,
)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 50)
    names = ("width", "layers", "heads", "sequence_length", "microbatch_size", "microbatches", "max_ratio", "steps")
    names += ("validation_sequences", "learning_rate", "learning_rate_warmup", "weight_decay", "seed")
    typed = [part for name in names for part in ("--" + name.replace("_", "-"), str(getattr(CONFIG, name)))]
    paths = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run")]
    return ["train", *typed, *paths, "--device", "cpu", "--checkpoint-every", "1"]


def loop_by_hand(text: Path, num_sequences: int) -> tuple[list[float], list[float]]:
    """Losses and validation losses of plain training on the first ``num_sequences`` rows of each batch."""
    corpus = read_corpus([text], sequence_length=8)
    model = build_model(CONFIG.model, seed=5)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    held_out = validation_batch(corpus.validation, batch_size=13, sequence_length=8)
    losses, validations = [], [float(byte_loss(model(held_out[0]), held_out[1]).detach())]
    for step in range(1, STEPS + 1):
        x, y = training_batch(corpus.train, batch_size=8, sequence_length=8, seed=5, step=step)
        loss = byte_loss(model(x[:num_sequences]), y[:num_sequences])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, step / 3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        validations.append(float(byte_loss(model(held_out[0]), held_out[1]).detach()))
    return losses, validations


def rows(folder: Path, run: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["run"] == run]


def test_plain_runs_are_the_loop_by_hand(arguments: list[str], tmp_path: Path) -> None:
    assert main(arguments) == 0
    for run, num_sequences in (("plain", 8), ("fewer", 4)):
        losses, validations = loop_by_hand(tmp_path / "text.txt", num_sequences)
        found = rows(tmp_path / "run", run)
        assert [row["loss"] for row in found[1:]] == pytest.approx(losses, rel=1e-4)
        assert [row["validation_loss"] for row in found] == pytest.approx(validations, rel=1e-4)


def test_metrics_are_durable_before_the_checkpoint_that_counts_on_them(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename
    log = tmp_path / "run" / "metrics.jsonl"

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        if log.exists() and os.path.samestat(os.fstat(descriptor), log.stat()):
            events.append("metrics")

    def watched_rename(source: str, target: str) -> None:
        rename(source, target)
        if ".tmp-" in str(source) and Path(target).parent.name == "checkpoints":
            events.append("checkpoint")

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    assert main([*arguments, "--no-compare"]) == 0
    assert events == ["metrics", "checkpoint"] * (STEPS + 1)


def test_gradients_that_are_not_finite_stop_before_they_reach_a_weight(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = torch.nn.utils.clip_grad_norm_
    num_calls = 0

    def poisoned(parameters: Any, max_norm: float) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        parameters = list(parameters)
        if num_calls == 3:
            parameters[0].grad.fill_(float("inf"))
        return clip(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "the norm of the gradients is not finite: got inf (run plain, step 3)" in error
    assert "--resume" in error
    checkpoint = saved(tmp_path / "run")
    assert checkpoint.done == [("plain", 2)]
    assert all(weight.isfinite().all() for weight in saved_weights(tmp_path / "run").values())

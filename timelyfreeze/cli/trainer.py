"""A model in training: what one step of any run does."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType

import torch

from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus, training_batch, validation_batch
from timelyfreeze.cli.errors import TrainingError
from timelyfreeze.cli.model import build_model, byte_loss
from timelyfreeze.errors import problem
from timelyfreeze.freeze import FreezeConfig
from timelyfreeze.pipeline import FreezingPipeline
from timelyfreeze.runtime.memory import count_saved_bytes
from timelyfreeze.runtime.results import StepResult
from timelyfreeze.schedule import Schedule

_CLIP_NORM = 1.0


@dataclass(frozen=True)
class Update:
    """A training step that is done.

    Attributes:
        result: the pipeline's.
        loss: mean over the batch.
        step_time_s: the whole step: batch, pipeline, clipping, optimizer.
        saved_bytes: most bytes kept for backward at once, if they were counted.
    """

    result: StepResult
    loss: float
    step_time_s: float
    saved_bytes: int | None


class Trainer:
    """The command's model, pipelined, with its optimizer and its batches; a context manager.

    Args:
        config, corpus: what to train, on what; weights and batches are functions of ``config.seed``.
        schedule: of the pipeline.
        freeze: what to leave out; None trains plainly.
        split: index of the child with which each stage from 1 on begins; None: balanced by measuring.
        batch_size: sequences that a step draws. The pipeline takes the first of them, as many as its micro-batches
            hold, so that runs with fewer micro-batches see a part of the same batch.
        name: of the run, for messages.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        schedule: Schedule,
        *,
        freeze: FreezeConfig | None = None,
        split: Sequence[int] | None = None,
        batch_size: int | None = None,
        name: str = "",
    ) -> None:
        self._config, self._corpus, self._name = config, corpus, name
        self.num_sequences = schedule.num_microbatches * config.microbatch_size
        self._batch_size = batch_size or self.num_sequences
        self.pipe = FreezingPipeline(
            build_model(config.model, config.seed),
            num_stages=config.stages,
            num_microbatches=schedule.num_microbatches,
            schedule=schedule,
            loss_fn=byte_loss,
            freeze=freeze,
            devices=["cpu"] * schedule.num_ranks if config.device == "cpu" else None,
            split_points=split,
            seed=config.seed,
        )
        self.optimizer = make_optimizer(self.pipe, config)
        self._validation = validation_batch(
            corpus.validation, batch_size=config.validation_sequences, sequence_length=config.sequence_length
        )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pipe.close()

    def update(self, step: int, *, counts_bytes: bool = False) -> Update:
        """Do a step, counted from 1.

        Args:
            step: decides the batch and the learning rate.
            counts_bytes: count what is kept for backward, too, which slows the step down.

        Raises:
            StageError: a stage failed, or its loss is not finite.
            TrainingError: the gradients are not finite; no weight has changed.
        """
        config = self._config
        begin_s = time.perf_counter()
        x, y = training_batch(
            self._corpus.train,
            batch_size=self._batch_size,
            sequence_length=config.sequence_length,
            seed=config.seed,
            step=step,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        with count_saved_bytes(self.pipe.parameters()) if counts_bytes else nullcontext() as saved, self._autocast():
            result = self.pipe.step(x[: self.num_sequences], target=y[: self.num_sequences])
        norm = float(torch.nn.utils.clip_grad_norm_(self.pipe.parameters(), _CLIP_NORM))
        self._check_finite("the norm of the gradients", norm, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = float(result.loss)
        step_time_s = time.perf_counter() - begin_s
        return Update(result, loss, step_time_s, None if saved is None else saved.peak_bytes)

    def validate(self, step: int) -> float:
        """Mean loss over the held-out sequences, in pieces of the plain run's batch.

        Raises:
            TrainingError: it is not finite; ``step`` is for the message.
        """
        x, y = self._validation
        total = 0.0
        for start in range(0, len(x), self._config.batch_size):
            piece = slice(start, start + self._config.batch_size)
            with self._autocast():
                total += float(self.pipe.evaluate(x[piece], target=y[piece])) * len(x[piece])
        self._check_finite("the validation loss", total, step)
        return total / len(x)

    def _check_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise TrainingError(
                problem(
                    f"{what} is not finite",
                    got=value,
                    where=f"run {self._name}, step {step}",
                    hint="Take a lower --learning-rate, or --dtype float32.",
                )
            )

    def _autocast(self) -> AbstractContextManager[object]:
        kind = "cuda" if self._config.device != "cpu" and torch.cuda.is_available() else "cpu"
        return torch.autocast(kind, torch.bfloat16, enabled=self._config.dtype == "bfloat16")


def make_optimizer(pipe: FreezingPipeline, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices but no norms, fused where this torch and these devices can."""
    parameters = list(pipe.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    try:
        return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
    except RuntimeError:
        return torch.optim.AdamW(groups, lr=config.learning_rate)

"""A model in training without a flush: streams of batches, each drained at its end."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from timelyfreeze import AsyncPipeline
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus
from timelyfreeze.cli.model import build_model, byte_loss
from timelyfreeze.cli.stream_optimizer import StreamOptimizer
from timelyfreeze.cli.trainer import CLIP_NORM, ModelTrainer, make_optimizer
from timelyfreeze.runtime.memory import count_saved_bytes


@dataclass(frozen=True)
class StreamedBatch:
    """A batch that has been through all stages, forward and backward.

    Attributes:
        step: which one, counted from 1.
        loss: mean over the batch; None where it is not finite.
        step_time_s: since the batch before it was through the last stage's forward; of a stream's last batch, until the
            pipeline was drained. The times of a stream add up to what it took.
        drift: for every stage, the most updates between forward and backward of one of its micro-batches.
        saved_bytes: most bytes kept for backward at once in this stream, if they were counted.
    """

    step: int
    loss: float | None
    step_time_s: float
    drift: tuple[int, ...]
    saved_bytes: int | None = None


@dataclass(frozen=True)
class StreamCounts:
    """What the stages did, each, and how many copies of weights they made."""

    updates: tuple[int, ...]
    skipped_updates: tuple[int, ...]
    weight_copies: int

    def since(self, before: StreamCounts) -> StreamCounts:
        """Less what had been done before.

        >>> StreamCounts((5, 5), (1, 0), 3).since(StreamCounts((2, 2), (0, 0), 3))
        StreamCounts(updates=(3, 3), skipped_updates=(1, 0), weight_copies=0)
        """
        updates = tuple(now - then for now, then in zip(self.updates, before.updates, strict=True))
        skipped = tuple(now - then for now, then in zip(self.skipped_updates, before.skipped_updates, strict=True))
        return StreamCounts(updates, skipped, self.weight_copies - before.weight_copies)


class StreamTrainer(ModelTrainer):
    """The command's model in an ``AsyncPipeline``, whose stages have an optimizer each; a context manager.

    Args:
        config, corpus: what to train, on what; weights and batches are those of a run with a flush.
        split: index of the child with which each stage from 1 on begins; None: balanced by measuring.
        name: of the run, for messages.
    """

    pipe: AsyncPipeline

    def __init__(self, config: TrainConfig, corpus: Corpus, *, split: Sequence[int] | None, name: str) -> None:
        super().__init__(config, corpus, name)
        self.num_sequences = config.batch_size
        self._num_done = 0  # batches since this object was made
        self.pipe = AsyncPipeline(
            build_model(config.model, config.seed),
            num_stages=config.stages,
            num_microbatches=config.microbatches,
            accumulation=config.num_accumulated,
            optimizer=lambda parameters: make_optimizer(parameters, config),
            lr_scheduler=lambda optimizer: RateByBatches(optimizer, config.learning_rate_at),
            loss_fn=byte_loss,
            devices=["cpu"] * config.stages if config.device == "cpu" else None,
            split_points=split,
            schedule=config.schedule,
            memory=config.memory,
            predict_weights=config.predict_weights,
            seed=config.seed,
            max_grad_norm=CLIP_NORM,
        )
        self.optimizer = StreamOptimizer(self.pipe)

    def __enter__(self) -> StreamTrainer:
        return self

    @property
    def counts(self) -> StreamCounts:
        """So far; exact when drained."""
        ledger = self.pipe.ledger
        return StreamCounts(
            tuple(stage.num_updates for stage in ledger.stages),
            tuple(stage.num_skipped for stage in ledger.stages),
            ledger.num_weight_copies,
        )

    def stream(
        self, steps: range, on_batch: Callable[[StreamedBatch], None], *, counts_bytes: bool = False
    ) -> StreamCounts:
        """Train on the batches of some steps one after the other, and drain the pipeline.

        Args:
            steps: decide the batches.
            on_batch: told of every batch in order, once all stages are done with it.
            counts_bytes: count what is kept for backward, too, which slows the stages down; batches are then told of
                at the end.

        Returns:
            what was done in this stream.

        Raises:
            StageError: a stage failed, or too many of its updates in a row were not finite.
        """
        before = self.counts
        # A batch's last backward is through when the results of so many batches after it are there, at the latest.
        lag = len(steps) if counts_bytes else -(-self._config.stages // self._config.microbatches)
        waiting: deque[tuple[int, Tensor, float]] = deque()
        counting = count_saved_bytes(self.pipe.parameters()) if counts_bytes else nullcontext()
        begin_s = time.perf_counter()
        with counting as saved, self._autocast():
            results = self.pipe.run(self._batches(steps), drain=False)
            for step, result in zip(steps, results, strict=True):
                if step == steps[-1]:
                    self.pipe.drain()
                end_s = time.perf_counter()
                waiting.append((step, result.loss, end_s - begin_s))
                begin_s = end_s
                if len(waiting) > lag:
                    on_batch(self._batch_of(*waiting.popleft()))
        for batch in waiting:
            on_batch(replace(self._batch_of(*batch), saved_bytes=None if saved is None else saved.peak_bytes))
        return self.counts.since(before)

    def _batches(self, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._batch(step, self.num_sequences) for step in steps)

    def _batch_of(self, step: int, loss: Tensor, step_time_s: float) -> StreamedBatch:
        value = float(loss)
        drift = self._drift_of(self._num_done)
        self._num_done += 1
        return StreamedBatch(step, value if math.isfinite(value) else None, step_time_s, drift)

    def _drift_of(self, index: int) -> tuple[int, ...]:
        """By stage, of a batch counted from 0 since this object was made; of as much of it as the ledger still has."""
        num_microbatches = self._config.microbatches
        drift = []
        for stage in self.pipe.ledger.stages:
            oldest = sum(stage.microbatches.values()) - len(stage.last)
            begin, end = (max(0, one * num_microbatches - oldest) for one in (index, index + 1))
            drift.append(max(stage.last[begin:end], default=0))
        return tuple(drift)

    def _own_part(self, batch: Tensor) -> Tensor:
        return batch


class RateByBatches:
    """Sets an optimizer's learning rate by the batches that its stage is through with, whatever updates they made.

    Args:
        rate_at: of a step, counted from 1.

    >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    >>> RateByBatches(optimizer, lambda step: step / 4).step()
    >>> optimizer.param_groups[0]["lr"]
    0.5
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rate_at: Callable[[int], float]) -> None:
        self._optimizer, self._rate_at = optimizer, rate_at
        self.load_state_dict({"step": 1})

    def step(self) -> None:
        """A batch is done."""
        self.load_state_dict({"step": self._step + 1})

    def state_dict(self) -> dict[str, Any]:
        """Which step is next."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on before that step."""
        self._step = int(state["step"])
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate_at(self._step)

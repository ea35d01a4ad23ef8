"""A model in training: what one step of any run does."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor, nn

from timelyfreeze import AsyncPipeline
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus, training_batch, validation_batch
from timelyfreeze.cli.errors import TrainingError
from timelyfreeze.cli.model import build_model, byte_loss, without_memory
from timelyfreeze.cli.stopping import StopRequest
from timelyfreeze.cli.world import World
from timelyfreeze.errors import problem
from timelyfreeze.freeze import FreezeConfig
from timelyfreeze.pipeline import FreezingPipeline
from timelyfreeze.runtime.memory import count_saved_bytes
from timelyfreeze.runtime.results import StepResult
from timelyfreeze.runtime.sources import StageSource, own_children
from timelyfreeze.schedule import Schedule

CLIP_NORM = 1.0


@dataclass(frozen=True)
class Update:
    """A training step that is done.

    Attributes:
        result: the pipeline's.
        loss: mean over the batch.
        step_time_s: the whole step: batch, pipeline, clipping, optimizer.
        saved_bytes: most bytes kept for backward at once, if they were counted; of several processes each one's most,
            added up.
    """

    result: StepResult
    loss: float
    step_time_s: float
    saved_bytes: int | None


class ModelTrainer(ABC):
    """What trainers of the command's model share; a context manager that closes the pipeline.

    Args:
        config, corpus: what to train, on what.
        name: of the run, for messages.
    """

    pipe: FreezingPipeline | AsyncPipeline

    def __init__(self, config: TrainConfig, corpus: Corpus, name: str) -> None:
        self._config, self._corpus, self._name = config, corpus, name
        self._validation = validation_batch(
            corpus.validation, batch_size=config.validation_sequences, sequence_length=config.sequence_length
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pipe.close()

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
                loss = self.pipe.evaluate(self._own_part(x[piece]), target=self._own_part(y[piece]))
            total += float(loss) * len(x[piece])
        self._check_finite("the validation loss", total, step)
        return total / len(x)

    @abstractmethod
    def _own_part(self, batch: Tensor) -> Tensor:
        """What of a batch goes into this process's pipeline."""

    def _batch(self, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Input and target of a step, the same in every run of a job."""
        config = self._config
        return training_batch(
            self._corpus.train,
            batch_size=batch_size,
            sequence_length=config.sequence_length,
            seed=config.seed,
            step=step,
        )

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
        kind = "cuda" if self._is_on_gpu else "cpu"
        return torch.autocast(kind, torch.bfloat16, enabled=self._config.dtype == "bfloat16")

    @property
    def _is_on_gpu(self) -> bool:
        return self._config.device != "cpu" and torch.cuda.is_available()


class Trainer(ModelTrainer):
    """The command's model, pipelined, with its optimizer and its batches; a context manager.

    Args:
        config, corpus: what to train, on what; weights and batches are functions of ``config.seed``.
        schedule: of the pipeline.
        freeze: what to leave out; None trains plainly.
        split: index of the child with which each stage from 1 on begins; None: balanced by measuring.
        batch_size: sequences that a step draws. The pipeline takes the first of them, as many as its micro-batches
            hold, so that runs with fewer micro-batches see a part of the same batch. Replicas share them out.
        name: of the run, for messages.
        world: the processes that train together, each with its own stages.
    """

    pipe: FreezingPipeline

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
        world: World | None = None,
    ) -> None:
        super().__init__(config, corpus, name)
        self._world = world or World()
        self.num_sequences = config.num_sequences(schedule.num_microbatches)
        self._batch_size = batch_size or self.num_sequences
        if split is None and (self._world.has_others or config.plan is not None):
            # By size, which every process knows alike, and every run that is to repeat.
            split = split_by_size(config, schedule)
        num_threads = schedule.num_ranks if not self._world.has_others else 1
        self.pipe = FreezingPipeline(
            self._world.each(lambda: self._build(schedule, split)),
            num_stages=config.stages,
            num_microbatches=schedule.num_microbatches,
            schedule=schedule,
            loss_fn=byte_loss,
            freeze=freeze,
            devices=["cpu"] * num_threads if config.device == "cpu" else None,
            split_points=split,
            init_fn=None if not self._world.has_others else lambda module: None,  # what it would fill is not kept
            seed=config.seed,
            **self._world.grid(config.data_parallel, on_gpu=self._is_on_gpu),
        )
        self._names = [name for name, _ in without_memory(config.model).named_parameters()]
        self.optimizer = make_optimizer(self.pipe.parameters(), config)

    def __enter__(self) -> Trainer:
        return self

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
        x, y = self._batch(step, self._batch_size)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        with count_saved_bytes(self.pipe.parameters()) if counts_bytes else nullcontext() as saved, self._autocast():
            result = self.pipe.step(
                self._own_part(x[: self.num_sequences]), target=self._own_part(y[: self.num_sequences])
            )
        norm = self._clip()
        self._check_finite("the norm of the gradients", norm, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = float(result.loss)
        step_time_s = time.perf_counter() - begin_s
        return Update(result, loss, step_time_s, None if saved is None else sum(self.pipe.gather(saved.peak_bytes)))

    def agree(self, stop: StopRequest) -> None:
        """Let all processes know whether one of them was asked to stop, so that they do so after the same step."""
        if self._world.has_others:
            stop.agree(self.pipe.gather(stop.own_signal))

    def _build(self, schedule: Schedule, split: Sequence[int] | None) -> nn.Sequential:
        """The model; with several processes, only what this one's stages have."""
        config = self._config
        if not self._world.has_others:
            return build_model(config.model, config.seed)
        assert split is not None
        rank = self._world.rank % schedule.num_ranks
        stages = [stage for stage, holder in enumerate(schedule.stage_to_rank) if holder == rank]
        return build_model(config.model, config.seed, own_children(split, config.layers + 2, stages))

    def _own_part(self, batch: Tensor) -> Tensor:
        """This replica's share of a batch; all of it where it cannot be shared out evenly, which has the same mean."""
        num_replicas = self._config.data_parallel
        if num_replicas == 1 or len(batch) % num_replicas:
            return batch
        return batch.tensor_split(num_replicas)[self._world.rank // (self._world.size // num_replicas)]

    def _clip(self) -> float:
        """Clip by the norm over all stages' gradients, wherever they are; the norm before."""
        parameters = list(self.pipe.parameters())
        if not self._world.has_others:
            return float(torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM))
        norms: dict[str, float] = {}
        for own in self.pipe.gather(gradient_norms(self.pipe)):
            norms.update(own)
        # Added in the order of one process, so that the sum has the same bits. Tied weights have one name in it.
        total = torch.linalg.vector_norm(torch.tensor([norms[name] for name in self._names if name in norms]))
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, total)
        return float(total)


def split_by_size(config: TrainConfig, schedule: Schedule) -> list[int]:
    """Children with which stages begin, so that every rank has about as many parameters.

    >>> from timelyfreeze.schedule import create_schedule
    >>> split_by_size(TrainConfig(), create_schedule("1f1b", num_ranks=2, num_microbatches=8))
    [4]
    """
    source = StageSource(without_memory(config.model), None)
    return source.points_by_size(schedule.num_stages, schedule.stage_to_rank)


def gradient_norms(pipe: FreezingPipeline) -> dict[str, float]:
    """The 2-norm of every gradient that is there, by the parameter's name."""
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    return {name: float(torch.linalg.vector_norm(grad)) for name, grad in gradients.items() if grad is not None}


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices but no norms, fused where this torch and these devices can."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    try:
        return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
    except RuntimeError:
        return torch.optim.AdamW(groups, lr=config.learning_rate)

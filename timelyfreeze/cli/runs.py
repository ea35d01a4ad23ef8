"""The runs of a job: plain, with freezing, and plain with fewer micro-batches."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from timelyfreeze.cli.checkpoint import Checkpoint
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus, training_batch, validation_batch
from timelyfreeze.cli.errors import TrainingError
from timelyfreeze.cli.folder import RunFolder
from timelyfreeze.cli.metrics import MetricsLog, StepRow
from timelyfreeze.cli.model import build_model, byte_loss
from timelyfreeze.cli.progress import Reporter
from timelyfreeze.cli.stopping import StopRequest
from timelyfreeze.cli.table import FEWER, FREEZE, PLAIN
from timelyfreeze.errors import problem
from timelyfreeze.freeze import FreezeConfig
from timelyfreeze.pipeline import FreezingPipeline
from timelyfreeze.planner import Plan
from timelyfreeze.runtime.memory import count_saved_bytes
from timelyfreeze.schedule import Schedule, create_schedule

_CLIP_NORM = 1.0


@dataclass(frozen=True)
class RunSpec:
    """One run of a job: its name, its schedule, and whether it freezes."""

    name: str
    schedule: Schedule
    freezes: bool = False


@dataclass
class Job:
    """What the runs share.

    Attributes:
        split: index of the child with which each stage from 1 on begins: balanced once, the same for all runs.
        done: for every run so far, in order, its name and the steps done.
        plan: of the run that freezes, once it is known.
    """

    config: TrainConfig
    corpus: Corpus
    schedule: Schedule
    fixed_plan: Plan | None
    folder: RunFolder | None
    log: MetricsLog
    reporter: Reporter
    stop: StopRequest
    split: list[int] | None = None
    done: list[tuple[str, int]] = field(default_factory=list)
    plan: Plan | None = None

    @property
    def specs(self) -> list[RunSpec]:
        """The runs in order; a schedule from a file has no sibling with fewer micro-batches."""
        specs = [RunSpec(FREEZE, self.schedule, freezes=True)]
        if self.config.compare:
            specs.insert(0, RunSpec(PLAIN, self.schedule))
            fewer = self.config.num_fewer_microbatches
            if fewer < self.config.microbatches and not self.config.has_schedule_file:
                schedule = create_schedule(self.config.schedule, num_ranks=self.config.stages, num_microbatches=fewer)
                specs.append(RunSpec(FEWER, schedule))
        return specs


def run_all(job: Job, checkpoint: Checkpoint | None) -> None:
    """Run what is not done yet, going on from ``checkpoint``.

    Raises:
        StageError: user code failed in a stage, or a loss was not finite; the last checkpoint stays.
        StoppedError: an end was asked for; the checkpoint is saved.
    """
    finished = {run for run, num_steps in job.done if num_steps == job.config.steps}
    for spec in job.specs:
        if spec.name not in finished:
            going_on = checkpoint is not None and checkpoint.done[-1][0] == spec.name
            TrainingRun(job, spec).train(checkpoint if going_on else None)


class TrainingRun:
    """One run of a job: its model, pipeline and optimizer, from its first step or a checkpoint to its last."""

    def __init__(self, job: Job, spec: RunSpec) -> None:
        self.job, self.spec, self.config = job, spec, job.config
        self.batch_size = spec.schedule.num_microbatches * job.config.microbatch_size
        self.elapsed_s = 0.0
        model = build_model(job.config.model, job.config.seed)
        devices = ["cpu"] * spec.schedule.num_ranks if job.config.device == "cpu" else None
        self.pipe = FreezingPipeline(
            model,
            num_stages=job.config.stages,
            num_microbatches=spec.schedule.num_microbatches,
            schedule=spec.schedule,
            loss_fn=byte_loss,
            freeze=self._freeze_config() if spec.freezes else None,
            devices=devices,
            split_points=job.split,
            seed=job.config.seed,
        )
        self.validation = validation_batch(
            job.corpus.validation,
            batch_size=job.config.validation_sequences,
            sequence_length=job.config.sequence_length,
        )

    def _freeze_config(self) -> FreezeConfig:
        return FreezeConfig(max_ratio=self.config.max_ratio, mode=self.config.mode, plan=self.job.fixed_plan)

    def train(self, checkpoint: Checkpoint | None) -> None:
        job, num_steps = self.job, self.config.steps
        with self.pipe:
            self.optimizer = make_optimizer(self.pipe, self.config)
            first = self._begin(checkpoint)
            job.reporter.begin_run(self.spec.name, num_steps, first - 1)
            try:
                for step in range(first, num_steps + 1):
                    row = self._step(step)
                    job.log.append(row)
                    job.reporter.show(row)
                    job.done[-1] = (self.spec.name, step)
                    if job.stop.requested or step == num_steps or step % self.config.checkpoint_interval == 0:
                        self._save()
                    if step < num_steps:
                        job.stop.check()
            finally:
                job.reporter.end_run()
        job.stop.check()

    def _begin(self, checkpoint: Checkpoint | None) -> int:
        """Restore, or measure the start; returns the first step to do."""
        job = self.job
        if checkpoint is not None:
            self.pipe.load_freeze_state_dict(checkpoint.freeze)
            self.pipe.load_state_dict(checkpoint.model)
            self.optimizer.load_state_dict(checkpoint.optimizer)
            self.elapsed_s = checkpoint.elapsed_s
            return job.done[-1][1] + 1
        job.done.append((self.spec.name, 0))
        job.log.append(StepRow(self.spec.name, 0, phase="start", validation_loss=self._validate()))
        job.split = self.pipe.report()["split_points"]
        if len(job.done) == 1:  # from here on there is something to resume from
            self._save()
        return 1

    def _step(self, step: int) -> StepRow:
        config = self.config
        counts = step == config.steps  # the last step alone, because counting slows it down
        begin_s = time.perf_counter()
        x, y = training_batch(
            self.job.corpus.train,
            batch_size=config.batch_size,
            sequence_length=config.sequence_length,
            seed=config.seed,
            step=step,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        with count_saved_bytes(self.pipe.parameters()) if counts else nullcontext() as saved, self._autocast():
            result = self.pipe.step(x[: self.batch_size], target=y[: self.batch_size])
        norm = float(torch.nn.utils.clip_grad_norm_(self.pipe.parameters(), _CLIP_NORM))
        self._check_finite("the norm of the gradients", norm, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = float(result.loss)
        step_time_s = time.perf_counter() - begin_s
        self.elapsed_s += step_time_s
        self._keep_plan()
        due = step == config.steps or step % config.evaluation_interval == 0
        plan = self.pipe.plan
        return StepRow(
            run=self.spec.name,
            step=step,
            loss=loss,
            step_time_s=step_time_s,
            pipeline_time_s=result.step_time_s,
            elapsed_s=self.elapsed_s,
            phase=result.phase,
            freeze_ratio=result.freeze_ratio,
            tokens_per_s=self.batch_size * config.sequence_length / step_time_s,
            validation_loss=self._validate() if due else None,
            predicted_s=None if plan is None else plan.makespan_s,
            saved_bytes=None if saved is None else saved.peak_bytes,
        )

    def _validate(self) -> float:
        """Mean loss over the held-out sequences, in pieces of the plain run's batch."""
        x, y = self.validation
        total = 0.0
        for start in range(0, len(x), self.config.batch_size):
            piece = slice(start, start + self.config.batch_size)
            with self._autocast():
                total += float(self.pipe.evaluate(x[piece], target=y[piece])) * len(x[piece])
        self._check_finite("the validation loss", total, self.job.done[-1][1])
        return total / len(x)

    def _check_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise TrainingError(
                problem(
                    f"{what} is not finite",
                    got=value,
                    where=f"run {self.spec.name}, step {step}",
                    hint="Take a lower --learning-rate, or --dtype float32.",
                )
            )

    def _autocast(self) -> Any:
        kind = "cuda" if self.config.device != "cpu" and torch.cuda.is_available() else "cpu"
        return torch.autocast(kind, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def _keep_plan(self) -> None:
        plan = self.pipe.plan
        if plan is not None and plan is not self.job.plan:
            self.job.plan = plan
            if self.job.folder is not None:
                plan.save(self.job.folder.plan)

    def _save(self) -> None:
        job = self.job
        if job.folder is None:
            return
        job.log.sync()
        Checkpoint(
            config=self.config.to_json(),
            corpus=job.corpus.fingerprint,
            done=list(job.done),
            elapsed_s=self.elapsed_s,
            split=list(job.split or []),
            model=self.pipe.state_dict(),
            optimizer=self.optimizer.state_dict(),
            freeze=self.pipe.freeze_state_dict(),
        ).save(job.folder.checkpoint)


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

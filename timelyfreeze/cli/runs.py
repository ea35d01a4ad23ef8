"""The runs of a job: plain, with freezing, and plain with fewer micro-batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from timelyfreeze.cli.calibrate import choose_live
from timelyfreeze.cli.checkpoint import Checkpoint, SavedOptimizer
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus
from timelyfreeze.cli.folder import RunFolder
from timelyfreeze.cli.measured import MeasuredRun, write_measured
from timelyfreeze.cli.metrics import MetricsLog, StepRow
from timelyfreeze.cli.progress import Reporter
from timelyfreeze.cli.stopping import StopRequest
from timelyfreeze.cli.stream_run import StreamRun
from timelyfreeze.cli.table import FEWER, FREEZE, PLAIN
from timelyfreeze.cli.trainer import Trainer, split_by_size
from timelyfreeze.cli.world import World
from timelyfreeze.distributed.checkpoint_values import CheckpointedPipeline
from timelyfreeze.freeze import FreezeConfig
from timelyfreeze.planner import Plan
from timelyfreeze.runtime.engine import StepTimes
from timelyfreeze.schedule import Action, Schedule

_RECENT_STEPS = 20  # whose median step is kept to be looked at
_STEADY = "steady"


@dataclass(frozen=True)
class RunSpec:
    """One run of a job: its name, its schedule, and how its plan is made; None: nothing is frozen.

    Of a run without a flush, ``schedule`` is the one that it is set beside.
    """

    name: str
    schedule: Schedule
    mode: str | None = None
    is_stream: bool = False


@dataclass
class Job:
    """What the runs share.

    Attributes:
        schedule: of the plain run.
        folder: of the run's files, on the process that writes them.
        world: the processes that train together.
        checkpoints: where all of them save; None saves none.
        split: index of the child with which each stage from 1 on begins: balanced once, the same for all runs.
        chosen: with ``--live-microbatches``, the number of micro-batches that was chosen for every mode.
        done: for every run so far, in order, its name and the steps done.
        plan: of the run named ``timelyfreeze``, once it is known.
        measured: of every run so far, by name, one step.
    """

    config: TrainConfig
    corpus: Corpus
    schedule: Schedule
    fixed_plan: Plan | None
    folder: RunFolder | None
    log: MetricsLog
    reporter: Reporter
    stop: StopRequest
    world: World
    checkpoints: Path | None = None
    split: list[int] | None = None
    chosen: dict[str, int] = field(default_factory=dict)
    done: list[tuple[str, int]] = field(default_factory=list)
    plan: Plan | None = None
    measured: dict[str, MeasuredRun] = field(default_factory=dict)

    @property
    def modes(self) -> list[str]:
        """How plans are made: as asked, and the other way where both are compared."""
        return [self.config.mode, *([self.config.other_mode] if self.config.compare_modes else [])]

    @property
    def specs(self) -> list[RunSpec]:
        """The runs in order; a schedule from a file has no sibling with fewer micro-batches."""
        config = self.config
        if config.is_stream:
            stream = RunSpec(config.schedule, self.schedule, is_stream=True)
            return [RunSpec(PLAIN, self.schedule), stream] if config.compare else [stream]
        specs = [RunSpec(FREEZE if mode == config.mode else mode, self._schedule(mode), mode) for mode in self.modes]
        if not config.compare:
            return specs
        fewer = self._num_fewer()
        if config.live_microbatches is None and fewer < config.microbatches and not config.has_schedule_file:
            specs.append(RunSpec(FEWER, self._sized(fewer)))
        return [RunSpec(PLAIN, self.schedule), *specs]

    def _num_fewer(self) -> int:
        live = None if self.fixed_plan is None else self.fixed_plan.live_microbatches
        return self.config.num_fewer_microbatches if live is None else live

    def _schedule(self, mode: str) -> Schedule:
        return self._sized(self.chosen[mode]) if mode in self.chosen else self.schedule

    def _sized(self, num_microbatches: int) -> Schedule:
        return self.config.sized_schedule(num_microbatches)

    def freeze_config(self) -> FreezeConfig:
        """What the options say of freezing."""
        config = self.config
        return FreezeConfig(
            max_ratio=config.max_ratio,
            mode=config.mode,
            stage_max_ratio=dict(config.stage_max_ratio) or None,
            target_makespan_s=None if config.target_ms is None else config.target_ms / 1e3,
            live_microbatches=config.live_microbatches,
            min_live_ratio=config.min_live_ratio,
            plan=self.fixed_plan,
        )

    def save(self, pipe: CheckpointedPipeline, optimizer: SavedOptimizer, elapsed_s: float) -> None:
        """Write down where the job stands after a whole step of its last run: metrics first, then the checkpoint."""
        if self.folder is not None:
            self.log.sync()
            write_measured(self.folder.measured, self.measured.values())
        if self.checkpoints is None:
            return
        Checkpoint(
            config=self.config.to_json(),
            corpus=self.corpus.fingerprint,
            done=list(self.done),
            elapsed_s=elapsed_s,
            split=list(self.split or []),
            chosen=dict(self.chosen),
        ).save(self.checkpoints, pipe, optimizer)


def run_all(job: Job, checkpoint: Checkpoint | None, *, with_freezing: bool = True) -> None:
    """Run what is not done yet, going on from ``checkpoint``, with its freezing state or without.

    Raises:
        StageError: user code failed in a stage, or a loss was not finite; the last checkpoint stays.
        StoppedError: an end was asked for; the checkpoint is saved.
    """
    if job.config.live_microbatches is not None and not job.chosen:
        job.chosen, job.split = choose_live(
            job.config, job.corpus, job.schedule, job.modes, reporter=job.reporter, stop=job.stop, world=job.world
        )
    if job.config.is_stream and job.split is None:
        # Which updates a parameter misses depends on its stage, so by size rather than by a clock: runs repeat.
        job.split = split_by_size(job.config, job.schedule)
    finished = {run for run, num_steps in job.done if num_steps == job.config.steps}
    for spec in job.specs:
        if spec.name not in finished:
            own = checkpoint if checkpoint is not None and checkpoint.done[-1][0] == spec.name else None
            if spec.is_stream:
                StreamRun(job, spec.name).train(own)
            else:
                TrainingRun(job, spec).train(own, with_freezing=with_freezing)


class _TimedStep(NamedTuple):
    """A step that may be kept to be looked at."""

    pipeline_time_s: float
    step: int
    phase: str
    times: StepTimes
    ratios: dict[Action, float]


class TrainingRun:
    """One run of a job: its model, pipeline and optimizer, from its first step or a checkpoint to its last."""

    def __init__(self, job: Job, spec: RunSpec) -> None:
        self.job, self.spec, self.config = job, spec, job.config
        self.elapsed_s = 0.0
        self._recent: deque[_TimedStep] = deque(maxlen=_RECENT_STEPS)
        self._plan: Plan | None = None
        self._failure: str | None = None
        with job.stop.suspended():
            self.trainer = Trainer(
                job.config,
                job.corpus,
                spec.schedule,
                freeze=None if spec.mode is None else replace(job.freeze_config(), mode=spec.mode),
                split=job.split,
                batch_size=job.config.num_sequences(max(s.schedule.num_microbatches for s in job.specs)),
                name=spec.name,
                world=job.world,
            )

    def train(self, checkpoint: Checkpoint | None, *, with_freezing: bool = True) -> None:
        """Train to the end; raises what ``run_all`` does."""
        job, num_steps = self.job, self.config.steps
        with self.trainer:
            first = self._begin(checkpoint, with_freezing)
            job.reporter.begin_run(self.spec.name, num_steps, first - 1)
            try:
                for step in range(first, num_steps + 1):
                    row = self._step(step)
                    self.trainer.agree(job.stop)
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

    def _begin(self, checkpoint: Checkpoint | None, with_freezing: bool) -> int:
        """Restore, or measure the start; returns the first step to do."""
        job, trainer = self.job, self.trainer
        if checkpoint is not None:
            assert job.checkpoints is not None
            checkpoint.restore(job.checkpoints, trainer.pipe, trainer.optimizer, with_freezing=with_freezing)
            self.elapsed_s = checkpoint.elapsed_s
            return job.done[-1][1] + 1
        job.done.append((self.spec.name, 0))
        job.log.append(StepRow(self.spec.name, 0, phase="start", validation_loss=trainer.validate(0)))
        job.split = trainer.pipe.report()["split_points"]
        if len(job.done) == 1:  # from here on there is something to resume from
            self._save()
        return 1

    def _step(self, step: int) -> StepRow:
        config = self.config
        # Bytes are counted in the last step alone, because counting slows it down.
        update = self.trainer.update(step, counts_bytes=step == config.steps)
        result = update.result
        self.elapsed_s += update.step_time_s
        self._keep_plan()
        due = step == config.steps or step % config.evaluation_interval == 0
        plan = self.trainer.pipe.plan
        row = StepRow(
            run=self.spec.name,
            step=step,
            loss=update.loss,
            step_time_s=update.step_time_s,
            pipeline_time_s=result.step_time_s,
            elapsed_s=self.elapsed_s,
            phase=result.phase,
            freeze_ratio=result.freeze_ratio,
            tokens_per_s=self.trainer.num_sequences * config.sequence_length / update.step_time_s,
            validation_loss=self.trainer.validate(step) if due else None,
            predicted_s=None if plan is None else plan.makespan_s,
            saved_bytes=update.saved_bytes,
        )
        if row.timed:
            ratios = plan.ratios if plan is not None and result.phase == _STEADY else {}
            if self._recent and self._recent[-1].phase != result.phase:
                self._recent.clear()
            self._recent.append(_TimedStep(result.step_time_s, step, result.phase, result.times, ratios))
        return row

    def _keep_plan(self) -> None:
        """Save the plan where it is a new one."""
        job, pipe = self.job, self.trainer.pipe
        plan = pipe.plan
        if plan is not None and plan is not self._plan:
            self._plan = plan
            if self.spec.name == FREEZE:
                job.plan = plan
            if job.folder is not None:
                plan.save(job.folder.plan if self.spec.name == FREEZE else job.folder.plan_of_mode(plan.mode))

    def _tell_failure(self) -> None:
        """Say once why there is no plan, where it is so."""
        failure = self.trainer.pipe.report().get("failure")
        if failure is not None and failure != self._failure:
            self.job.reporter.note(f"{self.spec.name}: no plan: {failure}")
        self._failure = failure

    def _keep_measured(self) -> None:
        """Of the last steps, the one whose time is their median."""
        if self._recent:
            steps = sorted(self._recent, key=lambda step: step.pipeline_time_s)
            _, step, phase, times, ratios = steps[(len(steps) - 1) // 2]
            self.job.measured[self.spec.name] = MeasuredRun(
                self.spec.name, self.spec.schedule, step, phase, times.start_s, times.end_s, times.skipped, ratios
            )

    def _save(self) -> None:
        self._tell_failure()
        self._keep_measured()
        self.job.save(self.trainer.pipe, self.trainer.optimizer, self.elapsed_s)

"""A run of a job whose pipeline is not flushed, from its first step or a checkpoint to its last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timelyfreeze.cli.checkpoint import Checkpoint
from timelyfreeze.cli.metrics import StepRow
from timelyfreeze.cli.stream_trainer import StreamCounts, StreamedBatch, StreamTrainer

if TYPE_CHECKING:
    from timelyfreeze.cli.runs import Job

PHASE = "stream"


class StreamRun:
    """Trains, validates and saves where the pipeline is drained, which ``Drains`` says from the options alone.

    Every batch's row is written once all stages are done with it. A stop that is asked for comes when the pipeline is
    drained the next time, so that the run goes on from there as if nothing had been.
    """

    def __init__(self, job: Job, name: str) -> None:
        self.job, self.name, self.config = job, name, job.config
        self.elapsed_s = 0.0
        self._saved = 0
        self.trainer = StreamTrainer(job.config, job.corpus, split=job.split, name=name)

    def train(self, checkpoint: Checkpoint | None) -> None:
        """Train to the end; raises what ``run_all`` does."""
        job, num_steps, drains = self.job, self.config.steps, self.config.drains
        with self.trainer:
            done = self._saved = self._begin(checkpoint)
            job.reporter.begin_run(self.name, num_steps, done)
            try:
                while done < num_steps:
                    done = self._stream(done, drains.next_after(done), counts_bytes=drains.counts(done))
                    if job.stop.requested or self._is_due(done):
                        self._save(done)
                    if done < num_steps:
                        job.stop.check()
            finally:
                job.reporter.end_run()
        job.stop.check()

    def _begin(self, checkpoint: Checkpoint | None) -> int:
        """Restore, or measure the start; returns how many steps are done."""
        job, trainer = self.job, self.trainer
        if checkpoint is not None:
            assert job.checkpoints is not None
            checkpoint.restore(job.checkpoints, trainer.pipe, trainer.optimizer)
            self.elapsed_s = checkpoint.elapsed_s
            return job.done[-1][1]
        job.done.append((self.name, 0))
        job.log.append(StepRow(self.name, 0, phase="start", validation_loss=trainer.validate(0)))
        job.split = trainer.pipe.report()["split_points"]
        if len(job.done) == 1:  # from here on there is something to resume from
            self._save(0)
        return 0

    def _stream(self, done: int, last: int, *, counts_bytes: bool) -> int:
        """Train the steps after ``done`` up to ``last``, which is where the pipeline stands then."""
        held: list[StreamedBatch] = []

        def on_batch(batch: StreamedBatch) -> None:
            held.append(batch)
            if batch.step < last:
                self._write(batch)

        counts = self.trainer.stream(range(done + 1, last + 1), on_batch, counts_bytes=counts_bytes)
        due = last == self.config.steps or last % self.config.evaluation_interval == 0
        self._write(held[-1], counts, self.trainer.validate(last) if due else None)
        return last

    def _write(
        self, batch: StreamedBatch, counts: StreamCounts | None = None, validation_loss: float | None = None
    ) -> None:
        """The row of a batch; ``counts`` of its stream where it was the last."""
        self.elapsed_s += batch.step_time_s
        num_tokens = self.trainer.num_sequences * self.config.sequence_length
        row = StepRow(
            run=self.name,
            step=batch.step,
            loss=batch.loss,
            step_time_s=batch.step_time_s,
            elapsed_s=self.elapsed_s,
            phase=PHASE,
            tokens_per_s=num_tokens / batch.step_time_s,
            validation_loss=validation_loss,
            saved_bytes=batch.saved_bytes,
            drift=batch.drift,
            updates=None if counts is None else counts.updates,
            skipped_updates=None if counts is None else counts.skipped_updates,
            weight_copies=None if counts is None else counts.weight_copies,
        )
        self.job.log.append(row)
        self.job.reporter.show(row)
        self.job.done[-1] = (self.name, batch.step)

    def _is_due(self, step: int) -> bool:
        """Whether a checkpoint has fallen due since the last one: the first drain after that takes it."""
        interval = self.config.checkpoint_interval
        return step == self.config.steps or step // interval > self._saved // interval

    def _save(self, step: int) -> None:
        self._saved = step
        self.job.save(self.trainer.pipe, self.trainer.optimizer, self.elapsed_s)

"""``timelyfreeze train``: runs a job, new or taken up again, and prints its table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console

from timelyfreeze.cli.calibrate import plain_makespan_s
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.errors import StoppedError, TrainingError
from timelyfreeze.cli.folder import RunFolder
from timelyfreeze.cli.launch import Launch
from timelyfreeze.cli.metrics import MetricsLog
from timelyfreeze.cli.progress import Reporter, SilentReporter, make_reporter
from timelyfreeze.cli.runs import Job, RunSpec, run_all
from timelyfreeze.cli.setup import Setup
from timelyfreeze.cli.sharing import shared_setup
from timelyfreeze.cli.stopping import StopRequest
from timelyfreeze.cli.stream_table import render_stream
from timelyfreeze.cli.table import render, steady_steps, summarize_run
from timelyfreeze.cli.world import World
from timelyfreeze.errors import StageError
from timelyfreeze.files import write_atomically


def train(
    typed: Mapping[str, Any],
    *,
    out: str | None = None,
    resume: str | None = None,
    console: Console | None = None,
    launch: Launch | None = None,
) -> int:
    """Run the job and print its table; returns the exit code 0.

    Args:
        typed: fields of ``TrainConfig`` that are not to have their defaults.
        out: folder for the run's files; None writes none.
        resume: folder of the run to go on with.
        console: where progress and table go; by default standard output.
        launch: the processes that train together, each with its own stages; None: this one alone.

    Raises:
        CommandError: wrong options or text, or a folder that cannot be used; nothing was trained.
        TrainingError: a stage raised, or a loss was not finite.
        StoppedError: a signal asked for an end.
        ElsewhereError: another process has raised one of these, and tells.
        OSError: a file of the run could not be written.
    """
    world = World(launch)
    reporter = make_reporter(console or Console()) if world.is_first else SilentReporter()
    with world.told_once(), world.joined(), ExitStack() as held:
        setup = shared_setup(world, typed, out, resume, held)
        _train(setup, reporter, world)
    return 0


def _train(setup: Setup, reporter: Reporter, world: World) -> None:
    if setup.config.device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(1)  # a stage is a thread of its own; OpenMP teams in each would fight over the cores
    reporter.note(setup.corpus.describe())
    log = MetricsLog(None if setup.folder is None else setup.folder.metrics, setup.rows)
    try:
        with StopRequest(lambda: reporter.note(_stopping(setup.config)), is_shared=world.has_others) as stop:
            job = _job(setup, log, reporter, stop, world)
            _run(job, setup)
    finally:
        log.close()
    if world.is_first:
        _finish(job, reporter)


def _job(setup: Setup, log: MetricsLog, reporter: Reporter, stop: StopRequest, world: World) -> Job:
    job = Job(setup.config, setup.corpus, setup.schedule, setup.fixed_plan, setup.folder, log, reporter, stop, world)
    job.checkpoints = setup.checkpoints
    job.plan = setup.plan
    job.measured = {run.name: run for run in setup.measured}
    if setup.checkpoint is not None:
        job.split = list(setup.checkpoint.split) or None
        job.chosen = dict(setup.checkpoint.chosen)
        job.done = list(setup.checkpoint.done)
        run, step = job.done[-1]
        if setup.folder is not None:
            setup.folder.tidy()
        anew = f", now with --stages {setup.config.stages}; times are measured anew" if setup.resized else ""
        reporter.note(f"Going on after step {step} of {run}{anew}.")
    return job


def _run(job: Job, setup: Setup) -> None:
    try:
        run_all(job, setup.checkpoint, with_freezing=not setup.resized)
    except StoppedError as error:
        at = f"after step {job.done[-1][1]} of {job.done[-1][0]}" if job.done else "before the first step"
        raise StoppedError(f"stopped {at}; {_way_on(job)}", error.signal_number) from None
    except StageError as error:
        at = _place(job)
        raise TrainingError(f"{error}\nThis was {at}; {_way_on(job)}") from error
    except TrainingError as error:
        raise TrainingError(f"{error}\n{_way_on(job)[0].upper()}{_way_on(job)[1:]}") from error


def _stopping(config: TrainConfig) -> str:
    when = "after this step"
    if config.is_stream:
        when += f", in {config.schedule} where it is drained next ({config.drains.longest} batches at the most)"
    return f"Stopping {when}; Ctrl-C again stops at once."


def _place(job: Job) -> str:
    """Where a stage failed; without a flush stages are in different steps, and rows come later."""
    if not job.done:
        return "before the first step"
    run, step = job.done[-1]
    return f"after step {step} of {run}" if run == job.config.schedule else f"in step {step + 1} of {run}"


def _way_on(job: Job) -> str:
    if job.folder is None:
        return "nothing is saved, because there is no --out"
    if not job.done:
        return "nothing is saved yet"
    return f"the last checkpoint is kept, and goes on with: timelyfreeze train --resume {_quoted(job.folder)}"


def _quoted(folder: RunFolder) -> str:
    return shlex.quote(str(folder.root))


def _finish(job: Job, reporter: Reporter) -> None:
    """Print the table and write table.txt."""
    if job.config.is_stream:
        text = render_stream(job.config, {spec.name: job.log.of(spec.name) for spec in job.specs})
    else:
        text = _rendered(job)
    if job.folder is not None:
        write_atomically(job.folder.table, text)
    reporter.note("\n" + text)
    if job.folder is not None:
        what = "More of" if job.config.is_stream else "Timelines of"
        reporter.note(f"{what} these runs: timelyfreeze show {_quoted(job.folder)}")


def _rendered(job: Job) -> str:
    frozen = [spec.name for spec in job.specs if spec.mode is not None]
    steady = set.intersection(*(steady_steps(job.log.of(name)) for name in frozen))
    tokens_per_microbatch = job.config.num_sequences(1) * job.config.sequence_length
    summaries = []
    for spec in job.specs:
        num_microbatches = spec.schedule.num_microbatches
        summaries.append(
            summarize_run(
                job.log.of(spec.name),
                steady,
                num_microbatches=num_microbatches,
                tokens_per_step=num_microbatches * tokens_per_microbatch,
                predicted_s=_plain_s(job, spec) if spec.mode is None else None,
            )
        )
    return render(summaries, len(steady), live_microbatches=job.config.live_microbatches)


def _plain_s(job: Job, spec: RunSpec) -> float | None:
    """What the bounds that were measured say of a plain step; those of a given plan may come from another machine."""
    if job.plan is None or job.fixed_plan is not None:
        return None
    return plain_makespan_s(job.plan.costs, spec.schedule)

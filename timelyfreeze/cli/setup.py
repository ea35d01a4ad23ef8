"""All that a job needs before its first step: a new one, or one to go on with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from timelyfreeze.cli.checkpoint import Checkpoint
from timelyfreeze.cli.config import DEFAULT_RANKS, FLUSHED, RESIZED, TrainConfig, option, shown, unfit
from timelyfreeze.cli.data import Corpus, read_corpus
from timelyfreeze.cli.errors import CommandError, user_errors
from timelyfreeze.cli.folder import RunFolder
from timelyfreeze.cli.launch import Launch
from timelyfreeze.cli.measured import MeasuredRun, read_measured
from timelyfreeze.cli.metrics import StepRow, read_rows
from timelyfreeze.cli.plan_options import option_errors
from timelyfreeze.distributed import latest_checkpoint
from timelyfreeze.errors import problem, raise_all
from timelyfreeze.freeze.config import check_fits
from timelyfreeze.planner import Plan
from timelyfreeze.runtime.arguments import stages_for_ranks
from timelyfreeze.schedule import Schedule, default_stages_per_rank, schedule_names
from timelyfreeze.schedule.asynchronous import STREAM_SCHEDULES

_FREEZING = "where nothing is frozen"
# What a schedule without a flush cannot be given, and why.
_NO_STREAM = {
    **dict.fromkeys(("mode", "max_ratio", "stage_max_ratio", "min_live_ratio", "target_ms"), _FREEZING),
    **dict.fromkeys(("live_microbatches", "plan", "compare_modes"), _FREEZING),
    "stages_per_rank": "where every stage has a rank of its own",
    "data_parallel": "which has no replicas",
}


@dataclass(frozen=True)
class Setup:
    """A job before it runs.

    Attributes:
        config, corpus, schedule: what to train, on what, in which order.
        fixed_plan: the plan that was given; None where one is to be made.
        folder: where files go; None writes none.
        checkpoint, rows, measured: where to go on, the metrics up to there, and a step of every run; None and empty for
            a new job.
        plan: the plan found before the checkpoint, if there is one.
        checkpoints: where all ranks save, also those that write no other file.
        resized: the checkpoint is of another number of stages.
    """

    config: TrainConfig
    corpus: Corpus
    schedule: Schedule
    fixed_plan: Plan | None
    folder: RunFolder | None
    checkpoint: Checkpoint | None = None
    rows: list[StepRow] = field(default_factory=list)
    measured: list[MeasuredRun] = field(default_factory=list)
    plan: Plan | None = None
    checkpoints: Path | None = None
    resized: bool = False


def make_setup(launch: Launch, typed: Mapping[str, Any], out: str | None, resume: str | None, held: ExitStack) -> Setup:
    """A new job, or one to go on with: as asked, or because torchrun has started this command again.

    Args:
        launch: the processes that are to train; this one speaks for all of them.
        typed, out, resume: as ``train`` takes them.
        held: gets what is to be released at the job's end: the folder's lock.

    Raises:
        CommandError: something is wrong with them; nothing was changed.
    """
    if resume is not None:
        return take_up(RunFolder(Path(resume)), typed, out, held, launch)
    if out is None or not RunFolder(Path(out)).is_of(launch):
        return start(typed, out, held, launch)
    if latest_checkpoint(RunFolder(Path(out)).checkpoints) is None:
        return start(typed, out, held, launch, again=True)
    return take_up(RunFolder(Path(out)), typed, None, held, launch)


def start(typed: Mapping[str, Any], out: str | None, held: ExitStack, launch: Launch, *, again: bool = False) -> Setup:
    """Check the options, read the text, and create the folder. Arguments as of ``make_setup``.

    Args:
        again: the folder may hold the beginning of this very job.

    Raises:
        CommandError: something is wrong with them; nothing was written.
    """
    with option_errors("reading the schedule or the plan"):
        config, schedule = _config_and_schedule(typed, launch)
        fixed_plan = None if config.plan is None else Plan.load(config.plan)
        if fixed_plan is not None:
            check_fits(fixed_plan, schedule)
            config = _under_plan(config, fixed_plan, typed)
    check_world(config, schedule, launch)
    _check_device(config)
    with user_errors("reading the text"):
        corpus = read_corpus(config.text, sequence_length=config.sequence_length)
    folder = None if out is None else RunFolder(Path(out))
    if folder is not None:
        held.enter_context(folder.made())
        folder.begin(config, corpus, launch, again=again)
        # Resuming must not depend on files elsewhere, which may change or go.
        if fixed_plan is not None:
            fixed_plan.save(folder.plan)
        if config.has_schedule_file:
            schedule.to_csv(folder.schedule)
    checkpoints = None if folder is None else folder.checkpoints
    return Setup(config, corpus, schedule, fixed_plan, folder, plan=fixed_plan, checkpoints=checkpoints)


def take_up(folder: RunFolder, typed: Mapping[str, Any], out: str | None, held: ExitStack, launch: Launch) -> Setup:
    """Read a run's folder and check that it can go on as it was. Arguments as of ``make_setup``.

    Raises:
        CommandError: a file is missing or damaged, or an option that matters differs; nothing was changed.
    """
    if out is not None and Path(out).absolute() != folder.root.absolute():
        raise CommandError(
            problem(
                "--out and --resume name different folders",
                expected="one of them",
                got=f"'{out}' and '{folder.root}'",
                hint="Leave out --out to go on in the same folder.",
            )
        )
    config = _fitted(folder.read_config(typed), typed, launch)
    held.enter_context(folder.locked())
    _check_device(config)
    with user_errors("reading the text"):
        corpus = read_corpus(config.text, sequence_length=config.sequence_length)
    checkpoint = _read_checkpoint(folder, config, corpus)
    resized = checkpoint.config["stages"] != config.stages
    if resized:
        checkpoint = replace(checkpoint, split=[])
    rows = read_rows(folder.metrics, checkpoint.done)
    runs = {run for run, _ in checkpoint.done}
    measured = [run for run in read_measured(folder.measured) if run.name in runs]
    with user_errors("reading the run's schedule or plan"):
        if config.has_schedule_file:
            schedule = Schedule.from_csv(folder.schedule, name=Path(config.schedule).stem)
        else:
            schedule = config.sized_schedule(config.microbatches)
        known = config.plan is not None or (folder.plan.exists() and not resized)
        plan = Plan.load(folder.plan) if known else None
    check_world(config, schedule, launch)
    fixed_plan = None if config.plan is None else plan
    if resized:
        folder.change_options(config)
    return Setup(
        config, corpus, schedule, fixed_plan, folder, checkpoint, rows, measured, plan, folder.checkpoints, resized
    )


def check_world(config: TrainConfig, schedule: Schedule, launch: Launch) -> None:
    """CommandError unless there is a process for every rank of every replica, or one for them all."""
    if config.is_stream and launch.size > 1:
        raise CommandError(
            problem(
                f"--schedule {config.schedule} under torchrun",
                expected="one process, whose threads are the stages",
                got=f"{launch.size} processes",
                hint=f"Start timelyfreeze without torchrun, or take --schedule {FLUSHED}.",
            )
        )
    needed = schedule.num_ranks * config.data_parallel
    if launch.size == needed or (launch.size == 1 and config.data_parallel == 1):
        return
    replicas = f" of {config.data_parallel} replicas" if config.data_parallel > 1 else ""
    raise CommandError(
        problem(
            "the pipeline's ranks and the processes disagree",
            expected=f"{needed} processes, one for each of {schedule.num_ranks} ranks{replicas}",
            got=launch.size,
            hint=f"Start it with torchrun and {needed} processes in all, or take other --stages or --data-parallel.",
        )
    )


def _fitted(config: TrainConfig, typed: Mapping[str, Any], launch: Launch) -> TrainConfig:
    """The options of a run that goes on, with a stage for every process where that may change and nobody says else."""
    if launch.size == 1 or "stages" in typed or not config.can_be_resized:
        return config
    with user_errors("the options"):
        return replace(
            config, stages=_stages_for(config.schedule, config.stages_per_rank, config.data_parallel, launch)
        )


def _stages_for(schedule: str, stages_per_rank: int | None, data_parallel: int, launch: Launch) -> int:
    """As many as all processes hold, or a few threads."""
    num_ranks = DEFAULT_RANKS if launch.size == 1 else max(1, launch.size // max(1, data_parallel))
    return stages_for_ranks(schedule, stages_per_rank, num_ranks)


def _read_checkpoint(folder: RunFolder, config: TrainConfig, corpus: Corpus) -> Checkpoint:
    checkpoint = Checkpoint.load(folder.checkpoints)
    try:
        saved = TrainConfig.from_json(checkpoint.config)
    except ValueError as error:
        raise CommandError(problem("the checkpoint holds no options of this command", got=str(error))) from error
    free = RESIZED if config.can_be_resized else frozenset()
    folder.refuse(saved.differences({name: value for name, value in vars(config).items() if name not in free}))
    if checkpoint.corpus != corpus.fingerprint:
        raise CommandError(
            problem(
                "the text is not the one that the run was trained on",
                expected=f"fingerprint {checkpoint.corpus[:12]}",
                got=f"{corpus.fingerprint[:12]}, {corpus.describe()}",
                hint="Name the same files with --text (where they lie does not matter), or start a new run.",
            )
        )
    return checkpoint


def _config_and_schedule(typed: Mapping[str, Any], launch: Launch) -> tuple[TrainConfig, Schedule]:
    path = str(typed.get("schedule", ""))
    if typed.get("live_microbatches") is not None:
        if "max_ratio" in typed:
            raise CommandError(
                problem("--live-microbatches and --max-ratio exclude each other", hint="Leave one of them out.")
            )
        typed = {"microbatches": typed["live_microbatches"], **typed}
    if path in STREAM_SCHEDULES:
        raise_all(CommandError, [unfit(name, path, why) for name, why in _NO_STREAM.items() if name in typed])
    if not path.endswith(".csv"):
        if "stages" not in typed:
            per_rank, replicas = typed.get("stages_per_rank"), typed.get("data_parallel", 1)
            named = FLUSHED if path in STREAM_SCHEDULES else path or TrainConfig.schedule
            _check_known(named)
            typed = {**typed, "stages": _stages_for(named, per_rank, replicas, launch)}
        config = TrainConfig(**typed)
        return config, config.sized_schedule(config.microbatches)
    schedule = Schedule.from_csv(path)
    sizes = {"stages": schedule.num_stages, "microbatches": schedule.num_microbatches}
    for name, size in sizes.items():
        if typed.get(name, size) != size:
            raise CommandError(
                problem(
                    f"--{name} and the schedule disagree",
                    expected=f"{size}, as '{path}' has it",
                    got=typed[name],
                    hint=f"Leave out --{name}.",
                )
            )
    return TrainConfig(**{**typed, **sizes}), schedule


def _check_known(schedule: str) -> None:
    """CommandError with all names, also those of schedules without a flush, where this is none."""
    try:
        default_stages_per_rank(schedule)
    except ValueError as error:
        names = ", ".join([*schedule_names(), *STREAM_SCHEDULES])
        raise CommandError(problem("unknown schedule", expected=f"one of {names}", got=repr(schedule))) from error


def _under_plan(config: TrainConfig, plan: Plan, typed: Mapping[str, Any]) -> TrainConfig:
    """The options with the plan's own mode and caps, which are the ones that count."""
    own: dict[str, Any] = {
        "mode": plan.mode,
        "max_ratio": plan.options.max_ratio if plan.live_microbatches is None else plan.max_ratio,
        "stage_max_ratio": tuple(plan.stage_max_ratio.items()),
        "min_live_ratio": plan.options.min_live_ratio,
    }
    differing = [name for name, value in own.items() if typed.get(name, value) != value]
    if differing:
        name = differing[0]
        raise CommandError(
            problem(
                f"{option(name)} and the plan disagree",
                expected=f"{shown(own[name])}, as the plan has it",
                got=shown(typed[name]),
                hint=f"Leave out {option(name)}.",
            )
        )
    return replace(config, **own)


def _check_device(config: TrainConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise CommandError(
            problem("--device cuda", expected="a GPU that this torch can use", got="none", hint="Take --device cpu.")
        )

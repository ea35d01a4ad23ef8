"""All that a job needs before its first step: a new one, or one to go on with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from timelyfreeze.cli.checkpoint import Checkpoint
from timelyfreeze.cli.config import DEFAULT_RANKS, TrainConfig, option, shown
from timelyfreeze.cli.data import Corpus, read_corpus
from timelyfreeze.cli.errors import CommandError, user_errors
from timelyfreeze.cli.folder import RunFolder
from timelyfreeze.cli.measured import MeasuredRun, read_measured
from timelyfreeze.cli.metrics import StepRow, read_rows
from timelyfreeze.cli.plan_options import option_errors
from timelyfreeze.errors import problem
from timelyfreeze.freeze.config import check_fits
from timelyfreeze.planner import Plan
from timelyfreeze.runtime.arguments import default_num_stages
from timelyfreeze.schedule import Schedule


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


def start(typed: Mapping[str, Any], out: str | None, held: ExitStack) -> Setup:
    """Check the options, read the text, and create the folder.

    Args:
        typed, out: as ``train`` takes them.
        held: gets what is to be released at the job's end: the folder's lock.

    Raises:
        CommandError: something is wrong with them; nothing was written.
    """
    with option_errors("reading the schedule or the plan"):
        config, schedule = _config_and_schedule(typed)
        fixed_plan = None if config.plan is None else Plan.load(config.plan)
        if fixed_plan is not None:
            check_fits(fixed_plan, schedule)
            config = _under_plan(config, fixed_plan, typed)
    _check_device(config)
    with user_errors("reading the text"):
        corpus = read_corpus(config.text, sequence_length=config.sequence_length)
    folder = None if out is None else RunFolder(Path(out))
    if folder is not None:
        held.enter_context(folder.made())
        folder.begin(config, corpus)
        # Resuming must not depend on files elsewhere, which may change or go.
        if fixed_plan is not None:
            fixed_plan.save(folder.plan)
        if config.has_schedule_file:
            schedule.to_csv(folder.schedule)
    return Setup(config, corpus, schedule, fixed_plan, folder, plan=fixed_plan)


def take_up(folder: RunFolder, typed: Mapping[str, Any], out: str | None, held: ExitStack) -> Setup:
    """Read a run's folder and check that it can go on as it was. Arguments as of ``start``.

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
    config = folder.read_config(typed)
    held.enter_context(folder.locked())
    _check_device(config)
    with user_errors("reading the text"):
        corpus = read_corpus(config.text, sequence_length=config.sequence_length)
    checkpoint = _read_checkpoint(folder, config, corpus)
    rows = read_rows(folder.metrics, checkpoint.done)
    runs = {run for run, _ in checkpoint.done}
    measured = [run for run in read_measured(folder.measured) if run.name in runs]
    with user_errors("reading the run's schedule or plan"):
        if config.has_schedule_file:
            schedule = Schedule.from_csv(folder.schedule, name=Path(config.schedule).stem)
        else:
            schedule = config.sized_schedule(config.microbatches)
        plan = Plan.load(folder.plan) if config.plan is not None or folder.plan.exists() else None
    fixed_plan = None if config.plan is None else plan
    return Setup(config, corpus, schedule, fixed_plan, folder, checkpoint, rows, measured, plan)


def _read_checkpoint(folder: RunFolder, config: TrainConfig, corpus: Corpus) -> Checkpoint:
    checkpoint = Checkpoint.load(folder.checkpoint)
    try:
        saved = TrainConfig.from_json(checkpoint.config)
    except ValueError as error:
        raise CommandError(problem("checkpoint.pt holds no options of this command", got=str(error))) from error
    folder.refuse(saved.differences(vars(config)))
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


def _config_and_schedule(typed: Mapping[str, Any]) -> tuple[TrainConfig, Schedule]:
    path = str(typed.get("schedule", ""))
    if typed.get("live_microbatches") is not None:
        if "max_ratio" in typed:
            raise CommandError(
                problem("--live-microbatches and --max-ratio exclude each other", hint="Leave one of them out.")
            )
        typed = {"microbatches": typed["live_microbatches"], **typed}
    if not path.endswith(".csv"):
        if "stages" not in typed:
            per_rank = typed.get("stages_per_rank")
            typed = {**typed, "stages": default_num_stages(path or TrainConfig.schedule, per_rank, DEFAULT_RANKS)}
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

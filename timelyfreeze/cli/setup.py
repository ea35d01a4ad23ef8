"""All that a job needs before its first step: a new one, or one to go on with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from timelyfreeze.cli.checkpoint import Checkpoint
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus, read_corpus
from timelyfreeze.cli.errors import CommandError, user_errors
from timelyfreeze.cli.folder import RunFolder
from timelyfreeze.cli.metrics import StepRow
from timelyfreeze.errors import problem
from timelyfreeze.freeze.config import check_fits
from timelyfreeze.planner import Plan
from timelyfreeze.schedule import Schedule, create_schedule


@dataclass(frozen=True)
class Setup:
    """A job before it runs.

    Attributes:
        config, corpus, schedule: what to train, on what, in which order.
        fixed_plan: the plan that was given; None where one is to be made.
        folder: where files go; None writes none.
        checkpoint, rows: where to go on, and the metrics up to there; None and empty for a new job.
        plan: the plan found before the checkpoint, if there is one.
    """

    config: TrainConfig
    corpus: Corpus
    schedule: Schedule
    fixed_plan: Plan | None
    folder: RunFolder | None
    checkpoint: Checkpoint | None = None
    rows: list[StepRow] = field(default_factory=list)
    plan: Plan | None = None


def start(typed: Mapping[str, Any], out: str | None) -> Setup:
    """Check the options, read the text, and create the folder.

    Raises:
        CommandError: something is wrong with them; nothing was written.
    """
    with user_errors("reading the schedule or the plan"):
        config, schedule = _config_and_schedule(typed)
        fixed_plan = None if config.plan is None else Plan.load(config.plan)
        if fixed_plan is not None:
            check_fits(fixed_plan, schedule)
            config = replace(config, max_ratio=_max_ratio(fixed_plan, typed))
    _check_device(config)
    with user_errors("reading the text"):
        corpus = read_corpus(config.text, sequence_length=config.sequence_length)
    folder = None if out is None else RunFolder(Path(out))
    if folder is not None:
        folder.begin(config, corpus)
        # Resuming must not depend on files elsewhere, which may change or go.
        if fixed_plan is not None:
            fixed_plan.save(folder.plan)
        if config.has_schedule_file:
            schedule.to_csv(folder.schedule)
    return Setup(config, corpus, schedule, fixed_plan, folder, plan=fixed_plan)


def take_up(folder: RunFolder, typed: Mapping[str, Any], out: str | None) -> Setup:
    """Read a run's folder and check that it can go on as it was.

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
    _check_device(config)
    with user_errors("reading the text"):
        corpus = read_corpus(config.text, sequence_length=config.sequence_length)
    checkpoint, rows = folder.read(config, corpus)
    with user_errors("reading the run's schedule or plan"):
        if config.has_schedule_file:
            schedule = Schedule.from_csv(folder.schedule, name=Path(config.schedule).stem)
        else:
            schedule = _named_schedule(config)
        plan = Plan.load(folder.plan) if config.plan is not None or folder.plan.exists() else None
    fixed_plan = None if config.plan is None else plan
    return Setup(config, corpus, schedule, fixed_plan, folder, checkpoint, rows, plan)


def _config_and_schedule(typed: Mapping[str, Any]) -> tuple[TrainConfig, Schedule]:
    path = str(typed.get("schedule", ""))
    if not path.endswith(".csv"):
        config = TrainConfig(**typed)
        return config, _named_schedule(config)
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


def _max_ratio(plan: Plan, typed: Mapping[str, Any]) -> float:
    """The plan's own cap, which is the one that counts."""
    if typed.get("max_ratio", plan.max_ratio) != plan.max_ratio:
        raise CommandError(
            problem(
                "--max-ratio and the plan disagree",
                expected=f"{plan.max_ratio}, as the plan has it",
                got=typed["max_ratio"],
                hint="Leave out --max-ratio.",
            )
        )
    return float(plan.max_ratio)


def _named_schedule(config: TrainConfig) -> Schedule:
    return create_schedule(config.schedule, num_ranks=config.stages, num_microbatches=config.microbatches)


def _check_device(config: TrainConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise CommandError(
            problem("--device cuda", expected="a GPU that this torch can use", got="none", hint="Take --device cpu.")
        )

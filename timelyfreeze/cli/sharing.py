"""A job's options, text and state, from rank 0 to all other processes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from timelyfreeze.cli.checkpoint import Checkpoint
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus
from timelyfreeze.cli.setup import Setup, make_setup
from timelyfreeze.cli.world import World
from timelyfreeze.planner import Plan
from timelyfreeze.schedule import Schedule

_TEXTS = ("train", "validation")


def shared_setup(world: World, typed: Mapping[str, Any], out: str | None, resume: str | None, held: ExitStack) -> Setup:
    """``make_setup`` on rank 0; what comes of it on all. Only rank 0 has the run's folder, locked, and its metrics.

    Raises:
        CommandError: on rank 0, as ``make_setup`` does.
        ElsewhereError: on the others.
    """
    own: list[Setup] = []

    def make() -> dict[str, Any]:
        own.append(make_setup(world.launch, typed, out, resume, held))
        return _packed(own[0]) if world.has_others else {}

    data = world.first(make)
    if not world.has_others:
        return own[0]
    texts = {
        name: world.bytes_of_first(getattr(own[0].corpus, name) if own else None, data["num_bytes"][name])
        for name in _TEXTS
    }
    return own[0] if own else _unpacked(data, texts)


def _packed(setup: Setup) -> dict[str, Any]:
    corpus = {f.name: getattr(setup.corpus, f.name) for f in fields(Corpus) if f.name not in _TEXTS}
    return {
        "config": setup.config.to_json(),
        "schedule": [[str(action) for action in order] for order in setup.schedule.ranks],
        "schedule_name": setup.schedule.name,
        "fixed_plan": None if setup.fixed_plan is None else setup.fixed_plan.to_json(),
        "checkpoint": None if setup.checkpoint is None else asdict(setup.checkpoint),
        "checkpoints": None if setup.checkpoints is None else str(setup.checkpoints.absolute()),
        "resized": setup.resized,
        "corpus": corpus,
        "num_bytes": {name: int(getattr(setup.corpus, name).size) for name in _TEXTS},
    }


def _unpacked(data: Mapping[str, Any], texts: Mapping[str, Any]) -> Setup:
    checkpoint, plan, folder = data["checkpoint"], data["fixed_plan"], data["checkpoints"]
    if checkpoint is not None:
        checkpoint = Checkpoint(**{**checkpoint, "done": [(run, step) for run, step in checkpoint["done"]]})
    return Setup(
        config=TrainConfig.from_json(data["config"]),
        corpus=Corpus(**texts, **data["corpus"]),
        schedule=Schedule([list(order) for order in data["schedule"]], name=data["schedule_name"]),
        fixed_plan=None if plan is None else Plan.from_json(plan),
        folder=None,
        checkpoint=checkpoint,
        checkpoints=None if folder is None else Path(folder),
        resized=data["resized"],
    )

"""Checks of the stages that a rank brings, against the schedule that places them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.schedule import Schedule

# torch's names that are not ours but for case and underscores.
_NAMES = {"interleavedzerobubble": "interleaved_zb", "zbvzerobubble": "zbv"}
_WRAPPERS = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)


def check_stages(stages: Sequence[Any]) -> None:
    """Raise TypeError for what is no stage, or none that can be run here, ValueError for stages that do not match."""
    for stage in stages:
        if not isinstance(getattr(stage, "submod", None), nn.Module) or not hasattr(stage, "stage_index"):
            got = type(stage).__name__
            raise TypeError(problem("stage", expected="a PipelineStage, or a non-empty list of them", got=got))
        wrapped = [type(m).__name__ for m in stage.submod.modules() if isinstance(m, _WRAPPERS)]
        if wrapped:
            hint = "Pass the module itself, and mesh= with the dimensions 'dp' and 'pp' for replicas."
            where = f"stage {stage.stage_index}"
            raise TypeError(problem("stage", expected="a plain module", got=wrapped[0], where=where, hint=hint))
    if not stages:
        raise TypeError(problem("stage", expected="a PipelineStage, or a non-empty list of them", got="an empty list"))
    faults = []
    for what in ("num_stages", "group", "device"):
        found = [getattr(stage, what) for stage in stages]
        if any(one != found[0] for one in found):
            faults.append(problem(f"{what} of this rank's stages", expected="one and the same", got=found))
    raise_all(ValueError, faults)


def own_name(schedule: Any) -> Any:
    """Our name for one of torch's schedules, given its name or its class; other things as they are.

    >>> own_name("Interleaved1F1B"), own_name("ZBVZeroBubble"), own_name("orders.csv")
    ('interleaved1f1b', 'zbv', 'orders.csv')
    """
    name = schedule.__name__ if isinstance(schedule, type) else schedule
    if not isinstance(name, str) or name.endswith(".csv"):
        return name
    plain = name.lower().replace("-", "").replace("_", "").removeprefix("schedule")
    return _NAMES.get(plain, plain)


def stages_per_rank(schedule: Any, num_stages: int, num_ranks: int) -> int | None:
    """How many stages each rank holds where the schedule does not say.

    Raises:
        ValueError: the stages cannot be dealt out evenly.
    """
    if isinstance(schedule, Schedule) or str(schedule).endswith(".csv"):
        return None
    if num_stages % num_ranks:
        expected = f"a multiple of the group's {num_ranks} ranks"
        raise ValueError(problem("num_stages of the stages", expected=expected, got=num_stages))
    return num_stages // num_ranks


def check_placement(stages: Sequence[Any], schedule: Schedule, rank: int, num_ranks: int) -> None:
    """Raise ValueError where this rank's stages are not those that the schedule has there."""
    rows: list[list[int]] = [[] for _ in range(schedule.num_ranks)]
    for stage, its_rank in enumerate(schedule.stage_to_rank):
        rows[its_rank].append(stage)
    if len(rows) != num_ranks:
        expected = f"a group of {len(rows)} ranks"
        raise ValueError(problem(f"schedule {schedule.name!r}", expected=expected, got=num_ranks))
    got = sorted(stage.stage_index for stage in stages)
    if got != rows[rank]:
        every = "; ".join(f"rank {one}: {', '.join(map(str, row))}" for one, row in enumerate(rows))
        raise ValueError(
            problem(
                f"stages on rank {rank} in schedule {schedule.name!r}",
                expected=", ".join(map(str, rows[rank])),
                got=", ".join(map(str, got)),
                hint=f"Place the stages so: {every}.",
            )
        )

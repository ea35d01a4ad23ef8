"""Checks of what a pipeline is created with, and the defaults that fill the gaps."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, Protocol

import torch
from torch import nn

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.runtime.partition import children_of
from timelyfreeze.runtime.values import is_sharded
from timelyfreeze.schedule import Schedule, create_schedule, default_stages_per_rank, merge_backward

# By name: importing the latter takes most of a second.
_REDUCING = {"DistributedDataParallel", "FullyShardedDataParallel"}


def children(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that the stages are made of, in order."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return children_of(model)
    stages = list(model)
    if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
        got = [type(stage).__name__ for stage in stages]
        raise TypeError(problem("model", expected="a non-empty list of stage modules", got=got))
    return stages


class PlanLike(Protocol):
    """What a plan says of its schedule: ``timelyfreeze.planner.Plan``."""

    @property
    def schedule(self) -> Schedule: ...


class Children(Protocol):
    """What there is to make stages of: ``sources.StageSource``."""

    @property
    def num_children(self) -> int: ...
    @property
    def gives_stages(self) -> bool: ...


def check_arguments(
    source: Children,
    num_stages: int,
    num_microbatches: int,
    timeout_s: float,
    seed: int,
    loss_fn: Any,
    max_pending_bytes: int | None,
) -> None:
    """Raise ValueError with everything that is wrong."""
    problems = []
    num_children = source.num_children
    if source.gives_stages and num_stages != num_children:
        problems.append(problem("num_stages", expected=f"{num_children}, as many as the list has", got=num_stages))
    if not 1 <= num_stages <= num_children:
        problems.append(
            problem(
                "num_stages",
                expected=f"1 to {num_children}, one child module a stage at the least",
                got=num_stages,
                hint="Use fewer stages, or a model with more children.",
            )
        )
    if num_microbatches < 1:
        problems.append(problem("num_microbatches", expected="1 or more", got=num_microbatches))
    if not timeout_s > 0:
        problems.append(problem("timeout_s", expected="seconds above 0", got=timeout_s))
    if not 0 <= seed < 2**64:
        problems.append(problem("seed", expected="an integer in [0, 2**64)", got=seed))
    if max_pending_bytes is not None and not max_pending_bytes >= 0:
        problems.append(problem("max_pending_bytes", expected="None, or bytes from 0", got=max_pending_bytes))
    if loss_fn is not None and not callable(loss_fn):
        problems.append(problem("loss_fn", expected="a function (output, target) -> loss, or None", got=loss_fn))
    raise_all(ValueError, problems)


def refuse_wrapped(stages: Sequence[nn.Module | None], *, allow_sharded: bool = False) -> None:
    """Raise ValueError where a module reduces its gradients itself: it would do so in every micro-batch's backward.

    Args:
        allow_sharded: modules under ``fully_shard`` are no fault.
    """
    for index, stage in enumerate(stages):
        if stage is not None and not allow_sharded and any(map(is_sharded, stage.parameters())):
            expected = "ranks that are processes, with mesh="
            raise ValueError(problem(f"sharded parameters in stage {index}", expected=expected, got="threads"))
        for module in [] if stage is None else stage.modules():
            if _REDUCING & {kind.__name__ for kind in type(module).__mro__}:
                raise ValueError(
                    problem(
                        f"stage {index} is wrapped in {type(module).__name__}",
                        expected="modules that are not wrapped",
                        hint='Pass mesh=DeviceMesh with dimensions ("dp", "pp"): the pipeline reduces gradients over '
                        '"dp" itself, once a step, and nothing for what is frozen.',
                    )
                )


def make_schedule(
    schedule: str | PathLike[str] | Schedule,
    num_stages: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    plan: PlanLike | None = None,
) -> Schedule:
    """The schedule that a pipeline runs: where a W follows its own I and nobody waits for the latter, they are one.

    Args:
        schedule: a name, a file or an object.
        stages_per_rank: where it is a name; default: the schedule's own.
        plan: of its schedule's very actions; so a schedule that it fits stays as it is.

    Raises:
        ValueError: the counts do not fit each other or the schedule; says which would.
    """
    made = _find_schedule(schedule, num_stages, num_microbatches, stages_per_rank)
    return made if plan is not None and plan.schedule == made else merge_backward(made)


def _find_schedule(
    schedule: str | PathLike[str] | Schedule, num_stages: int, num_microbatches: int, stages_per_rank: int | None
) -> Schedule:
    """What the name, the file or the object stands for, checked against the sizes."""
    if isinstance(schedule, Schedule):
        made = schedule
    elif str(schedule).endswith(".csv"):
        made = Schedule.from_csv(schedule)
    else:
        per_rank = default_stages_per_rank(str(schedule)) if stages_per_rank is None else stages_per_rank
        return create_schedule(
            str(schedule),
            num_ranks=num_ranks_of(str(schedule), num_stages, per_rank),
            num_microbatches=num_microbatches,
            stages_per_rank=per_rank,
        )
    if (made.num_stages, made.num_microbatches) != (num_stages, num_microbatches):
        raise ValueError(
            problem(
                f"schedule {made.name!r}",
                expected=f"{num_stages} stages and {num_microbatches} micro-batches",
                got=f"{made.num_stages} stages and {made.num_microbatches} micro-batches",
                hint="Pass num_stages= and num_microbatches= as the schedule has them.",
            )
        )
    if stages_per_rank is not None and made.num_ranks * stages_per_rank != num_stages:
        raise ValueError(
            problem(
                "stages_per_rank",
                expected=f"None: schedule {made.name!r} places its stages itself",
                got=stages_per_rank,
            )
        )
    return made


def default_num_stages(
    source: Children, schedule: str | PathLike[str] | Schedule, stages_per_rank: int | None, num_ranks: int
) -> int:
    """How many stages there are where the caller does not say: those that are given, else ``stages_for_ranks``."""
    return source.num_children if source.gives_stages else stages_for_ranks(schedule, stages_per_rank, num_ranks)


def stages_for_ranks(schedule: str | PathLike[str] | Schedule, stages_per_rank: int | None, num_ranks: int) -> int:
    """A schedule's own number of stages, else enough for the ranks."""
    if isinstance(schedule, Schedule):
        return schedule.num_stages
    if stages_per_rank is None:
        stages_per_rank = 1 if str(schedule).endswith(".csv") else default_stages_per_rank(str(schedule))
    return num_ranks * stages_per_rank


def num_ranks_of(schedule: str, num_stages: int, stages_per_rank: int) -> int:
    """How many ranks so many stages make.

    Raises:
        ValueError: the stages cannot be dealt out evenly.

    >>> num_ranks_of("zbv", 8, 2)
    4
    """
    if stages_per_rank < 1:
        raise ValueError(problem("stages_per_rank", expected="1 or more", got=stages_per_rank))
    if num_stages % stages_per_rank:
        below = num_stages // stages_per_rank * stages_per_rank
        counts = [str(count) for count in (below, below + stages_per_rank) if count]
        expected = f"a multiple of stages_per_rank={stages_per_rank}, such as {' or '.join(counts)}"
        raise ValueError(problem(f"num_stages of schedule {schedule}", expected=expected, got=num_stages))
    return num_stages // stages_per_rank


def default_devices(devices: Sequence[torch.device | str] | None) -> list[torch.device]:
    """The given devices; by default all GPUs, else the CPU."""
    if devices is not None:
        return [torch.device(device) for device in devices]
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


def fit_devices(devices: list[torch.device], num_ranks: int, *, explicit: bool) -> list[torch.device]:
    """One device a rank; default devices are dealt out in turn."""
    if explicit and len(devices) != num_ranks:
        raise ValueError(problem("devices", expected=f"{num_ranks}, one a rank", got=len(devices)))
    return [devices[rank % len(devices)] for rank in range(num_ranks)]

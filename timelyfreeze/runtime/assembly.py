"""From a model's children to the engine that runs them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from timelyfreeze.errors import problem
from timelyfreeze.runtime.arguments import children
from timelyfreeze.runtime.engine import Engine
from timelyfreeze.runtime.microbatch import Microbatch
from timelyfreeze.runtime.partition import balanced_split_points, check_split_points, measure_children_s
from timelyfreeze.runtime.ties import UnsharedStages
from timelyfreeze.schedule import Schedule


class Switch(Protocol):
    """Puts something on the model's modules as they are now: ``acceleration.switch.AccelerationSwitch``."""

    def on(self) -> None: ...


class StageAssembly:
    """A pipeline's stages: which children each consists of, and the engine that runs them.

    Args:
        model: what the user gave, whose children may be replaced between steps; None: they are fixed.
        children: that the stages are made of, in order; None: it is on another rank.
        schedule, loss_fn, max_pending_bytes, own_rank: as ``Engine`` takes them.
        devices: one a rank.
        split_points: index of the child with which each stage from 1 on begins; None: balanced when a batch comes.
        acceleration: put on before an engine is made.
        on_engine: is told of each engine that is made.
    """

    def __init__(
        self,
        model: nn.Module | None,
        children: Sequence[nn.Module | None],
        *,
        schedule: Schedule,
        devices: list[torch.device],
        loss_fn: Callable[..., Any] | None,
        split_points: list[int] | None,
        acceleration: Switch,
        on_engine: Callable[[Engine], None],
        max_pending_bytes: int | None = None,
        own_rank: int | None = None,
    ) -> None:
        self._model = model
        self._children = list(children)
        self._schedule = schedule
        self._devices = devices
        self._loss_fn = loss_fn
        self._acceleration = acceleration
        self._on_engine = on_engine
        self._max_pending_bytes = max_pending_bytes
        self._own_rank = own_rank
        self._unshared = UnsharedStages([])
        self._engine: Engine | None = None
        self.split_points = split_points
        if split_points is not None:
            self._build()

    @property
    def engine(self) -> Engine | None:
        """The one that ran last."""
        return self._engine

    def check_split_points(self, points: Sequence[int]) -> list[int]:
        """The points, if the stages can be split there; else ValueError."""
        checked = check_split_points(points, len(self._children), self._schedule.num_stages)
        if self._own_rank is not None and checked != self.split_points:
            raise ValueError(
                problem(
                    "split points",
                    expected=self.split_points,
                    got=checked,
                    hint=f"Create the pipeline with split_points={checked}.",
                )
            )
        return checked

    def set_split_points(self, points: list[int]) -> None:
        """Split there, which ``check_split_points`` has allowed."""
        if points != self.split_points:
            self.split_points = points
            self._build()

    def ready_engine(self, slices: Sequence[Microbatch]) -> Engine:
        """An engine of the model as it is now, with its modules in place until ``restore``.

        Args:
            slices: the first of them is used to balance the stages, where that is to be done.
        """
        self._notice_new_children()
        if self.split_points is None:
            first = slices[0]
            here = [child for child in self._children if child is not None]
            times_s = measure_children_s(here, first.args, first.kwargs, self._devices[0])
            self.split_points = balanced_split_points(times_s, self._schedule.num_stages, self._schedule.stage_to_rank)
        if self._engine is None or self._unshared.is_stale or not self._engine.holds():
            self._build()
        assert self._engine is not None
        self._unshared.install()
        return self._engine

    def restore(self) -> None:
        """The model's own modules stand where the user put them."""
        self._unshared.restore()

    def close(self) -> None:
        """Let the workers go."""
        if self._engine is not None:
            self._engine.close()

    def _notice_new_children(self) -> None:
        """Children that the user has replaced since: the model is what it is now."""
        if self._model is None:
            return
        now = list(self._model) if isinstance(self._model, nn.ModuleList) else children(self._model)
        if len(now) == len(self._children) and all(a is b for a, b in zip(now, self._children, strict=True)):
            return
        if self.split_points is not None:
            self.split_points = check_split_points(self.split_points, len(now), self._schedule.num_stages)
        self._children = list(now)
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _build(self) -> None:
        assert self.split_points is not None
        if self._engine is not None:
            self._engine.close()
        self._acceleration.on()
        bounds = [0, *self.split_points, len(self._children)]
        self._unshared = UnsharedStages([_join(self._children[a:b]) for a, b in itertools.pairwise(bounds)])
        devices = [self._devices[rank] for rank in self._schedule.stage_to_rank]
        # The first stage last: a parameter that several stages share stays where the first of them is.
        for stage, device in zip(reversed(self._unshared.stages), reversed(devices), strict=True):
            if stage is not None and device.type != "cpu":
                stage.to(device)
        self._engine = Engine(
            self._unshared.stages,
            self._schedule,
            self._devices,
            self._loss_fn,
            own_rank=self._own_rank,
            max_pending_bytes=self._max_pending_bytes,
        )
        self._unshared.restore()
        self._on_engine(self._engine)


def _join(part: Sequence[nn.Module | None]) -> nn.Module | None:
    here = [child for child in part if child is not None]
    if not here:
        return None
    return here[0] if len(here) == 1 else nn.Sequential(*here)

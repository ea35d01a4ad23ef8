"""A pipeline that cuts batches and enters stages as ``torch.distributed.pipelining`` does."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from timelyfreeze.compat.batch import slice_sizes, split_as_torch
from timelyfreeze.compat.loss import RecordingLoss
from timelyfreeze.errors import problem
from timelyfreeze.pipeline import FreezingPipeline
from timelyfreeze.runtime.microbatch import Microbatch


class StagePipeline(FreezingPipeline):
    """Cuts batches as torch does, and enters stages as torch does.

    Args:
        modules: this rank's stage modules, by stage.
        loss: wraps the user's.
        chunk_specs: of the arguments and of the keywords.
        options: as ``FreezingPipeline`` takes them.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        loss: RecordingLoss,
        chunk_specs: tuple[Any, Any],
        *,
        num_stages: int,
        **options: Any,
    ) -> None:
        # Stages of other ranks are made by nobody here: what stands for them is let go of at once.
        every = {stage: modules.get(stage, nn.Identity()) for stage in range(num_stages)}
        super().__init__(
            stages=[partial(every.__getitem__, stage) for stage in every],
            num_stages=num_stages,
            loss_fn=loss,
            **options,
        )
        self._chunk_specs = chunk_specs
        self._keywords: list[dict[str, Any]] = []
        own = weakref.ref(self)  # a pipeline may be dropped without being closed
        loss.running_microbatch = _Running(own, num_stages - 1)
        self._hooks = [
            module.register_forward_pre_hook(_EnterStage(_Running(own, stage)), with_kwargs=True)
            for stage, module in modules.items()
            if stage > 0
        ]

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return self._ranks.ends[1]

    def running_microbatch(self, stage: int) -> int | None:
        """The micro-batch for which the stage runs right now; None: it was called by somebody else."""
        engine = self._assembly.engine
        action = None if engine is None else engine.runtime.running_action
        return action[2] if action is not None and action[0] == stage else None

    def keywords(self, microbatch: int) -> Mapping[str, Any]:
        """The stages' keywords."""
        return self._keywords[microbatch] if self._keywords else {}

    def run_forward(self, args: Any, kwargs: Any, target: Any, *, with_loss: bool) -> list[Any] | None:
        """Forward of all ranks; without a loss, returns the last stage's outputs."""
        with self._calling(self._step_index):
            slices = self._slices(args, kwargs, target, None, needs_target=with_loss)
            engine, done = self._run_forward("evaluate" if with_loss else "forward", slices)
            self._ranks.gather(None)  # nobody returns before all have succeeded
            return done.report.outputs if engine.has_loss and not with_loss else None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    def _slices(
        self, args: Any, kwargs: Any, target: Any, microbatches: Sequence[Any] | None, *, needs_target: bool
    ) -> list[Microbatch]:
        if self._closed or microbatches is not None:
            return super()._slices(args, kwargs, target, microbatches, needs_target=needs_target)
        count, (args_spec, kwargs_spec) = self.num_microbatches, self._chunk_specs
        first, last = self._ranks.ends
        own_args, own_kwargs = split_as_torch(args if first else (), kwargs, count, args_spec, kwargs_spec)
        self._keywords = own_kwargs if kwargs else []
        targets: list[Any] = [None] * count
        sizes = None
        if last and needs_target:
            if target is None:
                raise ValueError(problem("target", expected="what loss_fn takes beside the output", got=None))
            targets = [one for (one,) in split_as_torch((target,), {}, count, None, None)[0]]
            sizes = slice_sizes((target,), None, count)
        if first:
            sizes = slice_sizes(args, args_spec, count) or slice_sizes(kwargs, kwargs_spec, count) or [1] * count
            return list(map(Microbatch, own_args, own_kwargs, targets, sizes))
        if not (last and needs_target):
            return []  # what other ranks take is theirs to bring
        return [Microbatch((), {}, one, size) for one, size in zip(targets, sizes or [1] * count, strict=True)]


class _Running:
    """Which micro-batch a stage of a pipeline runs for; None: it was called by somebody else."""

    def __init__(self, pipeline: weakref.ref[StagePipeline], stage: int) -> None:
        self._pipeline = pipeline
        self._stage = stage

    def __call__(self) -> int | None:
        pipeline = self._pipeline()
        return None if pipeline is None else pipeline.running_microbatch(self._stage)

    def keywords(self, microbatch: int) -> Mapping[str, Any]:
        pipeline = self._pipeline()
        return {} if pipeline is None else pipeline.keywords(microbatch)


class _EnterStage:
    """Before a stage's forward: a tuple from the stage before is spread over the arguments, keywords are put in."""

    def __init__(self, running: _Running) -> None:
        self._running = running

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        microbatch = self._running()
        if microbatch is None:
            return None
        if len(args) == 1 and type(args[0]) in (tuple, list):
            args = tuple(args[0])
        return args, {**kwargs, **self._running.keywords(microbatch)}

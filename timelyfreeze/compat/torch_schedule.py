"""What stands in for the schedules of ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.microbatch import merge_chunks

from timelyfreeze.compat.loss import RecordingLoss
from timelyfreeze.compat.pipeline import StagePipeline
from timelyfreeze.compat.stages import check_placement, check_stages, own_name, stages_per_rank
from timelyfreeze.errors import problem
from timelyfreeze.freeze import FreezeConfig
from timelyfreeze.runtime.arguments import make_schedule
from timelyfreeze.runtime.results import StepResult, join_outputs
from timelyfreeze.schedule import Schedule


def torch_schedule(
    stage: Any,
    n_microbatches: int,
    loss_fn: Callable[..., Any] | None = None,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
    output_merge_spec: Any = None,
    scale_grads: bool = True,
    *,
    schedule: str | PathLike[str] | type | Schedule = "1f1b",
    freeze: FreezeConfig | None = None,
    **pipeline_options: Any,
) -> TorchSchedule:
    """Make what stands in for a schedule of ``torch.distributed.pipelining``; all ranks of the group call it together.

    Args:
        stage: this rank's ``PipelineStage``, or a list of them where a rank has several.
        n_microbatches: into how many slices a step's batch is cut, along dimension 0 unless a chunk
            spec says otherwise.
        loss_fn: ``(output, target, **loss_kwargs)`` -> loss of a micro-batch. None: ``step`` runs forward only.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: as torch's schedules take them.
        scale_grads: True: gradients are the mean over the batch, for a loss that is a mean. False: the sum over the
            micro-batches, for a loss that is a sum, or one that is divided by something already.
        schedule: a name of ours or of torch (``"Interleaved1F1B"``), torch's class itself, a ``Schedule``, or the path
            of a .csv.
        freeze: what to leave out, and when; None trains plainly. Parameters are called ``"<stage>.<name in submod>"``.
        pipeline_options: further arguments of ``FreezingPipeline``: ``accelerate=False`` for torch's very bits,
            ``seed``, ``timeout_s``, ``tied``, or ``mesh`` for replicas.

    Raises:
        ValueError: stages that are not where the schedule wants them, or counts that it cannot have.
        TypeError: something that is no stage.

    Example::

        stage = PipelineStage(module, rank, num_stages, device)
        # schedule = Schedule1F1B(stage, 8, loss_fn)
        schedule = torch_schedule(stage, 8, loss_fn, freeze=FreezeConfig(max_ratio=0.5))
        for x, y in batches:
            losses = []
            if stage.is_first:
                schedule.step(x)
            else:
                output = schedule.step(target=y, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
    """
    stages = list(stage) if isinstance(stage, list | tuple) else [stage]
    check_stages(stages)
    first = stages[0]
    named = own_name(schedule)
    per_rank = stages_per_rank(named, first.num_stages, first.group_size)
    made = make_schedule(named, first.num_stages, n_microbatches, per_rank)
    check_placement(stages, made, first.group_rank, first.group_size)
    loss = RecordingLoss(loss_fn, n_microbatches, is_sum=not scale_grads)
    if "mesh" not in pipeline_options:
        pipeline_options["process_group"] = dist.group.WORLD if first.group is None else first.group
    pipeline = StagePipeline(
        {one.stage_index: one.submod for one in stages},
        loss,
        (args_chunk_spec, kwargs_chunk_spec),
        num_stages=first.num_stages,
        num_microbatches=n_microbatches,
        schedule=named,
        stages_per_rank=per_rank,
        freeze=freeze,
        devices=[first.device],
        **pipeline_options,
    )
    return TorchSchedule(pipeline, loss, output_merge_spec)


class TorchSchedule:
    """What ``torch_schedule`` makes: ``step`` and ``eval`` as torch's schedules have them.

    What differs from torch: several ``step`` calls before the optimizer's add up as plain ``backward()`` does
    (torch divides again what is in ``.grad`` already, in ``eval`` too); losses and outputs hold no graph; a
    parameter frozen in a whole step has no ``.grad``; micro-batches of unequal sizes weigh by their samples; shapes
    may change from step to step; stages may hand on dicts, None, numbers and integer tensors; dropout draws from
    ``seed``; a loss that is not finite raises ``StageError`` unless ``check_finite=False``; and a failure on one
    rank is raised on all of them.

    Attributes:
        pipeline: the ``FreezingPipeline`` underneath: ``pipeline.plan``, ``pipeline.report()``,
            ``pipeline.freeze_state_dict()``.
        last_result: the last training step's ``StepResult`` (its loss on every rank, phase, times), without outputs.

    Example::

        with torch_schedule(stage, 8, loss_fn, schedule="ZBVZeroBubble") as schedule:
            schedule.step(x) if has_first_stage else schedule.step(target=y)
    """

    def __init__(self, pipeline: StagePipeline, loss: RecordingLoss, output_merge_spec: Any) -> None:
        self.pipeline = pipeline
        self.last_result: StepResult | None = None
        self._loss = loss
        self._output_merge_spec = output_merge_spec

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of one batch; gradients are added to ``.grad``. All ranks call it together.

        Args:
            args: on the rank of the first stage, that stage's arguments.
            kwargs: of all stages on this rank.
            target: on the rank of the last stage, what ``loss_fn`` gets beside the output.
            losses: on that rank, is emptied and filled with one detached loss a micro-batch.
            return_outputs: whether to return the outputs.
            loss_kwargs: further arguments of ``loss_fn``.

        Returns:
            The last stage's outputs, put together; None on other ranks.

        Raises:
            StageError: user code failed in a stage; ``.grad`` is as it was before.
            ValueError, TypeError: wrong arguments.
        """
        if not self._loss.is_given:
            return self.eval(*args, losses=losses, return_outputs=return_outputs, **kwargs)
        if not torch.is_grad_enabled():
            raise RuntimeError(problem("step()", expected="grad mode", got="no_grad", hint="Call eval() instead."))
        _check_losses(losses)
        with self._loss.recording(loss_kwargs):
            result = self.pipeline.step(*args, target=target, return_outputs=bool(return_outputs), **kwargs)
            self._fill(losses)
        self.last_result = replace(result, outputs=None)
        return self._merge(result.outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The same without backward and gradients; modules keep their train or eval mode, and freezing its state."""
        _check_losses(losses)
        if losses is not None and not self._loss.is_given:
            raise ValueError(problem("losses", expected="None, since there is no loss_fn", got="a list"))
        with self._loss.recording(loss_kwargs, outputs=return_outputs):
            outputs = self.pipeline.run_forward(args, kwargs, target, with_loss=self._loss.is_given)
            self._fill(losses)
            if self._loss.is_given:
                outputs = self._loss.outputs
        return self._merge(outputs) if return_outputs else None

    def close(self) -> None:
        """Let the workers go, and the modules be as they were. Calling it twice is harmless."""
        self.pipeline.close()

    def __enter__(self) -> TorchSchedule:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, losses: list[torch.Tensor] | None) -> None:
        if losses is not None and self.pipeline.has_last_stage:
            losses[:] = self._loss.losses

    def _merge(self, outputs: list[Any] | None) -> Any:
        if not outputs or not self.pipeline.has_last_stage:
            return None
        if self._output_merge_spec is None:
            return join_outputs(outputs)
        return merge_chunks(outputs, self._output_merge_spec)


def _check_losses(losses: Any) -> None:
    if losses is not None and not isinstance(losses, list):
        raise TypeError(problem("losses", expected="a list, or None", got=type(losses).__name__))

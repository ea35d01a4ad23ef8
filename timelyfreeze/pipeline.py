"""The facade: a model in, pipelined and partly frozen training steps out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from timelyfreeze.acceleration.switch import AccelerationSwitch
from timelyfreeze.errors import problem
from timelyfreeze.freeze import FreezeConfig
from timelyfreeze.freeze.groups import check_patterns
from timelyfreeze.freeze.session import FreezeSession, as_tensors, gradient_factors
from timelyfreeze.runtime.arguments import (
    check_arguments,
    children,
    default_devices,
    default_num_stages,
    fit_devices,
    make_schedule,
)
from timelyfreeze.runtime.engine import Engine, EngineStep
from timelyfreeze.runtime.microbatch import Microbatch, as_microbatches, split_batch
from timelyfreeze.runtime.partition import (
    balanced_split_points,
    check_split_points,
    known_split_points,
    measure_children_s,
)
from timelyfreeze.runtime.results import StepResult, join_outputs, scale_of, send_input_gradients, step_loss
from timelyfreeze.runtime.ties import UnsharedStages
from timelyfreeze.schedule import Schedule, merge_backward

if TYPE_CHECKING:
    from timelyfreeze.planner import Plan


class FreezingPipeline(nn.Module):
    """Trains a model split over pipeline stages, leaving out weight gradients where the schedule can use the time.

    Args:
        model: an ``nn.Sequential``, a list of stage modules (each gets what the one before returned), or a module that
            a splitter is registered for (``timelyfreeze.runtime.register_splitter``).
        num_stages: how many stages; for a list its length. Default: one a device, or 2 on CPU.
        num_microbatches: into how many slices a step's batch is cut.
        schedule: a name (``timelyfreeze.schedule.schedule_names()``), a ``Schedule``, or the path of a .csv. Where a
            W follows its own I and nobody waits for the latter, the two run as one (``merge_backward``).
        stages_per_rank: where ``schedule`` is a name; default: the schedule's own, so that there are
            ``num_stages / stages_per_rank`` ranks.
        loss_fn: ``(output, target)`` -> mean over the samples (a scalar), or ``(sum, count)`` where samples weigh
            unequally: then the step divides once by the whole count. A module's own parameters are trained too, and
            never frozen. None: the last stage takes the target as its last argument and returns the loss.
        freeze: what to leave out, and when; None trains plainly.
        devices: one a rank; default: all GPUs, else the CPU for every rank.
        split_points: index of the child with which each stage from 1 on begins; default: balanced by the time that
            forward and backward of each child take, measured when the first batch comes.
        process_group: reserved for one process a rank.
        seed: dropout and masks draw from (seed, step, stage, micro-batch).
        timeout_s: the longest a step may take.
        max_pending_bytes: how much memory the weight gradients that wait for their W may keep on one rank, the inputs
            and output gradients of their layers; what goes beyond is computed in I. None: as much as the schedule asks.
        check_finite: raise ``StageError`` when a loss is NaN or infinite, instead of training on.

        accelerate: let the model's modules run on the package's own operators until ``close``
            (``timelyfreeze.accelerate``): the same results within rounding, sooner. False: to the last bit.

    Raises:
        ValueError, TypeError: wrong arguments, all of them named at once.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> with FreezingPipeline(model, num_stages=2, num_microbatches=2, loss_fn=nn.functional.mse_loss) as pipe:
        ...     optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        ...     result = pipe.step(torch.ones(4, 4), target=torch.zeros(4, 1))
        ...     optimizer.step()
        >>> result.phase
        'steady'
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        num_stages: int | None = None,
        num_microbatches: int = 8,
        *,
        schedule: str | PathLike[str] | Schedule = "1f1b",
        stages_per_rank: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        freeze: FreezeConfig | None = None,
        devices: Sequence[torch.device | str] | None = None,
        split_points: Sequence[int] | None = None,
        process_group: Any = None,
        seed: int = 0,
        timeout_s: float = 600.0,
        check_finite: bool = True,
        max_pending_bytes: int | None = None,
        accelerate: bool = True,
    ) -> None:
        super().__init__()
        if process_group is not None:
            raise ValueError(problem("process_group", expected="None", got=process_group, hint="Ranks are threads."))
        self._children_list = children(model)
        given_stages = not isinstance(model, nn.Module)
        if given_stages and num_stages is None:
            num_stages = len(self._children_list)
        rank_devices = default_devices(devices)
        if num_stages is None:
            num_stages = default_num_stages(schedule, stages_per_rank, max(2, len(rank_devices)))
        check_arguments(
            self._children_list, given_stages, num_stages, num_microbatches, timeout_s, seed, loss_fn, max_pending_bytes
        )
        made = make_schedule(schedule, num_stages, num_microbatches, stages_per_rank)
        fixed = None if freeze is None else freeze.fixed_plan
        # A plan is of its schedule's very actions.
        self.schedule = made if fixed is not None and fixed.schedule == made else merge_backward(made)
        self.num_stages = num_stages
        self.num_microbatches = self.schedule.num_microbatches
        self._devices = fit_devices(rank_devices, self.schedule.num_ranks, explicit=devices is not None)
        self._loss_fn = loss_fn
        self._seed = seed
        self._timeout_s = timeout_s
        self._check_finite = check_finite
        self._max_pending_bytes = max_pending_bytes
        self._step_index = 0
        self._engine: Engine | None = None
        self._unshared = UnsharedStages([])
        self._busy = threading.Lock()  # one step or evaluation at a time
        self._closed = False
        self._freezing = None if freeze is None else FreezeSession(freeze, self.schedule, seed)
        self.model = model if isinstance(model, nn.Module) else nn.ModuleList(self._children_list)
        self._acceleration = AccelerationSwitch(self.model, enabled=accelerate)
        if freeze is not None:
            check_patterns(freeze.options, [name for name, _ in self.named_parameters()])
        self._split_points = known_split_points(split_points, len(self._children_list), num_stages, given_stages)
        if self._split_points is not None:
            self._build()

    # --- training ---------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        microbatches: Sequence[Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run forward and backward of one batch; the gradients are added to ``.grad``, as by ``backward()``.

        Args:
            args, kwargs: the first stage's arguments; tensors are cut along dimension 0 (see ``NoChunk``).
            target: what ``loss_fn`` gets beside the output, cut likewise.
            microbatches: instead of the above, slices that exist already: ``(input, target)`` or ``Microbatch``.
            grad_scaler: scales the gradients; afterwards call its ``step`` and ``update`` as usual.
            return_outputs: keep the last stage's outputs (not with ``loss_fn=None``).

        Raises:
            StageError: user code failed in a stage, or the loss is not finite; ``.grad`` is as it was before.
            ValueError, TypeError: wrong arguments.
        """
        if not torch.is_grad_enabled():
            raise ValueError(problem("step()", expected="grad mode", got="no_grad", hint="Use pipe.evaluate(...)."))
        slices = self._slices(args, kwargs, target, microbatches, needs_target=True)
        with self._alone():
            return self._train(slices, grad_scaler, return_outputs)

    def _train(
        self, slices: list[Microbatch], grad_scaler: torch.amp.GradScaler | None, return_outputs: bool
    ) -> StepResult:
        engine = self._ready_engine(slices)
        freezing = self._freezing
        masks = None
        if freezing is not None:
            freezing.attach(engine.stages)
            masks = freezing.controller.begin_step(engine.trainable(), len(slices))
        try:
            with self._profiling():
                done = engine.run(
                    slices,
                    train=True,
                    step=self._step_index,
                    seed=self._seed,
                    timeout_s=self._timeout_s,
                    has_target=True,
                    return_outputs=return_outputs,
                    check_finite=self._check_finite,
                    grad_scale=None if grad_scaler is None else scale_of(grad_scaler),
                    masks=None if masks is None else as_tensors(masks),
                )
            loss = step_loss(done)
        except BaseException:
            engine.abort()
            if freezing is not None:
                freezing.controller.abort_step()
            raise
        scale = 1.0 / loss.divisor
        engine.commit(scale, None if masks is None else gradient_factors(masks, scale, loss.weights))
        send_input_gradients(done, scale)
        self._step_index += 1
        if freezing is not None:
            freezing.controller.end_step(done.times.durations_s)
        return StepResult(
            loss=loss.mean,
            outputs=done.report.outputs if return_outputs else None,
            step_time_s=done.times.step_time_s,
            phase="steady" if masks is None else masks.phase,
            freeze_ratio=0.0 if masks is None else masks.freeze_ratio,
            times=done.times,
            peak_pending_bytes=done.report.peak_pending_bytes,
        )

    # --- no gradient ------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch, without gradients, in the module's own train or eval mode.

        Micro-batches are put together along dimension 0; plain values are taken from the first one.
        """
        slices = self._slices(args, kwargs, None, None, needs_target=False)
        done = self._run_forward(slices, has_target=False)
        return join_outputs(done.report.outputs)

    def evaluate(
        self, *args: Any, target: Any = None, microbatches: Sequence[Any] | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """The mean loss of a batch, without gradients, in eval mode; training's state is left untouched."""
        slices = self._slices(args, kwargs, target, microbatches, needs_target=True)
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            return step_loss(self._run_forward(slices, has_target=True)).mean
        finally:
            for module in training:
                module.training = True

    def _run_forward(self, slices: list[Microbatch], *, has_target: bool) -> EngineStep:
        with self._alone(), torch.no_grad():
            engine = self._ready_engine(slices)
            return engine.run(
                slices,
                train=False,
                step=self._step_index,
                seed=self._seed,
                timeout_s=self._timeout_s,
                has_target=has_target,
                return_outputs=not has_target,
                check_finite=False,
            )

    # --- plan and state ---------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """What is left out where, once it is known."""
        return None if self._freezing is None else self._freezing.controller.plan

    def report(self) -> dict[str, Any]:
        """Planned and measured times by action, phases and plan switches so far, as plain data."""
        base = {"step": self._step_index, "schedule": self.schedule.name, "split_points": self._split_points}
        return base | ({} if self._freezing is None else self._freezing.controller.report())

    def freeze_state_dict(self) -> dict[str, Any]:
        """Where training stands (step, phase, samples, plan): with it a resumed run goes on exactly."""
        state: dict[str, Any] = {"step": self._step_index, "split_points": self._split_points}
        if self._freezing is not None:
            state["freezing"] = self._freezing.controller.state_dict()
        return state

    def load_freeze_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``freeze_state_dict`` was taken."""
        if ("freezing" in state) != (self._freezing is not None):
            raise ValueError(
                problem(
                    "freeze state",
                    expected="freezing" if self._freezing is not None else "no freezing",
                    got="freezing" if "freezing" in state else "no freezing",
                    hint="Create the pipeline with the freeze= that it was saved with.",
                )
            )
        points = state["split_points"]
        if points is not None:
            points = check_split_points(points, len(self._children_list), self.num_stages)
        if self._freezing is not None:
            self._freezing.controller.load_state_dict(state["freezing"])
        self._step_index = int(state["step"])
        if points is not None and points != self._split_points:
            self._split_points = points
            self._build()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's own ``state_dict``."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the wrapped model's own ``state_dict``."""
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The wrapped model's own names."""
        return self.model.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The wrapped model's own names."""
        return self.model.named_buffers(prefix, recurse, remove_duplicate)

    def close(self) -> None:
        """Let the workers go. Calling it twice is harmless."""
        self._closed = True
        if self._engine is not None:
            self._engine.close()
        self._acceleration.off()
        if self._freezing is not None:
            self._freezing.controller.close()

    def __enter__(self) -> FreezingPipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ValueError(
                problem(
                    "the pipeline is busy",
                    expected="one call at a time",
                    got="another from inside a stage or another thread",
                    hint="Call step() and evaluate() from one thread.",
                )
            )
        try:
            yield
        finally:
            self._unshared.restore()
            self._busy.release()

    @contextmanager
    def _profiling(self) -> Iterator[None]:
        """Around a step that finds out the parameters' work: plain modules run, whose calls can be watched."""
        if self._freezing is None or not self._freezing.controller.needs_work:
            yield
            return
        with self._acceleration.paused(), self._freezing.profiling(self.model):
            yield

    # --- stages -----------------------------------------------------------------------------------------------

    def _slices(
        self, args: Any, kwargs: Any, target: Any, microbatches: Sequence[Any] | None, *, needs_target: bool
    ) -> list[Microbatch]:
        if self._closed:
            raise ValueError(problem("the pipeline is closed", hint="Create a new FreezingPipeline."))
        if microbatches is not None:
            if args or kwargs or target is not None:
                raise ValueError(problem("arguments", expected="a batch or microbatches=, not both", got="both"))
            return as_microbatches(microbatches, self.num_microbatches, has_target=needs_target)
        if needs_target and target is None and self._loss_fn is not None:
            raise ValueError(problem("target", expected="what loss_fn takes beside the output", got=None))
        return split_batch(args, kwargs, target, self.num_microbatches)

    def _notice_new_children(self) -> None:
        """Children that the user has replaced since: the model is what it is now."""
        now = list(self.model) if isinstance(self.model, nn.ModuleList) else children(self.model)
        if len(now) == len(self._children_list) and all(a is b for a, b in zip(now, self._children_list, strict=True)):
            return
        if self._split_points is not None:
            self._split_points = check_split_points(self._split_points, len(now), self.num_stages)
        self._children_list = now
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _ready_engine(self, slices: list[Microbatch]) -> Engine:
        self._notice_new_children()
        if self._split_points is None:
            first = slices[0]
            times_s = measure_children_s(self._children_list, first.args, first.kwargs, self._devices[0])
            self._split_points = balanced_split_points(times_s, self.num_stages, self.schedule.stage_to_rank)
        if self._engine is None or self._unshared.is_stale or not self._engine.holds():
            self._build()
        assert self._engine is not None
        self._unshared.install()
        return self._engine

    def _build(self) -> None:
        assert self._split_points is not None
        if self._engine is not None:
            self._engine.close()
        self._acceleration.on()
        bounds = [0, *self._split_points, len(self._children_list)]
        parts = [self._children_list[a:b] for a, b in itertools.pairwise(bounds)]
        self._unshared = UnsharedStages([part[0] if len(part) == 1 else nn.Sequential(*part) for part in parts])
        devices = [self._devices[rank] for rank in self.schedule.stage_to_rank]
        # The first stage last: a parameter that several stages share stays where the first of them is.
        for stage, device in zip(reversed(self._unshared.stages), reversed(devices), strict=True):
            if device.type != "cpu":
                stage.to(device)
        self._engine = Engine(
            self._unshared.stages,
            self.schedule,
            self._devices,
            self._loss_fn,
            max_pending_bytes=self._max_pending_bytes,
        )
        self._unshared.restore()

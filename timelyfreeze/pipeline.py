"""The facade: a model in, pipelined and partly frozen training steps out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from timelyfreeze.acceleration.switch import AccelerationSwitch
from timelyfreeze.distributed.ranks import ProcessRanks, make_ranks
from timelyfreeze.errors import problem, raise_all
from timelyfreeze.freeze import FreezeConfig
from timelyfreeze.freeze.groups import check_patterns
from timelyfreeze.freeze.session import FreezeSession, as_tensors, gradient_factors
from timelyfreeze.pipeline_state import ResumablePipeline
from timelyfreeze.runtime.arguments import (
    check_arguments,
    default_devices,
    default_num_stages,
    fit_devices,
    make_schedule,
)
from timelyfreeze.runtime.assembly import StageAssembly
from timelyfreeze.runtime.clipping import Clipping
from timelyfreeze.runtime.engine import Engine, EngineStep
from timelyfreeze.runtime.microbatch import Microbatch, take_batch
from timelyfreeze.runtime.partition import known_split_points
from timelyfreeze.runtime.ranks import Closing, Exchange, Opening, Ranks, ThreadRanks
from timelyfreeze.runtime.results import StepResult, join_outputs, scale_of, send_input_gradients, step_loss
from timelyfreeze.runtime.scaling import note_overflow
from timelyfreeze.runtime.sources import StageSource, own_children, own_device
from timelyfreeze.schedule import Schedule

if TYPE_CHECKING:
    pass


class FreezingPipeline(ResumablePipeline):
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
        stages: instead of ``model``, functions that make the stage modules. Where ranks are processes, each keeps its
            own stages only, so the whole model never has to fit one of them; the same holds for a ``model`` on the meta
            device, whose modules are filled one after the other.
        init_fn: fills one module of such a model; default: its ``reset_parameters``.
        process_group: a group of ``torch.distributed``: this process is one rank of the pipeline, which has its rank's
            stages and parameters only. Every rank makes the same calls. The rank of the first stage brings the input,
            that of the last one the target; what others are given is not looked at. ``devices`` is then its one device,
            and split points that are not given deal the parameters out evenly.
        mesh: instead of it, a ``DeviceMesh`` with the dimensions "dp" and "pp": replicas of the pipeline, each with a
            part of the batch, that begin with the first one's values; buffers then stay each one's own. Gradients are
            added up over "dp" once a step, on each rank after its last action. Or stages are sharded,
            ``fully_shard(stage, mesh=mesh["dp"])``, which excludes ``freeze``.
        tied: names of parameters that are one and the same in several stages; known by itself where ``model`` is given.
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
        model: nn.Module | Sequence[nn.Module] | None = None,
        num_stages: int | None = None,
        num_microbatches: int = 8,
        *,
        schedule: str | PathLike[str] | Schedule = "1f1b",
        stages_per_rank: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        freeze: FreezeConfig | None = None,
        devices: Sequence[torch.device | str] | None = None,
        split_points: Sequence[int] | None = None,
        stages: Sequence[Callable[[], nn.Module]] | None = None,
        init_fn: Callable[[nn.Module], None] | None = None,
        process_group: Any = None,
        mesh: Any = None,
        tied: Sequence[Sequence[str]] | None = None,
        seed: int = 0,
        timeout_s: float = 600.0,
        check_finite: bool = True,
        max_pending_bytes: int | None = None,
        accelerate: bool = True,
    ) -> None:
        super().__init__()
        ranks = make_ranks(process_group, mesh, timeout_s)
        self._ranks: Ranks = ThreadRanks() if ranks is None else ranks
        with self._ranks.making():
            source = StageSource(model, stages, init_fn)
            rank_devices = default_devices(devices) if ranks is None else own_device(devices)
            if num_stages is None:
                num_ranks = max(2, len(rank_devices)) if ranks is None else ranks.num_ranks
                num_stages = default_num_stages(source, schedule, stages_per_rank, num_ranks)
            check_arguments(source, num_stages, num_microbatches, timeout_s, seed, loss_fn, max_pending_bytes)
            self.schedule = make_schedule(
                schedule, num_stages, num_microbatches, stages_per_rank, None if freeze is None else freeze.fixed_plan
            )
            self.num_stages = num_stages
            self.num_microbatches = self.schedule.num_microbatches
            self._loss_fn = loss_fn
            self._seed = seed
            self._timeout_s = timeout_s
            self._check_finite = check_finite
            self._step_index = 0
            self._busy = threading.Lock()  # one step or evaluation at a time
            self._closed = False
            fitted = fit_devices(rank_devices, self.schedule.num_ranks, explicit=ranks is None and devices is not None)
            points = known_split_points(split_points, source.num_children, num_stages, source.gives_stages)
            if ranks is None:
                self.model, parts = source.everything()
            else:
                points = points or source.points_by_size(num_stages, self.schedule.stage_to_rank)
                own = ranks.join(self.schedule, points, seed, fitted[0])
                self.model, parts = source.part(own_children(points, source.num_children, own))
            self._acceleration = AccelerationSwitch(self.model, enabled=accelerate)
            self._assembly = StageAssembly(
                None if ranks is not None or stages is not None else self.model,
                parts,
                schedule=self.schedule,
                devices=fitted,
                loss_fn=loss_fn,
                split_points=points,
                acceleration=self._acceleration,
                on_engine=self._ranks.connect,
                max_pending_bytes=max_pending_bytes,
                own_rank=self._ranks.own_rank,
            )
            if ranks is not None:
                ranks.tie(source.tied_names() if tied is None else tied, self.model)
            self._freezing = None if freeze is None else self._begin_freezing(freeze, ranks)

    def _begin_freezing(self, freeze: FreezeConfig, ranks: ProcessRanks | None) -> FreezeSession:
        every = self._ranks.gather([self._ranks.objection, [name for name, _ in self.named_parameters()]])
        with self._ranks.judging_alike():
            raise_all(ValueError, [objection for objection, _ in every if objection is not None][:1])
            check_patterns(freeze.options, [name for _, names in every for name in names])
        planner = None if ranks is None else ranks.planner(freeze)
        return FreezeSession(freeze, self.schedule, self._seed, planner)

    # --- training ---------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        microbatches: Sequence[Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        return_outputs: bool | str = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run forward and backward of one batch; the gradients are added to ``.grad``, as by ``backward()``.

        Args:
            args, kwargs: the first stage's arguments; tensors are cut along dimension 0 (see ``NoChunk``).
            target: what ``loss_fn`` gets beside the output, cut likewise.
            microbatches: instead of the above, slices that exist already: ``(input, target)`` or ``Microbatch``.
            grad_scaler: scales the gradients; afterwards call its ``step`` and ``update`` as usual. An overflow on one
                rank is known to all. ``timelyfreeze.GradScaler`` also does for a rank that has no gradients at all.
            return_outputs: keep the last stage's outputs (not with ``loss_fn=None``); where ranks are processes, the
                last stage's has them, and with "all" every one.

        Raises:
            StageError: user code failed in a stage, or the loss is not finite; ``.grad`` is as it was before.
            ValueError, TypeError: wrong arguments.
        """
        with self._calling(self._step_index):
            if not torch.is_grad_enabled():
                raise ValueError(problem("step()", expected="grad mode", got="no_grad", hint="Use pipe.evaluate(...)."))
            slices = self._slices(args, kwargs, target, microbatches, needs_target=True)
            return self._train(slices, grad_scaler, return_outputs)

    def _train(
        self, slices: list[Microbatch], grad_scaler: torch.amp.GradScaler | None, return_outputs: bool | str
    ) -> StepResult:
        engine = self._assembly.ready_engine(slices)
        freezing = self._freezing
        opened = self._open("train", slices, engine)
        masks = None
        if freezing is not None:
            masks = freezing.begin_step(opened.trainable, len(opened.shares), renew=opened.has_new_parameters)
        try:
            with self._profiling():
                done = engine.run(
                    slices,
                    opened.shares,
                    train=True,
                    step=self._step_index,
                    seed=self._seed,
                    timeout_s=self._timeout_s,
                    has_target=True,
                    return_outputs=bool(return_outputs),
                    check_finite=self._check_finite,
                    grad_scale=None if grad_scaler is None else scale_of(grad_scaler),
                    masks=None if masks is None else as_tensors(masks),
                )
            self._ranks.reduce_gradients(None if masks is None else masks.ever_live)
            has_scaler = grad_scaler is not None and grad_scaler.is_enabled()
            closed = self._close_step(engine, done, has_scaler=has_scaler)
            outputs = done.report.outputs if return_outputs and engine.has_loss else None
            if return_outputs == "all":
                outputs = self._ranks.share_outputs(outputs)
        except BaseException:
            engine.abort()
            if freezing is not None:
                freezing.controller.abort_step()
            raise
        loss = closed.loss
        assert loss is not None
        scale = 1.0 / loss.divisor
        self._ranks.commit(scale, None if masks is None else gradient_factors(masks, scale, loss.weights))
        note_overflow(grad_scaler, closed.overflow)
        send_input_gradients(done, scale)
        self._step_index += 1
        if freezing is not None:
            freezing.end_step(closed.durations_s or closed.times.durations_s, closed.works, closed.transfers_s)
        return StepResult(
            loss=loss.mean,
            outputs=outputs,
            step_time_s=closed.times.step_time_s,
            phase="steady" if masks is None else masks.phase,
            freeze_ratio=0.0 if masks is None else masks.freeze_ratio,
            times=closed.times,
            peak_pending_bytes=closed.peak_pending_bytes,
        )

    def _open(self, call: str, slices: list[Microbatch], engine: Engine) -> Opening:
        num_samples = [one.num_samples for one in slices]
        if call != "train" or self._freezing is None:
            return self._ranks.open(Opening(call, self._step_index, num_samples))
        renew = self._freezing.attach(engine.stages)
        return self._ranks.open(
            Opening(call, self._step_index, num_samples, trainable=engine.trainable(), has_new_parameters=renew)
        )

    def _close_step(self, engine: Engine, done: EngineStep, *, has_scaler: bool) -> Closing:
        return self._ranks.close(
            Closing(
                times=done.times,
                loss=step_loss(done) if engine.has_loss else None,
                works={} if self._freezing is None else self._freezing.take_works(),
                transfers_s=done.transfers_s,
                peak_pending_bytes=done.report.peak_pending_bytes,
                overflow=has_scaler and self._ranks.own_rank is not None and engine.overflows(),
            )
        )

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over the parameters of all stages and of ``loss_fn``, on whatever ranks.

        All ranks call it, also those without gradients. Tied parameters and replicas count once.

        Returns:
            The norm before, the same on every rank.

        Raises:
            RuntimeError: with ``error_if_nonfinite``, the norm is not finite; on every rank, gradients untouched.
        """
        with self._calling(self._step_index):
            clipping = Clipping(self.model, self._assembly.engine, norm_type)
            every = self._ranks.gather(clipping.own_norms(self._ranks.is_copy))
        return clipping.clip(every, max_norm, error_if_nonfinite=error_if_nonfinite)

    # --- no gradient ------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch, without gradients, in the module's own train or eval mode.

        Micro-batches are put together along dimension 0; plain values are taken from the first one.
        """
        with self._calling(self._step_index):
            slices = self._slices(args, kwargs, None, None, needs_target=False)
            engine, done = self._run_forward("forward", slices)
            return join_outputs(self._ranks.share_outputs(done.report.outputs if engine.has_loss else None))

    def evaluate(
        self, *args: Any, target: Any = None, microbatches: Sequence[Any] | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """The mean loss of a batch, without gradients, in eval mode; training's state is left untouched."""
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            with self._calling(self._step_index):
                slices = self._slices(args, kwargs, target, microbatches, needs_target=True)
                engine, done = self._run_forward("evaluate", slices)
                loss = step_loss(done) if engine.has_loss else None
                closed = self._ranks.close(Closing(times=done.times, loss=loss)).loss
                assert closed is not None
                return closed.mean
        finally:
            for module in training:
                module.training = True

    def _run_forward(self, call: str, slices: list[Microbatch]) -> tuple[Engine, EngineStep]:
        with torch.no_grad():
            engine = self._assembly.ready_engine(slices)
            opened = self._open(call, slices, engine)
            done = engine.run(
                slices,
                opened.shares,
                train=False,
                step=self._step_index,
                seed=self._seed,
                timeout_s=self._timeout_s,
                has_target=call == "evaluate",
                return_outputs=call == "forward",
                check_finite=False,
            )
            return engine, done

    # --- all ranks --------------------------------------------------------------------------------------------

    @property
    def process_group(self) -> Any:
        """The pipeline's own group of all its processes, for CPU tensors; None where ranks are threads of this one.

        It is another one after a failed step: ask for it on all ranks together, where you need it.
        """
        return self._ranks.process_group

    def gather(self, value: Any) -> list[Any]:
        """Everyone's plain value (JSON data), by rank in ``process_group``; where ranks are threads, the one given.

        A call like ``step``: all ranks make it together, and where it fails on one, it fails on all of them.
        """
        with self._calling(self._step_index):
            return self._ranks.gather(value)

    @contextmanager
    def together(self, what: str) -> Iterator[Exchange]:
        """A call like ``step`` around ``what`` all ranks do together; gives what tells everyone's bytes to all."""
        with self._calling(self._step_index), self._ranks.together(what, self._step_index) as exchange:
            yield exchange

    def close(self) -> None:
        """Let the workers go. Calling it twice is harmless."""
        self._closed = True
        self._ranks.shut()
        self._assembly.close()
        self._acceleration.off()
        if self._freezing is not None:
            self._freezing.controller.close()

    def __enter__(self) -> FreezingPipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _calling(self, step: int) -> Iterator[None]:
        """Around a call: one at a time, and if it fails on one rank, it fails on all of them."""
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
            with self._ranks.call(step):
                yield
        finally:
            self._assembly.restore()
            self._busy.release()

    @contextmanager
    def _profiling(self) -> Iterator[None]:
        """Around a step that finds out the parameters' work: plain modules run, whose calls can be watched."""
        if self._freezing is None or not self._freezing.controller.needs_work:
            yield
            return
        with self._acceleration.paused(), self._freezing.profiling(self.model):
            yield

    def _slices(
        self, args: Any, kwargs: Any, target: Any, microbatches: Sequence[Any] | None, *, needs_target: bool
    ) -> list[Microbatch]:
        if self._closed:
            raise ValueError(problem("the pipeline is closed", hint="Create a new FreezingPipeline."))
        takes_target = needs_target and self._loss_fn is not None
        return take_batch(
            args,
            kwargs,
            target,
            microbatches,
            self.num_microbatches,
            has_target=needs_target,
            needs=self._ranks.ends if takes_target else (self._ranks.ends[0], False),
        )

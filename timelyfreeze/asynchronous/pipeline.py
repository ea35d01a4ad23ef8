"""The facade: batches in, trained weights out, and never a flush between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from timelyfreeze.acceleration.switch import AccelerationSwitch
from timelyfreeze.asynchronous.arguments import (
    check_async_arguments,
    refuse_in_processes,
    refuse_prediction,
    slices_of,
)
from timelyfreeze.asynchronous.engine import AsyncEngine, AsyncOptions, MakeScheduler
from timelyfreeze.asynchronous.freezing import StreamFreezing
from timelyfreeze.asynchronous.modules import refuse_shared_parameters, refuse_unfit_modules
from timelyfreeze.asynchronous.ranks import AsyncRanks, make_async_ranks
from timelyfreeze.asynchronous.results import AsyncResult, join_batch
from timelyfreeze.asynchronous.state import ResumableAsyncPipeline
from timelyfreeze.asynchronous.updates import MakeOptimizer
from timelyfreeze.distributed.messages import DisagreementError
from timelyfreeze.errors import problem
from timelyfreeze.freeze import FreezeConfig
from timelyfreeze.runtime.arguments import check_arguments, default_devices, fit_devices
from timelyfreeze.runtime.assembly import StageAssembly
from timelyfreeze.runtime.engine import Engine
from timelyfreeze.runtime.microbatch import Microbatch, split_batch
from timelyfreeze.runtime.partition import known_split_points
from timelyfreeze.runtime.ranks import Closing, Opening, Ranks, ThreadRanks
from timelyfreeze.runtime.results import step_loss
from timelyfreeze.runtime.sources import StageSource, own_children, own_device
from timelyfreeze.schedule import create_schedule


class AsyncPipeline(ResumableAsyncPipeline):
    """Trains a model split over pipeline stages without ever waiting for the pipeline to empty (PACI).

    Each stage updates its own weights after every ``accumulation`` backwards, whatever the others do, while
    micro-batches are between its forward and its backward. Backward runs through the newer weights. Between the two of
    a micro-batch at stage s of N lie at most ``ceil((N-1-s) / accumulation)`` updates, which ``ledger`` counts. The
    order is fixed, so runs repeat bit for bit.

    What a stage makes from its weights in forward (a cast by autocast, say) stays as it was; modules for which that
    matters are refused by name. Regions under ``torch.utils.checkpoint`` are recomputed with the newer weights.

    Args:
        model, num_stages, num_microbatches, devices, split_points, stages, init_fn, accelerate: as
            ``FreezingPipeline`` takes them. No parameter may be in two stages.
        process_group: a group of ``torch.distributed``, each of whose processes has one stage and its optimizer. Every
            rank makes the same calls with batches of the same sizes; the input is looked at on the first alone, the
            target on the last: others may have None in its place, but not for both. Losses come to all ranks with the
            gradients, so nobody waits for them.
        accumulation: backwards of a stage between two of its updates; an update is the mean over their samples.
        optimizer: makes a stage's optimizer from its trainable parameters.
        lr_scheduler: makes its scheduler from it, if wanted; stepped after each batch's last backward in the stage.
        loss_fn: ``(output, target)`` -> mean over the samples, or ``(sum, count)``: then an update is divided by the
            count of its micro-batches. None: the last stage takes the target and returns the loss.
        freeze: what to leave out, and when (a batch is a step). Without bubbles freezing pays by balance alone, so that
            plans minimise the time from batch to batch. Masks hold in a micro-batch's forward and its backward;
            gradients are divided as if nothing were frozen. A parameter that no micro-batch of an update trained has no
            gradient then, and stays as it is.
        schedule: "paci", or "pipedream": backward gets the weights that its forward had, of which copies are kept.
        memory: "keep" what autograd saves of up to N-s micro-batches, or "recompute" it from the stages' inputs, by the
            weights and with the random numbers that backward finds and forward drew.
        predict_weights: forward sees the weights that its backward is expected to find: those of now, plus the last
            update for each that will fall between the two (SpecTrain, arXiv 1809.02839). Takes two copies of the
            weights of every stage but the last, and a pass over them for each micro-batch with drift.
        seed: dropout draws from (seed, micro-batch, stage).
        timeout_s: the longest that a batch may take.
        check_finite: leave out updates whose gradients are not finite; they are counted.
        max_skipped: so many left out in a row end the run with a StageError.
        max_grad_norm: clips by the whole model's gradient norm, without waiting for it: a stage takes its own norm of
            now times what the model's was to it over 32 updates, the last of them ``ceil((N-1)/accumulation) + 1``
            before. Its first updates go by equal shares. None: no clipping.
        grad_scaler: scales losses for float16 by its rule, as many updates late; the pipeline works it, and it shows
            the scale when drained. Updates that overflow are left out where they do, and at scales above 1 they do not
            count towards ``max_skipped``.

    Raises:
        ValueError, TypeError: wrong arguments, all of them named at once, or modules that cannot be trained so.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> batches = [(torch.ones(4, 4), torch.zeros(4, 1))] * 3
        >>> with AsyncPipeline(
        ...     model, 2, 2, accumulation=2, loss_fn=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.1)
        ... ) as pipe:
        ...     results = list(pipe.run(batches))
        >>> [result.index for result in results], pipe.ledger.max_drift
        ([0, 1, 2], 1)
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        num_stages: int | None = None,
        num_microbatches: int = 8,
        *,
        optimizer: MakeOptimizer,
        accumulation: int = 1,
        lr_scheduler: MakeScheduler | None = None,
        loss_fn: Callable[..., Any] | None = None,
        freeze: FreezeConfig | None = None,
        devices: Sequence[torch.device | str] | None = None,
        split_points: Sequence[int] | None = None,
        stages: Sequence[Callable[[], nn.Module]] | None = None,
        init_fn: Callable[[nn.Module], None] | None = None,
        process_group: Any = None,
        schedule: str = "paci",
        memory: str = "keep",
        predict_weights: bool = False,
        seed: int = 0,
        timeout_s: float = 600.0,
        check_finite: bool = True,
        max_skipped: int = 10,
        max_grad_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        accelerate: bool = True,
    ) -> None:
        super().__init__()
        ranks = make_async_ranks(process_group, timeout_s)
        self._ranks: Ranks = ThreadRanks() if ranks is None else ranks
        with self._ranks.making():
            source = StageSource(model, stages, init_fn)
            rank_devices = default_devices(devices) if ranks is None else own_device(devices)
            if num_stages is None:
                num_ranks = max(2, len(rank_devices)) if ranks is None else ranks.num_ranks
                num_stages = source.num_children if source.gives_stages else num_ranks
            check_arguments(source, num_stages, num_microbatches, timeout_s, seed, loss_fn, None)
            check_async_arguments(optimizer, accumulation, schedule, memory, max_skipped, max_grad_norm, grad_scaler)
            refuse_prediction(predict_weights, schedule)
            if ranks is not None:
                refuse_in_processes(freeze=freeze, grad_scaler=grad_scaler)
            self.num_stages = num_stages
            self.num_microbatches = num_microbatches
            self._loss_fn = loss_fn
            self._options = AsyncOptions(
                accumulation=accumulation,
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                stashes=schedule == "pipedream",
                recomputes=memory == "recompute",
                predicts=predict_weights,
                seed=seed,
                timeout_s=timeout_s,
                check_finite=check_finite,
                max_skipped=max_skipped,
                max_grad_norm=max_grad_norm,
                grad_scaler=grad_scaler,
            )
            self._schedule_name = schedule
            self._closed = False
            self._num_batches = 0
            self._told: BaseException | None = None  # that other ranks know of
            self._pending: deque[list[Microbatch]] = deque()  # handed over, and their result not yet given out
            self._async: AsyncEngine | None = None
            fitted = fit_devices(rank_devices, num_stages, explicit=ranks is None and devices is not None)
            points = known_split_points(split_points, source.num_children, num_stages, source.gives_stages)
            self._assemble(source, ranks, fitted, points, freeze, is_model=stages is None, accelerate=accelerate)
            if ranks is not None:
                same = [num_microbatches, accumulation, schedule, memory, predict_weights, check_finite, max_grad_norm]
                ranks.tie_none(source.tied_names(), self.model, same)

    def _assemble(
        self,
        source: StageSource,
        ranks: AsyncRanks | None,
        devices: list[torch.device],
        points: list[int] | None,
        freeze: FreezeConfig | None,
        *,
        is_model: bool,
        accelerate: bool,
    ) -> None:
        """The stages that this process has."""
        order = create_schedule("1f1b", num_ranks=self.num_stages, num_microbatches=self.num_microbatches)
        if ranks is None:
            self.model, parts = source.everything()
        else:
            points = points or source.points_by_size(self.num_stages, order.stage_to_rank)
            own = ranks.join(order, points, self._options.seed, devices[0])
            self.model, parts = source.part(own_children(points, source.num_children, own))
        self._acceleration = AccelerationSwitch(self.model, enabled=accelerate)
        options = self._options
        names = [name for name, _ in self.named_parameters()]
        self._freezing = (
            None if freeze is None else StreamFreezing(freeze, order, options.seed, names, options.accumulation)
        )
        self._assembly = StageAssembly(
            self.model if ranks is None and is_model else None,
            parts,
            schedule=order,
            devices=devices,
            loss_fn=self._loss_fn,
            split_points=points,
            acceleration=self._acceleration,
            on_engine=self._begin,
            own_rank=self._ranks.own_rank,
        )

    # --- training ---------------------------------------------------------------------------------------------

    def run(self, batches: Iterable[Any], *, drain: bool = True) -> Iterator[AsyncResult]:
        """Train on batches as they come, each result given out one batch behind (more, where a batch has fewer
        micro-batches than there are stages).

        Results that were not taken from a run before come first. Leave the loop whenever you like: what is in flight
        stays there until the next ``run`` or ``drain``.

        Args:
            batches: each is ``(input, ..., target)``: what the first stage takes, then what ``loss_fn`` takes beside
                the output, cut along dimension 0 (see ``NoChunk``); or a list of slices that exist already,
                ``Microbatch`` each.
            drain: at the end run what is left. False: the next ``run`` goes on without a gap.

        Raises:
            StageError: user code failed. Micro-batches in flight are lost; weights stay as the last updates left them.
                Where ranks are processes, all get it, and also what ``batches`` raise on one of them.
            ValueError, TypeError: wrong arguments.
        """
        try:
            for batch in batches:
                self._push(batch)
                while len(self._pending) > self._lag:
                    yield self._take()
            while self._pending:
                yield self._take()
            if drain:
                self.drain()
        except GeneratorExit:
            raise
        except BaseException as error:
            if self._ranks.own_rank is not None and error is not self._told:
                # The batches' own, or Ctrl-C: no rank shall wait for this one.
                with self._calling():
                    raise
            raise

    def drain(self) -> list[AsyncResult]:
        """Run the backwards that are left, and in every stage an update of what has been accumulated, as the mean over
        the micro-batches that there are.

        Returns:
            results that no ``run`` has given out.

        Raises:
            StageError: as ``run`` does.
        """
        results = [self._take() for _ in range(len(self._pending))]
        if self._async is not None and self._async.is_open:
            with self._calling():
                self._async.drain()
                self._ranks.gather(None)  # where a stage fails in its last updates, this call fails on all ranks
            self._note_times()
            self._async.forget()
        return results

    def settle(self) -> None:
        """Wait until the stages have done all that they can with the batches that they have been given, so that no
        weight changes until there are more. What is in flight stays there.

        Raises:
            StageError: as ``run`` does.
        """
        self._check_open()
        if self._async is not None:
            with self._calling():
                self._async.settle()

    @property
    def _lag(self) -> int:
        """So many batches are handed over before a result is given out: then its losses have come to all ranks."""
        return max(1, -(-self.num_stages // self.num_microbatches))

    def _push(self, batch: Any) -> None:
        self._check_open()
        with self._calling(loses=False):
            slices = slices_of(batch, self.num_microbatches)
            if not torch.is_grad_enabled():
                raise ValueError(problem("run()", expected="grad mode", got="no_grad", hint="Use pipe.evaluate(...)."))
            if self._async is None or not self._async.is_open:
                self._ready(slices)
                if isinstance(self._ranks, AsyncRanks):
                    self._num_batches = self._ranks.open_stream(self._num_batches)
            assert self._async is not None
            self._hand_over(slices, self._async)
            self._pending.append(slices)

    def _hand_over(self, slices: list[Microbatch], engine: AsyncEngine) -> None:
        freezing = self._freezing
        if freezing is None:
            engine.push(slices)
            return
        masks = freezing.begin_batch(engine.runtime.num_microbatches, len(slices))
        tensors = freezing.as_tensors(masks, len(engine.engine.loss_parameters))
        with self._calling(), freezing.profiling(self.model, self._acceleration) as is_profiled:
            engine.push(slices, tensors)
            if is_profiled:
                engine.settle()

    def _take(self) -> AsyncResult:
        assert self._async is not None
        slices = self._pending[0]
        with self._calling():
            if len(self._pending) > self._lag or not isinstance(self._ranks, AsyncRanks):
                loss = join_batch(slices, self._async.take_losses(len(slices)))
            else:  # of the last batches the gradients are yet to come, and the losses with them
                own = join_batch(slices, self._async.take_losses(len(slices))) if self._async.has_loss else None
                if own is None:
                    self._async.skip_losses(len(slices))
                loss = self._ranks.share_loss(own)
        self._note_times()
        self._pending.popleft()
        self._num_batches += 1
        return AsyncResult(self._num_batches - 1, loss)

    def _note_times(self) -> None:
        if self._freezing is not None and self._async is not None:
            self._freezing.take(self._async.runtime.take_times())

    # --- no gradient ------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """The mean loss of a batch, without gradients, in eval mode; training's state is left untouched.

        Settles the stages first (see ``settle``): by the weights that all batches so far have led to.
        """
        training = [module for module in self.modules() if module.training]
        self.settle()
        self.eval()
        try:
            with torch.no_grad(), self._calling(loses=False):
                slices = split_batch(args, kwargs, target, self.num_microbatches)
                engine = self._assembly.ready_engine(slices)
                # On all ranks together: from here on no stage updates its weights.
                opened = self._ranks.open(Opening("evaluate", self._num_batches, [one.num_samples for one in slices]))
                done = engine.run(
                    slices,
                    opened.shares,
                    train=False,
                    step=self._num_batches,
                    seed=self._options.seed,
                    timeout_s=self._options.timeout_s,
                    has_target=True,
                    check_finite=False,
                )
                own = step_loss(done) if engine.has_loss else None
                loss = self._ranks.close(Closing(times=done.times, loss=own)).loss
                assert loss is not None
                return loss.mean
        finally:
            self._assembly.restore()
            for module in training:
                module.training = True

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let the workers go, and with them what is in flight. Calling it twice is harmless."""
        self._closed = True
        self._ranks.shut()
        if self._async is not None:
            self._async.close()
        self._assembly.close()
        self._acceleration.off()
        if self._freezing is not None:
            self._freezing.close()

    def __enter__(self) -> AsyncPipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- the stages -------------------------------------------------------------------------------------------

    def _begin(self, engine: Engine) -> None:
        """The stages are known: each gets its worker and its optimizer."""
        refuse_shared_parameters(self, engine.ties.owners.values())
        if self._async is not None:
            self._async.close()
        self._ranks.connect(engine)
        self._async = AsyncEngine(engine, self._loss_fn, self._options)
        self._async.runtime.timed = self._freezing is not None
        if isinstance(self._ranks, AsyncRanks):
            self._ranks.attach(self._async)

    def _ready(self, slices: list[Microbatch]) -> None:
        """Before the first micro-batch of a stream: the stages as they are now."""
        try:
            engine = self._assembly.ready_engine(slices)
        finally:
            self._assembly.restore()
        refuse_unfit_modules(
            [stage for stage in engine.stages if stage is not None],
            recomputes=self._options.recomputes,
            stashes=self._options.stashes,
        )
        if self._freezing is not None:
            self._freezing.open(engine)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(problem("the pipeline is closed", hint="Create a new AsyncPipeline."))

    @contextmanager
    def _calling(self, *, loses: bool = True) -> Iterator[None]:
        """Around a call: if it fails on one rank, it fails on all of them, and what is in flight is lost; also where
        ranks are threads, unless ``loses`` is False."""
        try:
            with self._ranks.call(self._num_batches):
                yield
        except DisagreementError as error:
            self._told = error
            raise  # on all ranks alike: nothing has happened
        except BaseException as error:
            self._told = error
            if loses or self._ranks.own_rank is not None:
                self._pending.clear()
                if self._freezing is not None:
                    self._freezing.abort()
            if self._ranks.own_rank is not None and self._async is not None:
                self._async.abandon()
            raise

"""The ranks of a pipeline as processes of ``torch.distributed``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from timelyfreeze.distributed.failing import Blame, as_exception, describe, is_final
from timelyfreeze.distributed.failure import Failure
from timelyfreeze.distributed.groups import Groups, Place, default_store, find_place, make_groups, next_name, store_host
from timelyfreeze.distributed.messages import (
    DisagreementError,
    check_same_call,
    merge_closings,
    merge_openings,
    pack_closing,
    pack_opening,
)
from timelyfreeze.distributed.monitor import FailureMonitor
from timelyfreeze.distributed.planning import SharedPlanner
from timelyfreeze.distributed.replicas import (
    flags_of,
    layout_of,
    make_replicas_equal,
    reduce_over_replicas,
    show_overflow,
)
from timelyfreeze.distributed.sharding import ShardedStages
from timelyfreeze.distributed.ties import RemoteTies
from timelyfreeze.errors import StageError, problem
from timelyfreeze.runtime.engine import Engine
from timelyfreeze.runtime.ranks import Closing, Exchange, Flags, Opening
from timelyfreeze.runtime.values import encode, spec_from_bytes
from timelyfreeze.schedule import Schedule

if TYPE_CHECKING:
    from timelyfreeze.freeze import FreezeConfig

_PROBE_S = 2.0


def make_ranks(process_group: Any, mesh: Any, timeout_s: float) -> ProcessRanks | None:
    """The ranks as processes; None where neither a group nor a mesh is given."""
    if process_group is None and mesh is None:
        return None
    return ProcessRanks(find_place(process_group, mesh), timeout_s)


class ProcessRanks:
    """The other ranks are processes: see ``timelyfreeze.runtime.ranks.Ranks`` for what is asked of them.

    All that the ranks must agree on goes through ``_gather``, once before and once after a step. A failure is told to
    all by the monitor; the connections are then of no more use, and the next call makes new ones. Where a rank is gone
    for good, every later call raises that.

    Args:
        place: of this process.
        timeout_s: after which a rank that does not answer is given up.
    """

    def __init__(self, place: Place, timeout_s: float) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._engine: Engine | None = None
        self._groups: Groups | None = None
        self._device = torch.device("cpu")
        self._is_stale = False
        self._is_waiting = False
        self._works_alone = False
        self._own_stages: list[int] = []
        self._final: BaseException | None = None
        self._epoch = 0
        self._in_call: str | None = None
        self._num_calls = 0
        self._began_s = time.monotonic()
        self._planner: SharedPlanner | None = None
        self._ties: RemoteTies | None = None
        self._sharded: ShardedStages | None = None
        self._some_are_sharded = False
        self._ids: list[list[int]] = []
        self._name = next_name(place.members)
        self._monitor = FailureMonitor(
            default_store(),
            place.own_member,
            len(place.members),
            self._name,
            on_failure=self._on_failure,
            status=self._status,
            store_rank=store_host(place),
        )

    # --- the pipeline is being made ---------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return self._place.num_ranks

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The pipeline's own group of all its processes, for CPU tensors; another one after a failure."""
        if self._is_stale or self._final is not None or self._monitor.failure is not None:
            with self.call(None):
                pass
        assert self._groups is not None
        return self._groups.control

    @property
    def own_rank(self) -> int:
        return self._place.rank

    @property
    def ends(self) -> tuple[bool, bool]:
        return self._own_stages[0] == 0, self._own_stages[-1] == self._schedule.num_stages - 1

    @contextmanager
    def making(self) -> Iterator[None]:
        """Around all that makes the pipeline: where it fails on one rank, no rank waits for that one."""
        try:
            with self.call(None):
                yield
        except BaseException:
            if self._engine is not None:
                self._engine.close()
            self.shut()
            raise

    @contextmanager
    def judging_alike(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise DisagreementError(str(error)) from error

    def join(self, schedule: Schedule, points: Sequence[int], seed: int, device: torch.device) -> list[int]:
        """Take part in this pipeline; returns the stages of this rank.

        Raises:
            ValueError: there are not as many processes as the schedule has ranks.
        """
        if schedule.num_ranks != self.num_ranks:
            raise ValueError(
                problem(
                    "ranks",
                    expected=f"{self.num_ranks}, one a process",
                    got=f"schedule {schedule.name!r} with {schedule.num_ranks}",
                    hint=f"Pass num_stages={self.num_ranks} times the stages of a rank.",
                )
            )
        self._schedule = schedule
        self._own_stages = [stage for stage, rank in enumerate(schedule.stage_to_rank) if rank == self.own_rank]
        self._device = device
        self._promise = json.dumps([[[str(a) for a in row] for row in schedule.ranks], list(points), seed])
        self._make_groups()
        return self._own_stages

    @property
    def objection(self) -> str | None:
        return None if self._sharded is None else self._sharded.objection

    def planner(self, freeze: FreezeConfig) -> SharedPlanner:
        """The planner of this rank: only the first process solves."""
        self._planner = SharedPlanner(self._schedule, freeze.plan_options, solves=self._place.own_member == 0)
        return self._planner

    def connect(self, engine: Engine) -> None:
        self._engine = engine
        assert self._groups is not None
        peers = [self._place.member_of(self._place.replica, rank) for rank in range(self.num_ranks)]
        engine.runtime.connect(self._groups.transport, peers)

    def tie(self, names: Sequence[Sequence[str]], model: nn.Module) -> None:
        """The last of making a pipeline: all ranks are made alike, and tied parameters are known."""
        self._set_clock()
        assert self._engine is not None
        assert self._groups is not None
        every = self._gather([self._promise, layout_of(self._engine)])
        differing = [rank for rank, (promise, _) in enumerate(every) if promise != every[0][0]]
        if differing:
            expected = "the same schedule, split points and seed on every rank"
            raise DisagreementError(problem("the pipeline", expected=expected, got=f"others on ranks {differing}"))
        self._check_alike([layout for _, layout in every], "the same parameters and buffers on every replica")
        self._sharded = ShardedStages(self._engine.stages, self._place, has_ties=bool(self._engine.ties.owners))
        self._some_are_sharded = any(self._gather(bool(self._sharded)))
        if self._groups.replicas is not None:
            make_replicas_equal(self._engine, self._groups.replicas)
        self._ties = RemoteTies(names, model, self._engine, self._place, self.gather, self._transfer)

    # --- a call -----------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, step: int | None) -> Iterator[None]:
        if self._final is not None:
            raise self._final
        self._num_calls += 1
        self._in_call = "its construction" if step is None else f"step {step}"
        self._began_s, self._is_waiting, self._works_alone = time.monotonic(), False, False
        try:
            if self._is_stale:
                self._renew()
            if self._groups is not None:  # while it is made, what is wrong on all ranks is raised as such on each
                self._raise_told(self._monitor.failure)
            yield
        except DisagreementError:
            raise  # on all ranks alike; nothing is on its way
        except BaseException as error:
            raised = self._fail(error, step)
            # While a pipeline is made, what is wrong here is often wrong everywhere: it keeps its type.
            if raised is error or (step is None and not self._is_waiting):
                raise
            raise raised from (raised.__cause__ or error)
        finally:
            if self._ties is not None:
                self._ties.abort()
            if self._sharded is not None:
                self._sharded.rest()
            self._in_call, self._began_s = None, time.monotonic()

    def open(self, own: Opening) -> Opening:
        data = pack_opening(own)
        data["news"] = None if self._planner is None or own.call != "train" else self._planner.news()
        assert self._engine is not None
        assert self._ties is not None
        data["flags"] = flags_of(self._engine) if self._place.num_replicas > 1 and own.call == "train" else ""
        data["ties"] = self._ties.flags()
        every = self._gather(data)
        replicas = self._by_replica(every)
        opened = merge_openings(own, replicas, self._place.replica)
        self._check_alike([one["flags"] for one in every], "the same requires_grad flags on every replica")
        self._ties.check_flags([one["ties"] for one in every])
        if self._planner is not None and own.call == "train":
            # The solver is the first member, wherever that is in the grid.
            self._planner.receive(next((one["news"] for row in replicas for one in row if one["news"]), None))
        if own.call == "train":
            self._ties.begin()
            if self._sharded is not None:
                self._sharded.begin()
        return opened

    def reduce_gradients(self, live: Sequence[Flags] | None) -> None:
        assert self._engine is not None
        assert self._groups is not None
        if self._some_are_sharded:
            self._gather(None)  # FSDP's reduction could not be given up: first, that no replica has failed
        if self._sharded is not None:
            self._sharded.reduce()
        if self._groups.replicas is not None:
            reduce_over_replicas(self._engine, live, self._groups.replicas, self._monitor, self._timeout_s)

    def close(self, own: Closing) -> Closing:
        ids = self._action_ids(own)
        replicas = self._by_replica(self._gather(pack_closing(own, ids[self.own_rank])))
        closed = merge_closings(own, replicas, self._place.replica, ids, self._schedule)
        if closed.overflow and not own.overflow:
            assert self._engine is not None
            show_overflow(self._engine)
        return closed

    def commit(self, scale: float, factors: list[list[float]] | None) -> None:
        assert self._engine is not None
        assert self._ties is not None
        self._engine.commit(scale, factors)
        self._ties.merge()

    def share_outputs(self, outputs: list[Any] | None) -> list[Any]:
        last = self._schedule.stage_to_rank[-1]
        others = [rank for rank in range(self.num_ranks) if rank != last]
        if outputs is None:
            _, tensors, text = self._transfer([], [last])[0]
            received: list[Any] = spec_from_bytes(text).decode([t for t in tensors if t is not None])
            return received
        tensors, spec = encode(outputs)
        self._transfer([(rank, tensors, spec.to_bytes()) for rank in others], [])
        return outputs

    def gather(self, own: Any) -> list[Any]:
        return self._gather(own)

    @contextmanager
    def together(self, what: str, step: int) -> Iterator[Exchange]:
        self._in_call = what
        check_same_call([one["call"] for one in self._gather({"call": what, "step": step})])
        self._works_alone = True
        yield Exchange(self._place.own_member, len(self._place.members), self._exchange)

    def is_copy(self, parameter: nn.Parameter) -> bool:
        return self._ties is not None and self._ties.is_copy(parameter)

    def shut(self) -> None:
        self._monitor.close()
        self._final = self._final or ValueError(
            problem("the pipeline is closed", hint="Create a new FreezingPipeline.")
        )
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    # --- failures ---------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException, step: int | None) -> BaseException:
        """Tell all ranks, and find out what failed first; the exception to raise here."""
        self._is_stale = True  # first, whatever interrupts the rest
        if isinstance(error, StageError) and self._place.num_replicas > 1:
            # As the others are told: which of all processes, and in which replica.
            error.rank = self._place.own_member
            error.args = (f"replica {self._place.replica}: {error}",)
        blame = Blame(self._place, self._own_stages, self._monitor, _PROBE_S, self._status)
        winner = self._monitor.report(replace(describe(error, step, blame), call=self._num_calls))
        if self._groups is not None:
            self._groups.transport.cancel()
        is_own = winner.reporter == self._place.own_member and winner.rank == self._place.own_member
        raised = error if is_own else as_exception(winner)
        if is_final(winner):
            self._final = raised
        return raised

    def _on_failure(self, failure: Failure) -> None:
        """Another rank failed: end what this one waits for. Runs on the monitor's thread."""
        if not self._concerns(failure):
            return
        engine, groups = self._engine, self._groups
        if engine is not None:
            engine.runtime.cancel(as_exception(failure))
        if groups is not None:
            groups.transport.cancel()

    def _concerns(self, failure: Failure) -> bool:
        """Whether it is of this call, or of one before. A rank that is a call ahead has done its part of this one,
        which therefore ends well here too; the next one raises.
        """
        return failure.call <= self._num_calls or is_final(failure)

    def _raise_told(self, failure: Failure | None) -> None:
        if failure is not None and self._concerns(failure):
            raise as_exception(failure)

    def _renew(self) -> None:
        """New connections after a failure, on all ranks."""
        assert self._groups is not None
        assert self._engine is not None
        self._epoch += 1
        self._monitor.next_epoch(self._epoch)
        self._groups.close()
        self._make_groups()
        self.connect(self._engine)
        self._set_clock()
        self._is_stale = False

    def _make_groups(self) -> None:
        with self._waiting():
            # When all ranks are there, connecting takes a moment.
            self._raise_told(self._monitor.meet(self._timeout_s))
            name = f"{self._name}/{self._epoch}"
            make = partial(Groups, self._place, name, self._device, self._timeout_s)
            made = make_groups(make, self._timeout_s, lambda: self._monitor.failure is not None)
            self._groups = made or self._groups
            # It may have been told before there was anything to cancel.
            self._raise_told(self._monitor.failure)

    def _set_clock(self) -> None:
        assert self._engine is not None
        with self._waiting():
            self._engine.runtime.set_clock(self._timeout_s)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around what waits for other ranks; where it fails, ``_is_waiting`` stays."""
        self._is_waiting = True
        yield
        self._is_waiting = False

    def _status(self) -> str:
        """What this rank is doing, for others that wait for it."""
        since_s = time.monotonic() - self._began_s
        call, engine = self._in_call, self._engine
        if call is None:
            return f"between calls for {since_s:.1f} s"
        if (engine is None or self._works_alone) and not self._is_waiting:
            return f"running {call} for {since_s:.1f} s"
        action = None if engine is None else engine.runtime.running_action
        if action is None:
            return f"waiting in {call}"
        return f"running {action[0]}{action[1]}{action[2]} in {call} for {since_s:.1f} s"

    # --- messages ---------------------------------------------------------------------------------------------

    def _gather(self, own: Any) -> list[Any]:
        return [json.loads(one) for one in self._exchange(json.dumps(own).encode())]

    def _exchange(self, own: bytes) -> list[bytes]:
        assert self._engine is not None
        with self._waiting():
            return self._engine.runtime.exchange(own, self._timeout_s)

    def _transfer(self, parcels: Sequence[Any], sources: Sequence[int]) -> list[Any]:
        """Tensors to and from other ranks of this replica: (rank, tensors, bytes)."""
        assert self._engine is not None
        place = self._place
        sent = [(place.member_of(place.replica, rank), tensors, text) for rank, tensors, text in parcels]
        members = [place.member_of(place.replica, rank) for rank in sources]
        with self._waiting():
            return self._engine.runtime.transfer(sent, members, self._timeout_s)

    def _check_alike(self, every: Sequence[str], expected: str) -> None:
        """DisagreementError, on all ranks, where replicas of a rank have told differently."""
        for rank, told in enumerate(zip(*self._by_replica(every), strict=True)):
            if len(set(told)) > 1:
                hint = "Build and freeze the model alike in all processes."
                raise DisagreementError(problem(f"stages of rank {rank}", expected=expected, got="others", hint=hint))

    def _by_replica(self, every: Sequence[Any]) -> list[list[Any]]:
        place = self._place
        return [[every[place.member_of(d, r)] for r in range(self.num_ranks)] for d in range(place.num_replicas)]

    def _action_ids(self, own: Closing) -> list[list[int]]:
        """The places of each rank's actions among all of them."""
        ids: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for index, action in enumerate(own.times.actions):
            ids[self._schedule.stage_to_rank[action.stage]].append(index)
        return ids

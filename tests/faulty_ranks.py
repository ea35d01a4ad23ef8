"""Stages that fail where they are told to, and what ranks do with them."""

from __future__ import annotations

import _thread
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.pipelines import costs_of
from timelyfreeze import FreezeConfig, FreezingPipeline, create_schedule, make_plan
from timelyfreeze.distributed import load_checkpoint, save_checkpoint
from timelyfreeze.distributed.ranks import ProcessRanks
from timelyfreeze.errors import StageError, TransportError

NUM_MICROBATCHES = 6
TIMEOUT_S = 60.0  # enough for what does not hang, also on a busy machine
WIDTH = 4


class BoomError(RuntimeError):
    pass


class _AtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stage):
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.stage.at("B")
        return grad, None


class Fragile(nn.Module):
    """A layer that does what it was armed with, once, when its ``count``-th forward or backward since then runs."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)
        self._fault = None

    def arm(self, kind, act, count=0):
        self._fault = [kind, act, count]

    def disarm(self):
        self._fault = None

    def at(self, kind, value=None):
        """What the fault makes of ``value``."""
        if self._fault is None or self._fault[0] != kind:
            return value
        if self._fault[2] > 0:
            self._fault[2] -= 1
            return value
        act, self._fault = self._fault[1], None
        return act(value)

    def forward(self, x):
        y = _AtBackward.apply(self.linear(x), self)  # below its output: the first stage's input needs no gradient
        return self.at("F", torch.tanh(self.dropout(y)))


# --- what a stage is armed with -------------------------------------------------------------------------------------


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


class NotToBeBroughtBack:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise BoomError("cannot be unpickled")


def boom(value):
    raise BoomError("boom")


def out_of_memory(value):
    raise MemoryError("no room")


def spoil(value):
    return value * float("nan")


def interrupt(value):
    os.kill(os.getpid(), signal.SIGINT)
    return value


def hang(value):
    while True:
        time.sleep(0.05)


# --- ranks ----------------------------------------------------------------------------------------------------------


def make_pipe(group, schedule="1f1b", frozen=False, seed=0, num_more=0, **options):
    """``num_more``: children of the model beyond one a stage."""
    num_ranks = dist.get_world_size(group)
    made = create_schedule(schedule, num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
    torch.manual_seed(seed)
    model = nn.Sequential(*[Fragile() for _ in range(made.num_stages + num_more)])
    freeze = options.pop("freeze", None)
    if frozen:
        plan = make_plan(made, costs_of(made), max_ratio=0.5, mode="lp")
        freeze = FreezeConfig(plan=plan, ramp_steps=0)
    options = {"loss_fn": F.mse_loss, "timeout_s": TIMEOUT_S, "accelerate": False, "seed": seed} | options
    return FreezingPipeline(
        model, made.num_stages, NUM_MICROBATCHES, schedule=made, freeze=freeze, process_group=group, **options
    )


def own_stages(pipe):
    return [module for module in pipe.model.modules() if isinstance(module, Fragile)]


def batch(step, size=2 * NUM_MICROBATCHES):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator)


def train(pipe, optimizer, steps):
    """The losses of some steps, exactly."""
    losses = []
    for step in steps:
        x, y = batch(step)
        faulthandler.dump_traceback_later(TIMEOUT_S / 2, file=sys.stderr)
        losses.append(float(pipe.step(x, target=y).loss).hex())
        faulthandler.cancel_dump_traceback_later()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(pipe):
    return {name: parameter.detach().view(-1).tolist() for name, parameter in pipe.named_parameters()}


def caught(function):
    """What a call raised, as plain data."""
    began_s = time.monotonic()
    try:
        function()
    except BaseException as error:
        found = {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began_s}
        found["cause"] = "" if error.__cause__ is None else f"{type(error.__cause__).__name__}: {error.__cause__}"
        if isinstance(error, StageError | TransportError):
            found["rank"] = error.rank
        if isinstance(error, StageError):
            found |= {"stage": error.stage, "action": error.action, "step": error.step}
        return found
    return {"type": "", "text": "", "seconds": time.monotonic() - began_s, "cause": ""}


def _armed(where, act):
    def fault(pipe, rank, target, step):
        if rank == target:
            own_stages(pipe)[-1].arm(
                where, act, count=int(where == "F")
            )  # of backwards a frozen stage may run one only
        x, y = batch(step)
        pipe.step(x, target=y)

    return fault


def _wrong_arguments(pipe, rank, target, step):
    x, y = batch(step)
    if rank == target:
        pipe.step(x, target=y, microbatches=[(x, y)])
    pipe.step(x, target=y)


def _other_call(pipe, rank, target, step):
    x, y = batch(step)
    if rank == target:
        pipe.evaluate(x, target=y)
    pipe.step(x, target=y)


def _other_batch(pipe, rank, target, step):
    x, y = batch(step, size=(3 if rank == target else 2) * NUM_MICROBATCHES)
    pipe.step(x, target=y)


def _everyone(pipe, rank, target, step):
    own_stages(pipe)[0].arm("F", boom)
    x, y = batch(step)
    pipe.step(x, target=y)


def _loss(pipe, rank, target, step):
    def fail(output, target):
        raise BoomError("boom")

    engine = pipe._assembly.engine
    engine._loss_fn, kept = fail, engine._loss_fn
    x, y = batch(step)
    try:
        pipe.step(x, target=y)
    finally:
        engine._loss_fn = kept


FAULTS = {
    "raise in F": _armed("F", boom),
    "raise in B": _armed("B", boom),
    "MemoryError": _armed("F", out_of_memory),
    "NaN": _armed("F", spoil),
    "KeyboardInterrupt": _armed("F", interrupt),
    "unpicklable value": _armed("F", lambda value: (value, Unpicklable())),
    "value that is not unpickled": _armed("F", lambda value: (value, NotToBeBroughtBack())),
    "wrong arguments": _wrong_arguments,
    "another call": _other_call,
    "another batch": _other_batch,
    "every rank at once": _everyone,
    "loss_fn": _loss,
}


def recover(rank, num_ranks, cases):
    """Faults one after the other, a good step after each: what each rank got, and how it went on.

    Args:
        cases: (schedule, frozen, [(fault, rank)]).
    """
    return [_recover(rank, schedule, frozen, faults) for schedule, frozen, faults in cases]


def _recover(rank, schedule, frozen, faults):
    found = []
    with make_pipe(dist.group.WORLD, schedule, frozen) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        losses = train(pipe, optimizer, [0])
        for step, (fault, target) in enumerate(faults, 1):
            found.append(caught(lambda f=fault, t=target, s=step: FAULTS[f](pipe, rank, t, s)))
            for stage in own_stages(pipe):
                stage.disarm()
            losses += train(pipe, optimizer, [step])
        held = weights(pipe)
    with make_pipe(dist.group.WORLD, schedule, frozen) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        same = train(pipe, optimizer, range(1 + len(faults)))
        return {"errors": found, "losses": losses, "undisturbed": same, "weights": held == weights(pipe)}


# --- making a pipeline ----------------------------------------------------------------------------------------------


_making = ProcessRanks.making


def late_making(ranks):
    """Begin to make a pipeline when another rank is known to have failed to."""
    with ranks._monitor._changed:
        ranks._monitor._changed.wait_for(lambda: ranks._monitor._failure)
    return _making(ranks)


def fail_to_make(rank, num_ranks):
    """What each rank gets where one of them makes another pipeline, or none; then one that works."""
    group = dist.group.WORLD

    def make_with(factory):
        stages = [factory if rank == 1 and stage == 2 else Fragile for stage in range(num_ranks)]
        FreezingPipeline(stages=stages, loss_fn=F.mse_loss, process_group=group, timeout_s=TIMEOUT_S)

    def with_boom():
        make_with(lambda: boom(None))

    def outnumbered():
        model = nn.Sequential(Fragile(), Fragile(), Fragile(), Fragile())
        FreezingPipeline(model, 4, 4, loss_fn=F.mse_loss, process_group=group, timeout_s=TIMEOUT_S)

    def heard_of_first():
        with mock.patch.object(ProcessRanks, "making", late_making if rank == 2 else ProcessRanks.making):
            outnumbered()

    attempts = {
        "seed": lambda: make_pipe(group, seed=rank // 2),
        "schedule": lambda: make_pipe(group, "gpipe" if rank == 1 else "1f1b"),
        "split points": lambda: make_pipe(group, "1f1b", num_more=1, split_points=[1, 2 + rank // 2]),
        "factory": with_boom,
        "interrupted factory": lambda: make_with(lambda: _thread.interrupt_main() or time.sleep(0)),
        "arguments of one": lambda: make_pipe(group, timeout_s=-1.0 if rank == 2 else TIMEOUT_S),
        "arguments of all": outnumbered,
        "arguments of all, late": heard_of_first,
        "names": lambda: make_pipe(group, tied=[["0.linear.weight", "9.linear.weight"]]),
        "patterns": lambda: make_pipe(group, freeze=FreezeConfig(parameter_max_ratio={"nowhere*": 0.5})),
    }
    before = _resources()
    found = {name: caught(attempt) for name, attempt in attempts.items()}
    for _ in range(3):
        caught(with_boom)
    with make_pipe(group) as pipe:
        losses = train(pipe, torch.optim.Adam(pipe.parameters()), range(2))
    return {"errors": found, "losses": losses, "before": before, "after": _resources()}


def _resources():
    """Threads and file descriptors of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


# --- odd moments ----------------------------------------------------------------------------------------------------


def meet_late(rank, num_ranks):
    """A rank that hears of a failure between two calls; a checkpoint as the first call after a failure."""
    group = dist.group.WORLD
    found = {}
    store = dist.distributed_c10d._get_default_store()
    with make_pipe(group) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        losses = train(pipe, optimizer, [0])
        if rank == 2:
            store.wait(["failed"])
        found["late"] = caught(lambda: _wrong_arguments(pipe, rank, 1, 1))
        if rank == 1:
            store.set("failed", "")
        losses += train(pipe, optimizer, [1])
        found["boom"] = caught(lambda: FAULTS["raise in F"](pipe, rank, 1, 3))
        with tempfile.TemporaryDirectory() as folder:
            path = [folder]
            dist.broadcast_object_list(path, src=0)
            save_checkpoint(path[0], pipe, optimizer)
            losses += train(pipe, optimizer, [2])
            load_checkpoint(path[0], pipe, optimizer)
            again = train(pipe, optimizer, [2])
            dist.barrier()
    return {"errors": found, "losses": losses, "undisturbed": _undisturbed(3), "again": again}


def outlive_a_hang(rank, num_ranks):
    """Rank 0's stage does not come back from a step in which rank 2 then fails, nor before the next one."""
    found = {}
    store = dist.distributed_c10d._get_default_store()
    release = threading.Event()

    def hold(value):
        store.set("held", "")
        release.wait(TIMEOUT_S)
        return value

    def boom_meanwhile(value):
        store.wait(["held"])
        boom(value)

    with make_pipe(dist.group.WORLD) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        losses = train(pipe, optimizer, [0])
        if rank == 0:
            own_stages(pipe)[0].arm("F", hold, count=3)
        if rank == 2:
            own_stages(pipe)[0].arm("F", boom_meanwhile, count=1)
        found["failed"] = caught(lambda: train(pipe, optimizer, [1]))
        found["still running"] = caught(lambda: train(pipe, optimizer, [1]))
        release.set()
        losses += train(pipe, optimizer, [1])
    return {"errors": found, "losses": losses, "undisturbed": _undisturbed(2)}


def _undisturbed(num_steps):
    with make_pipe(dist.group.WORLD) as pipe:
        return train(pipe, torch.optim.Adam(pipe.parameters(), lr=0.01), range(num_steps))

"""Ranks that are lost, in a step or while a checkpoint is saved, and how training goes on: what ranks do."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.faulty_ranks import _wrong_arguments, batch, caught, hang, make_pipe, own_stages, train, weights
from tests.forked_ranks import note
from timelyfreeze.distributed import latest_checkpoint, load_checkpoint, save_checkpoint

NUM_STEPS = 6
LOSING_STEP = 3
LOSS_TIMEOUT_S = 4.0  # for the losing step alone: what can be slow, and has to succeed, is done by then


def _stop(value):
    os.kill(os.getpid(), signal.SIGSTOP)
    return value


def _kill(*value, **options):
    os.kill(os.getpid(), signal.SIGKILL)


LOSSES = {"killed": ("F", _kill), "killed in backward": ("B", _kill), "stopped": ("F", _stop), "hangs": ("F", hang)}


def shorten(pipe, timeout_s):
    """From now on nothing takes longer than this; ranks begin at once, so that none is blamed for coming late."""
    dist.barrier()
    pipe._timeout_s = pipe._ranks._timeout_s = timeout_s


def lose_a_rank(rank, num_ranks, folder, how, victim, schedule="1f1b", frozen=False):
    """Training with a checkpoint every second step, until the victim is lost; the others leave what they got."""
    with make_pipe(dist.group.WORLD, schedule, frozen) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        for step in range(NUM_STEPS):
            if step == LOSING_STEP:
                shorten(pipe, LOSS_TIMEOUT_S)
            if step == LOSING_STEP and rank == victim:
                if how == "exits":
                    os._exit(7)  # as in an optimizer
                elif how == "leaves":
                    raise SystemExit(7)
                elif how == "killed while connecting":
                    dist.distributed_c10d._new_process_group_helper = _kill
                elif how in LOSSES:
                    own_stages(pipe)[0].arm(*LOSSES[how])
            if step == LOSING_STEP and how == "killed while connecting":
                caught(lambda s=step: _wrong_arguments(pipe, rank, 0, s))
            found = caught(lambda s=step: note(train(pipe, optimizer, [s])))
            if found["type"]:
                note(found)
                raise SystemExit(3)
            if step % 2 == 0:
                save_checkpoint(folder, pipe, optimizer)


def resume(rank, num_ranks, cases):
    """From the last checkpoint of each ``(folder, schedule, frozen)``: losses from then on, and undisturbed ones."""
    found = []
    for folder, schedule, frozen in cases:
        with make_pipe(dist.group.WORLD, schedule, frozen, seed=0) as pipe:
            optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
            load_checkpoint(folder, pipe, optimizer)
            first = pipe.freeze_state_dict()["step"]
            losses = train(pipe, optimizer, range(first, NUM_STEPS))
            held = weights(pipe)
        with make_pipe(dist.group.WORLD, schedule, frozen, seed=0) as pipe:
            same = train(pipe, torch.optim.Adam(pipe.parameters(), lr=0.01), range(NUM_STEPS))
            found.append({"first": first, "losses": losses, "undisturbed": same, "weights": held == weights(pipe)})
    return found


# --- while a checkpoint is saved --------------------------------------------------------------------------------------


def fail(error):
    def act(*args):
        raise error

    return act


@contextmanager
def in_the_middle(act):
    """``act`` instead of the next ``fsync``: a rank's file is written then, and has no name yet that is read."""
    kept = os.fsync
    os.fsync = act
    try:
        yield
    finally:
        os.fsync = kept


def lose_while_saving(rank, num_ranks, folder, how, victim):
    """A checkpoint, then one in whose middle the victim is lost; the others leave what they got."""
    act = {"stopped": _stop, "killed": _kill, "hangs": hang}[how]
    with make_pipe(dist.group.WORLD) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        train(pipe, optimizer, [0])
        save_checkpoint(folder, pipe, optimizer)
        train(pipe, optimizer, [1])
        shorten(pipe, LOSS_TIMEOUT_S)
        with in_the_middle(act if rank == victim else os.fsync):
            note(caught(lambda: save_checkpoint(folder, pipe, optimizer)))
        raise SystemExit(3)


def go_on(rank, num_ranks, folder):
    """From the last checkpoint, with one more step; and without having been disturbed."""
    with make_pipe(dist.group.WORLD) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        load_checkpoint(folder, pipe, optimizer)
        losses, held = train(pipe, optimizer, [1]), weights(pipe)
    with make_pipe(dist.group.WORLD) as pipe:
        same = train(pipe, torch.optim.Adam(pipe.parameters(), lr=0.01), [0, 1])
        return losses == same[1:] and held == weights(pipe)


def fail_to_save(rank, num_ranks, folder):
    """Saves that fail on all ranks, a good step after each, and a good save in the end."""
    found = {}
    with make_pipe(dist.group.WORLD) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        losses = train(pipe, optimizer, [0])
        faults = {"disk": OSError(28, "No space left on device"), "interrupt": KeyboardInterrupt()}
        for step, (name, error) in enumerate(faults.items(), 1):
            with in_the_middle(fail(error) if rank == 1 else os.fsync):
                found[name] = caught(lambda: save_checkpoint(folder, pipe, optimizer))
            losses += train(pipe, optimizer, [step])
        x, y = batch(3)
        others = (lambda: pipe.step(x, target=y)) if rank == 2 else (lambda: save_checkpoint(folder, pipe, optimizer))
        found["another call"] = caught(others)
        losses += train(pipe, optimizer, [3])
        last = latest_checkpoint(folder)
        saved = save_checkpoint(folder, pipe, optimizer)
        load_checkpoint(folder, pipe, optimizer)
        losses += train(pipe, optimizer, [4])
    with make_pipe(dist.group.WORLD) as pipe:
        same = train(pipe, torch.optim.Adam(pipe.parameters(), lr=0.01), range(5))
    return {"errors": found, "last": last, "saved": saved.name, "losses": losses, "undisturbed": same}

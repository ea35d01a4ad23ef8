"""Ranks that are lost in a step, and how training goes on: what ranks do."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

from tests.faulty_ranks import _wrong_arguments, caught, hang, make_pipe, own_stages, train, weights
from tests.forked_ranks import note
from timelyfreeze.distributed import load_checkpoint, save_checkpoint

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

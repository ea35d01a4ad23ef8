"""Unusual values between ranks, unusual ends of pipelines, and long runs: what ranks do."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import torch
import torch.distributed as dist
from torch import nn

from tests.faulty_ranks import FAULTS, TIMEOUT_S, batch, caught, hang, make_pipe, own_stages, train
from tests.lost_ranks import LOSS_TIMEOUT_S, shorten
from timelyfreeze import FreezingPipeline

# --- values -------------------------------------------------------------------------------------------------------


class Sends(nn.Module):
    """Gives, from call to call, another of many kinds of values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        y = self.linear(x)
        self.calls += 1
        wide = y.repeat(1, 2)
        kinds = [
            lambda: {"y": y, "none": None, "count": 3, "nested": {"list": [y * 2, (None, "text", y.detach())]}},
            lambda: (y, wide[:, ::2], wide.t(), wide[:, 3]),
            lambda: [y, torch.empty(0, 4), y[:0], torch.tensor(2.0), y.sum()],
            lambda: (y, y > 0, torch.complex(y, y), y.bfloat16(), y.double(), (y * 10).long(), y.to(torch.float16)),
            lambda: (y, y, y.view(-1), y.detach()),
            lambda: (y, y.expand(3, *y.shape), y[:1].expand(5, 4), torch.ones(1).expand(7)),
            lambda: (y, torch.complex(y, y).conj(), torch.complex(y, y).conj().imag),
            lambda: y,
        ]
        return kinds[self.calls % len(kinds)]()


class Takes(nn.Module):
    """Adds up whatever comes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, value):
        return (self.scale * self.total(value)).float()

    def total(self, value):
        if isinstance(value, dict):
            return sum(self.total(one) for one in value.values())
        if isinstance(value, tuple | list):
            return sum((index + 1) * self.total(one) for index, one in enumerate(value))
        if isinstance(value, torch.Tensor):
            value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            return value.double().sum() + value.dim() + sum(value.shape)
        return value if isinstance(value, int) else 7


class Entry(nn.Module):
    """Takes one value, whatever it is."""

    def __init__(self):
        super().__init__()
        self.takes = Takes()

    def forward(self, value):
        return self.takes(value)


def values_run(group):
    """Losses and gradients of steps whose values, sizes and numbers of micro-batches change."""
    torch.manual_seed(0)
    found = []
    options = {"loss_fn": lambda output, target: output * target.mean(), "accelerate": False, "timeout_s": TIMEOUT_S}
    with FreezingPipeline([Sends(), Entry()], num_microbatches=8, process_group=group, **options) as pipe:
        for size in (16, 24, 5, 16):  # 5: fewer micro-batches than the schedule has
            x = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
            result = pipe.step(x, target=torch.ones(size))
            found.append(float(result.loss).hex())
        grads = {name: p.grad.view(-1).tolist() for name, p in pipe.named_parameters()}
    return found, grads


def exchange_values(rank, num_ranks):
    return values_run(dist.group.WORLD), values_run(None)


class Lengths(nn.Module):
    """Another shape, and another plain value, with every call."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.scale * x, self.calls


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, value):
        return self.scale * (value[0].sum() + value[1])


def many_layouts(rank, num_ranks):
    """More of them than ranks remember of each other, and then those of the beginning again."""
    num = 350
    options = {"loss_fn": lambda output, target: output.sum(), "accelerate": False, "process_group": dist.group.WORLD}
    stages = [Lengths(), Counts()]
    losses, expected = [], []
    with FreezingPipeline(stages, num_microbatches=num, schedule="gpipe", **options) as pipe:
        for step in range(14):
            lengths = [1 + (step * num + m) % 4500 for m in range(num)]
            slices = [(torch.ones(1, length), torch.zeros(1)) for length in lengths]
            losses.append(float(pipe.evaluate(microbatches=slices)))
            calls = range(step * num + 1, (step + 1) * num + 1)
            expected.append(sum(2.0 * length + call for length, call in zip(lengths, calls, strict=True)) / num)
    return losses, expected


# --- ends ---------------------------------------------------------------------------------------------------------


def resources():
    """Threads and file descriptors of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def end_oddly(rank, num_ranks):
    """Pipelines that are forgotten; one that a rank closes while the others step; one that outlives its group."""
    group = dist.group.WORLD
    seen = []
    for _ in range(6):
        pipe = make_pipe(group)
        train(pipe, torch.optim.SGD(pipe.parameters()), range(2))
        gone = weakref.ref(pipe)
        del pipe
        gc.collect()
        dist.barrier()
        seen.append((gone() is None, *resources()))
    pipe = make_pipe(group)
    optimizer = torch.optim.SGD(pipe.parameters())
    train(pipe, optimizer, range(1))
    if rank == 1:
        pipe.close()
    closed = caught(lambda: train(pipe, optimizer, range(1)))
    pipe.close()
    pipe = make_pipe(group)
    train(pipe, torch.optim.SGD(pipe.parameters()), range(1))
    dist.destroy_process_group()
    after = caught(lambda: pipe.step(batch(1)[0], target=batch(1)[1]))
    pipe.close()
    return {"seen": seen, "closed": closed, "after": after, "threads": threading.active_count()}


def exit_without_closing(rank, num_ranks):
    """The interpreter ends as a script's does."""
    dist.init_process_group("gloo")
    pipe = make_pipe(dist.group.WORLD)
    exit_without_closing.kept = pipe  # until the very end
    return train(pipe, torch.optim.SGD(pipe.parameters()), range(2))


def step_too_long(rank, num_ranks):
    """A step that takes longer than it may: which rank kept the others waiting. That one itself would wait longer."""
    with make_pipe(dist.group.WORLD) as pipe:
        if rank == 1:
            own_stages(pipe)[0].arm("F", hang)
        shorten(pipe, TIMEOUT_S if rank == 1 else LOSS_TIMEOUT_S)
        return caught(lambda: train(pipe, torch.optim.SGD(pipe.parameters()), [0]))


# --- long runs ----------------------------------------------------------------------------------------------------


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def many_steps(rank, num_ranks, num_steps):
    seen = []
    with make_pipe(dist.group.WORLD) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters())
        for step in range(num_steps):
            train(pipe, optimizer, [step % 7])
            if (step + 1) % (num_steps // 10) == 0:
                seen.append((resident_bytes(), *resources()))
    return seen


def many_failures(rank, num_ranks, num_failures):
    seen = []
    with make_pipe(dist.group.WORLD) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters())
        train(pipe, optimizer, [0])
        for number in range(num_failures):
            assert caught(lambda n=number: FAULTS["raise in F"](pipe, rank, n % num_ranks, n))["type"] == "StageError"
            train(pipe, optimizer, [number])
            seen.append(resources())
    return seen

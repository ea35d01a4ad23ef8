"""Ranks as processes, and a stand-in for a pipeline: a model's children dealt out to ranks."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import signal
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from timelyfreeze.distributed.checkpoint import load_checkpoint, save_checkpoint

HANGS_AFTER_S = 100


# --- processes ----------------------------------------------------------------------------------------------------


def run_ranks(num_ranks, work, *args):
    """``work(group, *args)`` in each rank's process: its results by rank; an error of any rank is raised."""
    answers = start_ranks(num_ranks, work, *args)
    for kind, value in answers:
        assert kind == "done", value
    return [value for _, value in answers]


def start_ranks(num_ranks, work, *args):
    """By rank ("done", result), ("failed", traceback) or ("killed", None)."""
    context = multiprocessing.get_context("forkserver")  # torch is imported once, in the server
    context.set_forkserver_preload(["tests.checkpoint_ranks"])
    processes, ends = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(num_ranks):
            end, other = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(other, folder, rank, num_ranks, work, args))
            process.start()
            other.close()
            processes.append(process)
            ends.append(end)
        try:
            return [_answer(end) for end in ends]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(end):
    assert end.poll(HANGS_AFTER_S), "a rank hangs"
    try:
        kind, value = end.recv()
    except EOFError:
        return "killed", None
    return kind, torch.load(io.BytesIO(value), weights_only=False) if kind == "done" else value


def _rank(end, folder, rank, num_ranks, work, args):
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        result = io.BytesIO()
        torch.save(work(dist.group.WORLD, *args), result)
        end.send(("done", result.getvalue()))
    except BaseException:
        end.send(("failed", traceback.format_exc()))


# --- a pipeline -----------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tensors of unusual kinds."""

    def __init__(self):
        super().__init__()
        self.short = nn.Parameter(torch.randn(3, 2).half())
        self.brain = nn.Parameter(torch.randn(4).bfloat16())
        self.scalar = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("part", torch.randn(10)[2:6])
        self.register_buffer("nothing", torch.empty(0, dtype=torch.int32))

    def get_extra_state(self):
        return {"calls": getattr(self, "calls", 0)}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), Odd(), nn.Linear(4, 2, dtype=torch.float64), nn.ReLU()
    )
    model[0].weight.requires_grad_(False)
    model[3].calls = seed
    return model


class DealtPipe:
    """Rank r has every ``num_ranks``-th child of the model; in-process one rank has all."""

    def __init__(self, model, group=None, step=0):
        self.process_group = group
        self._model = model
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._own = tuple(f"{index}." for index in range(len(model)) if index % size == rank)
        self._state = {"step": step, "split_points": [1]}

    def state_dict(self):
        return {name: value for name, value in self._model.state_dict().items() if name.startswith(self._own)}

    def load_state_dict(self, state_dict):
        assert set(state_dict) == set(self.state_dict())
        self._model.load_state_dict(state_dict, strict=False)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        for name, parameter in self._model.named_parameters(prefix, recurse, remove_duplicate):
            if name.startswith(self._own):
                yield name, parameter

    def freeze_state_dict(self):
        return dict(self._state)

    def load_freeze_state_dict(self, state):
        self._state = dict(state)


def make_optimizer(pipe, backwards=False, lr=0.1, keep_empty=False):
    """Matrices in one group, other parameters in another with its own rate."""
    named = list(pipe.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim <= 1], "lr": lr / 3, "betas": (0.8, 0.9)},
    ]
    for group in groups if backwards else []:
        group["params"].reverse()
    groups = [group for group in (reversed(groups) if backwards else groups) if group["params"] or keep_empty]
    return torch.optim.AdamW(groups, lr=lr) if groups else None


def train(pipe, optimizer, steps):
    """Optimizer steps with gradients that depend on step and name alone; frozen parameters get none."""
    for step, (name, parameter) in itertools.product(steps, list(pipe.named_parameters())):
        generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = values.to(parameter.dtype) if parameter.requires_grad else None
        if name == list(dict(pipe.named_parameters()))[-1]:
            optimizer.step()


def everything(pipe, optimizer):
    """What a rank holds, by name, to be compared between runs: tensors are copies."""
    held = {("model", name): value for name, value in pipe.state_dict().items()}
    names = {parameter: name for name, parameter in pipe.named_parameters()}
    for group in optimizer.param_groups if optimizer is not None else []:
        for parameter in group["params"]:
            held |= {("state", names[parameter], k): v for k, v in optimizer.state.get(parameter, {}).items()}
            held |= {("group", names[parameter], k): v for k, v in group.items() if k != "params"}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in held.items()}


def assert_same(a, b):
    """Bit for bit, with types."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        other = b[key]
        assert type(value) is type(other), key
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype, key
            assert torch.equal(value, other), key
        else:
            assert value == other, key


# --- what ranks do --------------------------------------------------------------------------------------------------


def train_and_save(group, path, steps=3, **options):
    pipe = DealtPipe(make_model(), group, step=steps)
    optimizer = make_optimizer(pipe)
    if optimizer is not None:
        train(pipe, optimizer, range(steps))
    folder = save_checkpoint(path, pipe, optimizer, extra={"rate": [0.1, None]}, **options)
    return str(folder), everything(pipe, optimizer)


def load_and_train(group, path, steps=0):
    pipe = DealtPipe(make_model(seed=1), group)
    optimizer = make_optimizer(pipe, backwards=True, lr=0.9)
    extra = load_checkpoint(path, pipe, optimizer)
    assert extra == {"rate": [0.1, None]}
    if optimizer is not None and steps:
        train(pipe, optimizer, range(3, 3 + steps))
    return everything(pipe, optimizer), pipe.freeze_state_dict()


def try_to_save(group, path, kind):
    """Save with a fault on rank 1, then without it: (text of the error, what then is there)."""
    pipe = DealtPipe(make_model(), group, step=5)
    optimizer = make_optimizer(pipe)
    rank = dist.get_rank(group)
    extra = None
    undo = []
    if rank == 1:
        if kind == "state_dict":
            pipe.state_dict = failing(UnpicklableError("no state", 1))
        elif kind == "disk":
            undo.append(os.fsync)
            os.fsync = failing(OSError(28, "No space left on device"))
        elif kind == "unpicklable":
            undo.append(os.fsync)
            os.fsync = failing(UnpicklableError("odd error", 1))
        elif kind == "extra":
            extra = {"rng": torch.ones(2)}
        elif kind == "step":
            pipe.load_freeze_state_dict({"step": 6})
        elif kind == "shape":
            own = pipe.state_dict
            pipe.state_dict = lambda: {**own(), "0.weight": torch.ones(9)}
    text = ""
    try:
        save_checkpoint(path, pipe, optimizer, extra=extra)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    if undo:
        os.fsync = undo[0]
    dist.barrier(group)
    left = sorted(os.listdir(path)) if os.path.isdir(path) else []
    dist.barrier(group)
    whole = DealtPipe(make_model(), group, step=5)
    return text, left, save_checkpoint(path, whole, make_optimizer(whole)).name


def try_to_load(group, path, change):
    """Load into a model that differs on rank 1 alone: (text of the error, whether anything has changed)."""
    model = make_model(seed=1)
    if dist.get_rank(group) == 1 and change:
        model[1] = nn.BatchNorm1d(5)
        model[5] = nn.Linear(2, 2)
    pipe = DealtPipe(model, group)
    optimizer = make_optimizer(pipe)
    before = everything(pipe, optimizer)
    try:
        load_checkpoint(path, pipe, optimizer)
    except Exception as error:
        assert_same(everything(pipe, optimizer), before)
        assert pipe.freeze_state_dict()["step"] == 0
        return f"{type(error).__name__}: {error}"
    return ""


class UnpicklableError(Exception):
    """Cannot be sent to another process."""

    def __init__(self, text, number):
        super().__init__(text)
        self.handle = io.StringIO().write, number

    def __reduce__(self):
        raise TypeError("not this one")


def failing(error):
    def fail(*args):
        raise error

    return fail


# --- kills ----------------------------------------------------------------------------------------------------------


def kill_at(number):
    """End this process as kill -9 does at the ``number``-th call of those that write."""
    instants = itertools.count(1)

    def hook(function, every=1):
        calls = itertools.count()

        def counted(*args, **kwargs):
            if next(calls) % every == 0 and next(instants) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, hook(getattr(os, name)))
    torch.save = hook(torch.save, every=40)  # in the middle of a file


def save_and_be_killed(group, path, rank, number):
    if dist.get_rank(group) == rank:
        kill_at(number)
    pipe = DealtPipe(make_model(seed=2), group, step=2)
    optimizer = make_optimizer(pipe)
    if optimizer is not None:
        train(pipe, optimizer, range(4))
    save_checkpoint(path, pipe, optimizer, keep_last=1)


def kill_each_instant(group, path):
    """In-process saves, each killed one call later than the one before: after each, which one is the newest."""
    first = DealtPipe(make_model(), step=1)
    save_checkpoint(path, first, make_optimizer(first))
    newest = []
    for number in itertools.count(1):
        pid = os.fork()
        if pid == 0:
            kill_at(number)
            pipe = DealtPipe(make_model(seed=2), step=2)
            save_checkpoint(path, pipe, make_optimizer(pipe), keep_last=1)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        pipe = DealtPipe(make_model(seed=3))
        load_checkpoint(path, pipe, make_optimizer(pipe))
        step = pipe.freeze_state_dict()["step"]
        whole = DealtPipe(make_model(seed={1: 0, 2: 2}[step]))
        assert_same(everything(pipe, None), everything(whole, None))
        newest.append(step)
        save_checkpoint(path, first, make_optimizer(first), keep_last=1)  # as it was, for the next kill
        left = os.listdir(path)
        assert len(left) == 1, left  # nothing unfinished, nothing half removed
        if os.WIFEXITED(status):
            return newest


def folders(path):
    return sorted(entry.name for entry in Path(path).iterdir())

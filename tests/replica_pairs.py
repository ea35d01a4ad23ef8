"""Training as replicas of processes beside the same in one process, and what is needed to compare the two."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from timelyfreeze import FreezingPipeline
from timelyfreeze.distributed import replicas
from timelyfreeze.distributed.groups import default_store

M = 4  # micro-batches
DOUBLE = {"rtol": 1e-12, "atol": 1e-14}


class Extra(nn.Module):
    """A layer with a parameter that is never used, and one that only large inputs use."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.never = nn.Parameter(torch.ones(width))
        self.sometimes = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return y * self.sometimes if float(x.detach().abs().max()) > 50.0 else y


class Fault(nn.Module):
    """Passes its input on; what it is told to do, it does once, in the given micro-batch."""

    def __init__(self):
        super().__init__()
        self.todo = ""
        self.microbatch = 0

    def forward(self, x):
        todo = "" if self.microbatch else self.todo
        self.microbatch -= 1
        if self.microbatch < 0:
            self.todo, self.microbatch = "", 0
        if todo == "forward":
            raise RuntimeError("boom in forward")
        if todo == "backward":
            x.register_hook(fail)
        if todo == "late backward":
            x.register_hook(fail_late)
        return x * 1.0


def fail(grad):
    raise RuntimeError("boom in backward")


def fail_late(grad):
    """Once all other ranks reduce."""
    default_store().wait([f"late backward {rank}" for rank in (0, 1, 3)])
    fail(grad)


class ScaledLoss(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, output, target):
        return F.mse_loss(output * self.scale, target)


def sum_and_count(output, target):
    """Samples weigh unequally."""
    weights = (target[:, 0] > 0).to(output.dtype) + 1.0
    return (weights[:, None] * (output - target) ** 2).sum(), weights.sum()


def make_model(width=5, seed=0):
    torch.manual_seed(seed)
    layers = [Extra(width), nn.Linear(width, width), Fault(), Fault(), nn.Linear(width, width), nn.Linear(width, width)]
    return nn.Sequential(*layers).double()


def make_mesh():
    return DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "pp"))


def batches(step, sizes=(8, 6), width=5):
    """One batch a replica."""
    generator = torch.Generator().manual_seed(step)
    return [
        tuple(torch.randn(size, width, dtype=torch.float64, generator=generator) for _ in range(2)) for size in sizes
    ]


def joined(parts):
    """The batch of which each micro-batch holds that of every replica."""
    columns = [[tensor.tensor_split(M) for tensor in part] for part in parts]
    return [tuple(torch.cat([column[i][m] for column in columns]) for i in range(2)) for m in range(M)]


def assert_close(part, whole, **tolerance):
    """Parameters and gradients of a rank's part are those of the whole model."""
    reference = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in part.named_parameters(remove_duplicate=False):
        other = reference[name]
        assert (parameter.grad is None) == (other.grad is None), f"{name} has a gradient or not"
        torch.testing.assert_close(parameter, other, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        if other.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, **tolerance, msg=lambda m, n=name: f"grad {n}: {m}")


class Pair:
    """The same training twice: as replicas of processes, and in this process with the joined batch."""

    def __init__(self, rank, model=None, loss_fn=F.mse_loss, freeze=None, **options):
        self.replica, self.own = divmod(rank, 2)
        whole = make_model() if model is None else model
        part = copy.deepcopy(whole)
        loss = copy.deepcopy(loss_fn)
        common = {"num_stages": 2, "num_microbatches": M, "accelerate": False, "seed": 3, "freeze": freeze} | options
        self.alone = FreezingPipeline(whole, loss_fn=loss_fn, **common, split_points=[len(whole) // 2])
        self.pipe = FreezingPipeline(part, loss_fn=loss, **common, split_points=[len(whole) // 2], mesh=make_mesh())
        self.losses = loss_fn, loss
        if freeze is not None:
            self._share_masks(self.pipe._freezing, self.alone._freezing)

    def _share_masks(self, ours, others):
        """The joined batch has masks of its own, since work depends on the batch's size: it shall take the pipe's."""
        begin, other = ours.begin_step, others.begin_step

        def keep(*args, **kwargs):
            self.masks = begin(*args, **kwargs)
            return self.masks

        def take(*args, **kwargs):
            other(*args, **kwargs)
            return self.masks

        ours.begin_step, others.begin_step = keep, take

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.alone.close()
        self.pipe.close()

    def optimizers(self):
        made = []
        for pipe, loss in zip((self.alone, self.pipe), self.losses, strict=True):
            parameters = list(pipe.parameters())
            if isinstance(loss, nn.Module) and (pipe is self.alone or self.own == 1):
                parameters += loss.parameters()
            made.append(torch.optim.AdamW(parameters, lr=0.01))
        return made

    def step(self, index, sizes=(8, 6), scale=1.0, **options):
        parts = [(x * scale, y) for x, y in batches(index, sizes)]
        x, y = parts[self.replica]
        result = self.pipe.step(x, target=y, **options)
        alone = self.alone.step(microbatches=joined(parts), **options)
        torch.testing.assert_close(result.loss, alone.loss, **DOUBLE)
        assert result.freeze_ratio == alone.freeze_ratio
        return result

    def compare(self):
        assert_close(self.pipe, self.alone, **DOUBLE)
        alone, own = self.losses
        if isinstance(own, nn.Module) and self.own == 1:
            assert_close(own, alone, **DOUBLE)


class Wire:
    """What is reduced over replicas while it lasts, numbers of elements.

    Args:
        key: set in the store once something is on its way.
    """

    def __init__(self, key=None):
        self.key = key

    def __enter__(self):
        self.sent, self._plain = [], dist.all_reduce

        def counted(tensor, *args, **kwargs):
            self.sent.append(tensor.numel())
            work = self._plain(tensor, *args, **kwargs)
            if self.key:
                default_store().set(self.key, "")
            return work

        replicas.dist.all_reduce = counted
        return self

    def __exit__(self, *exception):
        replicas.dist.all_reduce = self._plain


def everyone(value):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def bits(tensors):
    return [None if t is None else t.detach().reshape(-1).contiguous().view(torch.uint8).tolist() for t in tensors]


def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")

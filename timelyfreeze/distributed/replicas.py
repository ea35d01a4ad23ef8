"""Gradients of replicas, added up."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from time import monotonic

import torch
import torch.distributed as dist

from timelyfreeze.distributed.failing import as_exception
from timelyfreeze.distributed.monitor import FailureMonitor
from timelyfreeze.errors import problem
from timelyfreeze.runtime.engine import Engine
from timelyfreeze.runtime.ranks import Flags
from timelyfreeze.runtime.values import is_sharded, own_part

# As torch's DistributedDataParallel has it.
BUCKET_BYTES = 25 * 2**20
_LOOK_S = 0.5


def make_replicas_equal(engine: Engine, group: dist.ProcessGroup) -> None:
    """Parameters and buffers of this rank's stages, and the loss's parameters, as the first replica has them."""
    source = dist.get_process_group_ranks(group)[0]
    here = [stage for stage in engine.stages if stage is not None]
    tensors = [tensor for stage in here for tensor in (*stage.parameters(), *stage.buffers())]
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in [*tensors, *engine.loss_parameters]}.values():
            if is_sharded(tensor):
                continue
            value = tensor.detach().contiguous()
            dist.broadcast(value, source, group=group)
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)


def layout_of(engine: Engine) -> str:
    """Shapes and dtypes of what a rank has, as text: it must be the same on all replicas of the rank."""
    tensors = [*_parameters_of(engine), *(b for stage in engine.stages if stage is not None for b in stage.buffers())]
    text = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    return hashlib.sha256(text.encode()).hexdigest()


def flags_of(engine: Engine) -> str:
    """The user's ``requires_grad`` flags of what a rank has, as text: likewise."""
    bits = "".join("01"[parameter.requires_grad] for parameter in _parameters_of(engine))
    return f"{int('1' + bits, 2):x}"


def _parameters_of(engine: Engine) -> list[torch.Tensor]:
    owners = engine.ties.owners
    used = [owners.get(id(p), p) for parameters in engine.ties.stage_parameters for p in parameters]
    return [*used, *engine.loss_parameters]


def reduce_over_replicas(
    engine: Engine,
    live: Sequence[Flags] | None,
    group: dist.ProcessGroup,
    monitor: FailureMonitor,
    timeout_s: float,
) -> None:
    """Add the step's gradients over the replicas of this rank, before they are committed.

    A rank does so as soon as its own program has ended, while ranks below it still run theirs. What is frozen in every
    micro-batch is frozen on every replica, and costs nothing. A parameter that is live and was used on no replica
    keeps no gradient: a flag a parameter travels with the gradients.

    Args:
        live: for each stage, which parameters are live for some micro-batch; None: all.

    Raises:
        TransportError: a replica is gone.
        TypeError: a gradient is sparse.
    """
    with torch.no_grad():
        flights = [_Flight(bucket, group) for bucket in _buckets(_reduced_parameters(engine, live))]
        deadline_s = monotonic() + timeout_s
        for flight in flights:
            flight.land(monitor, deadline_s)


def _reduced_parameters(engine: Engine, live: Sequence[Flags] | None) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for stage, used in enumerate(engine.ties.stage_parameters):
        if engine.stages[stage] is None:
            continue
        flags = [True] * len(used) if live is None else live[stage]
        for parameter, is_live in zip(used, flags, strict=True):
            if parameter.requires_grad and is_live and not is_sharded(parameter):
                if parameter.grad is not None and parameter.grad.is_sparse:
                    raise TypeError(
                        problem(
                            "gradients of replicas",
                            expected="dense gradients",
                            got=f"a sparse one, stage {stage}",
                            hint="Use nn.Embedding(..., sparse=False).",
                        )
                    )
                found.append(parameter)
    return [*found, *(parameter for parameter in engine.loss_parameters if parameter.requires_grad)]


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of one dtype and device, from the last parameter on: its gradient came first."""
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for parameter in reversed(parameters):
        like = bucket and (bucket[0].dtype, bucket[0].device) == (parameter.dtype, parameter.device)
        if bucket and (not like or num_bytes + parameter.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(parameter)
        num_bytes += parameter.nbytes
    if bucket:
        yield bucket


class _Flight:
    """A bucket on its way: its gradients, and for each parameter whether there is one."""

    def __init__(self, parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        there = torch.tensor([p.grad is not None for p in parameters], dtype=parts[0].dtype, device=parts[0].device)
        self._flat = torch.cat([*(part.reshape(-1) for part in parts), there])
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)
        self._landed = threading.Event()
        self._work.get_future().add_done_callback(lambda _: self._landed.set())

    def land(self, monitor: FailureMonitor, deadline_s: float) -> None:
        while not self._landed.wait(_LOOK_S):
            failure = monitor.failure
            if failure is not None:
                raise as_exception(failure)
            if monotonic() > deadline_s:
                raise TimeoutError("a replica's gradients did not come")
        try:
            self._work.wait()
        except RuntimeError as error:
            raise as_exception(failure) if (failure := monitor.look()) else error from error
        there = self._flat[-len(self._parameters) :]
        position = 0
        for parameter, is_there in zip(self._parameters, there.tolist(), strict=True):
            summed = self._flat[position : position + parameter.numel()].view(parameter.shape)
            position += parameter.numel()
            if not is_there:
                continue
            if parameter.grad is None:
                parameter.grad = summed.clone()
            else:
                parameter.grad.copy_(summed)


def show_overflow(engine: Engine) -> None:
    """Gradients of another rank are not finite: make this rank's ``GradScaler`` see it as well."""
    for parameter in itertools.chain(*engine.ties.stage_parameters, engine.loss_parameters):
        if parameter.grad is None:
            continue
        grad = own_part(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
        if grad.numel() > 0:
            grad[(0,) * grad.dim()] = torch.inf
            return

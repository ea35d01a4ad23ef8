"""The processes of one job: how they meet, and what they tell each other outside of training steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from timelyfreeze.cli.errors import CommandError, ElsewhereError, StoppedError, TrainingError
from timelyfreeze.cli.launch import Launch
from timelyfreeze.distributed import CheckpointError
from timelyfreeze.distributed.failing import RemoteTracebackError
from timelyfreeze.errors import StageError, TransportError, problem

T = TypeVar("T")


class World:
    """All processes of a job. Every method but ``culprit`` is a collective: all of them call it.

    With several processes, rank 0 reads what the job needs and writes its files; the others get to know it from there,
    so that only checkpoints need a file system that all of them share.
    """

    def __init__(self, launch: Launch | None = None) -> None:
        self.launch = launch or Launch()
        self.rank, self.size = self.launch.rank, self.launch.size

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.launch.is_first

    @property
    def has_others(self) -> bool:
        """Whether there are other processes."""
        return self.size > 1

    @contextmanager
    def joined(self) -> Iterator[World]:
        """Meet the other processes, and part from them at the end."""
        if not self.has_others:
            yield self
            return
        with_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        if with_nccl:
            torch.cuda.set_device(self.launch.local_rank % torch.cuda.device_count())
        store, rank, size = next(rendezvous("env://"))
        if self.launch.num_machines == 1:
            # torchrun's store may outlive its processes, and with it the addresses of those that it has started before.
            # That of several machines is new each time, and they count their restarts each for itself.
            store = PrefixStore(f"restart-{self.launch.num_restarts}", store)
        backend = "cpu:gloo,cuda:nccl" if with_nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        try:
            yield self
        finally:
            dist.destroy_process_group()

    def grid(self, num_replicas: int, *, on_gpu: bool) -> dict[str, Any]:
        """How a pipeline is told of its processes: neighbouring ranks have neighbouring stages of one replica."""
        if not self.has_others:
            return {}
        if num_replicas == 1:
            return {"process_group": dist.group.WORLD}
        shape = (num_replicas, self.size // num_replicas)
        kind = "cuda" if on_gpu else "cpu"
        return {"mesh": init_device_mesh(kind, shape, mesh_dim_names=("dp", "pp"))}

    def first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0, which keeps its result; others get it through JSON.

        Raises:
            ElsewhereError: on the others, where it raised on rank 0.
        """
        if not self.has_others:
            return work()
        message: list[str | None] = [None]
        try:
            if self.is_first:
                result = work()
                message = [json.dumps(result)]
        finally:
            dist.broadcast_object_list(message, 0)
        if self.is_first:
            return result
        if message[0] is None:
            raise _elsewhere(self.rank, 0)
        received: T = json.loads(message[0])
        return received

    def each(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; where it raises on one, the others raise ``ElsewhereError``."""
        if not self.has_others:
            return work()
        failed = [True] * self.size
        done = False
        try:
            result = work()
            done = True
        finally:
            dist.all_gather_object(failed, not done)
        if any(failed):
            raise _elsewhere(self.rank, failed.index(True))
        return result

    def bytes_of_first(self, data: NDArray[np.uint8] | None, num_bytes: int) -> NDArray[np.uint8]:
        """Rank 0's array ``[num_bytes]``, on every rank."""
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        if data is not None:
            tensor.numpy()[:] = data
        dist.broadcast(tensor, 0)
        return tensor.numpy()

    def culprit(self, error: BaseException) -> int | None:
        """Which other rank is to blame; None: this one."""
        if isinstance(error, ElsewhereError):
            return error.rank
        if isinstance(error, TransportError):
            return None if error.rank == self.rank else error.rank
        if isinstance(error, StageError) and isinstance(error.__cause__, RemoteTracebackError):
            return error.rank
        return None

    @contextmanager
    def told_once(self) -> Iterator[None]:
        """Around a job: an error is told by the rank that it comes from, or by rank 0 where all ranks have it.

        Raises:
            ElsewhereError: instead of errors that another rank tells.
        """
        if not self.has_others:
            yield
            return
        try:
            yield
        except StoppedError as error:
            if self.is_first:
                raise
            raise ElsewhereError("", 0, 128 + error.signal_number) from error
        except (CommandError, TrainingError, CheckpointError, StageError, TransportError) as error:
            # TrainingError carries the stage's own
            rank = self.culprit(error.__cause__ if isinstance(error, TrainingError) and error.__cause__ else error)
            if rank is not None:
                if isinstance(error, TransportError):  # it may be gone without a word
                    raise ElsewhereError(str(error).splitlines()[0], rank, 1) from error
                raise _elsewhere(self.rank, rank) from error
            comes_from_here = isinstance(error, StageError) or isinstance(error.__cause__, StageError)
            if self.is_first or comes_from_here:
                raise
            raise _elsewhere(self.rank, 0) from error
        except RuntimeError as error:  # gloo's and NCCL's
            cause = (str(error).splitlines() or [type(error).__name__])[0].partition(". This is")[0]
            text = problem(f"rank {self.rank} lost the connection to another rank", got=cause)
            raise ElsewhereError(text, -1, 1) from error


def _elsewhere(own: int, rank: int) -> ElsewhereError:
    return ElsewhereError(f"rank {own} ends because rank {rank} failed", rank, 1)

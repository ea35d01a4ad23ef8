"""The process groups that a pipeline makes for itself, and what runs over them."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from timelyfreeze import _C
from timelyfreeze.errors import problem

_MIN_TIMEOUT_S = 1800.0
_LOOK_S = 0.2
_NUM_MADE: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True)
class Place:
    """Where this process stands among the processes of a pipeline and its replicas.

    Attributes:
        grid: global ranks, one row a replica, one column a rank of the pipeline.
        replica, rank: of this process.
    """

    grid: list[list[int]]
    replica: int
    rank: int

    @property
    def num_ranks(self) -> int:
        return len(self.grid[0])

    @property
    def num_replicas(self) -> int:
        return len(self.grid)

    @property
    def members(self) -> list[int]:
        """All global ranks, sorted, as a process group numbers them."""
        return sorted(rank for row in self.grid for rank in row)

    def member_of(self, replica: int, rank: int) -> int:
        """The number of a process among ``members``."""
        return self.members.index(self.grid[replica][rank])

    @property
    def own_member(self) -> int:
        return self.member_of(self.replica, self.rank)


def find_place(process_group: Any, mesh: Any) -> Place:
    """Where this process stands.

    Args:
        process_group: whose ranks are those of the pipeline, in order; or None.
        mesh: instead of it, a ``DeviceMesh`` with the dimensions "dp" and "pp".

    Raises:
        ValueError: both are given, or the mesh has other dimensions.
        RuntimeError: torch.distributed is not initialised.
    """
    if process_group is not None and mesh is not None:
        raise ValueError(problem("process_group and mesh", expected="one of them", got="both"))
    if not dist.is_initialized():
        raise RuntimeError(
            problem(
                "torch.distributed is not initialised",
                expected="an initialised process group",
                hint='Call torch.distributed.init_process_group("gloo") first, and start with torchrun.',
            )
        )
    own = dist.get_rank()
    if mesh is None:
        ranks = dist.get_process_group_ranks(process_group)
        if own not in ranks:
            raise ValueError(problem("process_group", expected="a group with this process in it", got=ranks))
        return Place([list(ranks)], 0, ranks.index(own))
    names = tuple(mesh.mesh_dim_names or ())
    if sorted(names) not in (["dp", "pp"], ["pp"]):
        raise ValueError(problem("mesh", expected='dimensions named "dp" and "pp"', got=names))
    table = mesh.mesh if "dp" in names else mesh.mesh.unsqueeze(0)
    if names == ("pp", "dp"):
        table = table.T
    grid: list[list[int]] = table.tolist()
    found = [(d, row.index(own)) for d, row in enumerate(grid) if own in row]
    if not found:
        raise ValueError(problem("mesh", expected=f"a mesh with global rank {own} in it", got=grid))
    return Place(grid, *found[0])


class Groups:
    """Process groups of a pipeline's own, so that no message of anyone else comes between.

    All members make them together.

    Args:
        place: of this process.
        name: the same on all members, and of no other groups before.
        device: where its tensors are.
        timeout_s: longer than anything waits; the pipeline itself gives up sooner.
    """

    def __init__(self, place: Place, name: str, device: torch.device, timeout_s: float) -> None:
        self._name = name
        timeout = timedelta(seconds=max(2 * timeout_s + 60, _MIN_TIMEOUT_S))
        members = place.members
        self._made: list[dist.ProcessGroup] = []
        self._let_go = weakref.finalize(self, _destroy, self._made)
        self._let_go.atexit = False  # the sockets go with the process
        # Control data are CPU tensors, whatever the stages compute on.
        self.control = control = self._make(members, "gloo", timeout, "control")
        if device.type == "cpu":
            up = down = control
        else:
            # One for each direction: see Transport's constructor.
            up, down = (self._make(members, None, timeout, way) for way in ("up", "down"))
        self.transport = _C.Transport(control.group_name, up.group_name, down.group_name, str(device))
        self.replicas: dist.ProcessGroup | None = None
        if place.num_replicas > 1:
            column = sorted(row[place.rank] for row in place.grid)
            self.replicas = self._make(column, "gloo" if device.type == "cpu" else None, timeout, f"dp{place.rank}")

    def close(self) -> None:
        """Give up what waits, and let the connections go."""
        self.transport.cancel()
        self._let_go()

    def _make(self, ranks: list[int], backend: str | None, timeout: timedelta, what: str) -> dist.ProcessGroup:
        # torch.distributed.new_group names a group by its ranks and by how many groups the process has: after a group
        # is given up that name comes again, and with it the addresses that the store still has of the old one.
        name: Any = f"timelyfreeze/{self._name}/{what}"
        made, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            backend or dist.get_backend(),
            default_store(),
            name,
            timeout=timeout,
            group_desc=name,
        )
        c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}
        assert isinstance(made, dist.ProcessGroup)
        self._made.append(made)
        return made


def make_groups(make: Callable[[], Groups], timeout_s: float, is_over: Callable[[], bool]) -> Groups | None:
    """What ``make`` gives; None where it is over before. Connecting itself can be neither ended nor interrupted.

    Raises:
        TimeoutError: there is no connection to every rank.
    """
    made: queue.SimpleQueue[Groups | Exception] = queue.SimpleQueue()

    def connect() -> None:
        try:
            made.put(make())
        except Exception as error:  # for the thread that waits
            made.put(error)

    threading.Thread(target=connect, name="timelyfreeze-connect", daemon=True).start()
    deadline_s = monotonic() + timeout_s
    while not is_over():
        try:
            found = made.get(timeout=_LOOK_S)
        except queue.Empty:
            if monotonic() > deadline_s:
                raise TimeoutError("there is no connection to every rank") from None
            continue
        if isinstance(found, Groups):
            return found
        raise TimeoutError(f"there is no connection to every rank: {found}") from found  # it names addresses, not ranks
    return None


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    for group in groups:
        with suppress(Exception):  # the default group may be gone already
            dist.destroy_process_group(group)


def default_store() -> Store:
    """The store over which the processes found each other."""
    return c10d._get_default_store()


def store_host(place: Place) -> int | None:
    """The member whose process hosts that store; None: none of them, or it is not known."""
    base = default_store()
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_env = isinstance(base, TCPStore) and os.environ.get("MASTER_PORT") == str(base.port)
    return place.members.index(0) if is_env and not is_agents and 0 in place.members else None


def next_name(members: Sequence[int]) -> str:
    """A name for the next pipeline over these processes: the same on all of them."""
    key = tuple(members)
    _NUM_MADE[key] += 1
    return f"{'-'.join(map(str, key))}/{_NUM_MADE[key]}"

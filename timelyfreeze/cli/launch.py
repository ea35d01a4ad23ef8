"""What torchrun, or another launcher, says of this process in its environment. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from timelyfreeze.cli.errors import CommandError
from timelyfreeze.errors import problem

_NEEDED = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together.

    Attributes:
        rank, size: its number, and how many there are. One process alone has its pipeline's ranks as threads.
        local_rank: its number on its machine.
        num_machines: each with a torchrun of its own.
        num_restarts: how often this machine's torchrun has started its processes again because one of them failed.
        run_id: torchrun's ``--rdzv-id``; "none" where it was not given one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    num_machines: int = 1
    num_restarts: int = 0
    run_id: str = "none"

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all: it prints, and writes the run's files."""
        return self.rank == 0

    def follows(self, run_id: object) -> bool:
        """Whether processes of ``run_id`` may have been this launch's own, before they were started again.

        torchrun counts only what fails on its own machine, not restarts because of others; an id of its own tells them.
        """
        return run_id == self.run_id and (self.num_restarts > 0 or self.run_id != "none")


def find_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``TORCHELASTIC_RESTART_COUNT``.

    Raises:
        CommandError: a number is none, or there are several processes that could not find each other.

    >>> find_launch({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    Launch(rank=1, size=2, local_rank=1, num_machines=1, num_restarts=0, run_id='none')
    >>> find_launch({})
    Launch(rank=0, size=1, local_rank=0, num_machines=1, num_restarts=0, run_id='none')
    """
    values = os.environ if environment is None else environment
    if "RANK" not in values or "WORLD_SIZE" not in values:
        return Launch()
    rank, size = _count(values, "RANK"), _count(values, "WORLD_SIZE")
    if rank >= size:
        raise _wrong("RANK", f"below WORLD_SIZE = {size}", str(rank))
    missing = [name for name in _NEEDED if name not in values] if size > 1 else []
    if missing:
        raise _wrong(missing[0], "where the processes meet", "nothing")
    return Launch(
        rank,
        size,
        _count(values, "LOCAL_RANK", rank),
        _count(values, "GROUP_WORLD_SIZE", 1),
        _count(values, "TORCHELASTIC_RESTART_COUNT"),
        values.get("TORCHELASTIC_RUN_ID") or "none",
    )


def _count(values: Mapping[str, str], name: str, default: int = 0) -> int:
    text = values.get(name, str(default))
    if not text.isdecimal():
        raise _wrong(name, "a count", repr(text))
    return int(text)


def _wrong(name: str, expected: str, got: str) -> CommandError:
    return CommandError(
        problem(
            f"the environment variable {name}",
            expected=expected,
            got=got,
            hint="Start the processes with torchrun, or unset RANK and WORLD_SIZE to train in this one alone.",
        )
    )

"""A stage's parameters as the planner of masks sees them: their work and the order of their use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.errors import problem, raise_all

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

PALETTE_SIZE = 4
"""Masks of a compiled stage. Dynamo compiles a graph for each, with and without input gradient: its limit is eight."""


@dataclass(frozen=True, eq=False)
class ParameterWork:
    """The parameters of one stage, in the order of ``stage.parameters()``.

    Attributes:
        names: as ``named_parameters()`` gives them.
        work_s: expected seconds of each one's gradient for one micro-batch, float64 ``[num_parameters]``.
        forward_order: indices of the parameters in the order in which forward first uses them; those that it does
            not use come first.
        groups: parameters of the same number are fed by one activation (query, key and value), ``[num_parameters]``;
            by default each is its own.
        used: whether the profiled forward used it, ``[num_parameters]``; by default all.
        palette_size: the stage draws from so many fixed masks (compiled stages); None: from all.
        reentrant: forward has reentrantly checkpointed regions. They give no gradient to what is inside unless one of
            their inputs carries one, so the stage's input must, wherever something in the stage is live.

    Raises:
        ValueError: lengths differ, a time is negative or not finite, or ``forward_order`` is no permutation.

    >>> ParameterWork(["a", "b"], [1.0, 3.0], [1, 0]).work_s.sum()
    np.float64(4.0)
    """

    names: Sequence[str]
    work_s: NDArray[np.float64]
    forward_order: NDArray[np.int64]
    groups: NDArray[np.int64] = None  # type: ignore[assignment]
    used: NDArray[np.bool_] = None  # type: ignore[assignment]
    palette_size: int | None = None
    reentrant: bool = False

    def __post_init__(self) -> None:
        names = tuple(self.names)
        num = len(names)
        arrays = {
            "work_s": np.array(self.work_s, dtype=np.float64),
            "forward_order": np.array(self.forward_order, dtype=np.int64),
            "groups": np.arange(num) if self.groups is None else np.array(self.groups, dtype=np.int64),
            "used": np.ones(num, dtype=bool) if self.used is None else np.array(self.used, dtype=bool),
        }
        faults = [
            problem(f"{name} of a stage's parameters", expected=f"shape ({num},)", got=array.shape)
            for name, array in arrays.items()
            if array.shape != (num,)
        ]
        raise_all(ValueError, faults)
        if not (np.isfinite(arrays["work_s"]).all() and (arrays["work_s"] >= 0).all()):
            faults.append(problem("work_s", expected="finite seconds, at least 0", got=arrays["work_s"].tolist()))
        if not np.array_equal(np.sort(arrays["forward_order"]), np.arange(num)):
            faults.append(
                problem("forward_order", expected=f"each of 0..{num - 1} once", got=arrays["forward_order"].tolist())
            )
        if self.palette_size is not None and self.palette_size < 2:
            faults.append(problem("palette_size", expected="at least 2, or None", got=self.palette_size))
        raise_all(ValueError, faults)
        object.__setattr__(self, "names", names)
        for name, array in arrays.items():
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def to_json(self) -> dict[str, Any]:
        """Plain values; floats keep every bit, so that masks are the same after a resume."""
        return {
            "names": list(self.names),
            "work_s": self.work_s.tolist(),
            "forward_order": self.forward_order.tolist(),
            "groups": self.groups.tolist(),
            "used": self.used.tolist(),
            "palette_size": self.palette_size,
            "reentrant": self.reentrant,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ParameterWork:
        """What ``to_json`` made; KeyError, TypeError or ValueError if it is something else."""
        return cls(
            data["names"],
            data["work_s"],
            data["forward_order"],
            data["groups"],
            data["used"],
            data["palette_size"],
            bool(data["reentrant"]),
        )

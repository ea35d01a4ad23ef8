"""Caps and prices of single parameters, given by patterns over their names: what each stage's come to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.freeze.parameters import Bools, Floats, ParameterWork
from timelyfreeze.planner import ParameterLimits, PlanOptions

_SHOWN = 5


class StageGroups(NamedTuple):
    """The caps on the freeze ratio of a stage's parameters, and its prices, both ``[num_parameters]``."""

    max_ratio: Floats
    weights: Floats

    def of(self, chosen: NDArray[np.intp]) -> StageGroups:
        """Those of some of the parameters."""
        return StageGroups(self.max_ratio[chosen], self.weights[chosen])


def check_patterns(options: PlanOptions, names: Iterable[str]) -> None:
    """Raise ValueError unless every pattern is the first that matches some parameter; says which is not.

    >>> check_patterns(PlanOptions(parameter_max_ratio={"*norm*": 0.0}), ["0.weight", "1.norm.weight"])
    """
    names = list(names)
    faults = []
    for option, patterns in (
        ("parameter_max_ratio", options.parameter_max_ratio or {}),
        ("parameter_weights", options.parameter_weights or {}),
    ):
        used = {_first_match(patterns, name) for name in names}
        faults += [
            problem(
                f"the pattern {pattern!r} of {option} is for no parameter",
                expected="one that matches names which no earlier pattern matches",
                got="no parameters" if not names else ", ".join(names[:_SHOWN]) + (", ..." * (len(names) > _SHOWN)),
            )
            for pattern in patterns
            if pattern not in used
        ]
    raise_all(ValueError, faults)


def stage_groups(options: PlanOptions, stage: int, work: ParameterWork) -> StageGroups | None:
    """Caps and prices of a stage's parameters; None where no pattern is about one of them.

    A compiled stage has few masks: what has a cap of 0 is live in all of them, the rest is frozen together, within the
    smallest of its caps.
    """
    groups = []
    matched = False
    for patterns, default in (
        (options.parameter_max_ratio or {}, options.own_cap(stage, num_microbatches=1)),
        (options.parameter_weights or {}, (options.weights or {}).get(stage, 1.0)),
    ):
        found = [_first_match(patterns, name) for name in work.names]
        matched |= any(pattern is not None for pattern in found)
        groups.append(np.array([default if pattern is None else patterns[pattern] for pattern in found], np.float64))
    if not matched:
        return None
    caps, prices = groups
    if work.palette_size is not None:
        caps = np.where(caps > 0, caps[caps > 0].min(initial=1.0), 0.0)
    return StageGroups(caps, prices)


def with_limits(options: PlanOptions, works: Sequence[ParameterWork], trainable: Sequence[Bools]) -> PlanOptions:
    """The options with what the parameters' caps and prices come to in each stage, for its trainable parameters.

    Args:
        works: one a stage; none where they are not known yet.
    """
    limits = {}
    for stage, (work, flags) in enumerate(zip(works, trainable, strict=False)):
        groups = stage_groups(options, stage, work)
        counted = flags & (work.work_s > 0)  # what takes no time, such as an unused parameter, binds nothing
        if groups is None or not counted.any():
            continue
        caps, shares = groups.max_ratio[counted], work.work_s[counted] / work.work_s[counted].sum()
        least, most = float(caps.min()), float(caps.max())
        limits[stage] = ParameterLimits(
            least=least,
            mean=min(max(float(shares @ caps), least), most),
            most=most,
            price=float(shares @ groups.weights[counted]),
        )
    return replace(options, parameter_limits=limits)


def _first_match(patterns: Mapping[str, float], name: str) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)

"""What a plan is to achieve, and what it may give up for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.schedule.checks import is_number

MODES = ("cut", "lp")
GOALS = ("makespan", "period")
_BY_STAGE = ("stage_max_ratio", "weights", "parameter_limits")
_BY_PATTERN = ("parameter_max_ratio", "parameter_weights")


class ParameterLimits(NamedTuple):
    """What a stage whose parameters have caps and prices of their own may give up.

    Attributes:
        least, mean, most: of the caps of its parameters; the mean is weighted by their work.
        price: the mean of their prices, weighted likewise.
    """

    least: float
    mean: float
    most: float
    price: float


@dataclass(frozen=True)
class PlanOptions:
    """How to plan; checked when it is made.

    Attributes:
        max_ratio: cap on every stage's mean freeze ratio, in [0, 1].
        mode: ``"cut"``: each micro-batch's cut is chosen together with the ratios, so that below it no backward runs.
            ``"lp"``: TimelyFreeze's linear program (arXiv 2602.05754), which knows no cuts; then the lowest stage's
            ratios are dealt out by whole micro-batches, which are cut there.
        goal: ``"makespan"``: the least time of a step, which ends with a flush. ``"period"``: the least time from batch
            to batch where nothing is flushed (``AsyncPipeline``). Without bubbles freezing pays by balance: linear
            programs minimise the largest sum of a rank's durations, a simulated stream judges what they find, and all
            that is called a makespan is from batch to batch.
        stage_max_ratio: caps of single stages, instead of ``max_ratio``.
        weights: the price of a stage's freeze ratio, at least 0; those left out cost 1. Among plans that are equally
            fast, or that reach ``target_makespan_s``, the cheapest is taken.
        target_makespan_s: freeze as little as reaches this time, instead of as much as the caps allow.
        live_microbatches: every parameter is to see the gradients of this many micro-batches in a step; then the cap is
            1 - k / M for every stage, and ``max_ratio`` does not count.
        parameter_max_ratio: caps of single parameters: shell patterns (``"*norm*"``) over the names that
            ``pipe.named_parameters()`` gives, of which the first that matches counts. A parameter with a cap of 0 is
            live in every micro-batch. Others have their stage's cap.
        parameter_weights: prices of single parameters, by patterns likewise; others have their stage's price.
        parameter_limits: what these two come to, for every stage that they are about. Training fills it in, once it
            knows how the work is shared out; a planner obeys this alone.
        min_live_ratio: share of the work of the highest stage that trains which is live in every micro-batch, in
            [0, 1]. A micro-batch that trained nothing would be a smaller batch, paid for in full.
        floor_ratio: every parameter is live in at least this share of what the cap leaves, ``floor_ratio (1 - cap)`` of
            the micro-batches. With 0 the bottom of a stage may stay frozen for ever.

    Raises:
        ValueError, TypeError: an option is out of range or of another type; every fault is in the message.

    >>> PlanOptions(stage_max_ratio={3: 0.0}).cap(3, num_microbatches=8)
    0.0
    """

    max_ratio: float = 0.3
    mode: str = "cut"
    stage_max_ratio: Mapping[int, float] | None = None
    weights: Mapping[int, float] | None = None
    target_makespan_s: float | None = None
    live_microbatches: int | None = None
    min_live_ratio: float = 0.25
    floor_ratio: float = 0.5
    parameter_max_ratio: Mapping[str, float] | None = None
    parameter_weights: Mapping[str, float] | None = None
    parameter_limits: Mapping[int, ParameterLimits] | None = None
    goal: str = "makespan"

    def __post_init__(self) -> None:
        kinds = dict.fromkeys(_BY_STAGE, "stage") | dict.fromkeys(_BY_PATTERN, "pattern")
        types = [
            problem(name, expected=f"a mapping from {kind} to number, or None", got=repr(getattr(self, name)))
            for name, kind in kinds.items()
            if not isinstance(getattr(self, name), Mapping | None)
        ]
        raise_all(TypeError, types)
        raise_all(ValueError, self._faults())
        for name in kinds:
            items = (getattr(self, name) or {}).items()
            # Of patterns the first that matches counts, so their order stays.
            object.__setattr__(self, name, dict(sorted(items) if name in _BY_STAGE else items) or None)

    def to_json(self) -> dict[str, Any]:
        """What differs from the defaults, and the mode and the cap; JSON has only texts for keys."""
        default = asdict(PlanOptions())
        found = {
            name: value
            for name, value in asdict(self).items()
            if name in ("mode", "max_ratio") or value != default[name]
        }
        found["parameter_limits"] = {stage: list(limits) for stage, limits in (self.parameter_limits or {}).items()}
        return {
            name: {str(key): number for key, number in value.items()} if isinstance(value, dict) else value
            for name, value in found.items()
            if value != {}
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanOptions:
        """What ``to_json`` made; TypeError or ValueError if it is something else."""
        unknown = data.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(problem("unknown options of the plan", got=", ".join(sorted(unknown))))
        values = dict(data)
        for name in values.keys() & set(_BY_STAGE):
            values[name] = {int(stage): number for stage, number in values[name].items()}
        if "parameter_limits" in values:
            values["parameter_limits"] = {
                stage: ParameterLimits(*limits) for stage, limits in values["parameter_limits"].items()
            }
        return cls(**values)

    def _faults(self) -> list[str]:
        shares = {name: getattr(self, name) for name in ("max_ratio", "min_live_ratio", "floor_ratio")}
        for name in ("stage_max_ratio", "parameter_max_ratio"):
            shares |= {f"{name}[{key!r}]": cap for key, cap in (getattr(self, name) or {}).items()}
        faults = [
            problem(name, expected="a number in [0, 1]", got=repr(value))
            for name, value in shares.items()
            if not is_number(value) or not 0 <= value <= 1
        ]
        faults += [
            problem(f"{name}[{key!r}]", expected="a finite number, at least 0", got=repr(price))
            for name in ("weights", "parameter_weights")
            for key, price in (getattr(self, name) or {}).items()
            if not is_number(price) or not 0 <= price < math.inf
        ]
        for name in _BY_STAGE:
            odd = [stage for stage in getattr(self, name) or () if type(stage) is not int or stage < 0]
            faults += [problem(f"a stage of {name}", expected="a whole number from 0", got=repr(odd[0]))] if odd else []
        for name in _BY_PATTERN:
            odd = [pattern for pattern in getattr(self, name) or () if not isinstance(pattern, str)]
            faults += [problem(f"a pattern of {name}", expected="a text", got=repr(odd[0]))] if odd else []
        faults += [
            problem(f"parameter_limits[{stage!r}]", expected="0 <= least <= mean <= most <= 1", got=repr(limits))
            for stage, limits in (self.parameter_limits or {}).items()
            if not 0 <= limits.least <= limits.mean <= limits.most <= 1
        ]
        if self.mode not in MODES:
            faults.append(problem("unknown mode", expected=f"one of {', '.join(MODES)}", got=repr(self.mode)))
        if self.goal not in GOALS:
            faults.append(problem("unknown goal", expected=f"one of {', '.join(GOALS)}", got=repr(self.goal)))
        target, live = self.target_makespan_s, self.live_microbatches
        if target is not None and not (is_number(target) and 0 < target < math.inf):
            faults.append(problem("target_makespan_s", expected="seconds above 0, or None", got=repr(target)))
        if live is not None and (type(live) is not int or live < 1):
            faults.append(problem("live_microbatches", expected="a whole number from 1, or None", got=repr(live)))
        if target is not None and self.goal == "period":
            faults.append(problem('goal "period" and target_makespan_s exclude each other', hint="Leave one out."))
        for name in ("stage_max_ratio", *_BY_PATTERN):
            if live is not None and getattr(self, name):
                faults.append(
                    problem(f"live_microbatches and {name} exclude each other", hint="Leave one of them out.")
                )
        return faults

    def own_cap(self, stage: int, num_microbatches: int) -> float:
        """The cap on a stage's mean freeze ratio, and of its parameters that have none of their own."""
        if self.live_microbatches is not None:
            return 1.0 - self.live_microbatches / num_microbatches
        return float((self.stage_max_ratio or {}).get(stage, self.max_ratio))

    def cap(self, stage: int, num_microbatches: int) -> float:
        """The cap on a stage's mean freeze ratio: what its parameters' caps come to, where they have their own."""
        limits = (self.parameter_limits or {}).get(stage)
        return self.own_cap(stage, num_microbatches) if limits is None else limits.mean

    def caps(self, num_stages: int, num_microbatches: int) -> list[float]:
        """The cap on every stage's mean freeze ratio.

        Raises:
            ValueError: an option is about a stage that is not there, or more micro-batches are to be live than a step
                has.
        """
        faults = []
        for name in _BY_STAGE:
            beyond = [stage for stage in getattr(self, name) or () if stage >= num_stages]
            if beyond:
                faults.append(problem(f"a stage of {name}", expected=f"0 to {num_stages - 1}", got=beyond[0]))
        if self.live_microbatches is not None and self.live_microbatches > num_microbatches:
            faults.append(
                problem(
                    "more micro-batches are to be live than a step has",
                    expected=f"live_microbatches of at most {num_microbatches}",
                    got=self.live_microbatches,
                    hint="Take more micro-batches.",
                )
            )
        raise_all(ValueError, faults)
        return [self.cap(stage, num_microbatches) for stage in range(num_stages)]

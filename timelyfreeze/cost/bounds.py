"""How long every action takes: with nothing frozen, and with everything of its own frozen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from statistics import median
from typing import Any

from timelyfreeze.errors import PlanError, problem, raise_all
from timelyfreeze.files import load_json, write_atomically
from timelyfreeze.schedule import Action, Kind, Schedule
from timelyfreeze.schedule.checks import Transfers, check_transfers, is_time, some

_FORMAT = "timelyfreeze-costs"
_VERSION = 1

Bounds = dict[tuple[int, Kind], tuple[float, float]]


@dataclass(frozen=True)
class ActionCosts:
    """Durations of a schedule's actions, float64 seconds.

    Attributes:
        upper_s: of every action, with nothing frozen.
        lower_s: of backward actions, with the stage's own weights all frozen and the input gradient still computed;
            0 in stage 0, which needs none. An action that is left out has its upper bound here as well. Only B and W
            can be frozen; of other kinds the upper bound counts.
        transfer_s: between ranks: one number, or by (from stage, to stage).

    Raises:
        ValueError: a bound is not a finite number of seconds of at least 0, a lower bound is above its upper one, or
            belongs to no action. Every fault is in the message.

    >>> costs = ActionCosts({Action.parse("0F0"): 0.015, Action.parse("0B0"): 0.043}, {Action.parse("0B0"): 0.0})
    >>> costs.is_freezable(Action.parse("0B0")), costs.is_freezable(Action.parse("0F0"))
    (True, False)
    """

    upper_s: Mapping[Action, float]
    lower_s: Mapping[Action, float] = field(default_factory=dict)
    transfer_s: Transfers = 0.0

    def __post_init__(self) -> None:
        faults = []
        for name, bounds in (("upper_s", self.upper_s), ("lower_s", self.lower_s)):
            if not isinstance(bounds, Mapping):
                raise TypeError(problem(name, expected="a mapping from Action to seconds", got=type(bounds).__name__))
            odd = [repr(action) for action in bounds if not isinstance(action, Action)]
            if odd:
                raise TypeError(problem(f"keys of {name}", expected="Action", got=some(odd)))
            bad = [f"{action}: {time!r}" for action, time in bounds.items() if not is_time(time)]
            if bad:
                faults.append(problem(name, expected="finite seconds, at least 0", got=some(bad)))
        raise_all(ValueError, faults)
        unknown = [str(action) for action in self.lower_s if action not in self.upper_s]
        if unknown:
            faults.append(problem("lower_s has actions that upper_s lacks", got=some(unknown)))
        crossed = [
            f"{action}: {low!r} > {self.upper_s[action]!r}"
            for action, low in self.lower_s.items()
            if action in self.upper_s and low > self.upper_s[action]
        ]
        if crossed:
            faults.append(problem("lower bounds above upper bounds", got=some(crossed)))
        raise_all(ValueError, faults)
        check_transfers(self.transfer_s)
        lower = {action: self.lower_s.get(action, upper) for action, upper in self.upper_s.items()}
        object.__setattr__(self, "upper_s", {action: float(time) for action, time in self.upper_s.items()})
        object.__setattr__(self, "lower_s", {action: float(time) for action, time in lower.items()})
        transfers = self.transfer_s
        plain = (
            {pair: float(t) for pair, t in transfers.items()} if isinstance(transfers, Mapping) else float(transfers)
        )
        object.__setattr__(self, "transfer_s", plain)

    @classmethod
    def uniform(
        cls,
        schedule: Schedule,
        *,
        forward_s: float | Sequence[float],
        backward_s: float | Sequence[float],
        frozen_backward_s: float | Sequence[float],
        transfer_s: Transfers = 0.0,
    ) -> ActionCosts:
        """The same times for every micro-batch.

        A split backward is charged as the frozen one (I) and what that leaves of the whole (W). Stage 0 needs no input
        gradient, so its B can shrink to nothing.

        Args:
            forward_s, backward_s, frozen_backward_s: seconds, one number or one a stage.

        Raises:
            ValueError: the wrong number of stages, or what the class itself refuses.

        >>> from timelyfreeze.schedule import create_schedule
        >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=1)
        >>> costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=2.0, frozen_backward_s=[1.0, 1.2])
        >>> costs.lower_s[Action.parse("0B0")], costs.lower_s[Action.parse("1B0")]
        (0.0, 1.2)
        """
        given = {"forward_s": forward_s, "backward_s": backward_s, "frozen_backward_s": frozen_backward_s}
        by_stage = {
            name: list(times) if isinstance(times, Sequence) else [times] * schedule.num_stages
            for name, times in given.items()
        }
        raise_all(
            ValueError,
            [
                problem(name, expected=f"one time or {schedule.num_stages}, one a stage", got=f"{len(times)} times")
                for name, times in by_stage.items()
                if len(times) != schedule.num_stages
            ],
        )
        forward, backward, frozen = by_stage.values()
        upper, lower = {}, {}
        for action in schedule.actions:
            stage, kind, _ = action
            upper[action] = {
                Kind.F: forward[stage],
                Kind.B: backward[stage],
                Kind.I: frozen[stage],
                Kind.W: backward[stage] - frozen[stage],
            }[kind]
            if kind is Kind.B:
                lower[action] = frozen[stage] if stage else 0.0
            elif kind is Kind.W:
                lower[action] = 0.0
        return cls(upper, lower, transfer_s)

    def adapted(self, schedule: Schedule) -> ActionCosts:
        """These costs for another schedule of the same stages: every stage's kind of action takes its median.

        Where that schedule splits backwards and these costs know whole ones, I takes the whole one's lower bound, and W
        what that leaves of it. Stage 0's, which has none, is put at the other stages' share of the whole. Where it has
        whole ones and these costs know their parts, they take as long as both.

        Raises:
            ValueError: the schedule has other stages, or a kind of action that these costs do not have.

        >>> from timelyfreeze.schedule import create_schedule
        >>> small, large = (create_schedule("1f1b", num_ranks=1, num_microbatches=m) for m in (2, 3))
        >>> ActionCosts({action: 2.0 for action in small.actions}).adapted(large).upper_s[Action.parse("0F2")]
        2.0
        """
        bounds = _medians(self)
        num_stages = 1 + max((stage for stage, _ in bounds), default=-1)
        if num_stages != schedule.num_stages:
            raise ValueError(
                problem("the costs are of another model", expected=f"{schedule.num_stages} stages", got=num_stages)
            )
        for stage, kind in {(action.stage, action.kind) for action in schedule.actions} - bounds.keys():
            if kind in (Kind.I, Kind.W) and (stage, Kind.B) in bounds:
                bounds[stage, kind] = _split(bounds, stage)[kind]
            elif kind is Kind.B and {(stage, Kind.I), (stage, Kind.W)} <= bounds.keys():
                bounds[stage, kind] = _joined(bounds, stage)
        missing = {f"stage {a.stage} {a.kind.value}" for a in schedule.actions if (a.stage, a.kind) not in bounds}
        if missing:
            raise ValueError(problem("costs lack times for the schedule", got=some(sorted(missing))))
        times = {action: bounds[action.stage, action.kind] for action in schedule.actions}
        return ActionCosts(
            {action: upper for action, (upper, _) in times.items()},
            {action: lower for action, (_, lower) in times.items()},
            self.transfer_s,
        )

    def is_freezable(self, action: Action) -> bool:
        """Whether freezing can shorten the action: kind B or W, with its lower bound below its upper one."""
        return action.kind in (Kind.B, Kind.W) and self.lower_s[action] < self.upper_s[action]

    def check(self, schedule: Schedule) -> None:
        """Raise ValueError unless the costs are those of exactly this schedule's actions."""
        known = set(schedule.actions)
        faults = []
        missing = [str(action) for action in schedule.actions if action not in self.upper_s]
        unknown = [str(action) for action in self.upper_s if action not in known]
        if missing:
            faults.append(problem("costs lack actions of the schedule", got=some(missing), where=schedule.name))
        if unknown:
            faults.append(
                problem("costs have actions that are not in the schedule", got=some(unknown), where=schedule.name)
            )
        raise_all(ValueError, faults)
        check_transfers(self.transfer_s, schedule.num_stages)

    def to_json(self) -> dict[str, Any]:
        """The costs as JSON values; floats keep every bit. Lower bounds that equal the upper ones are left out."""
        transfers = self.transfer_s
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "transfer_s": {f"{a}>{b}": time for (a, b), time in transfers.items()}
            if isinstance(transfers, Mapping)
            else transfers,
            "upper_s": {str(action): time for action, time in self.upper_s.items()},
            "lower_s": {str(a): time for a, time in self.lower_s.items() if time != self.upper_s[a]},
        }

    @classmethod
    def from_json(cls, data: object) -> ActionCosts:
        """Read what ``to_json`` made; PlanError if it is something else."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise PlanError(problem("not action costs", expected=f'an object with "format": "{_FORMAT}"'))
        if data.get("version") != _VERSION:
            raise PlanError(
                problem("action costs of another version", expected=_VERSION, got=repr(data.get("version")))
            )
        try:
            transfers = data["transfer_s"]
            if isinstance(transfers, dict):
                transfers = {_parse_pair(pair): time for pair, time in transfers.items()}
            upper, lower = (
                {Action.parse(text): time for text, time in data[name].items()} for name in ("upper_s", "lower_s")
            )
            return cls(upper, lower, transfers)
        except KeyError as error:
            raise PlanError(problem("action costs lack a field", expected=str(error))) from error
        except (AttributeError, TypeError, ValueError) as error:
            raise PlanError(f"damaged action costs: {error}") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write the costs as JSON, whole or not at all."""
        write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ActionCosts:
        """Read a file that ``save`` wrote.

        Raises:
            PlanError: it holds something else; names the file and what is wrong.
            OSError: it cannot be read.
        """
        return load_json(path, cls.from_json)


def _parse_pair(text: str) -> tuple[int, int]:
    before, _, after = text.partition(">")
    return int(before), int(after)


def _medians(costs: ActionCosts) -> Bounds:
    """(upper, lower) bound of every stage's kind of action: medians over micro-batches, in seconds."""
    groups: dict[tuple[int, Kind], list[Action]] = {}
    for action in costs.upper_s:
        groups.setdefault((action.stage, action.kind), []).append(action)
    return {
        group: (
            median(costs.upper_s[action] for action in actions),
            median(costs.lower_s[action] for action in actions),
        )
        for group, actions in groups.items()
    }


def _joined(bounds: Bounds, stage: int) -> tuple[float, float]:
    """(upper, lower) bound of a stage's B from those of its I and W; stage 0 needs no input gradient."""
    (input_s, _), (upper, lower) = bounds[stage, Kind.I], bounds[stage, Kind.W]
    return input_s + upper, input_s + lower if stage else 0.0


def _split(bounds: Bounds, stage: int) -> dict[Kind, tuple[float, float]]:
    """(upper, lower) bounds of a stage's I and W from those of its B."""
    upper, lower = bounds[stage, Kind.B]
    if stage == 0:
        shares = [low / up for (other, kind), (up, low) in bounds.items() if other and kind is Kind.B and up > 0]
        lower = upper * (median(shares) if shares else 0.5)
    return {Kind.I: (lower, lower), Kind.W: (upper - lower, 0.0)}

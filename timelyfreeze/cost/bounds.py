"""How long every action takes: with nothing frozen, and with everything of its own frozen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

from timelyfreeze.errors import PlanError, problem, raise_all
from timelyfreeze.files import read_json, write_atomically
from timelyfreeze.schedule import Action, Kind, Schedule
from timelyfreeze.schedule.checks import Transfers, check_transfers, is_time, some

_FORMAT = "timelyfreeze-costs"
_VERSION = 1


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
        data = read_json(path)
        try:
            return cls.from_json(data)
        except PlanError as error:
            raise PlanError(f"{fspath(path)}: {error}") from error


def _parse_pair(text: str) -> tuple[int, int]:
    before, _, after = text.partition(">")
    return int(before), int(after)

"""measured.json: of every run of a job one real step, action by action, for people to look at. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from timelyfreeze.cli.errors import CommandError
from timelyfreeze.errors import PlanError, ScheduleError, problem, raise_all
from timelyfreeze.files import read_json, write_atomically
from timelyfreeze.schedule import Action, Kind, Schedule
from timelyfreeze.schedule.checks import is_time, some

_FORMAT = "timelyfreeze-measured"
_VERSION = 1


@dataclass(frozen=True)
class MeasuredRun:
    """One step of one run.

    Attributes:
        name: of the run: ``plain``, ``timelyfreeze``, ``lp`` or ``fewer``.
        schedule: what its ranks did.
        step, phase: which step this was.
        start_s, end_s: of every action, seconds since the step began.
        skipped: backward actions that did not run, below their micro-batch's cut.
        ratios: planned freeze ratio by action; empty where the step followed no plan, or not yet at full strength.

    >>> schedule = Schedule([["0F0", "0B0"], ["1F0", "1B0"]])
    >>> start_s = {action: 0.0 for action in schedule.actions}
    >>> MeasuredRun("plain", schedule, 9, "steady", start_s, start_s, frozenset([Action.parse("0B0")]), {}).cuts
    [1]
    """

    name: str
    schedule: Schedule
    step: int
    phase: str
    start_s: Mapping[Action, float]
    end_s: Mapping[Action, float]
    skipped: frozenset[Action]
    ratios: Mapping[Action, float]

    @property
    def cuts(self) -> list[int]:
        """For every micro-batch, the lowest stage whose backward ran; ``num_stages`` where none did."""
        cuts = [self.schedule.num_stages] * self.schedule.num_microbatches
        for action in self.schedule.actions:
            if action.kind is not Kind.F and action not in self.skipped:
                cuts[action.microbatch] = min(cuts[action.microbatch], action.stage)
        return cuts

    def to_json(self) -> dict[str, Any]:
        """As JSON values; ``from_json`` reads them."""
        return {
            "name": self.name,
            "step": self.step,
            "phase": self.phase,
            "schedule": {
                "name": self.schedule.name,
                "ranks": [" ".join(map(str, order)) for order in self.schedule.ranks],
            },
            "start_s": {str(action): time_s for action, time_s in self.start_s.items()},
            "end_s": {str(action): time_s for action, time_s in self.end_s.items()},
            "skipped": sorted(map(str, self.skipped)),
            "ratios": {str(action): ratio for action, ratio in self.ratios.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> MeasuredRun:
        """Read ``to_json``'s form.

        Raises:
            KeyError, TypeError, AttributeError, ValueError, ScheduleError: it is something else.
        """
        run = cls(
            name=data["name"],
            schedule=Schedule([order.split() for order in data["schedule"]["ranks"]], name=data["schedule"]["name"]),
            step=data["step"],
            phase=data["phase"],
            start_s={Action.parse(text): time_s for text, time_s in data["start_s"].items()},
            end_s={Action.parse(text): time_s for text, time_s in data["end_s"].items()},
            skipped=frozenset(map(Action.parse, data["skipped"])),
            ratios={Action.parse(text): ratio for text, ratio in data["ratios"].items()},
        )
        raise_all(ValueError, run._faults())
        return run

    def _faults(self) -> list[str]:
        names = (self.name, self.phase, self.schedule.name)
        faults = [problem("a name", expected="text", got=repr(name)) for name in names if not isinstance(name, str)]
        if type(self.step) is not int or self.step < 0:
            faults.append(problem("step", expected="a count", got=repr(self.step)))
        known = set(self.schedule.actions)
        for name, times_s in (("start_s", self.start_s), ("end_s", self.end_s)):
            if times_s.keys() != known:
                odd = [str(action) for action in sorted(times_s.keys() ^ known)]
                faults.append(problem(name, expected="exactly the schedule's actions", got=f"other by {some(odd)}"))
            bad = [f"{action}: {time_s!r}" for action, time_s in times_s.items() if not is_time(time_s)]
            faults += [problem(name, expected="finite seconds, at least 0", got=some(bad))] if bad else []
        backwards = {action for action in known if action.kind is not Kind.F}
        for name, actions in (("skipped", self.skipped), ("ratios", self.ratios.keys())):
            strange = [str(action) for action in sorted(actions - backwards)]
            faults += [problem(name, expected="backward actions", got=some(strange))] if strange else []
        bad = [f"{action}: {ratio!r}" for action, ratio in self.ratios.items() if not (is_time(ratio) and ratio <= 1)]
        faults += [problem("ratios", expected="numbers in [0, 1]", got=some(bad))] if bad else []
        if not faults:
            late = [str(action) for action in self.schedule.actions if self.end_s[action] < self.start_s[action]]
            faults += [problem("end_s", expected="no action to end before it starts", got=some(late))] if late else []
        return faults


def write_measured(path: str | PathLike[str], runs: Iterable[MeasuredRun]) -> None:
    """Write the runs as JSON, whole or not at all; OSError if the folder cannot be written."""
    data = {"format": _FORMAT, "version": _VERSION, "runs": [run.to_json() for run in runs]}
    write_atomically(path, json.dumps(data, indent=1) + "\n")


def read_measured(path: str | PathLike[str]) -> list[MeasuredRun]:
    """Read what ``write_measured`` wrote. A file that is not there yet holds no runs.

    Raises:
        CommandError: it cannot be read or holds something else; names the file and what is wrong.
    """
    if not Path(path).exists():
        return []
    try:
        data = read_json(path)
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(problem("not measured steps", expected=f'an object with "format": "{_FORMAT}"'))
        if data.get("version") != _VERSION:
            raise ValueError(problem("another version", expected=_VERSION, got=repr(data.get("version"))))
        return [MeasuredRun.from_json(run) for run in data["runs"]]
    except KeyError as error:
        raise _damaged(path, f"no field {error}") from error
    except (AttributeError, OSError, PlanError, ScheduleError, TypeError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: str | PathLike[str], what: str) -> CommandError:
    return CommandError(
        problem(
            "the measured steps cannot be read",
            got=what,
            where=f"'{fspath(path)}'",
            hint="Delete the file; a job that goes on writes it anew.",
        )
    )

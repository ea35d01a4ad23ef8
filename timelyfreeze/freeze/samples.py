"""Measured durations of a running job, and the bounds that they amount to."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.cost import ActionCosts, Measured, summarize
from timelyfreeze.errors import PlanError, problem, raise_all
from timelyfreeze.freeze.phases import MEASURE_LOWER, MEASURE_UPPER
from timelyfreeze.schedule import Action, Kind, Schedule

Durations = Mapping[Action, float]

_SHOWN = 5
# Of normal noise with deviation s: the median of |a - b| is 0.6745 sqrt(2) s, a median of n varies by pi/2 s^2 / n.
_PAIR_SCALE = 1.0 / (0.674490 * math.sqrt(2.0))
_MEDIAN_VARIANCE = math.pi / 2.0


class BoundSamples:
    """Durations from the measuring phases, float64 seconds.

    Forwards count always; backwards as upper bounds only from steps that froze nothing, as lower bounds only where
    their micro-batch was frozen.
    """

    def __init__(self) -> None:
        self._samples: dict[str, dict[Action, list[float]]] = {name: {} for name in ("forward", "upper", "lower")}
        self._transfers: dict[tuple[int, int], list[float]] = {}

    def add(self, durations_s: Durations, phase: str, frozen: NDArray[np.bool_]) -> None:
        """Take in a step of phase ``measure_upper`` or ``measure_lower``; ``frozen`` tells the micro-batches."""
        for action, time_s in durations_s.items():
            if action.kind is Kind.F:
                kind = "forward"
            elif phase == MEASURE_UPPER:
                kind = "upper"
            elif phase == MEASURE_LOWER and frozen[action.microbatch]:
                kind = "lower"
            else:
                continue
            self._samples[kind].setdefault(action, []).append(float(time_s))

    def add_transfers(self, transfers_s: Mapping[tuple[int, int], Sequence[float]]) -> None:
        """Take in how long data was on its way between ranks, by (from stage, to stage)."""
        for ends, times in transfers_s.items():
            self._transfers.setdefault(ends, []).extend(float(time) for time in times)

    def clear(self) -> None:
        """Forget everything: a new measurement begins."""
        for samples in self._samples.values():
            samples.clear()
        self._transfers.clear()

    def medians(self) -> dict[str, dict[Action, Measured]]:
        """Median, spread and number of samples: under "upper" (with forwards) and "lower", by action."""
        upper = self._samples["forward"] | self._samples["upper"]
        return {"upper": summarize(upper), "lower": summarize(self._samples["lower"])}

    def costs(self, schedule: Schedule, trains: Sequence[bool], transfer_s: Any = 0.0) -> ActionCosts:
        """The bounds of every action.

        Where nothing trains at or below a stage, its backward takes no time. In the lowest stage that trains the lower
        bound is 0: it needs no input gradient. In a stage that does not train, both bounds are the same.

        Args:
            transfer_s: between ranks, where it was not measured.

        Raises:
            PlanError: an action was not measured.
        """
        upper = _pooled(self._samples["forward"]) | _pooled(self._samples["upper"])
        measured_lower = _pooled(self._samples["lower"])
        lowest = next((stage for stage, stage_trains in enumerate(trains) if stage_trains), schedule.num_stages)
        lower = {}
        for action in schedule.actions:
            if action.kind is not Kind.F and action.stage < lowest:
                upper[action] = 0.0
            if action not in upper or action.kind not in (Kind.B, Kind.W) or not trains[action.stage]:
                continue
            if action.stage == lowest:
                lower[action] = 0.0
            elif action in measured_lower:
                lower[action] = min(measured_lower[action], upper[action])  # noise may put it above
        missing = [str(action) for action in schedule.actions if action not in upper]
        missing += [
            f"{a} (frozen)" for a in schedule.actions if a.kind is Kind.B and trains[a.stage] and a not in lower
        ]
        if missing:
            raise PlanError(
                problem(
                    "no plan: some actions were not measured",
                    expected="a duration of every action in some step of each measuring phase",
                    got=f"none of {', '.join(missing[:_SHOWN])}" + (" ..." if len(missing) > _SHOWN else ""),
                )
            )
        if self._transfers:
            transfer_s = {ends: float(np.median(times)) for ends, times in self._transfers.items()}
        return ActionCosts({action: upper[action] for action in schedule.actions}, lower, transfer_s)

    def to_json(self) -> dict[str, Any]:
        """Plain values; floats keep every bit."""
        data: dict[str, Any] = {
            kind: {str(action): list(times) for action, times in samples.items()}
            for kind, samples in self._samples.items()
        }
        data["transfers"] = [[*ends, times] for ends, times in self._transfers.items()]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BoundSamples:
        """What ``to_json`` made; KeyError, TypeError or ValueError if it is something else."""
        made = cls()
        for kind, samples in made._samples.items():
            samples.update({Action.parse(text): [float(t) for t in times] for text, times in data[kind].items()})
        for below, above, times in data.get("transfers", []):
            made._transfers[int(below), int(above)] = [float(time) for time in times]
        return made


def _pooled(samples: Mapping[Action, Sequence[float]]) -> dict[Action, float]:
    """Medians of all actions, those of a stage and kind pooled with each other."""
    together: defaultdict[tuple[int, Kind], dict[Action, Sequence[float]]] = defaultdict(dict)
    for action, times in samples.items():
        together[action.stage, action.kind][action] = times
    pooled: dict[Action, float] = {}
    for group in together.values():
        pooled.update(zip(group, shrunk_medians(list(group.values())), strict=True))
    return pooled


def shrunk_medians(samples: Sequence[Sequence[float]]) -> list[float]:
    """Medians of several groups of samples, drawn towards their common median as far as they differ by noise alone.

    The micro-batches of a stage do the same work unless they are of unequal size, and a lower bound has two or three
    samples of each. So a median of n samples, whose noise has the variance v = (pi/2) s^2 / n with s from the
    differences within groups, keeps the share t / (t + v) of its distance from the common median, t being by how much
    more the medians vary among each other than noise explains (empirical Bayes; Efron & Morris, 1973).

    >>> shrunk_medians([[1.0, 3.0], [2.0, 2.5], [1.5, 2.5]])
    [2.0, 2.0, 2.0]
    >>> [round(median, 2) for median in shrunk_medians([[1.0, 1.01], [1.0, 0.99], [5.0, 5.01]])]
    [1.0, 1.0, 5.0]
    """
    medians = np.array([np.median(times) for times in samples])
    differences = [abs(a - b) for times in samples for a, b in itertools.combinations(times, 2)]
    if len(medians) < 2 or not differences:
        return [float(median) for median in medians]
    deviation = float(np.median(differences)) * _PAIR_SCALE
    noise = _MEDIAN_VARIANCE * deviation**2 / np.array([len(times) for times in samples])
    signal = max(float(medians.var(ddof=1) - noise.mean()), 0.0)
    common = float(np.median(medians))
    kept = signal / np.maximum(signal + noise, np.finfo(np.float64).tiny)
    return [float(median) for median in common + kept * (medians - common)]


class RecentSteps:
    """The durations of the last few steps, by action.

    Args:
        schedule: whose actions.
        window: how many steps.
    """

    def __init__(self, schedule: Schedule, window: int) -> None:
        self._actions = list(schedule.actions)
        self._stage = np.array([action.stage for action in self._actions])
        self._num_stages = schedule.num_stages
        self._rows = np.full((window, len(self._actions)), np.nan)
        self._num_added = 0

    @property
    def full(self) -> bool:
        return self._num_added >= len(self._rows)

    def add(self, durations_s: Durations) -> None:
        """Take in a step; actions that are left out did not run."""
        row = np.fromiter((durations_s.get(action, np.nan) for action in self._actions), np.float64, len(self._actions))
        self._rows[self._num_added % len(self._rows)] = row
        self._num_added += 1

    def clear(self) -> None:
        """Forget everything."""
        self._rows[:] = np.nan
        self._num_added = 0

    def medians(self) -> dict[Action, Measured]:
        """Median, spread and number of samples of every action that ran."""
        samples = {}
        for action, column in zip(self._actions, self._rows.T, strict=True):
            times = column[~np.isnan(column)]
            if times.size:
                samples[action] = times.tolist()
        return summarize(samples)

    def stage_medians_s(self) -> NDArray[np.float64]:
        """The median over the steps of the time that each stage's actions take together, ``[num_stages]``."""
        per_step = np.zeros((len(self._rows), self._num_stages))
        np.add.at(per_step.T, self._stage, np.nan_to_num(self._rows).T)
        return np.asarray(np.median(per_step[: min(self._num_added, len(self._rows))], axis=0))

    def to_json(self) -> dict[str, Any]:
        """Plain values; None where an action did not run."""
        rows = [[None if math.isnan(time) else time for time in row] for row in self._rows.tolist()]
        return {"rows": rows[: self._num_added], "num_added": self._num_added}

    def load_json(self, data: Mapping[str, Any]) -> None:
        """Take over what ``to_json`` made; a window of another length starts anew."""
        rows = [[np.nan if time is None else time for time in row] for row in data["rows"]]
        self.clear()
        if rows and len(rows) == min(int(data["num_added"]), len(self._rows)):
            self._rows[: len(rows)] = rows
            self._num_added = int(data["num_added"])


def check_durations(durations_s: Durations, schedule: Schedule, known: Collection[Action]) -> None:
    """Raise ValueError unless these are finite times of actions of the schedule, ``known``."""
    unknown = [str(action) for action in durations_s if action not in known]
    bad = [f"{action}: {time!r}" for action, time in durations_s.items() if not (math.isfinite(time) and time >= 0)]
    faults = []
    if unknown:
        faults.append(problem("durations of unknown actions", got=", ".join(unknown[:_SHOWN]), where=schedule.name))
    if bad:
        faults.append(problem("durations_s", expected="finite seconds, at least 0", got=", ".join(bad[:_SHOWN])))
    raise_all(ValueError, faults)

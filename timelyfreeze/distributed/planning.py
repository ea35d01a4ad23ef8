"""One rank solves, all ranks get the same plan at the same step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import PlanError
from timelyfreeze.planner import BackgroundPlanner, Plan, PlanOptions
from timelyfreeze.schedule import Schedule


class SharedPlanner:
    """A planner whose plans come from one rank.

    The controllers of all ranks start it alike, since they see the same durations. Only the solving rank makes plans;
    before each step its ``news`` go to all ranks, itself among them, which take plans from there only. So every rank
    takes a plan at the same step, whenever it was found.

    Args:
        schedule, options: as for ``BackgroundPlanner``.
        solves: whether this rank makes the plans.

    >>> from timelyfreeze.schedule import create_schedule
    >>> SharedPlanner(create_schedule("1f1b", num_ranks=2, num_microbatches=2), None, solves=False).news() is None
    True
    """

    def __init__(self, schedule: Schedule, options: PlanOptions | None, *, solves: bool) -> None:
        self._solver = BackgroundPlanner(schedule, options) if solves else None
        self._is_busy = False
        self._plan: Plan | None = None
        self._error: str | None = None

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    def start(self, costs: ActionCosts, options: PlanOptions | None = None) -> None:
        self._is_busy, self._plan, self._error = True, None, None
        if self._solver is not None:
            self._solver.start(costs, options)

    def take(self) -> Plan | None:
        plan, self._plan = self._plan, None
        if plan is None and self._error is not None:
            error, self._error = self._error, None
            raise PlanError(error)
        return plan

    def cancel(self) -> None:
        self._is_busy, self._plan, self._error = False, None, None
        if self._solver is not None:
            self._solver.cancel()

    def close(self) -> None:
        self.cancel()
        if self._solver is not None:
            self._solver.close()

    def news(self) -> dict[str, Any] | None:
        """On the rank that solves: what it has found since, as plain data; None where nothing is being solved."""
        if self._solver is None or not self._is_busy:
            return None
        is_busy = self._solver.is_busy  # before taking: what is found after that comes next time
        found: Plan | None = None
        error = None
        try:
            found = self._solver.take()
        except Exception as problem:  # whatever it is, training goes on and the report tells
            error = f"{type(problem).__name__}: {problem}"
        return {"busy": is_busy or found is not None, "plan": found and found.to_json(), "error": error}

    def receive(self, news: Mapping[str, Any] | None) -> None:
        """Take in what the solving rank's ``news`` were, on every rank."""
        if news is None or not self._is_busy:
            return
        if news["plan"] is not None:
            self._plan = Plan.from_json(news["plan"])
        self._error = news["error"]
        self._is_busy = news["busy"]

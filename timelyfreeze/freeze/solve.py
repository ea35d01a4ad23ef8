"""The plan that is being made while training goes on."""

from __future__ import annotations

from typing import Protocol

from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import Plan


class PlansInBackground(Protocol):
    """What makes plans: ``timelyfreeze.planner.BackgroundPlanner``, or something that asks another rank for them."""

    def start(self, costs: ActionCosts) -> None:
        """Begin to make a plan; one in the making is dropped."""

    def take(self) -> Plan | None:
        """The plan, once; None while it is in the making. Raises what making it raised."""

    def cancel(self) -> None:
        """Give up the plan in the making, without waiting."""

    def close(self) -> None:
        """End for good."""


class PendingPlan:
    """At most one plan in the making, or made and waiting for its step.

    Args:
        planner: makes it.

    Attributes:
        costs: what it is made for; None: none is asked for.
    """

    def __init__(self, planner: PlansInBackground) -> None:
        self._planner = planner
        self._outcome: Plan | Exception | None = None
        self.costs: ActionCosts | None = None

    def start(self, costs: ActionCosts, plan: Plan | None = None) -> None:
        """Ask for a plan; ``plan`` if it was made before a checkpoint."""
        self.drop()
        self.costs, self._outcome = costs, plan
        if plan is None:
            self._planner.start(costs)

    def poll(self) -> Plan | Exception | None:
        """The plan, or why there is none; None while it is in the making. May be asked again."""
        if self.costs is not None and self._outcome is None:
            try:
                self._outcome = self._planner.take()
            except Exception as error:  # whatever it is, training goes on and the report tells
                self._outcome = error
        return self._outcome

    def drop(self) -> None:
        """Forget it."""
        if self.costs is not None:
            self._planner.cancel()
        self.costs = self._outcome = None

    def close(self) -> None:
        """Forget it, and end what makes plans."""
        self.drop()
        self._planner.close()

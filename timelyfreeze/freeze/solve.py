"""The plan that is being made while training goes on."""

from __future__ import annotations

from typing import Protocol

from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import Plan, PlanOptions


class PlansInBackground(Protocol):
    """What makes plans: ``timelyfreeze.planner.BackgroundPlanner``, or something that asks another rank for them."""

    @property
    def is_busy(self) -> bool:
        """Whether a plan, or a better one, is in the making."""

    def start(self, costs: ActionCosts, options: PlanOptions | None = None) -> None:
        """Begin to make a plan; one in the making is dropped. Without ``options`` those of before hold."""

    def take(self) -> Plan | None:
        """The newest plan that was not taken yet, if there is one. Raises what making it raised."""

    def cancel(self) -> None:
        """Give up the plan in the making, without waiting."""

    def close(self) -> None:
        """End for good."""


class PendingPlan:
    """The best plan made so far for some bounds, while the planner may be looking for a better one.

    Args:
        planner: makes it.

    Attributes:
        costs, options: what plans are made for; costs None: none is asked for.
    """

    def __init__(self, planner: PlansInBackground) -> None:
        self._planner = planner
        self._outcome: Plan | Exception | None = None
        self.costs: ActionCosts | None = None
        self.options: PlanOptions | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a plan, or a better one, may still come."""
        return self.costs is not None and self._planner.is_busy

    def start(
        self, costs: ActionCosts, options: PlanOptions, plan: Plan | None = None, *, improve: bool = True
    ) -> None:
        """Ask for plans.

        Args:
            plan: one that was made for these bounds before a checkpoint.
            improve: with ``plan``, whether to look for a better one.
        """
        self.drop()
        self.costs, self.options, self._outcome = costs, options, plan
        if plan is None or improve:
            self._planner.start(costs, options)

    def poll(self) -> Plan | Exception | None:
        """The best plan so far, or why there is none; None while the first is in the making. May be asked again."""
        if self.costs is None or isinstance(self._outcome, Exception):
            return self._outcome
        try:
            newest = self._planner.take()
        except Exception as error:  # whatever it is, training goes on and the report tells
            newest = None
            self._outcome = self._outcome or error
        # Each plan is better than the one before, but for one that a checkpoint brought.
        if newest is not None and not (isinstance(self._outcome, Plan) and self._outcome.beats(newest)):
            self._outcome = newest
        return self._outcome

    def drop(self) -> None:
        """Forget it."""
        if self.costs is not None:
            self._planner.cancel()
        self.costs = self.options = self._outcome = None

    def close(self) -> None:
        """Forget it, and end what makes plans."""
        self.drop()
        self._planner.close()

"""When what happens: warmup -> measure_upper -> measure_lower -> (solving) -> ramp -> steady, and measuring again.

Counted in steps, never in seconds; every phase ends after a number of steps that is known beforehand, also when no plan
comes. While a plan is being solved for, training goes on with the last plan ("steady"), or with nothing frozen where
there is none yet ("measure_lower"). A planner that goes on looking may find a better plan for the same bounds: it takes
effect in the same way, at a step that is stated beforehand, but only from "steady", when no ramp is under way.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from timelyfreeze.freeze.config import FreezeConfig
from timelyfreeze.planner import Plan

WARMUP = "warmup"
MEASURE_UPPER = "measure_upper"
MEASURE_LOWER = "measure_lower"
RAMP = "ramp"
STEADY = "steady"
PHASES = (WARMUP, MEASURE_UPPER, MEASURE_LOWER, RAMP, STEADY)

# A better plan for the same bounds is adopted if it predicts a step that is shorter by this share: a tenth of what
# freezing gains at a small cap. Predictions are off by more (up to 0.06), but alike for plans of the same bounds.
LEAST_GAIN_RATIO = 0.01

_MAX_EVENTS = 1000
_MAX_DOUBLINGS = 10


def plan_id(plan: Plan | None) -> str | None:
    """Twelve hexadecimal digits that tell plans apart: of a hash of all they hold."""
    if plan is None:
        return None
    return hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()[:12]


class PhaseMachine:
    """Where a run stands, and which plan is in force. Steps are counted by the caller.

    Attributes:
        phase: one of ``PHASES``.
        start_step: when it began.
        plan: in force (in ``ramp``: being ramped up to).
        previous: what the ramp starts from; None: from nothing frozen.
        switch_step: the announced step at which the plan being solved for takes effect; None: none is.
        failure: why the last attempt gave no plan; None if it gave one.
        events: what happened, plain dictionaries with ``step`` and ``event``, at most the last 1000.
    """

    def __init__(self, config: FreezeConfig) -> None:
        self._config = config
        self.phase = WARMUP
        self.start_step = 0
        self.plan: Plan | None = None
        self.previous: Plan | None = None
        self.switch_step: int | None = None
        self.failure: str | None = None
        self.events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)
        self._delay_steps = 0
        self._solve_step = 0
        self._again_step = 0
        self._num_in_a_row = 0
        self._change_step: int | None = None
        if config.fixed_plan is not None:
            self.adopt(0, config.fixed_plan)
        elif config.warmup_steps == 0:
            self._enter(MEASURE_UPPER, 0)

    @property
    def solving(self) -> bool:
        """Whether a plan is being solved for."""
        return self.switch_step is not None

    @property
    def freezes_halves(self) -> bool:
        """Whether lower bounds are being measured in this step."""
        return self.phase == MEASURE_LOWER and not self.solving

    @property
    def follows_plan(self) -> bool:
        """Whether masks come from the plan."""
        return self.plan is not None and self.phase in (RAMP, STEADY)

    def begins_measuring(self, step: int) -> bool:
        """Whether ``step`` is the first of a new measurement."""
        return self.phase == MEASURE_UPPER and step == self.start_step

    def phase_step(self, step: int) -> int:
        """How many steps of this phase lie before ``step``."""
        return step - self.start_step

    def is_timed(self, step: int) -> bool:
        """Whether the step's durations are samples of a bound."""
        if self.phase == MEASURE_UPPER or self.freezes_halves:
            return self.phase_step(step) >= self._config.settle_steps
        return False

    def ramp_share(self, step: int) -> float:
        """How far the plan has replaced the previous one, in (0, 1]: k/(n+1) in the k-th of n ramp steps."""
        if self.phase != RAMP:
            return 1.0
        return min(1.0, (self.phase_step(step) + 1) / (self._config.ramp_steps + 1))

    def may_measure(self, step: int) -> bool:
        """Whether the last measurement is long enough ago for another one, and none is going on."""
        return self._config.fixed_plan is None and self.phase in (RAMP, STEADY) and step >= self._again_step

    def advance(self, step: int, next_step: int) -> bool:
        """After ``step`` finished steps, go to the next phase if it is time. True: the bounds are there, solve now.

        Args:
            next_step: that is to begin; where steps overlap, more have begun than finished.
        """
        lengths = {
            WARMUP: (self._config.warmup_steps, MEASURE_UPPER),
            MEASURE_UPPER: (self._config.measure_steps, MEASURE_LOWER),
            RAMP: (self._config.ramp_steps, STEADY),
        }
        if self.freezes_halves:
            return self.phase_step(step) >= self._config.measure_steps
        if self.phase in lengths and self.phase_step(step) >= lengths[self.phase][0]:
            self._enter(lengths[self.phase][1], next_step)
        return False

    def measure(self, step: int, reason: str) -> None:
        """Measure the bounds again, from ``step`` on; the plan stays until another one comes."""
        # Called for as soon as it was allowed: the last measurement did not help, so wait twice as long for the next.
        hasty = step < self._again_step + self._config.replan_interval_steps
        self._num_in_a_row = self._num_in_a_row + 1 if hasty else 0
        self._begin_measuring(step, reason)

    def note_change(self, step: int) -> None:
        """The trainable parameters are not those that were measured: measure again, but not at every such change."""
        if self._config.fixed_plan is not None or self.phase == WARMUP:
            return
        if self._change_step is None or step - self._change_step >= self._config.replan_interval_steps:
            self._change_step = step
            self._begin_measuring(step, "other parameters are trainable")

    def _begin_measuring(self, step: int, reason: str) -> None:
        self.switch_step = None
        self.log(step, "measure_again", reason=reason)
        self._enter(MEASURE_UPPER, step)
        self._wait_before_next(step)

    def announce(self, step: int) -> None:
        """A solve begins: state the step at which its plan will take effect."""
        self._delay_steps = self._config.switch_delay_steps
        self._solve_step = step
        self.switch_step = step + self._delay_steps
        self.log(step, "solve", switch_step=self.switch_step)
        if self.plan is not None:
            self.previous = None
            self._enter(STEADY, step)

    def announce_better(self, step: int, plan: Plan) -> bool:
        """Another plan for the same bounds: if it is worth a switch, state the step at which it will take effect."""
        assert self.plan is not None
        before, after = self.plan.makespan_s, plan.makespan_s
        if plan.options.target_makespan_s is not None and plan.beats(self.plan):
            before, after = self.plan.freezing, plan.freezing  # both are fast enough
        if after > (1.0 - LEAST_GAIN_RATIO) * before:
            return False
        self.switch_step = step + self._config.switch_delay_steps
        self.log(step, "better_plan", switch_step=self.switch_step, new_makespan_s=plan.makespan_s)
        return True

    def postpone(self, step: int) -> bool:
        """The announced step is there but the plan is not: state a later one. False: it was given up."""
        waited = step - self._solve_step
        if waited >= self._config.plan_wait_steps:
            self.give_up(step, f"the solver gave no answer within {waited} steps")
            return False
        self._delay_steps = min(2 * self._delay_steps, self._config.plan_wait_steps - waited)
        self.switch_step = step + self._delay_steps
        self.log(step, "switch_postponed", switch_step=self.switch_step)
        return True

    def adopt(self, step: int, plan: Plan) -> None:
        """The plan takes effect at ``step``."""
        self.log(
            step,
            "plan",
            old_plan=plan_id(self.plan),
            new_plan=plan_id(plan),
            old_makespan_s=None if self.plan is None else self.plan.makespan_s,
            new_makespan_s=plan.makespan_s,
            unfrozen_makespan_s=plan.unfrozen_makespan_s,
            frozen_makespan_s=plan.frozen_makespan_s,
        )
        self.previous, self.plan = self.plan, plan
        self.switch_step = None
        self.failure = None
        self._enter(RAMP if self._config.ramp_steps else STEADY, step)
        self._wait_before_next(step)

    def give_up(self, step: int, reason: str) -> None:
        """No plan came: go on with the last one, or with nothing frozen, and try again after a while."""
        self.failure = reason
        self.switch_step = None
        self.log(step, "no_plan", reason=reason, kept_plan=plan_id(self.plan))
        self._enter(STEADY, step)
        self._wait_before_next(step)

    def log(self, step: int, event: str, **details: Any) -> None:
        """Note what happened at the beginning of ``step``."""
        self.events.append({"step": step, "event": event, **details})

    def _enter(self, phase: str, step: int) -> None:
        if phase != self.phase or step:
            self.log(step, "phase", old=self.phase, new=phase)
        self.phase = phase
        self.start_step = step
        if phase == STEADY:
            self.previous = None

    def _wait_before_next(self, step: int) -> None:
        self._again_step = step + self._config.replan_interval_steps * 2 ** min(self._num_in_a_row, _MAX_DOUBLINGS)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "phase": self.phase,
            "start_step": self.start_step,
            "plan": None if self.plan is None else self.plan.to_json(),
            "previous": None if self.previous is None else self.previous.to_json(),
            "switch_step": self.switch_step,
            "failure": self.failure,
            "events": [dict(event) for event in self.events],
            "delay_steps": self._delay_steps,
            "solve_step": self._solve_step,
            "again_step": self._again_step,
            "num_in_a_row": self._num_in_a_row,
            "change_step": self._change_step,
        }

    @classmethod
    def from_json(cls, config: FreezeConfig, data: Mapping[str, Any]) -> PhaseMachine:
        """What ``to_json`` made; KeyError, TypeError, ValueError or PlanError if it is something else."""
        machine = cls(config)
        if data["phase"] not in PHASES:
            raise ValueError(data["phase"])
        machine.phase = data["phase"]
        machine.plan, machine.previous = (
            None if data[name] is None else Plan.from_json(data[name]) for name in ("plan", "previous")
        )
        machine.failure = data["failure"]
        machine.events = deque((dict(event) for event in data["events"]), maxlen=_MAX_EVENTS)
        machine.switch_step = None if data["switch_step"] is None else int(data["switch_step"])
        machine.start_step = int(data["start_step"])
        machine._delay_steps = int(data["delay_steps"])
        machine._solve_step = int(data["solve_step"])
        machine._again_step = int(data["again_step"])
        machine._num_in_a_row = int(data["num_in_a_row"])
        machine._change_step = None if data["change_step"] is None else int(data["change_step"])
        return machine

"""What to leave out, and when: the user's choices, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike, fspath

from timelyfreeze.errors import PlanError, problem, raise_all
from timelyfreeze.freeze.policies import policy_names
from timelyfreeze.planner import Plan
from timelyfreeze.planner.make import MODES
from timelyfreeze.schedule import Schedule

_SHOWN = 3


@dataclass(frozen=True)
class FreezeConfig:
    """What to leave out, and when. Without ``plan`` the pipeline measures, plans and re-plans by itself.

    With the defaults the plan is in force at full strength 26 steps after the start if solving takes at most two steps
    (3 warm-up, 6 + 6 measuring, 2 until the switch, 8 ramp), so that a run of 100 steps is planned for three quarters.

    Attributes:
        max_ratio: cap on every stage's mean freeze ratio, in [0, 1]. With 1 a stage may never train. With ``plan`` the
            plan's own cap counts.
        mode: how plans are made (``timelyfreeze.planner.make_plan``).
        plan: a plan, or the path of one: nothing is measured, and never planned again, so that a run repeats.
        warmup_steps: first steps, which are not timed: allocators and caches fill. Three, since a step's second
            run still pays for first-touched gradient buffers.
        measure_steps: steps each for the upper and for the lower bounds. Six give, after ``settle_steps``, five samples
            of an upper bound and two or three of a lower one for every micro-batch; samples of equal micro-batches are
            pooled.
        settle_steps: first steps of a measuring phase that are not used, since memory use has just changed.
        switch_delay_steps: steps between the start of a solve and the step that its plan is announced for. It doubles
            whenever the plan is not there by then.
        plan_wait_steps: after so many steps without an answer the solve is given up.
        ramp_steps: over so many steps the ratios grow linearly from the last plan's (first: 0) to the new plan's.
            0: at once.
        policy: how parameters are chosen above a micro-batch's cut (``timelyfreeze.freeze.policy_names()``).
        rescale: divide each parameter's gradient by its planned probability of being live.
        replan_drift_ratio: plan again when a stage's measured time in steady steps is off by more than this share of
            the planned one; None: never. Predictions that are well are within 0.06.
        replan_window_steps: over so many steps (their median) that is judged.
        replan_interval_steps: at least so many steps lie between two measurements; doubled after each one in a row
            that drift asked for. Measuring costs about a dozen unfrozen steps: at 200 below 3 % of a 1.4x speed-up.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type; every fault is in the message.
        PlanError: ``plan`` is a path that holds no plan.

    >>> FreezeConfig(max_ratio=0.5).ramp_steps
    8
    """

    max_ratio: float = 0.8
    mode: str = "lp"
    plan: Plan | str | PathLike[str] | None = None
    warmup_steps: int = 3
    measure_steps: int = 6
    settle_steps: int = 1
    switch_delay_steps: int = 2
    plan_wait_steps: int = 10_000
    ramp_steps: int = 8
    policy: str = "random"
    rescale: bool = False
    replan_drift_ratio: float | None = 0.2
    replan_window_steps: int = 20
    replan_interval_steps: int = 200

    def __post_init__(self) -> None:
        types = self._type_faults()
        raise_all(TypeError, types)
        raise_all(ValueError, self._value_faults())
        if self.plan is not None and not isinstance(self.plan, Plan):
            object.__setattr__(self, "plan", _load(self.plan))

    @property
    def fixed_plan(self) -> Plan | None:
        """The plan that was given, loaded."""
        assert self.plan is None or isinstance(self.plan, Plan)
        return self.plan

    def _type_faults(self) -> list[str]:
        faults = []
        if not _is_number(self.max_ratio):
            faults.append(problem("max_ratio", expected="a number in [0, 1]", got=repr(self.max_ratio)))
        if self.replan_drift_ratio is not None and not _is_number(self.replan_drift_ratio):
            faults.append(problem("replan_drift_ratio", expected="a number or None", got=repr(self.replan_drift_ratio)))
        for name in ("mode", "policy"):
            if not isinstance(getattr(self, name), str):
                faults.append(problem(name, expected="a name", got=repr(getattr(self, name))))
        rescale: object = self.rescale
        if not isinstance(rescale, bool):
            faults.append(problem("rescale", expected="True or False", got=repr(self.rescale)))
        for name in _LEAST_STEPS:
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                faults.append(problem(name, expected="a whole number of steps", got=repr(getattr(self, name))))
        plan: object = self.plan
        if plan is not None and not isinstance(plan, (str, PathLike, Plan)):
            faults.append(problem("plan", expected="a Plan, the path of one, or None", got=type(plan).__name__))
        return faults

    def _value_faults(self) -> list[str]:
        faults = []
        if not 0.0 <= self.max_ratio <= 1.0:
            faults.append(problem("max_ratio", expected="a number in [0, 1]", got=self.max_ratio))
        drift = self.replan_drift_ratio
        if drift is not None and not (drift > 0 and math.isfinite(drift)):
            faults.append(problem("replan_drift_ratio", expected="a number above 0, or None", got=drift))
        if self.policy not in policy_names():
            faults.append(problem("unknown policy", expected=f"one of {', '.join(policy_names())}", got=self.policy))
        if self.mode not in MODES:
            faults.append(problem("unknown mode", expected=f"one of {', '.join(MODES)}", got=self.mode))
        for name, least in _LEAST_STEPS.items():
            if getattr(self, name) < least:
                faults.append(problem(name, expected=f"at least {least} steps", got=getattr(self, name)))
        if self.measure_steps < self.settle_steps + 2:
            faults.append(
                problem(
                    "measure_steps leaves too few steps to time",
                    expected=f"at least settle_steps + 2 = {self.settle_steps + 2}, so that every micro-batch is "
                    "frozen in one of them",
                    got=self.measure_steps,
                )
            )
        return faults


_LEAST_STEPS = {
    "warmup_steps": 0,
    "measure_steps": 2,
    "settle_steps": 0,
    "switch_delay_steps": 1,
    "plan_wait_steps": 1,
    "ramp_steps": 0,
    "replan_window_steps": 1,
    "replan_interval_steps": 1,
}


def check_fits(plan: Plan, schedule: Schedule) -> None:
    """Raise PlanError unless a plan was made for this schedule; its name may differ. Says everything that differs."""
    made_for = plan.schedule
    faults = []
    for name in ("num_ranks", "num_stages", "num_microbatches"):
        if getattr(made_for, name) != getattr(schedule, name):
            faults.append(
                problem(
                    f"the plan has another {name.replace('_', ' ').replace('num ', 'number of ')}",
                    expected=getattr(schedule, name),
                    got=getattr(made_for, name),
                    where=f"plan for {made_for.name}, pipeline runs {schedule.name}",
                )
            )
    if not faults:
        for rank, (planned, real) in enumerate(zip(made_for.ranks, schedule.ranks, strict=True)):
            if planned != real:
                at = next((i for i, pair in enumerate(zip(planned, real, strict=False)) if pair[0] != pair[1]), 0)
                faults.append(
                    problem(
                        "the plan has another order of actions",
                        expected=" ".join(map(str, real[at : at + _SHOWN])),
                        got=" ".join(map(str, planned[at : at + _SHOWN])),
                        where=f"rank {rank}, action {at}; plan for {made_for.name}, pipeline runs {schedule.name}",
                    )
                )
    if faults:
        faults[-1] += " Make a plan for this schedule, or leave plan= out."
    raise_all(PlanError, faults)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _load(path: str | PathLike[str]) -> Plan:
    try:
        return Plan.load(path)
    except OSError as error:
        raise PlanError(problem(f"cannot read the plan: {error.strerror or error}", where=fspath(path))) from error

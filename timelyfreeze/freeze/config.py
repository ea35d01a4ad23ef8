"""What to leave out, and when: the user's choices, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath

from timelyfreeze.errors import PlanError, problem, raise_all
from timelyfreeze.freeze.policies import policy_names
from timelyfreeze.planner import Plan, PlanOptions
from timelyfreeze.schedule import Schedule
from timelyfreeze.schedule.checks import is_number

_SHOWN = 3


@dataclass(frozen=True)
class FreezeConfig:
    """What to leave out, and when. Without ``plan`` the pipeline measures, plans and re-plans by itself.

    With the defaults the plan is in force at full strength 26 steps after the start if solving takes at most two steps
    (3 warm-up, 6 + 6 measuring, 2 until the switch, 8 ramp), so that a run of 100 steps is planned for three quarters.

    Attributes:
        max_ratio: cap on every stage's mean freeze ratio, in [0, 1]. With 1 a stage may never train.
        mode, goal, stage_max_ratio, weights, target_makespan_s, min_live_ratio: how plans are made, as in
            ``timelyfreeze.planner.PlanOptions``. ``AsyncPipeline`` sets the goal "period".
        live_microbatches: instead of a cap, how many micro-batches train each parameter in a step (k). Its gradient is
            the mean over those, as in a plain step with k micro-batches; the reported loss is the mean over all. Each
            use of a parameter that several stages share counts by itself. A step with fewer micro-batches than the
            schedule freezes nothing.
        parameter_max_ratio: caps on the mean freeze ratio of single parameters: shell patterns over the names of
            ``pipe.named_parameters()``, of which the first that matches counts (``{"*norm*": 0.0, "embedding.*":
            0.1}``). They hold in all steps that follow a plan; at 0 a parameter is live in every micro-batch of them.
            Where something trains backward cannot stop early: a stage is cut in no more micro-batches than its smallest
            cap allows, and the lowest stage freezes nothing in the others. Measuring lower bounds freezes everything.
        parameter_weights: prices of single parameters, by patterns likewise: a stage's price is their mean by work, and
            within it the cheapest are frozen first, as far as their caps allow.
        plan: a plan, or the path of one: nothing is measured, and never planned again, so that a run repeats. What the
            plan was made with counts, instead of the above.
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
        policy: how parameters are chosen above a micro-batch's cut (``timelyfreeze.freeze.policy_names()``). Under
            ``live_microbatches``, and in stages with parameters that have caps or prices of their own, they are dealt
            out by count instead.
        rescale: divide each parameter's gradient by its planned probability of being live. Not with
            ``live_microbatches``, which divides by what was live.
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

    max_ratio: float = 0.3
    mode: str = "cut"
    stage_max_ratio: Mapping[int, float] | None = None
    weights: Mapping[int, float] | None = None
    target_makespan_s: float | None = None
    live_microbatches: int | None = None
    min_live_ratio: float = 0.25
    parameter_max_ratio: Mapping[str, float] | None = None
    parameter_weights: Mapping[str, float] | None = None
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
    goal: str = "makespan"

    def __post_init__(self) -> None:
        raise_all(TypeError, self._type_faults())
        raise_all(ValueError, self._value_faults())
        if self.plan is not None and not isinstance(self.plan, Plan):
            object.__setattr__(self, "plan", _load(self.plan))
        faults = [
            problem(f"{name} differs from the plan's", expected=repr(theirs), got=repr(own), hint="Leave it out.")
            for name in ("parameter_max_ratio", "parameter_weights")
            if (own := getattr(self.plan_options, name)) not in (None, theirs := getattr(self.options, name))
        ]
        raise_all(ValueError, faults)
        if self.rescale and self.averages_live:
            hint = "Leave rescale out: gradients are means over the live micro-batches already."
            raise ValueError(problem("rescale and live_microbatches exclude each other", hint=hint))

    @cached_property
    def plan_options(self) -> PlanOptions:
        """How plans are made."""
        return PlanOptions(
            max_ratio=self.max_ratio,
            mode=self.mode,
            goal=self.goal,
            stage_max_ratio=self.stage_max_ratio,
            weights=self.weights,
            target_makespan_s=self.target_makespan_s,
            live_microbatches=self.live_microbatches,
            min_live_ratio=self.min_live_ratio,
            parameter_max_ratio=self.parameter_max_ratio,
            parameter_weights=self.parameter_weights,
        )

    @property
    def options(self) -> PlanOptions:
        """What holds: how plans are made, or how the plan that was given was made."""
        return self.plan_options if self.fixed_plan is None else self.fixed_plan.options

    @property
    def averages_live(self) -> bool:
        """Whether a gradient is the mean over the micro-batches that trained its parameter."""
        return self.options.live_microbatches is not None

    @property
    def fixed_plan(self) -> Plan | None:
        """The plan that was given, loaded."""
        assert self.plan is None or isinstance(self.plan, Plan)
        return self.plan

    def check(self, schedule: Schedule) -> None:
        """Raise unless this fits a schedule: PlanError for the plan, ValueError for stages and micro-batches."""
        if self.fixed_plan is not None:
            check_fits(self.fixed_plan, schedule)
        else:
            self.plan_options.caps(schedule.num_stages, schedule.num_microbatches)

    def _type_faults(self) -> list[str]:
        faults = []
        if self.replan_drift_ratio is not None and not is_number(self.replan_drift_ratio):
            faults.append(problem("replan_drift_ratio", expected="a number or None", got=repr(self.replan_drift_ratio)))
        policy: object = self.policy
        if not isinstance(policy, str):
            faults.append(problem("policy", expected="a name", got=repr(policy)))
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
        try:
            _ = self.plan_options
        except ValueError as error:
            faults.append(str(error))
        drift = self.replan_drift_ratio
        if drift is not None and not (drift > 0 and math.isfinite(drift)):
            faults.append(problem("replan_drift_ratio", expected="a number above 0, or None", got=drift))
        if self.policy not in policy_names():
            faults.append(problem("unknown policy", expected=f"one of {', '.join(policy_names())}", got=self.policy))
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


def _load(path: str | PathLike[str]) -> Plan:
    try:
        return Plan.load(path)
    except OSError as error:
        raise PlanError(problem(f"cannot read the plan: {error.strerror or error}", where=fspath(path))) from error

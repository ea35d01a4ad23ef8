"""When plans take effect, what happens when none comes, and planning again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.freeze_machine import SCHEDULE, InstantPlanner, Machine, all_live, events_of, make_machine, make_works, runs
from timelyfreeze.errors import PlanError
from timelyfreeze.freeze import FreezeConfig, FreezeController
from timelyfreeze.freeze.phases import LEAST_GAIN_RATIO
from timelyfreeze.planner import BackgroundPlanner, Plan

# --- the switch -------------------------------------------------------------------------------------------------


def test_the_plan_takes_effect_at_the_announced_step() -> None:
    machine, _ = make_machine(warmup_steps=1, measure_steps=3, switch_delay_steps=4)
    machine.run(7)
    assert events_of(machine.controller, "solve") == [{"step": 7, "switch_step": 11}]
    assert machine.controller.report()["announced_switch_step"] == 11
    machine.run(5)
    assert machine.phases[7:] == ["measure_lower"] * 4 + ["ramp"]
    (switch,) = events_of(machine.controller, "plan")
    plan = machine.controller.plan
    assert plan is not None
    assert switch["step"] == 11
    assert switch["old_plan"] is None
    assert switch["new_plan"] == machine.controller.report()["plan"]["id"]
    assert switch["new_makespan_s"] == plan.makespan_s
    assert switch["unfrozen_makespan_s"] == plan.unfrozen_makespan_s


def test_a_late_plan_is_announced_again_and_training_goes_on() -> None:
    machine, planner = make_machine(warmup_steps=1, measure_steps=3, switch_delay_steps=2)
    planner.waiting = True
    machine.run(7 + 2 + 4 + 3)
    assert [e["switch_step"] for e in events_of(machine.controller, "solve", "switch_postponed")] == [9, 13, 21]
    assert set(machine.phases[7:]) == {"measure_lower"}
    assert all(masks.freeze_ratio == 0 for masks in machine.masks[7:])
    planner.waiting = False
    machine.run(6)
    assert machine.phases[-2:] == ["measure_lower", "ramp"]
    assert [e["step"] for e in events_of(machine.controller, "plan")] == [21]


def test_waiting_for_a_plan_is_bounded() -> None:
    machine, planner = make_machine(warmup_steps=0, measure_steps=3, plan_wait_steps=20, replan_interval_steps=10)
    planner.waiting = True
    machine.run(6 + 20 + 1)
    assert machine.phases[-1] == "steady"
    assert machine.controller.plan is None
    assert "no answer within 20 steps" in machine.controller.report()["failure"]


def test_an_unsolved_program_leaves_training_unfrozen_and_is_tried_again_later() -> None:
    machine, planner = make_machine(replan_interval_steps=30)
    planner.error = PlanError("infeasible")
    machine.run(18)
    assert machine.phases[-1] == "steady"
    report = machine.controller.report()
    assert report["failure"] == "PlanError: infeasible"
    assert report["plan"] is None
    assert machine.masks[-1].freeze_ratio == 0
    planner.error = None
    machine.run_until("ramp")
    assert machine.controller.step <= 18 + 30 + 6 + 6 + 2
    assert machine.controller.report()["failure"] is None


def test_the_last_plan_stays_when_the_next_one_fails() -> None:
    machine, planner = make_machine(replan_interval_steps=40, replan_window_steps=5)
    machine.run_until("steady")
    plan = machine.controller.plan
    planner.error = RuntimeError("out of luck")
    machine.slowdown = 2.0
    machine.run(90)
    assert events_of(machine.controller, "no_plan")[0]["reason"] == "RuntimeError: out of luck"
    assert machine.controller.plan is plan
    assert machine.phases[-1] == "steady"
    assert machine.masks[-1].freeze_ratio > 0.3


def test_an_action_that_was_never_timed_is_reported() -> None:
    works = make_works(2)
    controller = FreezeController(FreezeConfig(), SCHEDULE, 0, works, planner=InstantPlanner(SCHEDULE))
    for _ in range(16):
        controller.begin_step(all_live(works))
        controller.end_step({})
    assert controller.phase == "steady"
    assert "not measured" in controller.report()["failure"]


# --- better plans for the same bounds -----------------------------------------------------------------------------


def faster(plan: Plan, share: float) -> Plan:
    """The plan, said to end earlier by a share."""
    return replace(plan, makespan_s=(1.0 - share) * plan.makespan_s)


def run_until_planned(**config: object) -> tuple[Machine, InstantPlanner, Plan]:
    """A machine whose first plan has just been adopted."""
    machine, planner = make_machine(warmup_steps=0, measure_steps=3, ramp_steps=3, **config)
    machine.run_until("ramp")
    plan = machine.controller.plan
    assert plan is not None
    return machine, planner, plan


def test_a_better_plan_is_announced_when_the_ramp_has_ended_and_ramped_to() -> None:
    machine, planner, first = run_until_planned(switch_delay_steps=4)
    start = machine.controller.step - 1
    second = faster(first, 0.05)
    planner.better = [None, second]
    machine.run(2 + 2 + 4 + 3 + 3)
    # After the ramp: one step in which nothing is there yet, one in which it is found, announced for four steps on.
    assert events_of(machine.controller, "better_plan") == [
        {"step": start + 4, "switch_step": start + 8, "new_makespan_s": second.makespan_s}
    ]
    assert runs(machine.phases[start:]) == [("ramp", 3), ("steady", 5), ("ramp", 3), ("steady", 4)]
    switch = events_of(machine.controller, "plan")[-1]
    assert (switch["step"], switch["old_makespan_s"]) == (start + 8, first.makespan_s)
    assert machine.controller.plan is second
    assert machine.controller.state_dict()["costs"] is None  # nothing is looked for any more


def test_a_plan_that_is_hardly_better_is_not_worth_a_switch() -> None:
    machine, planner, first = run_until_planned()
    planner.better = [faster(first, share) for share in (-0.1, 0.0, 0.5 * LEAST_GAIN_RATIO)]
    machine.run(20)
    assert planner.better == []
    assert machine.controller.plan is first
    assert events_of(machine.controller, "better_plan") == []


def test_of_several_better_plans_the_best_is_adopted() -> None:
    machine, planner, first = run_until_planned(switch_delay_steps=3)
    best = faster(first, 0.2)
    planner.better = [faster(first, 0.05), faster(first, 0.1)]
    machine.run(4)
    assert [event["new_makespan_s"] for event in events_of(machine.controller, "better_plan")] == [
        0.95 * first.makespan_s
    ]
    planner.better = [best, faster(first, 0.15)]
    machine.run(3)
    assert machine.controller.plan is best
    machine.run(20)
    assert machine.controller.plan is best
    assert len(events_of(machine.controller, "plan")) == 2


@pytest.mark.parametrize("ends", ["with a worse plan", "with an error"])
def test_the_announced_plan_is_adopted_however_the_search_ends(ends: str) -> None:
    machine, planner, first = run_until_planned(switch_delay_steps=3)
    announced = faster(first, 0.1)
    planner.better = [announced]
    machine.run(4)
    assert len(events_of(machine.controller, "better_plan")) == 1
    if ends == "with an error":
        planner.costs, planner.error = first.costs, PlanError("out of memory")
    else:
        planner.better = [faster(first, 0.05)]
    machine.run(3)
    assert machine.controller.plan is announced
    assert machine.controller.report()["failure"] is None


def test_a_search_that_fails_after_its_first_plan_leaves_that_plan() -> None:
    machine, planner, first = run_until_planned()
    planner.costs, planner.error = first.costs, PlanError("out of memory")
    machine.run(20)
    assert machine.controller.plan is first
    assert machine.controller.report()["failure"] is None
    assert machine.masks[-1].freeze_ratio > 0.3


def test_measuring_again_ends_the_search() -> None:
    machine, planner, first = run_until_planned(replan_interval_steps=10, replan_window_steps=2)
    planner.better = [None] * 500 + [faster(first, 0.5)]
    machine.slowdown = 2.0
    machine.run(15)
    assert events_of(machine.controller, "measure_again") != []
    assert planner.better == []
    machine.run(40)
    assert events_of(machine.controller, "better_plan") == []


# --- planning again ---------------------------------------------------------------------------------------------


def test_drift_leads_to_a_new_plan_by_way_of_a_ramp_between_the_two() -> None:
    machine, planner = make_machine(replan_interval_steps=60, replan_window_steps=10, replan_drift_ratio=0.2)
    machine.run_until("steady")
    machine.run(80)
    first = machine.controller.plan
    assert first is not None
    assert planner.num_started == 1  # no drift, no new plan
    machine.slowdown = 1.5
    start = machine.controller.step
    machine.run(40)
    (again,) = events_of(machine.controller, "measure_again")
    assert "has drifted" in str(again["reason"])
    assert start + 5 <= int(str(again["step"])) <= start + 11
    after = machine.phases[int(str(again["step"])) :]
    # While the new plan is made, the old one stays in force.
    assert runs(after)[:4] == [("measure_upper", 6), ("measure_lower", 6), ("steady", 2), ("ramp", 8)]
    between = machine.masks[int(str(again["step"])) + 12 : int(str(again["step"])) + 22]
    assert all(masks.freeze_ratio > 0.4 for masks in between)
    second = machine.controller.plan
    assert second is not None
    assert second.makespan_s == pytest.approx(1.5 * first.makespan_s, rel=0.02)


def test_drift_within_the_limit_is_let_be() -> None:
    machine, planner = make_machine(replan_interval_steps=10, replan_window_steps=5, replan_drift_ratio=0.3)
    machine.run_until("steady")
    machine.slowdown = 1.15
    machine.run(60)
    assert planner.num_started == 1


def test_planning_again_gets_rarer_when_it_does_not_help() -> None:
    """A machine whose steady steps are always slower than measured: a plan cannot mend that."""

    class Biased(Machine):
        def run(self, num_steps: int) -> None:
            for _ in range(num_steps):
                self.slowdown = 1.6 if self.controller.phase == "steady" else 1.0
                super().run(1)

    machine, _ = make_machine(replan_interval_steps=20, replan_window_steps=3, ramp_steps=2)
    biased = Biased(machine.controller, machine.works)
    biased.run(1000)
    starts = [int(str(event["step"])) for event in events_of(machine.controller, "measure_again")]
    assert 3 <= len(starts) <= 6
    gaps = np.diff(starts)
    assert (gaps[1:] > 1.5 * gaps[:-1]).all()


def test_other_trainable_parameters_are_measured_anew() -> None:
    machine, planner = make_machine(replan_interval_steps=100)
    machine.trainable[0][:] = False
    machine.run_until("steady")
    machine.run(3)
    first = machine.controller.plan
    assert first is not None
    assert all(ratio == 0 or action.stage == 1 for action, ratio in first.ratios.items())
    machine.trainable[0][:] = True
    machine.run(1)
    assert machine.phases[-1] == "measure_upper"
    assert machine.masks[-1].live[0].all()
    machine.run(40)
    second = machine.controller.plan
    assert second is not None
    assert any(action.stage == 0 for action in second.ratios)
    assert planner.num_started == 2
    assert [e["num_trainable"] for e in events_of(machine.controller, "trainable_changed")] == [24]


def test_a_plan_for_parameters_that_no_longer_train_is_dropped() -> None:
    machine, planner = make_machine(warmup_steps=0, measure_steps=3, switch_delay_steps=5)
    planner.waiting = True
    machine.run(7)
    assert planner.costs is not None
    machine.trainable[0][:] = False
    machine.run(1)
    assert planner.costs is None
    planner.waiting = False
    assert machine.controller.report()["announced_switch_step"] is None
    machine.run_until("ramp")
    assert [event["step"] for event in events_of(machine.controller, "plan")] == [7 + 6 + 5]
    plan = machine.controller.plan
    assert plan is not None
    assert all(action.stage == 1 for action in plan.ratios)


def test_flags_that_change_all_the_time_do_not_keep_a_run_measuring() -> None:
    machine, _ = make_machine(replan_interval_steps=50)
    measured = 0
    for step in range(300):
        machine.trainable[1][0] = bool(step % 2)
        machine.run(1)
        measured += machine.phases[-1].startswith("measure")
        assert machine.masks[-1].live[1][:, 0].any() <= bool(step % 2)
    assert measured < 0.4 * 300
    assert machine.controller.plan is not None


def test_the_background_planner_makes_the_plan() -> None:
    works = make_works(2)
    planner = BackgroundPlanner(SCHEDULE)
    controller = FreezeController(FreezeConfig(), SCHEDULE, 0, works, planner=planner)
    machine = Machine(controller, works)
    machine.run(15)
    assert planner.wait(60)
    machine.run(3)
    assert machine.phases[-1] == "ramp"
    controller.close()

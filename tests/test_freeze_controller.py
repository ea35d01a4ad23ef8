"""The phases of a run: their lengths, their masks, the plan's switch, failures, and planning again."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest

from tests.freeze_machine import InstantPlanner, Machine, all_live, events_of, make_works
from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import PlanError
from timelyfreeze.freeze import FreezeConfig, FreezeController
from timelyfreeze.planner import BackgroundPlanner, Plan
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule

SCHEDULE = create_schedule("1f1b", num_ranks=2, num_microbatches=8)


def make_machine(
    schedule: Schedule = SCHEDULE, *, seed: int = 0, sizes: tuple[float, ...] = (), **config: object
) -> tuple[Machine, InstantPlanner]:
    settings = FreezeConfig(**config)  # type: ignore[arg-type]
    planner = InstantPlanner(schedule, settings.max_ratio)
    works = make_works(schedule.num_stages)
    controller = FreezeController(settings, schedule, seed, works, planner=planner)
    return Machine(controller, works, sizes), planner


def hand_made(schedule: Schedule, ratio: float | list[float], max_ratio: float = 0.8) -> Plan:
    ratios = ratio if isinstance(ratio, list) else [ratio] * schedule.num_microbatches
    backward = [a for a in schedule.actions if a.kind is Kind.B]
    costs = ActionCosts(
        {a: 1.0 if a.kind is Kind.F else 3.0 for a in schedule.actions}, {a: 1.2 if a.stage else 0.0 for a in backward}
    )
    planned = {a: ratios[a.microbatch] for a in backward}
    plan = Plan.of_ratios(schedule, costs, planned, mode="lp", max_ratio=max_ratio, objective_s=0.0)
    return replace(plan, objective_s=plan.unfrozen_makespan_s)


def runs(phases: list[str]) -> list[tuple[str, int]]:
    return [(phase, len(list(steps))) for phase, steps in groupby(phases)]


# --- phases and masks -------------------------------------------------------------------------------------------


def test_phases_and_their_lengths() -> None:
    machine, _ = make_machine(warmup_steps=2, measure_steps=4, ramp_steps=5, switch_delay_steps=3)
    machine.run(24)
    # Three steps of measure_lower more, in which the plan is made and nothing is frozen.
    assert runs(machine.phases) == [
        ("warmup", 2), ("measure_upper", 4), ("measure_lower", 4 + 3), ("ramp", 5), ("steady", 6),
    ]  # fmt: skip
    assert machine.controller.step == 24
    ratios = [masks.freeze_ratio for masks in machine.masks]
    assert ratios[:6] == [0.0] * 6
    assert ratios[6:13] == [0.5] * 4 + [0.0] * 3
    assert min(ratios[18:]) > 0.5


def test_a_hundred_steps_are_mostly_planned_with_the_defaults() -> None:
    machine, _ = make_machine()
    machine.run(100)
    assert machine.phases.index("steady") == 3 + 6 + 6 + 2 + 8


@pytest.mark.parametrize("num_microbatches", [2, 3, 8])
def test_lower_bounds_are_measured_on_halves_with_input_gradients(num_microbatches: int) -> None:
    schedule = create_schedule("1f1b", num_ranks=3, num_microbatches=num_microbatches)
    machine, _ = make_machine(schedule, warmup_steps=0, measure_steps=4)
    machine.run(8)
    frozen_in = np.zeros(num_microbatches, dtype=int)
    for masks in machine.masks[4:]:
        assert masks.phase == "measure_lower"
        frozen = ~masks.live[0].any(axis=1)
        assert 0 < frozen.sum() < num_microbatches  # some step of each kind: none trains nothing
        for live in masks.live:
            assert (live == ~frozen[:, None]).all()
        assert masks.needs_input_grad[1:].all()
        assert not masks.needs_input_grad[0].any()
        assert (masks.planned_ratio == frozen).all()
        frozen_in += frozen
    assert frozen_in.tolist() == [2] * num_microbatches


def test_a_single_micro_batch_is_frozen_in_every_other_step() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=1)
    machine, _ = make_machine(schedule, warmup_steps=1)
    machine.run(30)
    lower = [masks.freeze_ratio for masks in machine.masks if masks.phase == "measure_lower"]
    assert lower == [0.0, 1.0] * 3 + [0.0, 0.0]
    assert machine.controller.phase == "steady"
    assert machine.controller.plan is not None


def test_measured_bounds_are_the_machines() -> None:
    """Without forced input gradients the lower bounds would come out as 0 and the plan a third too fast."""
    machine, _ = make_machine(sizes=(1.0,) * 7 + (0.5,))
    machine.run_until("ramp")
    plan = machine.controller.plan
    assert plan is not None
    for action in SCHEDULE.actions:
        size = 0.5 if action.microbatch == 7 else 1.0
        upper = 1.0 if action.kind is Kind.F else 3.0
        assert plan.costs.upper_s[action] == pytest.approx(size * upper)
        if action.kind is Kind.B:
            assert plan.costs.lower_s[action] == pytest.approx(1.2 * size if action.stage else 0.0)


@pytest.mark.parametrize("settle_steps", [0, 1, 3])
def test_the_first_steps_of_a_measuring_phase_do_not_count(settle_steps: int) -> None:
    machine, _ = make_machine(warmup_steps=1, measure_steps=7, settle_steps=settle_steps)
    for step in range(15):
        machine.slowdown = 50.0 if step in range(1, 1 + settle_steps) or step in range(8, 8 + settle_steps) else 1.0
        machine.run(1)
    actions = machine.controller.report()["actions"]
    assert actions["1B0"]["upper"] == {"median_s": 3.0, "spread_s": 0.0, "num_samples": 7 - settle_steps}
    assert actions["1F0"]["upper"]["num_samples"] == 2 * (7 - settle_steps)
    assert actions["1B0"]["lower"]["spread_s"] == 0.0


@pytest.mark.parametrize(("num_ranks", "max_ratio"), [(2, 0.5), (2, 0.8), (4, 0.8)])
def test_steady_steps_take_what_the_plan_says(num_ranks: int, max_ratio: float) -> None:
    schedule = create_schedule("1f1b", num_ranks=num_ranks, num_microbatches=8)
    machine, _ = make_machine(schedule, max_ratio=max_ratio)
    machine.run_until("steady")
    machine.run(100)
    plan = machine.controller.plan
    assert plan is not None
    assert plan.makespan_s < plan.unfrozen_makespan_s
    assert np.median(machine.step_times_s[-100:]) == pytest.approx(plan.makespan_s, rel=0.05)
    planned = np.zeros((num_ranks, 8))
    for action, ratio in plan.ratios.items():
        planned[action.stage, action.microbatch] = ratio
    realised = np.mean([masks.planned_ratio for masks in machine.masks[-100:]], axis=0)
    assert np.allclose(realised, planned)
    assert machine.masks[-1].freeze_ratio <= max_ratio + 0.15


def test_input_gradients_are_needed_where_something_below_is_live() -> None:
    machine, _ = make_machine(create_schedule("1f1b", num_ranks=3, num_microbatches=4))
    machine.run_until("steady")
    machine.run(40)
    for masks in machine.masks[-40:]:
        below = np.zeros(4, dtype=bool)
        for stage, live in enumerate(masks.live):
            assert (masks.needs_input_grad[stage] == below).all()
            below |= live.any(axis=1)


# --- the ramp ---------------------------------------------------------------------------------------------------


def test_ratios_grow_linearly_to_the_plans() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    plan = hand_made(schedule, [1.0, 1.0, 0.5, 0.0])
    found = []
    for seed in range(400):
        works = make_works(2)
        controller = FreezeController(FreezeConfig(plan=plan, ramp_steps=4), schedule, seed, works)
        machine = Machine(controller, works)
        machine.run(6)
        assert runs(machine.phases) == [("ramp", 4), ("steady", 2)]
        found.append([masks.planned_ratio for masks in machine.masks])
    mean = np.mean(found, axis=0)
    for step, share in enumerate([0.2, 0.4, 0.6, 0.8, 1.0, 1.0]):
        expected = np.array([[1.0, 1.0, 0.5, 0.0]] * 2) * share
        assert np.abs(mean[step] - expected).max() < 4 * 0.5 / 20, step


def test_in_cut_stages_a_micro_batch_is_ramped_in_whole_or_not_at_all() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    plan = hand_made(schedule, [1.0, 1.0, 0.5, 0.0])
    works = make_works(2)
    machine = Machine(FreezeController(FreezeConfig(plan=plan, ramp_steps=50), schedule, 0, works), works)
    machine.run(50)
    seen = np.array([masks.planned_ratio for masks in machine.masks])
    assert set(seen[:, 0, 0]) == {0.0, 1.0}  # the cut stage of micro-batches 0 and 1 is none: both follow
    assert (seen[:, 0, :2] == seen[:, 1, :2]).all()
    assert set(seen[:, 0, 2]) == {0.0, 0.5}
    assert len(set(seen[:, 1, 2])) == 50  # above the cut the ratio itself grows
    assert (np.diff(seen[:, 1, 2]) > 0).all()
    share_on = seen[:, 0, 0].reshape(5, 10).mean(axis=1)
    assert (np.diff(share_on) > 0).all()


def test_a_fixed_plan_is_never_measured_nor_made_again() -> None:
    plan = hand_made(SCHEDULE, 0.6)
    planner = InstantPlanner(SCHEDULE)
    works = make_works(2)
    config = FreezeConfig(plan=plan, ramp_steps=0, replan_interval_steps=1, replan_window_steps=1)
    machine = Machine(FreezeController(config, SCHEDULE, 0, works, planner=planner), works)
    machine.slowdown = 3.0
    machine.run(30)
    machine.trainable[0][3] = False
    machine.run(5)
    assert set(machine.phases) == {"steady"}
    assert planner.num_started == 0
    assert machine.controller.plan is plan


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


# --- the edges of a step ----------------------------------------------------------------------------------------


def test_an_aborted_step_counts_for_nothing_and_is_drawn_again() -> None:
    machine, _ = make_machine(warmup_steps=0, measure_steps=3, ramp_steps=3)
    twin, _ = make_machine(warmup_steps=0, measure_steps=3, ramp_steps=3)
    for step in range(20):
        if step % 3 == 1:
            aborted = machine.controller.begin_step(machine.trainable)
            machine.controller.abort_step()
            again = machine.controller.begin_step(machine.trainable)
            assert all((a == b).all() for a, b in zip(aborted.live, again.live, strict=True))
        machine.run(1)
        twin.run(1)
    assert machine.controller.report() == twin.controller.report()


def test_a_step_must_be_begun() -> None:
    machine, _ = make_machine()
    with pytest.raises(RuntimeError, match="begin_step"):
        machine.controller.end_step({})
    machine.controller.begin_step(machine.trainable)
    machine.controller.abort_step()
    with pytest.raises(RuntimeError, match="begin_step"):
        machine.controller.end_step({})


def test_bad_durations_are_refused_and_not_counted() -> None:
    machine, _ = make_machine()
    machine.controller.begin_step(machine.trainable)
    bad = {Action.parse("0F0"): float("nan"), Action.parse("0B0"): -1.0, Action.parse("7F0"): 1.0}
    with pytest.raises(ValueError, match=r"(?s)7F0.*0F0: nan, 0B0: -1.0"):
        machine.controller.end_step(bad)
    assert machine.controller.step == 0
    machine.controller.end_step({Action.parse("0F0"): 1.0})
    assert machine.controller.step == 1


def test_flags_must_fit_the_stages() -> None:
    machine, _ = make_machine()
    with pytest.raises(ValueError, match="expected 2 stages, got 1"):
        machine.controller.begin_step([np.ones(12, bool)])
    with pytest.raises(ValueError, match=r"expected shape \(12,\), got shape \(3,\) \(stage 1\)"):
        machine.controller.begin_step([np.ones(12, bool), np.ones(3, bool)])
    with pytest.raises(ValueError, match="expected 2 stages, got 3"):
        machine.controller.set_work(make_works(3))


def test_flags_are_copied() -> None:
    machine, _ = make_machine()
    machine.run_until("steady")
    flags = all_live(machine.works)
    machine.controller.begin_step(flags)
    flags[0][:] = False
    machine.controller.end_step({})
    assert machine.controller.begin_step(all_live(machine.works)).phase == "steady"
    assert events_of(machine.controller, "trainable_changed") == []


def test_works_may_come_after_the_first_step() -> None:
    plan = hand_made(SCHEDULE, 0.8)
    works = make_works(2)
    controller = FreezeController(FreezeConfig(plan=plan, ramp_steps=0), SCHEDULE, 0)
    machine = Machine(controller, works)
    assert controller.needs_work
    machine.run(2)
    assert all(live.all() for masks in machine.masks for live in masks.live)
    controller.set_work(works)
    assert not controller.needs_work
    machine.run(20)
    assert np.mean([masks.freeze_ratio for masks in machine.masks[2:]]) == pytest.approx(0.8, abs=0.05)


def test_steps_with_fewer_micro_batches_are_not_measured() -> None:
    machine, planner = make_machine(warmup_steps=0, measure_steps=3)
    controller = machine.controller
    for _ in range(8):
        masks = controller.begin_step(machine.trainable, num_microbatches=3)
        assert masks.freeze_ratio == 0.0
        controller.end_step({a: 1e9 for a in SCHEDULE.actions if a.microbatch < 3})
    assert planner.num_started == 0
    assert "not measured" in controller.report()["failure"]


def test_nothing_trainable_is_no_error() -> None:
    machine, _ = make_machine(replan_interval_steps=10)
    for flags in machine.trainable:
        flags[:] = False
    machine.run(40)
    assert all(not live.any() for masks in machine.masks for live in masks.live)
    assert not any(masks.needs_input_grad.any() for masks in machine.masks)


def test_rescaling_tells_the_probability_of_being_live() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    plan = hand_made(schedule, [1.0, 0.5, 0.5, 0.0])
    works = make_works(2)
    machine = Machine(FreezeController(FreezeConfig(plan=plan, ramp_steps=4, rescale=True), schedule, 0, works), works)
    machine.run(400)
    live = [np.mean([masks.live[s].mean(axis=0) for masks in machine.masks[4:]], axis=0) for s in range(2)]
    for planned, found in zip(machine.masks[-1].live_probability or [], live, strict=True):
        assert np.abs(planned - found).max() < 0.03
    ramp = machine.masks[0].live_probability
    steady = machine.masks[-1].live_probability
    assert ramp is not None
    assert steady is not None
    assert np.allclose(ramp[1], 1.0 - 0.2 * (1.0 - steady[1]))
    plain, _ = make_machine()
    assert plain.controller.begin_step(plain.trainable).live_probability is None


def test_the_report_is_plain_data() -> None:
    machine, _ = make_machine()
    machine.run(60)
    report = json.loads(json.dumps(machine.controller.report()))
    assert report["phase"] == "steady"
    assert report["step"] == 60
    assert 0.1 < report["mean_freeze_ratio"] < 0.8
    action = next(a for name, a in report["actions"].items() if name.startswith("1B") and a["planned_s"] > 0)
    assert action["upper"]["median_s"] == pytest.approx(3.0)
    assert action["lower"]["num_samples"] in (2, 3)
    assert action["steady"]["num_samples"] == 20
    assert action["planned_s"] == pytest.approx(action["steady"]["median_s"], rel=0.3)
    assert set(report["plan"]) >= {"id", "makespan_s", "unfrozen_makespan_s", "cuts"}


def test_a_long_run_keeps_little() -> None:
    machine, _ = make_machine(replan_interval_steps=5)
    for step in range(3000):
        machine.trainable[1][0] = bool(step // 3 % 2)
        machine.run(1)
        machine.masks.clear()
    assert len(machine.controller.report()["events"]) <= 1000


def test_close_ends_the_planner() -> None:
    machine, planner = make_machine()
    machine.run(15)
    machine.controller.close()
    machine.controller.close()
    assert planner.is_closed
    assert planner.costs is None


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

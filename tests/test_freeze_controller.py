"""The phases of a run: their lengths, their masks, the ramp, and the edges of a step."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.freeze_machine import (
    SCHEDULE,
    InstantPlanner,
    Machine,
    all_live,
    events_of,
    hand_made,
    make_machine,
    make_works,
    runs,
)
from timelyfreeze.freeze import FreezeConfig, FreezeController
from timelyfreeze.freeze.targets import PlanTargets, Ramp
from timelyfreeze.schedule import Action, Kind, create_schedule

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


def test_plans_with_other_cuts_are_ramped_micro_batch_by_micro_batch() -> None:
    """From a cut in micro-batches 0 and 1 to one in 2 and 3: at and below the cuts nothing is ever frozen in part."""
    schedule = create_schedule("1f1b", num_ranks=3, num_microbatches=4)
    old, new = hand_made(schedule, [1.0, 1.0, 0.0, 0.0]), hand_made(schedule, [0.0, 0.0, 1.0, 1.0])
    trains = np.ones(3, dtype=bool)
    ramp = Ramp(0, PlanTargets(schedule, old, trains), PlanTargets(schedule, new, trains))
    for step, share in enumerate(np.linspace(0.1, 0.9, 9)):
        ratios = ramp.at(step, share).ratios
        assert set(np.unique(ratios)) <= {0.0, 1.0}
        assert (ratios == ratios[0]).all()  # cut at the same stage in all of them, or not at all
    many = np.mean([ramp.at(step, 0.25).ratios for step in range(2000)], axis=0)
    assert np.abs(many - [0.75, 0.75, 0.25, 0.25]).max() < 0.01


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

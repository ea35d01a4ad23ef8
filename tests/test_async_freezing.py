"""Freezing in an asynchronous pipeline equals the same masks in plain Python, and plans for the least period."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.async_reference import train_asynchronously
from timelyfreeze import ActionCosts, AsyncPipeline, FreezeConfig, PlanError, StageError, create_schedule, make_plan
from timelyfreeze.freeze import FreezeController, ParameterWork
from timelyfreeze.planner import Plan
from timelyfreeze.schedule import Kind

WIDTH, MICROBATCHES = 6, 4


def make_stages(num_stages):
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
        for _ in range(num_stages)
    ]


def make_batches(num_batches=5, size=8):
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(), draw()) for _ in range(num_batches)]


def slices_of(batches):
    cut = lambda t: t.tensor_split(MICROBATCHES)  # noqa: E731
    return [pair for x, y in batches for pair in zip(cut(x), cut(y), strict=True)]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def costs_of(schedule, heavy=None):
    times = [2.0 if stage == heavy else 1.0 for stage in range(schedule.num_stages)]
    return ActionCosts.uniform(
        schedule, forward_s=times, backward_s=[2 * time for time in times], frozen_backward_s=times
    )


def plan_of(num_stages, max_ratio=0.5, heavy=None, mode="lp"):
    schedule = create_schedule("1f1b", num_ranks=num_stages, num_microbatches=MICROBATCHES)
    return make_plan(schedule, costs_of(schedule, heavy), max_ratio, mode, goal="period")


def plan_with(num_stages, ratio_of, **options):
    """A plan with the ratio that ``ratio_of`` gives a backward."""
    schedule = create_schedule("1f1b", num_ranks=num_stages, num_microbatches=MICROBATCHES)
    ratios = {action: ratio_of(action) for action in schedule.actions if action.kind is Kind.B}
    options = {"max_ratio": 1.0, "goal": "period"} | options
    return Plan.of_ratios(schedule, costs_of(schedule), ratios, objective_s=0.0, **options)


def make_pipe(stages, freeze, **options):
    if isinstance(freeze, Plan):
        freeze = FreezeConfig(plan=freeze, ramp_steps=0)
    defaults = {"num_microbatches": MICROBATCHES, "loss_fn": F.mse_loss, "optimizer": adamw, "accelerate": False}
    return AsyncPipeline(stages, freeze=freeze, **(defaults | options))


def record_masks(pipe):
    """For every micro-batch, which parameters of every stage train; filled as batches are handed over."""
    masks = []
    begin = pipe._freezing.begin_batch

    def recording(first, num_microbatches):
        drawn = begin(first, num_microbatches)
        masks.extend([[stage[m] for stage in drawn.live] for m in range(num_microbatches)])
        return drawn

    pipe._freezing.begin_batch = recording
    return masks


def assert_equal(stages, expected):
    for stage, other in zip(stages, expected, strict=True):
        for p, q in zip(stage.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("schedule", ["paci", "pipedream"])
@pytest.mark.parametrize("accumulation", [1, 3, 4])
@pytest.mark.parametrize(("num_stages", "heavy", "mode"), [(2, 0, "lp"), (2, 1, "lp"), (3, 1, "lp"), (3, 1, "cut")])
def test_weights_equal_the_reference_with_the_same_masks(num_stages, heavy, mode, accumulation, schedule):
    stages, batches = make_stages(num_stages), make_batches()
    before = copy.deepcopy(stages)
    with make_pipe(
        stages, plan_of(num_stages, heavy=heavy, mode=mode), accumulation=accumulation, schedule=schedule
    ) as pipe:
        masks = record_masks(pipe)
        losses = [result.loss for result in pipe.run(batches)]
    slices, stash = slices_of(batches), schedule == "pipedream"
    expected, reference = train_asynchronously(
        before, adamw, F.mse_loss, slices, accumulation, stash=stash, masks=masks
    )
    assert_equal(stages, expected)
    torch.testing.assert_close(
        torch.stack(losses), torch.stack(reference).view(-1, MICROBATCHES).mean(1), rtol=0, atol=1e-14
    )
    frozen = [1 - np.mean([mask[stage] for mask in masks[MICROBATCHES:]]) for stage in range(num_stages)]
    assert frozen[heavy] > 0.25
    assert all(all(stage.all() for stage in mask) for mask in masks[:MICROBATCHES])  # the works are found out


def test_recomputing_freezes_what_forward_froze():
    """Without updates in between, a recomputed forward has the same graph."""
    plan, batches = plan_of(3, heavy=1), make_batches(3)
    kept, recomputed = make_stages(3), make_stages(3)
    for stages, memory in ((kept, "keep"), (recomputed, "recompute")):
        with make_pipe(stages, plan, accumulation=3 * MICROBATCHES, memory=memory) as pipe:
            masks = record_masks(pipe)
            list(pipe.run(batches))
    assert_equal(kept, recomputed)
    assert not all(all(stage.all() for stage in mask) for mask in masks)


def test_checkpointed_regions_freeze_what_forward_froze():
    """They run their forward once more in backward, where the masks have to be in force again."""

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    plan, batches = plan_of(3, heavy=1), make_batches(3)
    plain, stages = make_stages(3), make_stages(3)
    for trained in (plain, [Checkpointed(stage) for stage in stages]):
        with make_pipe(trained, plan, accumulation=3 * MICROBATCHES) as pipe:
            list(pipe.run(batches))
    assert_equal(plain, stages)


def test_what_never_trains_stays_as_it_is():
    """Stage 0 is frozen from the second batch on: no gradient, so neither decay nor momentum moves it."""
    plan = plan_with(2, lambda action: 1.0 if action.stage == 0 else 0.0)
    stages, batches = make_stages(2), make_batches(4)
    with make_pipe(stages, plan, accumulation=MICROBATCHES) as pipe:
        list(pipe.run(batches[:1]))
        first, other = copy.deepcopy(stages)
        list(pipe.run(batches[1:]))
        steps = [{int(state["step"]) for state in one.state.values()} for one in pipe.optimizers]
    assert_equal(stages[:1], [first])
    assert not torch.equal(stages[1][0].weight, other[0].weight)
    assert steps == [{1}, {4}]


def test_below_a_cut_no_backward_runs():
    """Every other micro-batch trains nothing in stages 0 and 1."""
    calls = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, stage):
            ctx.stage = stage
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            calls.append(ctx.stage)
            return grad, None

    class Stage(nn.Module):
        def __init__(self, inner, index):
            super().__init__()
            self.inner, self.index = inner, index

        def forward(self, x):
            return Watched.apply(self.inner(x), self.index)

    plan = plan_with(3, lambda action: float(action.stage < 2 and action.microbatch % 2))
    assert plan.cuts == [0, 2, 0, 2]
    stages = [Stage(stage, index) for index, stage in enumerate(make_stages(3))]
    with make_pipe(stages, plan, accumulation=2) as pipe:
        list(pipe.run(make_batches(1)))
        calls.clear()
        list(pipe.run(make_batches(3)))
    assert [calls.count(stage) for stage in range(3)] == [6, 6, 12]


def test_bounds_are_measured_and_a_plan_made_while_the_stream_runs():
    config = FreezeConfig(
        max_ratio=0.5, mode="lp", warmup_steps=1, measure_steps=3, ramp_steps=2, replan_drift_ratio=None
    )
    stages = make_stages(3)
    trained = 0
    with make_pipe(stages, config, accumulation=2) as pipe:
        masks = record_masks(pipe)
        batches = iter(make_batches(400))

        def until_planned():
            for batch in batches:
                yield batch
                if pipe.report()["freezing"]["phase"] == "steady" and pipe.plan is not None:
                    return

        trained += len(list(pipe.run(until_planned(), drain=False)))
        trained += len(list(pipe.run(make_batches(6))))
        report, plan = pipe.report()["freezing"], pipe.plan
    phases = [event["new"] for event in report["events"] if event["event"] == "phase"]
    assert phases == ["measure_upper", "measure_lower", "ramp", "steady"]
    assert report["step"] == trained
    assert plan.options.goal == "period"
    for stage in range(3):
        measured = report["actions"][f"{stage}B0"]
        assert measured["upper"]["num_samples"] >= 2
        assert measured["lower"]["num_samples"] >= 1
    assert report["planned_stage_ratios"] == pytest.approx(
        [sum(r for a, r in plan.ratios.items() if a.stage == s) / MICROBATCHES for s in range(3)]
    )
    assert max(report["planned_stage_ratios"]) <= 0.5 + 1e-9
    assert report["least_period_s"] <= report["predicted_period_s"] <= report["unfrozen_period_s"]
    assert report["measured_period_s"] > 0
    # Lower bounds: every other micro-batch is frozen whole, so that no batch trains nothing.
    whole = [not any(stage.any() for stage in mask) for mask in masks]
    assert [True, False, True, False] in np.array(whole).reshape(-1, MICROBATCHES).tolist()
    assert [False, True, False, True] in np.array(whole).reshape(-1, MICROBATCHES).tolist()


def test_a_resumed_run_draws_the_same_masks():
    batches = make_batches(6)
    plan = plan_of(2, heavy=0)
    whole, parts = make_stages(2), make_stages(2)
    with make_pipe(whole, plan, accumulation=2) as pipe:
        list(pipe.run(batches[:3]))
        list(pipe.run(batches[3:]))
    with make_pipe(parts, plan, accumulation=2) as pipe:
        list(pipe.run(batches[:3]))
        state, weights = pipe.training_state_dict(), copy.deepcopy(pipe.state_dict())
    again = make_stages(2)
    with make_pipe(again, plan, accumulation=2) as pipe:
        pipe.load_state_dict(weights)
        pipe.load_training_state_dict(state)
        list(pipe.run(batches[3:]))
    assert_equal(again, whole)


class Fragile(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise ArithmeticError("planted")
        return self.inner(x)


def test_after_a_failure_masks_go_on_where_results_ended():
    stages = make_stages(2)
    stages[1] = Fragile(stages[1])
    with make_pipe(stages, plan_of(2, heavy=1)) as pipe:
        list(pipe.run(make_batches(2)))
        stages[1].fails = True
        with pytest.raises(StageError, match="planted"):
            list(pipe.run(make_batches(2)))
        stages[1].fails = False
        assert all(parameter.requires_grad for parameter in pipe.parameters())
        assert pipe.report()["freezing"]["step"] == 2
        list(pipe.run(make_batches(3)))
        assert pipe.report()["freezing"]["step"] == 5


def test_evaluation_between_batches_sees_no_masks():
    stages = make_stages(2)
    batches = make_batches(4)
    with make_pipe(stages, plan_of(2, heavy=1)) as pipe:
        results = pipe.run(batches)
        next(results)
        loss = pipe.evaluate(*batches[0][:1], target=batches[0][1])
        with torch.no_grad():
            x = stages[1](stages[0](batches[0][0]))
        torch.testing.assert_close(loss, F.mse_loss(x, batches[0][1]), rtol=1e-12, atol=0)
        assert len(list(results)) == 3


def test_parameters_of_the_loss_train_always():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, output, target):
            return F.mse_loss(self.scale * output, target)

    loss_fn, stages = Scaled(), make_stages(2)
    plan = plan_with(2, lambda action: 1.0)
    with make_pipe(stages, plan, loss_fn=loss_fn) as pipe:
        list(pipe.run(make_batches(1)))
        before, weights = loss_fn.scale.item(), copy.deepcopy(stages)
        list(pipe.run(make_batches(1)))
    assert_equal(stages, weights)
    assert loss_fn.scale.item() != before


@pytest.mark.parametrize("option", [{"rescale": True}, {"live_microbatches": 2}])
def test_other_divisors_are_refused_by_name(option):
    with pytest.raises(ValueError, match=f"freeze={next(iter(option))}"):
        make_pipe(make_stages(2), FreezeConfig(**option))


def test_a_plan_for_other_stages_is_refused():
    with pytest.raises(PlanError, match="another number of stages"):
        make_pipe(make_stages(3), plan_of(2))


def test_patterns_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match="nothing"):
        make_pipe(make_stages(2), FreezeConfig(parameter_max_ratio={"nothing.*": 0.0}))


def controller_of(plan, **options):
    work = [ParameterWork(["a", "b", "c"], [1.0, 2.0, 1.0], [0, 1, 2])] * 2
    return FreezeController(FreezeConfig(plan=plan), plan.schedule, work=work, **options)


def test_masks_of_a_fixed_plan_do_not_depend_on_when_earlier_steps_end():
    plan = plan_of(2, heavy=1)
    alone, overlapping = controller_of(plan), controller_of(plan, overlapping=True)
    trainable = [np.ones(3, bool)] * 2
    durations = dict.fromkeys(plan.schedule.actions, 1.0)
    for step in range(30):
        expected = alone.begin_step(trainable)
        alone.end_step(durations)
        drawn = overlapping.begin_step(trainable)
        for one, other in zip(drawn.live, expected.live, strict=True):
            assert np.array_equal(one, other)
        if step % 3 == 2:
            for _ in range(3):
                overlapping.end_step(durations)
    assert overlapping.step == alone.step == 30


def test_overlapping_steps_count_for_the_phase_that_they_began_in():
    config = FreezeConfig(warmup_steps=1, measure_steps=4, settle_steps=1, plan_wait_steps=1)
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    controller = FreezeController(config, schedule, overlapping=True)
    trainable = [np.ones(3, bool)] * 2
    begun = [controller.begin_step(trainable) for _ in range(2)]
    while len(begun) < 14:
        frozen = [not mask.any() for mask in begun[controller.step].live[1]]
        times = {
            action: 1.0 if action.kind is Kind.F else 2.0 if frozen[action.microbatch] else 3.0
            for action in schedule.actions
        }
        controller.end_step(times)
        begun.append(controller.begin_step(trainable))
    actions = controller.report()["actions"]
    controller.close()
    timed = [mask for mask in begun[: controller.step] if mask.phase == "measure_upper"][config.settle_steps :]
    assert actions["1B0"]["upper"]["num_samples"] == len(timed) == 4
    assert actions["1B0"]["upper"]["median_s"] == 3.0
    assert actions["1B0"]["upper"]["spread_s"] == 0.0
    assert actions["1B1"]["lower"]["median_s"] == 2.0
    assert actions["1B1"]["lower"]["spread_s"] == 0.0

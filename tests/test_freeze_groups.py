"""Caps and prices of single parameters: masks keep them whatever the plan, and plans are made that masks can meet."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.freeze_machine import InstantPlanner, Machine, make_works
from tests.pipelines import SHORT, costs_of, cut_plan
from tests.plan_checks import check_plan
from tests.test_planner_parameter_limits import check_limits
from timelyfreeze import FreezeConfig, FreezingPipeline, Plan
from timelyfreeze.cost import ActionCosts
from timelyfreeze.freeze import FreezeController, MaskDrawer, ParameterWork
from timelyfreeze.freeze.even_masks import live_chances
from timelyfreeze.freeze.groups import StageGroups, check_patterns, stage_groups, with_limits
from timelyfreeze.planner import ParameterLimits, Planner, PlanOptions
from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.model import CostModel
from timelyfreeze.planner.true_cost import ratio_grid
from timelyfreeze.schedule import create_schedule

STAGES, MICROBATCHES, WINDOW = 3, 6, 200
SCHEDULE = create_schedule("1f1b", num_ranks=STAGES, num_microbatches=MICROBATCHES)
COSTS = ActionCosts.uniform(SCHEDULE, forward_s=15.0, backward_s=43.0, frozen_backward_s=20.0)
CAPS = {"0.*": 0.25, "*norm*": 0.0, "2.*": 0.7}
PRICES = {"*.up.*": 3.0}


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_model() -> nn.Sequential:
    """Stage 0 holds no norm, so it may be cut; the others have one in every block."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Block(), Block(), Block(), nn.Linear(6, 6))


def make_pipe(model: nn.Module, **config: object) -> FreezingPipeline:
    freeze = FreezeConfig(**config)  # type: ignore[arg-type]
    return FreezingPipeline(
        model, STAGES, MICROBATCHES, loss_fn=F.mse_loss, freeze=freeze, split_points=[1, 3], timeout_s=60.0
    )


def works_of_model() -> list[ParameterWork]:
    """As the pipeline names them, with works by size."""
    named = [(name, float(parameter.numel())) for name, parameter in make_model().named_parameters()]
    stages = [[pair for pair in named if pair[0][0] in part] for part in ("0", "12", "34")]
    return [
        ParameterWork([name for name, _ in pairs], [size for _, size in pairs], np.arange(len(pairs)))
        for pairs in stages
    ]


def make_group_plan(mode: str, **options: object) -> Plan:
    given = PlanOptions(**{"max_ratio": 0.5, "mode": mode, "parameter_max_ratio": CAPS} | options)  # type: ignore[arg-type]
    works = works_of_model()
    trainable = [np.ones(len(work.names), dtype=bool) for work in works]
    return Planner(SCHEDULE, with_limits(given, works, trainable)).solve(COSTS)


def cap_of(name: str, patterns: dict[str, float], default: float) -> float:
    """First match wins, written down once more: "0.*" begins a name, "*norm*" is in one."""
    for pattern, cap in patterns.items():
        if name.startswith(pattern.rstrip("*")) or ("norm" in pattern and "norm" in name):
            return cap
    return default


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["cut", "lp"])
@pytest.mark.parametrize("prices", [None, PRICES])
def test_every_parameter_keeps_its_cap_over_200_steps(mode: str, prices: dict[str, float] | None) -> None:
    """Counted where it happens: the flags that the modules' forwards see."""
    plan = make_group_plan(mode, parameter_weights=prices)
    model, x = make_model(), torch.randn(6, 6)
    live: dict[str, list[bool]] = {name: [] for name, _ in model.named_parameters()}

    def record(prefix):
        def hook(module, _):
            for name, parameter in module.named_parameters(recurse=False):
                live[f"{prefix}.{name}"].append(parameter.requires_grad)

        return hook

    with make_pipe(model, plan=plan, ramp_steps=4) as pipe:
        pipe.step(x, target=x)  # profiled
        for prefix, module in model.named_modules():
            if prefix:
                module.register_forward_pre_hook(record(prefix))
        ratios = [pipe.step(x, target=x).freeze_ratio for _ in range(WINDOW)]
    frozen = {name: 1.0 - np.mean(flags) for name, flags in live.items()}
    assert {len(flags) for flags in live.values()} == {WINDOW * MICROBATCHES}
    for name, share in frozen.items():
        # Systematic sampling: off by less than one micro-batch a step, and by a few in 200 evenly spread steps.
        assert share <= cap_of(name, CAPS, 0.5) + 3 / WINDOW, (name, share)
        assert share > 0 or cap_of(name, CAPS, 0.5) == 0 or (mode == "lp" and name.startswith("0."))
    assert all(all(flags) for name, flags in live.items() if "norm" in name)
    assert np.mean(ratios) > 0.2
    if prices is None:
        return
    for block in "123":  # stage 2's cap leaves a choice only where the plan does not use it up
        assert frozen[f"{block}.up.weight"] <= frozen[f"{block}.down.weight"] + 3 / WINDOW


def test_a_run_that_plans_by_itself_takes_the_names_of_the_pipeline() -> None:
    model, x = make_model(), torch.randn(6, 6)
    config = SHORT | {"max_ratio": 0.5, "parameter_max_ratio": CAPS, "parameter_weights": PRICES}
    with make_pipe(model, **config) as pipe:
        for _ in range(60):
            pipe.step(x, target=x)
            if pipe.plan is not None:
                break
        assert pipe.plan is not None
        limits = pipe.plan.options.parameter_limits
        assert limits is not None
        assert {stage: (each.least, each.most) for stage, each in limits.items()} == {
            0: (0.25, 0.25),
            1: (0.0, 0.7),
            2: (0.0, 0.5),
        }
        assert 1.0 < limits[1].price < 3.0
        check_limits(pipe.plan)
        names = [stage["names"] for stage in pipe.freeze_state_dict()["freezing"]["work"]]
    assert [name for stage in names for name in stage] == [name for name, _ in make_model().named_parameters()]


def test_a_shared_parameter_keeps_its_cap_in_every_stage() -> None:
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    with FreezingPipeline(
        [first, last], 2, 4, loss_fn=F.mse_loss, freeze=FreezeConfig(parameter_max_ratio={"0.weight": 0.0})
    ) as pipe:
        pipe.step(torch.randn(4, 6), target=torch.randn(4, 6))
        names = [stage["names"] for stage in pipe.freeze_state_dict()["freezing"]["work"]]
    assert names == [["0.weight", "0.bias"], ["0.weight", "1.bias"]]


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_that_cuts_above_such_a_stage_is_caught_and_its_masks_keep_the_caps_all_the_same() -> None:
    limits = {1: ParameterLimits(0.0, 0.4, 0.5, 1.0)}
    plan = cut_plan([2, 0, 0, 0], 3, max_ratio=0.5, parameter_max_ratio={"1.norm": 0.0}, parameter_limits=limits)
    with pytest.raises(AssertionError):
        check_limits(plan)
    model = CostModel(plan.schedule, plan.costs)
    assert Limits.of_options(model, plan.options).most_full.tolist() == [2, 0, 0]
    assert not Limits.of_options(model, plan.options).allow(ratio_grid(plan.schedule, plan.costs, plan.ratios))
    work = [ParameterWork([f"{s}.norm", f"{s}.weight"], [1.0, 4.0], [0, 1]) for s in range(3)]
    controller = FreezeController(FreezeConfig(plan=plan, ramp_steps=3), plan.schedule, 0, work)
    machine = Machine(controller, work)
    machine.run(40)
    assert all(masks.live[1][:, 0].all() for masks in machine.masks)
    assert any(not masks.live[1][0, 1] for masks in machine.masks)


def test_prices_of_parameters_make_the_stages_price() -> None:
    work = [ParameterWork(["a", "b"], [1.0, 3.0], [0, 1]), ParameterWork(["c"], [1.0], [0])]
    flags = [np.ones(2, bool), np.ones(1, bool)]
    options = with_limits(PlanOptions(0.5, weights={0: 2.0}, parameter_weights={"b": 4.0}), work, flags)
    assert options.parameter_limits == {0: ParameterLimits(0.5, 0.5, 0.5, 0.25 * 2.0 + 0.75 * 4.0)}
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    assert Limits.of_options(CostModel(schedule, costs_of(schedule)), options).prices.tolist() == [3.5, 1.0]
    assert with_limits(options, work, [np.array([True, False]), flags[1]]).parameter_limits == {
        0: ParameterLimits(0.5, 0.5, 0.5, 2.0)  # of those that are trainable
    }


# --- masks ------------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.data())
def test_chances_keep_the_caps_whatever_the_ratios(data: st.DataObject) -> None:
    num, num_microbatches = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    shares = np.array(data.draw(st.lists(st.floats(0.01, 1.0), min_size=num, max_size=num)))
    shares /= shares.sum()
    caps = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), min_size=num, max_size=num)))
    prices = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=num, max_size=num)))
    ratios = np.array(data.draw(st.lists(st.floats(0.0, 1.0), min_size=num_microbatches, max_size=num_microbatches)))
    at_cut = np.array(data.draw(st.lists(st.booleans(), min_size=num_microbatches, max_size=num_microbatches)))
    chances = live_chances(shares, np.cumsum(shares) - shares, ratios, at_cut, StageGroups(caps, prices))
    assert (chances >= 0).all()
    assert (chances <= 1).all()
    assert ((1.0 - chances).sum(axis=0) <= caps * num_microbatches + 1e-9).all()
    assert (chances[:, caps == 0] == 1.0).all()


def test_chances_meet_ratios_that_are_within_the_limits() -> None:
    shares, caps = np.array([0.1, 0.4, 0.5]), np.array([0.0, 0.5, 0.25])
    ratios = np.array([0.5, 0.2, 0.45, 0.15])  # their mean is that of the caps, none passes 0.325 / 0.5
    chances = live_chances(shares, np.cumsum(shares) - shares, ratios, np.zeros(4, bool), StageGroups(caps, np.ones(3)))
    assert np.allclose(chances @ shares, 1.0 - ratios)
    assert np.allclose((1.0 - chances).sum(axis=0), 4 * caps)


def test_chances_make_up_for_micro_batches_that_are_wholly_frozen() -> None:
    shares, groups = np.array([0.5, 0.5]), StageGroups(np.array([0.25, 0.5]), np.ones(2))
    ratios, at_cut = np.array([1.0, 0.25, 0.25, 0.0]), np.zeros(4, bool)
    chances = live_chances(shares, np.array([0.0, 0.5]), ratios, at_cut, groups)
    assert chances.tolist() == [[0.0, 0.0], [1.0, 0.5], [1.0, 0.5], [1.0, 1.0]]


def test_cheap_parameters_are_frozen_first_as_far_as_their_caps_allow() -> None:
    shares, caps = np.array([0.5, 0.5]), np.array([0.5, 0.5])
    groups = StageGroups(caps, np.array([5.0, 1.0]))

    def frozen(ratio: float) -> list[float]:
        chances = live_chances(shares, np.array([0.0, 0.5]), np.full(8, ratio), np.zeros(8, bool), groups)
        return (1.0 - chances).mean(axis=0).round(9).tolist()

    assert frozen(0.1) == [0.0, 0.2]
    assert frozen(0.25) == [0.0, 0.5]
    assert frozen(0.4) == [0.3, 0.5]


@pytest.mark.parametrize("palette_size", [2, 4])
def test_compiled_stages_keep_the_smallest_cap_and_train_what_has_cap_0(palette_size: int) -> None:
    names = ["norm", "up", "down"]
    work = ParameterWork(names, [1.0, 5.0, 4.0], [0, 1, 2], palette_size=palette_size)
    options = PlanOptions(0.6, parameter_max_ratio={"norm": 0.0, "up": 0.25})
    limits = with_limits(options, [work], [np.ones(3, bool)]).parameter_limits
    assert limits == {0: ParameterLimits(0.0, pytest.approx(0.225), 0.25, 1.0)}
    below = ParameterWork(["below"], [1.0], [0])
    groups = [None, stage_groups(options, 0, work)]
    drawer = MaskDrawer([below, work], [np.ones(1, bool), np.ones(3, bool)], 4, groups=groups)
    ratios = np.array([[0.0] * 4, [0.225] * 4])
    masks = np.array([drawer.draw(step, ratios, np.zeros((2, 4)))[1] for step in range(WINDOW)])
    assert {tuple(row) for row in masks.reshape(-1, 3).tolist()} == {(True, True, True), (True, False, False)}
    assert (masks.sum(axis=1) == [4, 3, 3]).all()


def test_stages_that_no_pattern_is_about_draw_as_before() -> None:
    works = make_works(2)
    options = PlanOptions(0.5, parameter_max_ratio={"p1": 0.0})
    works[1] = replace(works[1], names=[f"q{i}" for i in range(12)])
    assert stage_groups(options, 1, works[1]) is None
    groups = [stage_groups(options, stage, work) for stage, work in enumerate(works)]
    flags = [np.ones(12, dtype=bool)] * 2
    ratios, mixes = np.array([[0.0, 0.3], [0.5, 0.4]]), np.zeros((2, 2))
    plain, grouped = MaskDrawer(works, flags, 2), MaskDrawer(works, flags, 2, groups=groups)
    for step in range(50):
        assert (plain.draw(step, ratios, mixes)[1] == grouped.draw(step, ratios, mixes)[1]).all()
        assert grouped.draw(step, ratios, mixes)[0][:, 1].all()


# --- checks, files and resume -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parameter_max_ratio": {"*": 1.5}}, r"parameter_max_ratio\['\*'\]: expected a number in \[0, 1\], got 1.5"),
        ({"parameter_max_ratio": {0: 0.5}}, "a pattern of parameter_max_ratio: expected a text, got 0"),
        ({"parameter_weights": {"*": -1.0}}, r"parameter_weights\['\*'\]: expected a finite number, at least 0"),
        ({"parameter_weights": {"*": 2.0}, "live_microbatches": 2}, "live_microbatches and parameter_weights exclude"),
        ({"parameter_max_ratio": {"a": -1}, "parameter_weights": {"b": -1}}, r"(?s)\['a'\].*\['b'\]"),
    ],
)
def test_wrong_patterns_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FreezeConfig(**arguments)  # type: ignore[arg-type]


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match="parameter_max_ratio: expected a mapping from pattern to number"):
        FreezeConfig(parameter_max_ratio=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"parameter_limits\[0\]: expected 0 <= least <= mean <= most <= 1"):
        PlanOptions(parameter_limits={0: ParameterLimits(0.5, 0.4, 0.6, 1.0)})
    with pytest.raises(ValueError, match="a stage of parameter_limits: expected 0 to 1, got 5"):
        PlanOptions(parameter_limits={5: ParameterLimits(0.5, 0.5, 0.5, 1.0)}).caps(2, 4)


def test_a_pattern_for_no_parameter_is_refused_when_the_pipeline_is_made() -> None:
    config = FreezeConfig(parameter_max_ratio={"*nrom*": 0.0}, parameter_weights={"head.*": 2.0})
    with pytest.raises(ValueError, match=r"(?s)'\*nrom\*' of parameter_max_ratio is for no .*0\.weight.*'head\.\*'"):
        FreezingPipeline(make_model(), 3, 6, loss_fn=F.mse_loss, freeze=config)
    with pytest.raises(ValueError, match=r"the pattern '\*norm\*' .* which no earlier pattern matches"):
        check_patterns(PlanOptions(parameter_max_ratio={"*": 0.1, "*norm*": 0.0}), ["0.norm.weight", "1.weight"])


def test_a_plans_own_patterns_hold_and_others_are_refused() -> None:
    plan = make_group_plan("lp")
    assert FreezeConfig(plan=plan).options.parameter_max_ratio == CAPS
    assert FreezeConfig(plan=plan, parameter_max_ratio=CAPS).options is plan.options
    with pytest.raises(ValueError, match=r"parameter_max_ratio differs from the plan's: .*Leave it out"):
        FreezeConfig(plan=plan, parameter_max_ratio={"*": 0.0})


@pytest.mark.parametrize("mode", ["cut", "lp"])
def test_plans_are_saved_with_patterns_in_their_order(tmp_path, mode: str) -> None:
    plan = make_group_plan(mode, parameter_weights={"z*": 2.0, "*": 1.5})
    check_limits(plan)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert list(again.options.parameter_weights or {}) == ["z*", "*"]
    check_plan(replace(plan, options=replace(plan.options, parameter_limits=None, floor_ratio=0.0)))


def make_machine(**config: object) -> tuple[Machine, InstantPlanner]:
    works = works_of_model()
    settings = FreezeConfig(**{"max_ratio": 0.5, "parameter_max_ratio": CAPS} | config)  # type: ignore[arg-type]
    planner = InstantPlanner(SCHEDULE, 0.5)
    controller = FreezeController(settings, SCHEDULE, 0, works, planner=planner)
    return Machine(controller, works), planner


def test_the_controller_passes_the_limits_on_when_it_asks_for_a_plan() -> None:
    machine, planner = make_machine()
    planner.waiting = True
    machine.run(18)
    works = works_of_model()
    flags = [np.ones(len(work.names), bool) for work in works]
    assert planner.options == with_limits(PlanOptions(0.5, parameter_max_ratio=CAPS), works, flags)
    assert planner.options.parameter_limits
    # A checkpoint while the plan is in the making brings them back.
    state = json.loads(json.dumps(machine.controller.state_dict()))
    again, other = make_machine()
    again.controller.load_state_dict(state)
    assert other.options == planner.options


@pytest.mark.parametrize("at", [3, 30])
def test_a_resumed_run_draws_the_same_masks(tmp_path, at: int) -> None:
    plan, x = make_group_plan("cut", parameter_weights=PRICES), torch.randn(6, 6)

    def losses(pipe, num):
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
        found = []
        for _ in range(num):
            found.append(pipe.step(x, target=0.5 * x).loss)
            optimizer.step()
            optimizer.zero_grad()
        return found

    with make_pipe(make_model(), plan=plan) as whole:
        expected = losses(whole, 40)
    with make_pipe(make_model(), plan=plan) as first:
        found = losses(first, at)
        torch.save({"model": first.state_dict(), "freeze": first.freeze_state_dict()}, tmp_path / "checkpoint.pt")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    with make_pipe(make_model(), plan=plan) as second:
        second.load_state_dict(state["model"])
        second.load_freeze_state_dict(state["freeze"])
        found += losses(second, 40 - at)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

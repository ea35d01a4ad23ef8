"""Nothing starves: over any 200 steps every parameter is live in half of what its stage's cap leaves, at the least."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.test_freeze_masks import WINDOW, draw_steps, make_work, random_works
from timelyfreeze.cost import ActionCosts
from timelyfreeze.freeze import ParameterWork, mixing
from timelyfreeze.freeze.targets import PlanTargets
from timelyfreeze.planner import Planner, PlanOptions
from timelyfreeze.schedule import create_schedule


def least_live_shares(
    works: list[ParameterWork], ratios: np.ndarray, caps: float | np.ndarray, seed: int
) -> list[float]:
    """The least share of micro-batches that train any one parameter, over all windows of 200 steps, by stage."""
    mixes = mixing(ratios, np.ones(len(works), bool), caps)
    sums = [[np.zeros(len(work.names), dtype=int)] for work in works]
    for masks, _ in draw_steps(works, ratios, mixes, 2 * WINDOW, seed):
        for total, mask in zip(sums, masks, strict=True):
            total.append(total[-1] + mask.sum(axis=0))
    live = [np.array(total) for total in sums]
    return [float((total[WINDOW:] - total[:-WINDOW]).min()) / (WINDOW * ratios.shape[1]) for total in live]


def least_live_share(works: list[ParameterWork], ratios: np.ndarray, cap: float, seed: int) -> float:
    return min(least_live_shares(works, ratios, cap, seed))


def hand_made_plans(cap: float, num_stages: int, num_microbatches: int) -> Iterator[np.ndarray]:
    shape = (num_stages, num_microbatches)
    yield np.full(shape, cap)
    bottom_free = np.full(shape, cap)
    bottom_free[0] = 0.0
    yield bottom_free
    # As a linear program's corners: wholly frozen, one in part, nothing.
    corner = np.clip(cap * num_microbatches - np.arange(num_microbatches), 0.0, 1.0)
    yield np.repeat(corner[None], num_stages, axis=0)
    yield np.stack([np.roll(corner, stage) for stage in range(num_stages)])
    rng = np.random.default_rng(num_microbatches)
    spread = rng.random(shape)
    yield np.minimum(spread * cap / spread.mean(axis=1, keepdims=True), 1.0)


@pytest.mark.parametrize("cap", [0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_nothing_starves(cap: float, num_microbatches: int) -> None:
    for num_stages in (1, 2, 4):
        for number, ratios in enumerate(hand_made_plans(cap, num_stages, num_microbatches)):
            works = random_works(10 * number + num_stages, num_stages)
            share = least_live_share(works, ratios, cap, seed=number)
            assert share >= (1 - cap) / 2 - 1e-12, (num_stages, number, ratios.tolist())


@pytest.mark.parametrize("schedule_name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "options"),
    [
        (2, 8, PlanOptions(0.3)),
        (2, 8, PlanOptions(0.8)),
        (3, 4, PlanOptions(0.95)),
        (4, 8, PlanOptions(0.5)),
        (4, 8, PlanOptions(0.8)),
        (4, 6, PlanOptions(0.3, stage_max_ratio={0: 0.9, 2: 0.0})),
        (4, 6, PlanOptions(0.8, stage_max_ratio={1: 0.2}, min_live_ratio=0.5)),
    ],
)
def test_nothing_starves_under_cut_plans(
    schedule_name: str, num_stages: int, num_microbatches: int, options: PlanOptions
) -> None:
    schedule = create_schedule(schedule_name, num_ranks=num_stages, num_microbatches=num_microbatches)
    costs = ActionCosts.uniform(schedule, forward_s=15.0, backward_s=43.0, frozen_backward_s=20.0)
    targets = PlanTargets(schedule, Planner(schedule, options).solve(costs), np.ones(num_stages, dtype=bool))
    assert (targets.cuts > 0).any()
    caps = np.array(options.caps(num_stages, num_microbatches))
    for seed in range(2):
        shares = least_live_shares(random_works(seed, num_stages), targets.ratios, caps, seed)
        assert all(share >= (1 - cap) / 2 - 1e-12 for share, cap in zip(shares, caps, strict=True)), (shares, caps)


def test_every_stage_is_mixed_for_its_own_cap() -> None:
    ratios = np.array([[0.5, 0.5], [0.9, 0.9]])
    both = mixing(ratios, np.ones(2, bool), np.array([0.5, 0.9]))
    assert (both[0] == mixing(ratios, np.ones(2, bool), 0.5)[0]).all()
    assert (both[1] == mixing(ratios, np.ones(2, bool), 0.9)[1]).all()
    assert both[0, 0] != mixing(ratios, np.ones(2, bool), 0.9)[0, 0]


@pytest.mark.parametrize("palette_size", [2, 4])
def test_nothing_starves_in_compiled_stages(palette_size: int) -> None:
    works = [make_work([1.0, 5.0, 2.0, 2.0], palette_size=palette_size) for _ in range(3)]
    assert least_live_share(works, np.full((3, 2), 0.8), 0.8, seed=1) >= 0.1


def test_without_mixing_the_bottom_starves() -> None:
    """What mixing is for: the test above would notice."""
    works = [make_work([1.0] * 10)]
    live = np.mean(
        [m[0].mean(axis=0) for m, _ in draw_steps(works, np.full((1, 4), 0.8), np.zeros((1, 4)), 300)], axis=0
    )
    assert live[0] == 0.0
    assert least_live_share(works, np.full((1, 4), 0.8), 0.8, seed=0) >= 0.1


def test_mixing_is_no_more_than_needed() -> None:
    one_of_eight = np.array([[1.0] * 6 + [0.4, 0.0]])
    assert mixing(one_of_eight, np.array([True]), 0.8).tolist() == [[0.0] * 8]
    all_middling = mixing(np.full((1, 8), 0.8), np.array([True]), 0.8)
    assert 0.5 < all_middling[0, 0] < 0.7
    # A stage without trainable parameters keeps nothing live for the one above.
    above = mixing(np.array([[0.0], [0.8]]), np.array([False, True]), 0.8)
    assert above[1, 0] > 0.5


def test_all_frozen_for_ever_is_the_users_wish() -> None:
    ratios = np.ones((2, 2))
    for masks, found in draw_steps(random_works(0, 2), ratios, mixing(ratios, np.ones(2, bool), 1.0), 20):
        assert not any(mask.any() for mask in masks)
        assert (found == 1.0).all()

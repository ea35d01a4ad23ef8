"""Masks of ``live_microbatches``: every parameter is live in equally many micro-batches, whatever is cut where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_freeze_masks import all_trainable, make_work, random_works
from timelyfreeze.freeze import MaskDrawer, ParameterWork
from timelyfreeze.freeze.even_masks import live_chances

STEPS = 300


def draw_steps(
    works: list[ParameterWork], ratios: np.ndarray, steps: int = STEPS, num_live: int = 0
) -> list[list[np.ndarray]]:
    drawer = MaskDrawer(works, all_trainable(works), ratios.shape[1], seed=3, num_live=num_live)
    return [drawer.draw(step, ratios, np.zeros(ratios.shape)) for step in range(steps)]


def counts(drawn: list[list[np.ndarray]], stage: int) -> np.ndarray:
    """How many micro-batches train each parameter, ``[num_steps, num_parameters]``."""
    return np.array([masks[stage].sum(axis=0) for masks in drawn])


@pytest.mark.parametrize("seed", range(5))
def test_cuts_of_whole_micro_batches_are_followed_exactly(seed: int) -> None:
    ratios = np.array([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0, 0.0, 1.0], [0.0] * 6])
    for masks in draw_steps(random_works(seed, 3), ratios, 20):
        for live, row in zip(masks, ratios, strict=True):
            assert (live == (row == 0)[:, None]).all()


@pytest.mark.parametrize("seed", range(5))
def test_a_whole_sum_is_met_in_every_step_by_every_parameter(seed: int) -> None:
    """Stage 1 is cut in micro-batches 1 and 2, where its bottom is frozen; 0, 3 and 4 make up for that."""
    ratios = np.array([[0.0, 1.0, 1.0, 0.0, 0.0], [0.3, 0.75, 0.4, 0.5, 0.05], [0.4] * 5])
    drawn = draw_steps(random_works(seed, 3), ratios, num_live=3)
    for stage, expected in ((0, 3), (1, 3), (2, 3)):
        assert (counts(drawn, stage) == expected).all(), stage


def test_the_cut_stages_masks_grow_from_the_bottom_up() -> None:
    ratios = np.array([[0.0, 1.0, 1.0], [0.3, 0.75, 0.4]])
    works = [make_work([1.0]), make_work([1.0] * 20)]
    for masks in draw_steps(works, ratios, 20):
        assert masks[1][1].tolist() == [False] * 15 + [True] * 5
        assert masks[1][2].tolist() == [False] * 8 + [True] * 12


@pytest.mark.parametrize("seed", range(5))
def test_other_sums_are_met_within_one_and_in_expectation(seed: int) -> None:
    ratios = np.array([[0.0, 0.3, 0.9, 0.5], [0.3, 0.5, 0.5, 0.9]])
    works = random_works(seed, 2)
    drawn = draw_steps(works, ratios, 1500)
    seen = counts(drawn, 1)
    assert set(np.unique(seen)) == {1, 2}
    assert np.abs(seen.mean(axis=0) - 1.8).max() < 0.02
    drawer = MaskDrawer(works, all_trainable(works), 4, num_live=0)
    found = np.mean([drawer.frozen_ratios(masks) for masks in drawn], axis=0)
    assert np.abs(found - ratios).max() < 0.02  # the work, micro-batch by micro-batch


@pytest.mark.parametrize("ratios", [[0.5, 0.5, 0.5, 0.875, 0.25, 0.375]])
def test_what_is_wished_for_most_comes_first(ratios: list[float]) -> None:
    """Shared out in proportion, the last micro-batch finds too few parameters that may be frozen."""
    thirds, at_cut = np.full(3, 1 / 3), np.arange(6) < 2
    chances = live_chances(thirds, np.cumsum(thirds) - thirds, np.array(ratios), at_cut)
    assert np.allclose(chances @ thirds, 1.0 - np.array(ratios), atol=1e-9)


@settings(max_examples=150)
@given(st.data())
def test_chances_have_the_ratios_means_and_equal_sums(data: st.DataObject) -> None:
    """Whatever lies at or above its cut, as long as those above can make up for those at it."""
    num = data.draw(st.integers(1, 8))
    shares = np.array(data.draw(st.lists(st.floats(0.01, 1.0), min_size=num, max_size=num)))
    shares /= shares.sum()
    num_above, num_at_cut = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 2))
    above = [data.draw(st.floats(0.0, 0.9)) for _ in range(num_above)]
    at_cut = [data.draw(st.floats(0.1, 1.0)) for _ in range(num_at_cut)]
    ratios, flags = np.array(at_cut + above), np.arange(num_at_cut + num_above) < num_at_cut
    starts = np.cumsum(shares) - shares
    chances = live_chances(shares, starts, ratios, flags)
    assert (chances >= 0).all()
    assert (chances <= 1).all()
    at = slice(0, num_at_cut)
    assert np.allclose(chances[at] @ shares, 1.0 - ratios[at], atol=1e-6)
    short = chances[at].sum(axis=0)
    some = (ratios > 0) & (ratios < 1 - 1e-9)
    free = some & ~flags
    needs = (1.0 - ratios[some]).sum() - short + (chances[flags & ~some].sum(axis=0) if num_at_cut else 0.0)
    if ((needs >= 0) & (needs <= free.sum())).all():
        # Both can be had if and only if the largest ratios find enough parameters that may be frozen (Gale, 1957).
        largest = np.cumsum(np.sort(ratios[free])[::-1])
        room = [shares @ np.minimum(free.sum() - needs, count) for count in range(1, len(largest) + 1)]
        if (largest <= np.array(room) + 1e-9).all():
            assert np.allclose(chances @ shares, 1.0 - ratios, atol=1e-6)
        assert chances.sum(axis=0).min() >= np.floor((1.0 - ratios).sum() + 1e-6) - 1e-6
        if free.sum() <= 1 or not (flags & some).any():
            assert np.ptp(chances.sum(axis=0)) < 1e-6 or (largest > np.array(room) + 1e-9).any()


def test_what_cannot_be_made_up_for_is_off_by_less_than_what_is_cut() -> None:
    """All at their cut in stage 0: no micro-batch is left that could train the bottom more often."""
    for masks in draw_steps([make_work([1.0] * 10)], np.array([[0.5, 0.5, 0.0]]), 20):
        assert masks[0].sum(axis=0).tolist() == [1] * 5 + [3] * 5


@pytest.mark.parametrize("palette_size", [2, 4])
def test_compiled_stages_train_all_or_nothing_of_a_micro_batch(palette_size: int) -> None:
    works = [make_work([1.0, 2.0]), make_work([1.0, 5.0, 2.0], palette_size=palette_size)]
    drawn = draw_steps(works, np.array([[0.0, 1.0, 0.0], [0.4, 0.75, 0.85]]))
    assert (counts(drawn, 1) == 1).all()
    assert {tuple(row) for masks in drawn for row in masks[1]} == {(True,) * 3, (False,) * 3}


def test_stages_without_trainable_parameters_are_no_cut() -> None:
    works = [make_work([1.0]), make_work([1.0] * 4)]
    drawer = MaskDrawer(works, [np.array([False]), np.ones(4, dtype=bool)], 2, num_live=0)
    masks = drawer.draw(0, np.array([[0.0, 0.0], [0.75, 0.25]]), np.zeros((2, 2)))
    assert masks[0].shape == (2, 1)
    assert not masks[0].any()
    assert masks[1][0].tolist() == [False, False, False, True]


def test_masks_repeat_from_their_key() -> None:
    works, ratios = random_works(1, 2), np.array([[0.5, 0.5, 0.0], [0.3, 0.3, 0.4]])
    first, second = (draw_steps(works, ratios, 40) for _ in range(2))
    assert all(
        (a == b).all() for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )

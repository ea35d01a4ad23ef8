"""Masks: expectation, spread, determinism by key, prefixes in the cut stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyfreeze.freeze import MaskDrawer, MaskRequest, ParameterWork, mixing, policy_names, register_policy
from timelyfreeze.freeze.points import PointSequence, keyed_generator
from timelyfreeze.freeze.policies import get_policy

WINDOW = 200


def make_work(work_s: list[float], order: list[int] | None = None, palette_size: int | None = None) -> ParameterWork:
    names = [f"p{i}" for i in range(len(work_s))]
    return ParameterWork(names, work_s, list(range(len(names))) if order is None else order, palette_size=palette_size)


def random_works(seed: int, num_stages: int, most: int = 14) -> list[ParameterWork]:
    """Works over four orders of magnitude: an embedding beside norms."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most, num_stages)
    return [make_work(rng.lognormal(0, 2, n).tolist(), rng.permutation(n).tolist()) for n in sizes]


def all_trainable(works: list[ParameterWork]) -> list[np.ndarray]:
    return [np.ones(len(work.names), dtype=bool) for work in works]


def draw_steps(
    works: list[ParameterWork], ratios: np.ndarray, mixes: np.ndarray, steps: int, seed: int = 0, policy: str = "random"
) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    drawer = MaskDrawer(works, all_trainable(works), ratios.shape[1], seed=seed, policy=policy)
    for step in range(steps):
        masks = drawer.draw(step, ratios, mixes)
        yield masks, drawer.frozen_ratios(masks)


# --- points -----------------------------------------------------------------------------------------------------


def test_points_are_uniform_over_seeds() -> None:
    values = np.array([PointSequence(seed, 1).at(step=37, num=3)[2] for seed in range(2000)])
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    # Chi-square of 19 degrees of freedom: 43.8 is exceeded by chance once in a thousand.
    assert ((counts - 100.0) ** 2 / 100.0).sum() < 43.8


@pytest.mark.parametrize("stream", range(12))
@pytest.mark.parametrize("length", [0.03, 0.1, 0.5])
def test_every_interval_gets_its_share_of_any_200_steps(stream: int, length: float) -> None:
    sequence = PointSequence(5, stream)
    points = np.array([sequence.at(step, 2) for step in range(600)])
    for start, column in itertools.product(np.linspace(0, 1, 13), range(2)):
        hits = np.concatenate([[0], np.cumsum((points[:, column] - start) % 1.0 < length)])
        counts = hits[WINDOW:] - hits[:-WINDOW]
        # Independent draws would stray by 4 sqrt(200 p (1 - p)) = 17 at p = 0.1.
        assert abs(counts - WINDOW * length).max() <= 4


def test_late_steps_keep_every_digit() -> None:
    sequence = PointSequence(0, 0)
    late = np.array([sequence.at(10**12 + step, 1)[0] for step in range(1000)])
    assert len(np.unique(late)) == 1000
    assert abs(late.mean() - 0.5) < 0.01


def test_generators_differ_by_each_part_of_the_key() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (2**70, 3, 2**40)]
    draws = {keyed_generator(*key).random() for key in keys}
    assert len(draws) == len(keys)


# --- expectation and spread -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["random", "grouped"])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.8, 0.97])
def test_frozen_work_meets_the_ratio_in_expectation(policy: str, ratio: float) -> None:
    """For one (step, stage, micro-batch) over seeds: in the cut stage, above it, and with mixing."""
    works = random_works(1, 3)
    ratios = np.array([[0.0, ratio], [ratio, ratio], [ratio, ratio]])
    mixes = np.array([[0.0, 0.9], [0.0, 0.0], [0.0, 0.4]])
    num_seeds = 3000
    found = np.empty((num_seeds, 3, 2))
    for seed in range(num_seeds):
        drawer = MaskDrawer(works, all_trainable(works), 2, seed=seed, policy=policy)
        found[seed] = drawer.frozen_ratios(drawer.draw(11, ratios, mixes))
    error = np.abs(found.mean(axis=0) - ratios)
    standard_error = found.std(axis=0) / math.sqrt(num_seeds)
    assert (error <= 4 * standard_error + 1e-9).all(), (error, standard_error)


@settings(max_examples=60)
@given(
    work_s=st.lists(st.sampled_from([0.0, 1e-6, 1.0, 3.0, 50.0]), min_size=1, max_size=12),
    ratio=st.floats(0.0, 1.0),
    seed=st.integers(-(2**65), 2**65),
    step=st.integers(0, 2**50),
)
def test_one_mask_is_off_by_less_than_its_largest_tensor(
    work_s: list[float], ratio: float, seed: int, step: int
) -> None:
    work = make_work(work_s)
    drawer = MaskDrawer([make_work([1.0]), work], [np.ones(1, bool), np.ones(len(work_s), bool)], 2, seed=seed)
    # Micro-batch 0 is cut in stage 1, micro-batch 1 in stage 0.
    masks = drawer.draw(step, np.array([[1.0, 0.0], [ratio, ratio]]), np.zeros((2, 2)))
    shares = np.array(work_s) / sum(work_s) if sum(work_s) else np.full(len(work_s), 1 / len(work_s))
    assert (np.abs(drawer.frozen_ratios(masks)[1] - ratio) <= shares.max() + 1e-9).all()


def test_ratios_of_0_and_1_are_exact() -> None:
    works = random_works(3, 2, most=40)
    ratios = np.array([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]])
    for masks, _ in draw_steps(works, ratios, np.full((2, 4), 0.9), 50):
        for mask, row in zip(masks, ratios, strict=True):
            assert (mask == (row == 0.0)[:, None]).all()


def test_steps_spread_less_than_independent_draws() -> None:
    """The mean ratio of a step's micro-batches; each alone would be off by up to one tensor in ten."""
    works = [make_work([1.0]), make_work([1.0] * 10)]
    ratios = np.array([[0.0] * 8, [0.55] * 8])
    means = [found[1].mean() for _, found in draw_steps(works, ratios, np.zeros((2, 8)), 500)]
    independent = 0.1 * math.sqrt(0.5 * 0.5 / 8)
    assert abs(np.mean(means) - 0.55) < 0.002
    assert np.std(means) < 0.9 * independent


def test_each_parameter_is_live_as_often_as_any_other_whatever_its_size() -> None:
    works = [make_work([1.0]), make_work([100.0, 10.0, 1.0, 0.1, 0.0])]
    ratios = np.array([[0.0], [0.8]])
    live = np.mean([masks[1][0] for masks, _ in draw_steps(works, ratios, np.zeros((2, 1)), 5000)], axis=0)
    assert np.abs(live - 0.2).max() < 0.01


def test_orders_change() -> None:
    works = [make_work([1.0]), make_work([1.0] * 8)]
    ratios = np.array([[0.0] * 4, [0.5] * 4])
    seen = {mask.tobytes() for masks, _ in draw_steps(works, ratios, np.zeros((2, 4)), 2000) for mask in masks[1]}
    assert len(seen) >= 60  # of the 70 ways to choose 4 of 8


# --- determinism ------------------------------------------------------------------------------------------------


def test_masks_are_a_function_of_their_key() -> None:
    works = random_works(4, 3)
    ratios = np.full((3, 4), 0.6)
    mixes = mixing(ratios, np.ones(3, bool), 0.6)

    def draw(step: int, seed: int = 9) -> list[bytes]:
        drawer = MaskDrawer(works, all_trainable(works), 4, seed=seed)
        return [mask.tobytes() for mask in drawer.draw(step, ratios, mixes)]

    state = repr(np.random.get_state(legacy=False))
    in_order = [draw(step) for step in range(6)]
    assert [draw(step) for step in reversed(range(6))] == in_order[::-1]
    assert len({tuple(masks) for masks in in_order}) == 6
    assert draw(2, seed=10) != in_order[2]
    assert repr(np.random.get_state(legacy=False)) == state


def test_masks_are_what_they_were() -> None:
    """Other numbers here mean that a run resumed with this version goes on otherwise than it would have."""
    works = [make_work([3.0, 1.0, 2.0, 2.0]), make_work([1.0, 4.0, 1.0, 2.0, 2.0])]
    drawer = MaskDrawer(works, all_trainable(works), 3, seed=7)
    masks = drawer.draw(100, np.array([[1.0, 0.4, 0.0], [0.5, 0.5, 0.5]]), np.full((2, 3), 0.5))
    drawn = ["/".join("".join("-x"[int(flag)] for flag in row) for row in mask) for mask in masks]
    assert drawn == GOLDEN


GOLDEN = ["----/--xx/xxxx", "xxxxx/xxx--/xxxxx"]


# --- the cut ----------------------------------------------------------------------------------------------------


def test_cut_stages_freeze_a_prefix_in_forward_order() -> None:
    order = [2, 0, 3, 1]
    works = [make_work([1.0, 2.0, 1.0, 1.0], order), make_work([1.0, 1.0, 2.0], [2, 1, 0])]
    ratios = np.array([[0.5, 1.0], [0.5, 0.5]])
    for masks, _ in draw_steps(works, ratios, np.zeros((2, 2)), 100):
        first = masks[0][0][order]
        assert not first[0]
        assert (np.diff(first.astype(int)) >= 0).all()  # frozen ones below live ones
        second = masks[1][1][[2, 1, 0]]  # stage 0 is all frozen for micro-batch 1: stage 1 is its cut
        assert (np.diff(second.astype(int)) >= 0).all()
        assert second.any()


def test_a_realised_cut_moves_up_when_the_planned_one_is_all_frozen() -> None:
    """One tensor in stage 0 at ratio 0.5: half of the masks freeze it, and then stage 1 freezes from the bottom up."""
    works = [make_work([1.0]), make_work([1.0] * 6)]
    ratios = np.array([[0.5], [0.5]])
    prefixes = {True: 0, False: 0}
    others = {True: 0, False: 0}
    for masks, _ in draw_steps(works, ratios, np.zeros((2, 1)), 400):
        lower_live = bool(masks[0].any())
        is_prefix = (np.diff(masks[1][0].astype(int)) >= 0).all()
        (prefixes if is_prefix else others)[lower_live] += 1
    assert others[False] == 0
    assert prefixes[False] > 150
    assert others[True] > 100


def test_only_trainable_parameters_are_drawn() -> None:
    works = [make_work([5.0, 1.0, 1.0, 1.0]), make_work([1.0, 1.0])]
    trainable = [np.array([False, True, True, True]), np.zeros(2, dtype=bool)]
    drawer = MaskDrawer(works, trainable, 3)
    found = []
    for step in range(300):
        masks = drawer.draw(step, np.full((2, 3), 1 / 3), np.zeros((2, 3)))
        assert not masks[0][:, 0].any()
        assert not masks[1].any()
        found.append(drawer.frozen_ratios(masks)[0])
    assert np.allclose(np.mean(found, axis=0), 1 / 3, atol=1e-6)  # shares of the trainable work


# --- palettes, probabilities, policies --------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.7, 0.9])
def test_compiled_stages_draw_from_four_masks_that_meet_the_ratio(ratio: float) -> None:
    works = [make_work([1.0]), make_work([3.0, 1.0, 2.0, 7.0, 1.0], palette_size=4)]
    seen: set[bytes] = set()
    ratios = np.array([[0.0, 1.0], [ratio, ratio]])
    found = []
    live = np.zeros(5)
    for masks, frozen in draw_steps(works, ratios, np.zeros((2, 2)), 2000):
        seen |= {mask.tobytes() for mask in masks[1]}
        found.append(frozen[1])
        live += masks[1][0]
    assert len(seen) <= 4
    assert np.abs(np.mean(found, axis=0) - ratio).max() < 0.005
    assert np.abs(live / 2000 - (1 - ratio)).max() < 0.005  # each parameter as often, above the cut
    unfrozen = {
        mask.tobytes() for masks, _ in draw_steps(works, np.zeros((2, 2)), np.zeros((2, 2)), 3) for mask in masks[1]
    }
    assert len(seen | unfrozen) <= 4


def test_live_probability_is_what_is_drawn() -> None:
    works = random_works(6, 3)
    ratios = np.array([[1.0, 0.6, 0.0], [0.5, 0.5, 0.9], [0.3, 0.0, 0.7]])
    mixes = mixing(ratios, np.ones(3, bool), 0.8)
    drawer = MaskDrawer(works, all_trainable(works), 3, seed=2)
    planned = drawer.live_probability(ratios, mixes)
    later = [np.zeros(len(work.names)) for work in works]
    for step in range(10_000, 13_000):
        for total, mask in zip(later, drawer.draw(step, ratios, mixes), strict=True):
            total += mask.mean(axis=0)
    for probability, total in zip(planned, later, strict=True):
        assert np.abs(probability - total / 3000).max() < 0.02


def test_grouped_freezes_what_one_activation_feeds_together() -> None:
    groups = [0, 0, 0, 3, 4, 4]
    stage = ParameterWork([f"p{i}" for i in range(6)], [1.0] * 6, range(6), groups=groups)  # type: ignore[arg-type]
    works = [make_work([1.0]), stage]
    patterns = set()
    for masks, _ in draw_steps(works, np.array([[0.0], [0.5]]), np.zeros((2, 1)), 200, policy="grouped"):
        row = masks[1][0]
        assert len(set(row[:3])) == 1
        assert row[4] == row[5]
        patterns.add(row.tobytes())
    assert len(patterns) > 3


def test_a_policy_can_be_added() -> None:
    @register_policy("test_last_first")
    def freeze_last_first(request: MaskRequest) -> np.ndarray:
        return np.cumsum(request.shares) <= 1.0 - request.ratios[:, None] + 1e-12

    assert "test_last_first" in policy_names()
    works = [make_work([1.0]), make_work([1.0] * 4)]
    (masks, _) = next(iter(draw_steps(works, np.array([[0.0], [0.5]]), np.zeros((2, 1)), 1, policy="test_last_first")))
    assert masks[1].tolist() == [[True, True, False, False]]
    with pytest.raises(ValueError, match=r"unknown policy: expected one of .*random.*got 'nope'"):
        get_policy("nope")


# --- works ------------------------------------------------------------------------------------------------------


def test_works_are_checked() -> None:
    with pytest.raises(ValueError, match=r"expected shape \(2,\), got \(1,\)"):
        ParameterWork(["a", "b"], [1.0], [0, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"(?s)2 problems:.*work_s.*forward_order"):
        ParameterWork(["a", "b"], [1.0, float("nan")], [1, 1])  # type: ignore[arg-type]


def test_works_survive_json_bit_for_bit() -> None:
    work = make_work([1 / 3, 2 / 7], [1, 0], palette_size=4)
    again = ParameterWork.from_json(work.to_json())
    assert again.to_json() == work.to_json()
    assert again.work_s.tobytes() == work.work_s.tobytes()

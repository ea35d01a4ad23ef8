"""Masks under which every parameter is live in a given number of micro-batches of a step: equal, or by its cap.

Where a micro-batch is cut, its mask grows from the bottom up and so favours the stage's top. Micro-batches above their
cut, where every choice takes the same time, make up for that: they train first what the others leave out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.freeze.groups import StageGroups
from timelyfreeze.freeze.parameters import Bools, Floats
from timelyfreeze.freeze.points import keyed_generator

# Sums of shares miss 1 by rounding; the planner takes ratios from here on as 1 as well.
FULL = 1.0 - 1e-9

_BITS = 40  # sums of shares are counted in whole multiples of 2^-40: no rounding may cost a parameter its turn


class EvenMasks:
    """Draws the masks of one stage.

    Args:
        shares: each trainable parameter's share of the stage's work, sum 1, ``[num_trainable]``.
        starts: the sum of the shares that forward uses before it, ``[num_trainable]``.
        divisible: whether one parameter can be live without the others; compiled stages have too few masks for that.
        groups: caps and prices of the trainable parameters; None: all are to be live equally often.
        num_live: in at least so many micro-batches, where there are no groups.
        seed, stage: key the random numbers.
    """

    def __init__(
        self,
        shares: Floats,
        starts: Floats,
        divisible: bool,
        groups: StageGroups | None,
        num_live: int | None,
        *,
        seed: int,
        stage: int,
    ) -> None:
        self._num_live = num_live
        self._shares, self._starts, self._groups = shares, starts, groups
        self._unit_of = np.arange(len(shares))
        if not divisible and len(shares) > 0:
            caps = np.zeros(len(shares)) if groups is None else groups.max_ratio
            _, first, self._unit_of = np.unique(caps, return_index=True, return_inverse=True)
            sums = np.bincount(self._unit_of, shares).astype(np.float64)
            self._shares, self._starts = sums / sums.sum(), np.zeros(len(first))
            self._groups = None if groups is None else groups.of(first)
        self._seed, self._stage = seed, stage
        self._dealt: tuple[bytes, NDArray[np.int64]] = b"", np.zeros((0, 0), dtype=np.int64)

    def draw(self, block: int, point: float, ratios: Floats, at_cut: Bools) -> Bools:
        """Which trainable parameters are live, ``[num_microbatches, num_trainable]``.

        Systematic sampling (Madow, 1949) of every parameter's micro-batches: laid behind each other, each as long as
        the chance that it trains the parameter, those that hold a whole number beyond the parameter's own point.
        So it is live as often as the chances add up to, exactly or but for less than one. The points of the parameters
        are spread by their shares, in random order, so that each mask meets its ratio nearly.

        Args:
            block: number of the block of steps that share a random order.
            point: uniform in [0, 1) over seeds, evenly spread over steps.
            ratios: share of the stage's work to freeze, ``[num_microbatches]``.
            at_cut: micro-batches that train nothing below this stage.
        """
        ends = self._ends(ratios, at_cut)
        generator = keyed_generator(self._seed, self._stage, block)
        order = np.argsort(generator.bit_generator.random_raw(len(self._shares)), kind="stable")
        spread = np.empty_like(self._shares)
        spread[order] = np.cumsum(self._shares[order])
        own = np.floor((point + spread) % 1.0 * 2.0**_BITS).astype(np.int64)
        live: Bools = np.diff((ends + own) >> _BITS, axis=0) > 0
        return live[:, self._unit_of]

    def _ends(self, ratios: Floats, at_cut: Bools) -> NDArray[np.int64]:
        """Where the micro-batches end when laid behind each other, ``[1 + num_microbatches, num_parameters]``."""
        key = ratios.tobytes() + at_cut.tobytes()
        if key != self._dealt[0]:
            chances = live_chances(self._shares, self._starts, ratios, at_cut, self._groups, self._num_live)
            ends = np.cumsum(np.concatenate([np.zeros((1, len(self._shares))), chances]), axis=0)
            self._dealt = key, np.rint(ends * 2.0**_BITS).astype(np.int64)
        return self._dealt[1]


def live_chances(
    shares: Floats,
    starts: Floats,
    ratios: Floats,
    at_cut: Bools,
    groups: StageGroups | None = None,
    num_live: int | None = None,
) -> Floats:
    """The chance of each parameter to be live in each micro-batch, ``[num_microbatches, num_parameters]``.

    Weighted by the shares, a micro-batch's chances have the mean 1 - ratio. A parameter's chances add up to the sum of
    1 - ratio, as far as the micro-batches above their cut can make up for the others and keep to their ratios; whatever
    these are, to ``num_live`` (None: as many whole micro-batches as there are in that sum). With ``groups`` they add up
    to at least 1 - cap for each micro-batch, whatever the ratios are, and the cheapest parameters are frozen most.

    >>> quarters = np.full(4, 0.25)
    >>> live_chances(quarters, np.cumsum(quarters) - 0.25, np.array([0.75, 0.25]), np.array([True, False])).tolist()
    [[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]]
    """
    chances = np.repeat(1.0 - np.where(ratios >= FULL, 1.0, ratios)[:, None], len(shares), axis=1)
    some = (ratios > 0) & (ratios < FULL)
    bottom = some & at_cut
    # As long as the part of a parameter that lies above the frozen bottom.
    above = starts + shares - ratios[bottom, None]
    chances[bottom] = np.clip(above / np.maximum(shares, np.finfo(np.float64).tiny), 0.0, 1.0)
    free = np.flatnonzero(some & ~at_cut)
    free = free[np.argsort(ratios[free], kind="stable")]
    if groups is None:
        given = chances[~some | bottom].sum(axis=0)
        total = (1.0 - ratios).sum()
        wishes = total - given
        needs = (np.floor(total + 1e-6) if num_live is None else min(num_live, total)) - given
    else:
        frozen = (1.0 - chances[~some | bottom]).sum(axis=0)
        needs = len(free) - _frozen_counts(shares, groups, len(ratios) * groups.max_ratio - frozen, ratios[free])
        wishes = needs
    for num_left, microbatch in zip(range(len(free), 0, -1), free, strict=True):
        live_share = 1.0 - ratios[microbatch]
        # What the others cannot give, no more than one each, has to be. Then of what is wished for, most to those that
        # wish for most: so the ratios are met if they can be (Gale, 1957). Then, so that the ratio and the time are
        # met, what nobody wishes for.
        forced = np.clip(needs - (num_left - 1), 0.0, 1.0)
        chance = _levelled(forced, wishes, shares, live_share, 0.0 if groups is not None else -np.inf)
        chances[microbatch] = chance
        needs, wishes = needs - chances[microbatch], wishes - chances[microbatch]
    if groups is not None:
        # While one plan gives way to another, or where more parameters train than were planned for, it may be too much.
        most = len(ratios) * groups.max_ratio
        frozen = np.maximum((1.0 - chances).sum(axis=0), most)
        chances = 1.0 - (1.0 - chances) * (most / np.maximum(frozen, np.finfo(np.float64).tiny))
    return chances


def _levelled(forced: Floats, wishes: Floats, shares: Floats, live_share: float, least: float) -> Floats:
    """Chances whose mean is ``live_share``, or as near as there are: wishes down to one level, at most 1 each.

    Args:
        forced: the chances are at least these.
        least: the level sinks no lower.
    """

    def above(level: float) -> Floats:
        return np.maximum(forced, np.clip(wishes - level, 0.0, 1.0))

    low, high = max(least, wishes.min(initial=0.0) - 1.0), wishes.max(initial=0.0)
    for _ in range(_BITS):
        middle = (low + high) / 2
        low, high = (middle, high) if shares @ above(middle) > live_share else (low, middle)
    fewest, most = above(high), above(low)
    room = shares @ (most - fewest)
    part = np.clip((live_share - shares @ fewest) / room, 0.0, 1.0) if room > 0 else 0.0
    levelled: Floats = fewest + part * (most - fewest)
    return levelled


def _frozen_counts(shares: Floats, groups: StageGroups, room: Floats, ratios: Floats) -> Floats:
    """In how many micro-batches above their cut to freeze each parameter, ``[num_parameters]``.

    The cheapest as far as the caps allow, those of one price in proportion to what is left of their caps.

    Args:
        room: what is left of each parameter's cap.
        ratios: of these micro-batches.
    """
    total = ratios.sum()
    # In no more than total / largest ratio of them, or the largest ratio could not be met (as planner/limits.py says).
    most = np.clip(room, 0.0, total / ratios.max(initial=np.finfo(np.float64).tiny))
    counts = np.zeros_like(shares)
    for price in np.unique(groups.weights):
        same = groups.weights == price
        room_of_price = shares[same] @ most[same]
        part = min(total / room_of_price, 1.0) if room_of_price > 0 else 0.0
        counts[same] = part * most[same]
        total -= part * room_of_price
    return counts

"""Draw which parameters are live, for every stage and micro-batch of a step, so that the planned ratios are met.

For a micro-batch, the cut stage is the lowest one that has something live. Its masks freeze a prefix in forward order,
so that backward stops early; above it any choice takes the same time, and a policy makes it. Which stage is the cut
follows from the masks below, so stages are drawn from the bottom up.

The points that a step's masks of a stage are drawn from follow each other at the distance of the shares that are live
(systematic sampling): above the cut, a parameter that is to be live in 2.3 micro-batches is live in 2 or 3 of every
step. Where that shall hold for cut micro-batches as well, or parameters have caps of their own, ``even_masks`` deals
the parameters out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from timelyfreeze.freeze.even_masks import FULL, EvenMasks
from timelyfreeze.freeze.groups import StageGroups
from timelyfreeze.freeze.parameters import Bools, Floats, ParameterWork
from timelyfreeze.freeze.points import PointSequence, keyed_generator
from timelyfreeze.freeze.policies import MaskRequest, get_policy

# So many masks of a stage share one random order: long enough for the arc to go round evenly (at a cap of 0.95 a
# tensor is live in 13 of 256), short enough that orders change all the time (every 32 steps of 8 micro-batches).
_MASKS_PER_ORDER = 256

# The promise: over 200 steps every parameter is live in (1 - cap) / 2 of the micro-batches. How often evenly spread
# points hit an interval strays by up to 2 of 200, and parameters move; count on 3 less.
_PROMISED, _STRAY = 0.5, 3 / 200
_MOST_MIXED = 0.95
_LARGEST_CAP = 0.95  # a cap of 1 promises nothing, but a stage with ratios below 1 shall train all over all the same
_PROBABILITY_STEPS = 512


class StageMasks:
    """Draws the masks of one stage for one set of trainable parameters."""

    def __init__(
        self,
        work: ParameterWork,
        trainable: Bools,
        *,
        seed: int,
        stage: int,
        policy: str,
        num_live: int | None = None,
        groups: StageGroups | None = None,
    ) -> None:
        self.columns = np.flatnonzero(trainable)
        self.num_parameters = len(trainable)
        work_s = work.work_s[self.columns]
        total = work_s.sum()
        num = len(self.columns)
        self.shares: Floats = work_s / total if total > 0 else np.full(num, 1.0 / max(num, 1))
        self._groups = work.groups[self.columns]
        position = np.full(self.num_parameters, -1)
        position[self.columns] = np.arange(num)
        order = position[work.forward_order]
        order = order[order >= 0]
        in_order = self.shares[order]
        self._starts = np.empty(num)
        self._starts[order] = np.cumsum(in_order) - in_order
        self._palette_size = work.palette_size
        self.even: EvenMasks | None = None
        if num_live is not None or groups is not None:
            own = None if groups is None else groups.of(self.columns)
            divisible = work.palette_size is None
            self.even = EvenMasks(self.shares, self._starts, divisible, own, num_live, seed=seed, stage=stage)
        self._in_bottom_half = self._starts + 0.5 * self.shares < 0.5
        self._policy = get_policy(policy)
        self._seed, self._stage = seed, stage

    def draw(self, block: int, points: Floats, ratios: Floats, mixes: Floats, cut: Bools, maybe_cut: Bools) -> Bools:
        """Which trainable parameters are live, ``[num_microbatches, num_trainable]``.

        Args:
            block: number of the block of steps that share a random order.
            points, ratios, mixes: of each micro-batch; for the last see ``mixing``.
            cut: where nothing below this stage is live.
            maybe_cut: where that can happen under these ratios.
        """
        live = np.repeat((ratios < FULL)[:, None], len(self.columns), axis=1)
        some = (ratios > 0) & (ratios < FULL)
        if not len(self.columns) or not some.any():
            return live
        if self._palette_size is not None:
            live[some] = self._from_palette(points[some], ratios[some], maybe_cut[some])
            return live
        # Nothing is frozen with probability ``mix (1 - ratio)``, else so much more that the mean is the ratio. Whether
        # the stage is the cut makes no difference to it: a parameter's luck must not hang on the stages below.
        empty = mixes * (1.0 - ratios)
        deeper = ratios / (1.0 - empty)
        odds = (points - empty) / (1.0 - empty)  # uniform in [0, 1) where something is frozen
        some &= odds >= 0
        bottom, free = some & cut, some & ~cut
        if bottom.any():
            live[bottom] = self._above_prefix(odds[bottom], deeper[bottom])
        if free.any():
            generator = keyed_generator(self._seed, self._stage, block)
            request = MaskRequest(self.shares, self._groups, deeper[free], odds[free], generator)
            live[free] = self._policy(request)
        return live

    def _above_prefix(self, odds: Floats, depth: Floats) -> Bools:
        """Freeze what lies below ``depth``, and what its end crosses by the odds that make it exact."""
        # Whole below: depth - start >= share. Crossed: frozen with probability (depth - start) / share.
        frozen = odds[:, None] * self.shares < depth[:, None] - self._starts
        return ~frozen

    def _from_palette(self, points: Floats, ratios: Floats, maybe_cut: Bools) -> Bools:
        """All live, all frozen, or (from four masks on, surely above the cut) one half of the work or the other frozen.

        Each half with the same probability, so that every parameter is frozen with probability ``ratio`` exactly.
        """
        assert self._palette_size is not None
        half = np.where(maybe_cut | (self._palette_size < 4), 0.0, np.minimum(ratios, 1.0 - ratios))
        # Of the points, the first ``half`` freeze one half, the next the other, the next ``ratio - half`` everything.
        live = np.repeat((points >= ratios + half)[:, None], len(self.columns), axis=1)
        live[points < half] = ~self._in_bottom_half
        live[(points >= half) & (points < 2 * half)] = self._in_bottom_half
        return live


class MaskDrawer:
    """Draws the masks of all stages: a function of (seed, step, stage, micro-batch), the plan and the trainable flags.

    Args:
        works: one a stage.
        trainable: which parameters the user lets train, one array ``[num_parameters]`` a stage.
        num_microbatches: of a step.
        seed: any whole number.
        policy: a name from ``policy_names()``.
        num_live: every parameter is to be live in so many micro-batches of a step, or as equally often as the ratios
            allow. The policy has no say then.
        groups: of every stage, or None where its parameters have no caps of their own. With them the policy has no say.
    """

    def __init__(
        self,
        works: Sequence[ParameterWork],
        trainable: Sequence[Bools],
        num_microbatches: int,
        *,
        seed: int = 0,
        policy: str = "random",
        num_live: int | None = None,
        groups: Sequence[StageGroups | None] | None = None,
    ) -> None:
        self.stages = [
            StageMasks(work, flags, seed=seed, stage=stage, policy=policy, num_live=num_live, groups=own)
            for stage, (work, flags, own) in enumerate(
                zip(works, trainable, groups or [None] * len(works), strict=True)
            )
        ]
        self._points = [PointSequence(seed, stage) for stage in range(len(works))]
        self._num_microbatches = num_microbatches
        self._steps_per_order = max(1, _MASKS_PER_ORDER // num_microbatches)

    def draw(self, step: int, ratios: Floats, mixes: Floats) -> list[Bools]:
        """Which parameters are live in a step, one array ``[num_microbatches, num_parameters]`` a stage.

        Args:
            ratios: share of each stage's trainable work to freeze, ``[num_stages, num_microbatches]``.
            mixes: what ``mixing`` gave for the plan, of the same shape.

        >>> work = ParameterWork(["a", "b"], [1.0, 1.0], [0, 1])
        >>> drawer = MaskDrawer([work], [np.array([True, True])], 2)
        >>> drawer.draw(0, np.array([[0.5, 1.0]]), np.zeros((1, 2)))[0].tolist()
        [[False, True], [False, False]]
        """
        below_live = np.zeros(self._num_microbatches, dtype=bool)
        surely_live = below_live.copy()
        at_cut = ~below_live
        masks = []
        for stage, sequence, row, mix in zip(self.stages, self._points, ratios, mixes, strict=True):
            point = float(sequence.at(step, 1)[0])
            block = step // self._steps_per_order
            if stage.even is not None:
                drawn = stage.even.draw(block, point, row, at_cut)
            else:
                points = (point + np.cumsum(1.0 - row)) % 1.0
                drawn = stage.draw(block, points, row, mix, cut=~below_live, maybe_cut=~surely_live)
            at_cut &= (row >= FULL) | (len(stage.columns) == 0)
            surely_live |= (row <= 0) & (len(stage.columns) > 0)
            below_live |= drawn.any(axis=1)
            live = np.zeros((self._num_microbatches, stage.num_parameters), dtype=bool)
            live[:, stage.columns] = drawn
            masks.append(live)
        return masks

    def frozen_ratios(self, masks: Sequence[Bools]) -> Floats:
        """The share of trainable work that masks freeze, ``[num_stages, num_microbatches]``; 0 in a stage with none."""
        return np.stack(
            [
                1.0 - live[:, stage.columns] @ stage.shares if len(stage.columns) else np.zeros(len(live))
                for stage, live in zip(self.stages, masks, strict=True)
            ]
        )

    def live_probability(self, ratios: Floats, mixes: Floats, num_steps: int = _PROBABILITY_STEPS) -> list[Floats]:
        """The probability that each parameter is live in a micro-batch, mean over the step's, ``[num_parameters]``.

        Averaged over the masks of ``num_steps`` steps: draws are evenly spread, so 512 steps are right to about 0.005.
        """
        sums = [np.zeros(stage.num_parameters) for stage in self.stages]
        for step in range(num_steps):
            for total, live in zip(sums, self.draw(step, ratios, mixes), strict=True):
                total += live.mean(axis=0)
        return [total / num_steps for total in sums]


def mixing(ratios: Floats, trains: Bools, caps: float | Floats) -> Floats:
    """By how much masks must vary so that a stage's bottom does not starve: in [0, 0.95], of the shape of ``ratios``.

    Where a stage may be the cut, a middling ratio r in every micro-batch would leave the bottom parameters frozen for
    ever. So a share p = mix (1 - r) of these masks freezes nothing and the others r / (1 - p). That keeps the mean but
    makes step times vary: mix is 0 where other micro-batches keep the bottom live often enough, else just large enough.

    Args:
        ratios: of a plan, ``[num_stages, num_microbatches]``.
        trains: whether a stage has trainable parameters, ``[num_stages]``.
        caps: on the stages' mean ratios, one or ``[num_stages]``: every parameter shall be live in at least
            (1 - cap) / 2 of the micro-batches.

    >>> np.round(mixing(np.array([[1.0, 0.8, 0.0], [0.0, 0.8, 0.8]]), np.array([True, True]), 0.8), 3)
    array([[0., 0., 0.],
           [0., 0., 0.]])
    >>> np.round(mixing(np.array([[0.8]]), np.array([True]), 0.8), 3)
    array([[0.575]])
    """
    floors = _PROMISED * (1.0 - np.minimum(np.broadcast_to(caps, len(trains)), _LARGEST_CAP))
    mixes = np.zeros(ratios.shape)
    surely_live_below = np.zeros(ratios.shape[1], dtype=bool)
    for mix, row, stage_trains, floor in zip(mixes, ratios, trains, floors, strict=True):
        middling = (row > 0) & (row < FULL)
        drawn = np.where(middling & surely_live_below, np.maximum(1.0 - row - _STRAY, 0.0), 0.0)
        given = np.where(row <= 0, 1.0, drawn).mean()
        bottom_up = middling & ~surely_live_below
        if given < floor and bottom_up.any():
            missing = floor - given + _STRAY * bottom_up.mean()
            mix[bottom_up] = min(_MOST_MIXED, missing / np.where(bottom_up, 1.0 - row, 0.0).mean())
        if stage_trains:
            surely_live_below |= row <= 0
    return mixes

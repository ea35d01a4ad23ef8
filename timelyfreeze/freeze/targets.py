"""From a plan to the ratios that a step's masks are drawn for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.freeze.even_masks import FULL
from timelyfreeze.freeze.masks import mixing
from timelyfreeze.freeze.parameters import Bools, Floats
from timelyfreeze.freeze.points import RAMP, PointSequence
from timelyfreeze.planner import Plan
from timelyfreeze.schedule import Schedule


class Targets(NamedTuple):
    """What a step's masks are drawn for: see ``MaskDrawer.draw``. Both ``[num_stages, num_microbatches]``."""

    ratios: Floats
    mixes: Floats


class PlanTargets:
    """A plan as arrays.

    Args:
        schedule: whose stages and micro-batches.
        plan: None: nothing is frozen.
        trains: whether each stage has trainable parameters, ``[num_stages]``.
    """

    def __init__(self, schedule: Schedule, plan: Plan | None, trains: Bools) -> None:
        self.ratios = np.zeros((schedule.num_stages, schedule.num_microbatches))
        self.cuts: NDArray[np.int64] = np.zeros(schedule.num_microbatches, dtype=np.int64)
        self.mixes = np.zeros_like(self.ratios)
        if plan is None:
            return
        for action, ratio in plan.ratios.items():
            self.ratios[action.stage, action.microbatch] = 1.0 if ratio >= FULL else ratio
        self.cuts[:] = plan.cuts
        caps = np.array(plan.options.caps(schedule.num_stages, schedule.num_microbatches))
        self.mixes = mixing(self.ratios, trains, caps)

    @property
    def targets(self) -> Targets:
        return Targets(self.ratios, self.mixes)


class Ramp:
    """The way from one plan to the next, micro-batch by micro-batch.

    Above the cuts ratios move linearly. At and below them a micro-batch follows the one plan or the other, the new one
    in a growing share of steps: a middling ratio in a cut stage would freeze its bottom in every step.
    """

    def __init__(self, seed: int, old: PlanTargets, new: PlanTargets) -> None:
        self._old, self._new = old, new
        self._points = PointSequence(seed, RAMP)
        stages = np.arange(len(new.ratios))[:, None]
        self._at_cut = stages <= np.maximum(old.cuts, new.cuts)

    def at(self, step: int, share: float) -> Targets:
        """The targets of a step in which ``share`` of the new plan is in force, in [0, 1]; linear in expectation."""
        switched = self._points.at(step, len(self._new.cuts)) < share
        chosen = np.where(switched, self._new.ratios, self._old.ratios)
        moved = (1.0 - share) * self._old.ratios + share * self._new.ratios
        ratios = np.where(self._at_cut, chosen, moved)
        return Targets(ratios, np.where(switched, self._new.mixes, self._old.mixes))

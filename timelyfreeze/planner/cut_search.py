"""Search for the cuts of a plan: local search over cuts, with a linear program for the ratios of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from timelyfreeze.planner.cut_lp import FixedCuts
from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.live import top_stage
from timelyfreeze.planner.model import Bools, CostModel, Floats, Ints
from timelyfreeze.planner.neighbours import first_cuts, guess_ratios, neighbour_cuts, rotated_cuts

_SAME = 1e-7  # makespans this close, relatively, are equal: the solver's own tolerance
_SEEDS = 3  # local search begins from so many of the first cuts
_BATCH = 12  # cuts are tried by linear program in batches, the most promising first
_MOST_ROTATED = 48  # so many of the cuts with three passed round: there are M^3 / 3, and few plans need one

# What a search may take, in microseconds of a 3 GHz core: the linear program of n actions takes about n^1.5 of them
# (0.5 ms at 64 actions, 2 at 256, 8 at 512, 90 at 2,048: measured). Counted rather than timed, so that plans repeat.
DEFAULT_EFFORT = 10_000_000


@dataclass(frozen=True)
class Found:
    """A set of ratios ``[num_stages, num_microbatches]`` with what it takes and gives up.

    Attributes:
        spared: the places in their micro-batch's cut stage that are left live, lest the stage's bottom starve.
    """

    ratios: Floats
    makespan_s: float
    freezing: float
    spared: Bools

    def beats(self, other: Found | None, target_s: float) -> bool:
        """Whether it is faster, down to the target; or as fast and freezes less."""
        if other is None:
            return True
        mine, theirs = max(self.makespan_s, target_s), max(other.makespan_s, target_s)
        if abs(mine - theirs) > _SAME * theirs:
            return mine < theirs
        return self.freezing < other.freezing - 1e-6


class CutSearch:
    """Improves a plan's cuts and ratios until no small change of the cuts makes it better.

    Args:
        model, limits: what is planned.
        programs: solves for the ratios of given cuts.
        target_s: a makespan below this is not wanted; then less freezing is. 0: the least makespan.
        is_stopped: asked between two solves.
        on_better: told of every plan that is better than all before.

    Attributes:
        best: so far; None until the first cuts were solved.
    """

    def __init__(
        self,
        model: CostModel,
        limits: Limits,
        programs: FixedCuts,
        *,
        target_s: float = 0.0,
        is_stopped: Callable[[], bool] = lambda: False,
        on_better: Callable[[Found], None] = lambda _: None,
    ) -> None:
        self._model, self._limits, self._programs = model, limits, programs
        self._target_s, self._is_stopped, self._on_better = target_s, is_stopped, on_better
        self._known: dict[bytes, Found | None] = {}
        self._effort = 0
        self._price = int(len(model.upper_s) ** 1.5)
        self.best: Found | None = None

    def run(self, effort: int, plans: Sequence[Floats]) -> Found:
        """Search until nothing near is better, the effort is spent, or the caller stops it.

        Args:
            effort: what may be spent; a linear program of n actions counts n^1.5.
            plans: ratios within the limits, at least one set, from which the search begins as well. What is returned is
                no worse than any of them.
        """
        self._effort = effort
        seeds: list[Found] = []
        for ratios in plans:
            spared = self._in_cut_stage(ratios) & (ratios <= 0)
            self._offer(self._judge(ratios, spared))
            found = self._solve_live(self._cuts(ratios), spared)
            seeds += [] if found is None else [found]
        known = [self._cuts(ratios)[None] for ratios in plans]
        for cuts in self._spread(np.concatenate([*known, first_cuts(self._model, self._limits)])):
            found = self._solve(cuts)
            if found is not None:
                seeds.append(found)
            if self._is_spent():
                break
        for seed in self._best_first(seeds)[:_SEEDS]:
            self._descend(seed)
        return self._finish()

    def solve_cuts(self, cuts: Ints) -> Floats:
        """The best ratios with these cuts, which the limits must allow: least time first, then least freezing."""
        found = self._solve_live(cuts, is_exact=True)
        assert found is not None
        return found.ratios

    def _spread(self, starts: Ints) -> Iterator[Ints]:
        """At most a third of the effort goes into the first cuts; where they are too many, evenly spread ones."""
        most = max(1, self._effort // (3 * self._price))
        yield from starts[:: max(1, -(-len(starts) // most))]

    def _descend(self, found: Found) -> None:
        """Follow improvements from one plan until there is none, or the effort is spent."""
        passed = set()  # a little slower but freezing less, again and again, would lead round in circles
        while not self._is_spent():
            passed.add(self._cuts(found.ratios).tobytes())
            better = self._improve(found)
            if better is None or self._cuts(better.ratios).tobytes() in passed:
                return
            found = better

    def _improve(self, found: Found) -> Found | None:
        """A better plan among the neighbours of one, or else among those with three cuts passed round."""
        at = self._cuts(found.ratios)
        for near, most in ((neighbour_cuts, None), (rotated_cuts, _MOST_ROTATED)):
            better = self._best_of(found, *near(at, self._model, self._limits), most)
            if better is not None or self._is_spent():
                return better
        return None

    def _best_of(self, found: Found, cuts: Ints, sources: Ints, most: int | None) -> Found | None:
        """The best of the first batch of cuts that holds something better than ``found``, the most promising first."""
        guesses = guess_ratios(found.ratios, cuts, sources, self._limits)
        order = np.argsort(self._model.makespans(guesses), kind="stable")[:most]
        for first in range(0, len(order), _BATCH):
            best = found
            for number in order[first : first + _BATCH]:
                tried = self._solve(cuts[number])
                if tried is not None and tried.beats(best, self._target_s):
                    best = tried
                if self._is_spent():
                    break
            if best is not found:
                return best
            if self._is_spent():
                return None
        return None

    def _finish(self) -> Found:
        """Solve the best cuts once more, exactly: the least makespan, then the least freezing."""
        assert self.best is not None
        for _ in range(self._model.num_microbatches):
            if self._is_spent() or not self._spare_others(self.best):
                break
        self._solve_live(self._cuts(self.best.ratios), self.best.spared, is_exact=True)
        return self.best

    def _spare_others(self, found: Found) -> bool:
        """Whether it is better to leave another micro-batch live, or one more, lest the bottom of a stage starve.

        Which one saves least was a guess (one rank, 8 micro-batches of which 2 are to be live: 3.5 % slower than the
        best choice). One more that is live in the cut stage may leave others, above their cuts, more to freeze.
        """
        cuts = self._cuts(found.ratios)
        is_open = self._in_cut_stage(found.ratios) & ~found.spared & (found.ratios > 0)
        swaps = np.argwhere(found.spared[:, :, None] & is_open[:, None, :])
        more = np.argwhere(is_open & (self._limits.live > 0)[:, None])
        stage, live, frozen = np.concatenate([swaps, more[:, [0, 1, 1]]]).T
        sets = np.repeat(found.ratios[None], len(stage), axis=0)
        at = np.arange(len(stage))
        sets[at, stage, live] = sets[at, stage, frozen]
        sets[at, stage, frozen] = 0.0
        for number in np.argsort(self._model.makespans(sets), kind="stable")[:_BATCH]:
            spared = found.spared.copy()
            spared[stage[number], live[number]] = False
            spared[stage[number], frozen[number]] = True
            self._solve_live(cuts, spared)
            if self.best is not found or self._is_spent():
                break
        return self.best is not found

    def _cuts(self, ratios: Floats) -> Ints:
        return np.minimum(self._model.cuts(ratios), top_stage(self._model))

    def _in_cut_stage(self, ratios: Floats) -> Bools:
        places: Bools = np.arange(self._model.num_stages)[:, None] == self._cuts(ratios)
        return places & self._model.freezable

    def _is_spent(self) -> bool:
        return self._effort <= 0 or self._is_stopped()

    def _best_first(self, found: list[Found]) -> list[Found]:
        return sorted(found, key=lambda one: (max(one.makespan_s, self._target_s), one.freezing))

    def _solve(self, cuts: Ints) -> Found | None:
        """The best plan with these cuts; None where the limits forbid them. Solved once."""
        key = cuts.tobytes()
        if key not in self._known:
            self._known[key] = self._solve_live(cuts)
        return self._known[key]

    def _solve_live(self, cuts: Ints, spared: Bools | None = None, is_exact: bool = False) -> Found | None:
        """As ``_solve``; where the bottom of a stage would starve, micro-batches in their cut stage are left live.

        Args:
            spared: places to leave live from the beginning.
        """
        spared = np.zeros(self._limits.most.shape, dtype=np.bool_) if spared is None else spared
        while True:
            self._effort -= self._price
            most = np.where(spared, 0.0, self._limits.most)
            ratios = self._programs.solve(cuts, most, target_s=self._target_s, is_exact=is_exact)
            if ratios is None:
                return None
            starved = self._limits.starved(self._model, ratios)
            if not starved.any():
                break
            spared = spared | starved
        found = self._judge(ratios, spared)
        self._offer(found)
        return found

    def _offer(self, found: Found) -> None:
        if found.beats(self.best, self._target_s):
            self.best = found
            self._on_better(found)

    def _judge(self, ratios: Floats, spared: Bools) -> Found:
        makespan_s = float(self._model.makespans(ratios[None])[0])
        return Found(ratios, makespan_s, float(self._limits.freezing(ratios)), spared)

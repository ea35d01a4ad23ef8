"""Cuts to begin a search from, cuts near given ones, and a guess at their ratios to tell the promising ones."""

from __future__ import annotations

import numpy as np

from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.live import top_stage
from timelyfreeze.planner.model import FULL, Bools, CostModel, Floats, Ints

_SLOPES = (1.0, 2.0, 0.5, 0.0)  # of the staircase at the end, in stages a micro-batch; 0: none, all at the top
_MOST_NEIGHBOURS = 4_000


def first_cuts(model: CostModel, limits: Limits) -> Ints:
    """Cuts to begin with, ``[num, num_microbatches]``: all a block at the beginning, and a staircase at the end.

    The best plans that an exact solver found for 1F1B with 2 to 8 stages look so: the first micro-batches, whose
    backwards fill the pipeline's way down, train the highest stage alone; of the last ones each trains one stage more
    than the next, so that the way out shortens.
    """
    top = top_stage(model)
    most = int(limits.most_full[model.base]) if model.base < model.num_stages else 0
    num = model.num_microbatches
    rows: dict[tuple[int, ...], None] = {}
    for total in {most, most - 1, most // 2}:
        for length in range(max(total, 0) + 1):
            for slope in _SLOPES:
                row = np.full(num, model.base)
                row[: total - length] = top
                for place in range(length):
                    row[num - 1 - place] = max(round(top - place * slope), model.base)
                rows[tuple(row.tolist())] = None
    cuts = np.array(list(rows), dtype=np.intp).reshape(-1, num)
    return cuts[_fits(cuts, model, limits)]


def neighbour_cuts(cuts: Ints, model: CostModel, limits: Limits) -> tuple[Ints, Ints]:
    """Cuts that differ in one or two micro-batches.

    Two exchange theirs; one moves to another stage; one is raised by a stage while another is lowered by one; one is
    raised to the top while another is lowered to the bottom.

    Returns:
        the cuts, and for every micro-batch the one that had its cut before (itself where its cut is new), both
        ``[num, num_microbatches]``.
    """
    num, top, base = len(cuts), top_stage(model), model.base
    stages, moved = np.indices((model.num_stages, num))[:, base : top + 1].reshape(2, -1)
    first, second = np.indices((num, num)).reshape(2, -1)
    low, high = cuts[first], cuts[second]
    swapped = (first < second) & (low != high)
    stepped = (first != second) & (low < top) & (high > base)
    leaped = stepped & (low + 1 < top)
    rows = [
        _with(cuts, moved, stages)[cuts[moved] != stages],
        _with(_with(cuts, first, low + 1), second, high - 1)[stepped],
        _with(_with(cuts, first, np.full_like(low, top)), second, np.full_like(low, base))[leaped],
    ]
    exchanges = _with(_with(np.arange(num), first, second), second, first)[swapped]
    sources = np.concatenate([np.tile(np.arange(num), (sum(map(len, rows)), 1)), exchanges])
    return _valid(np.concatenate([*rows, cuts[exchanges]]), sources, model, limits)


def rotated_cuts(cuts: Ints, model: CostModel, limits: Limits) -> tuple[Ints, Ints]:
    """Cuts in which three micro-batches pass theirs round; returned as from ``neighbour_cuts``.

    Where micro-batches are unlike each other, two exchanges in a row may lead past what is slower or not allowed.
    """
    num = len(cuts)
    first, second, third = np.indices((num, num, num)).reshape(3, -1)
    unlike = (cuts[first] != cuts[second]) & (cuts[second] != cuts[third]) & (cuts[third] != cuts[first])
    chosen = np.flatnonzero((first < second) & (first < third) & unlike)
    first, second, third = (places[_evenly(chosen)] for places in (first, second, third))
    sources = _with(_with(_with(np.arange(num), first, second), second, third), third, first)
    return _valid(cuts[sources], sources, model, limits)


def guess_ratios(ratios: Floats, cuts: Ints, sources: Ints, limits: Limits) -> Floats:
    """Ratios for each of several cuts near those of ``ratios``: kept where they can be, scaled to the limits.

    Args:
        cuts, sources: as ``neighbour_cuts`` returns them.

    Returns:
        ``[num, num_stages, num_microbatches]``.
    """
    sets = ratios[:, sources].swapaxes(0, 1)
    stages = np.arange(ratios.shape[0])[None, :, None]
    full = (stages < cuts[:, None, :]) & (limits.most > 0)
    released = (sets >= FULL) & ~full
    partly = np.where(full | released, 0.0, sets)
    room = limits.sums[:, None] - full.sum(axis=2, keepdims=True)
    used = partly.sum(axis=2, keepdims=True)
    partly *= np.minimum(1.0, np.maximum(room, 0.0) / np.maximum(used, 1e-12))
    left = np.maximum(room - used, 0.0) / np.maximum(released.sum(axis=2, keepdims=True), 1)
    partly = np.where(released, np.minimum(left, 0.9 * limits.most), partly)
    guesses: Floats = np.where(full, 1.0, partly)
    return guesses


def _with(rows: Ints, places: Ints, values: Ints) -> Ints:
    """One row, or one for each of ``places``, with one entry of each changed."""
    changed = np.array(np.broadcast_to(rows, (len(places), rows.shape[-1])))
    changed[np.arange(len(places)), places] = values
    return changed


def _valid(cuts: Ints, sources: Ints, model: CostModel, limits: Limits) -> tuple[Ints, Ints]:
    chosen = _evenly(np.flatnonzero(_fits(cuts, model, limits)))
    return cuts[chosen], sources[chosen]


def _evenly(numbers: Ints) -> Ints:
    """At most so many as are worth a guess, evenly chosen."""
    return numbers[:: max(1, -(-len(numbers) // _MOST_NEIGHBOURS))]


def _fits(cuts: Ints, model: CostModel, limits: Limits) -> Bools:
    """Which cuts leave no stage more micro-batches wholly frozen than its limit allows."""
    stages = np.arange(model.num_stages)
    num_full = ((cuts[:, None, :] > stages[:, None]) & model.freezable).sum(axis=2)
    blocked = ((cuts[:, None, :] > stages[:, None]) & model.always_trains).any(axis=(1, 2))
    fits: Bools = (num_full <= limits.most_full).all(axis=1) & ~blocked
    return fits

"""Cuts to begin a search from, cuts near given ones, and a guess at their ratios to tell the promising ones."""

from __future__ import annotations

import numpy as np

from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.live import top_stage
from timelyfreeze.planner.model import FULL, Bools, CostModel, Floats, Ints

_SLOPES = (1.0, 2.0, 0.5, 0.0)  # of the staircase at the end, in stages a micro-batch; 0: none, all at the top
_MOST_NEIGHBOURS = 4_000
_NO_SOURCE = -1


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
        the cuts ``[num, num_microbatches]``, and for exchanges the two micro-batches ``[num, 2]``, else -1.
    """
    num, top, base = len(cuts), top_stage(model), model.base
    first, second = (places.reshape(-1) for places in np.indices((num, num)))
    low, high = cuts[first], cuts[second]
    kinds = [
        (first < second) & (low != high),
        (first != second) & (low < top) & (high > base),
        (first != second) & (low < top) & (high > base) & (low + 1 < top),
    ]
    new_first = [high, low + 1, np.full_like(low, top)]
    new_second = [low, high - 1, np.full_like(low, base)]
    rows, sources = [], []
    for stage in range(base, top + 1):
        moved = np.flatnonzero(cuts != stage)
        rows.append(np.repeat(cuts[None], len(moved), axis=0))
        rows[-1][np.arange(len(moved)), moved] = stage
        sources.append(np.full((len(moved), 2), _NO_SOURCE))
    for kind, (where, mine, theirs) in enumerate(zip(kinds, new_first, new_second, strict=True)):
        chosen = np.flatnonzero(where)
        row = np.repeat(cuts[None], len(chosen), axis=0)
        at = np.arange(len(chosen))
        row[at, second[chosen]] = theirs[chosen]
        row[at, first[chosen]] = mine[chosen]
        rows.append(row)
        pair = np.stack([first[chosen], second[chosen]], axis=1)
        sources.append(pair if kind == 0 else np.full_like(pair, _NO_SOURCE))
    found, source = np.concatenate(rows), np.concatenate(sources)
    fits = np.flatnonzero(_fits(found, model, limits))
    fits = fits[:: max(1, -(-len(fits) // _MOST_NEIGHBOURS))]
    return found[fits], source[fits]


def guess_ratios(ratios: Floats, cuts: Ints, sources: Ints, limits: Limits) -> Floats:
    """Ratios for each of several cuts near those of ``ratios``: kept where they can be, scaled to the limits.

    Returns:
        ``[num, num_stages, num_microbatches]``.
    """
    num = len(cuts)
    sets = np.repeat(ratios[None], num, axis=0)
    exchanged = np.flatnonzero(sources[:, 0] != _NO_SOURCE)
    first, second = sources[exchanged].T
    sets[exchanged, :, first], sets[exchanged, :, second] = ratios[:, second].T, ratios[:, first].T
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


def _fits(cuts: Ints, model: CostModel, limits: Limits) -> Bools:
    """Which cuts leave no stage more micro-batches wholly frozen than its limit allows."""
    stages = np.arange(model.num_stages)
    num_full = ((cuts[:, None, :] > stages[:, None]) & model.freezable).sum(axis=2)
    blocked = ((cuts[:, None, :] > stages[:, None]) & model.always_trains).any(axis=(1, 2))
    fits: Bools = (num_full <= limits.most_full).all(axis=1) & ~blocked
    return fits

"""No parameter is frozen for ever: how much of each stage stays live, and how plans that starve one are mended."""

from __future__ import annotations

import numpy as np

from timelyfreeze.planner.model import FULL, CostModel, Floats

MIN_LIVE_RATIO = 0.25
"""The share of the highest stage's work that every micro-batch trains."""

_LIVE = 1e-9  # a ratio this small leaves everything live


def live_floor(max_ratio: float) -> float:
    """The share of micro-batches in which every parameter has to be live: half of what the cap leaves.

    >>> live_floor(0.5)
    0.25
    """
    return (1.0 - max_ratio) / 2


def least_live_shares(model: CostModel, ratios: Floats) -> Floats:
    """For every stage, the share of micro-batches in which its least trained parameter is live, in expectation.

    Above a micro-batch's cut any parameter may be chosen, so each is live with probability 1 - r. In the cut stage
    masks grow from the bottom up: the bottom parameter is live only if nothing there is frozen. Below it is never live.

    Args:
        ratios: ``[num_stages, num_microbatches]``.

    Returns:
        ``[num_stages]``; 1 where a stage has nothing that can be frozen.
    """
    shares: Floats = np.where(model.freezable, _live(model, ratios), 1.0).mean(axis=1)
    return shares


def top_stage(model: CostModel) -> int:
    """The highest stage that has something to freeze; -1 if none has."""
    return int(np.flatnonzero(model.freezable.any(axis=1)).max(initial=-1))


def keep_microbatches_live(model: CostModel, ratios: Floats) -> Floats:
    """Let every micro-batch train something: one that trained nothing would be a smaller batch, paid for in full.

    In the highest stage that trains no ratio passes ``1 - MIN_LIVE_RATIO``. What is taken from one micro-batch goes to
    the others, evenly, as far as they have room, so that the stage's sum stays where it can.
    """
    top = top_stage(model)
    if top < 0:
        return ratios
    places = np.flatnonzero(model.freezable[top])
    row = np.minimum(ratios[top, places], 1.0 - MIN_LIVE_RATIO)
    spare = min(float(ratios[top, places].sum()), (1.0 - MIN_LIVE_RATIO) * len(row)) - float(row.sum())
    while spare > 1e-12:
        room = 1.0 - MIN_LIVE_RATIO - row
        open_places = room > 1e-12
        if not open_places.any():
            break
        share = min(spare / int(open_places.sum()), float(room[open_places].min()))
        row = row + share * open_places
        spare -= share * int(open_places.sum())
    limited: Floats = ratios.copy()
    limited[top, places] = row
    return limited


def keep_live(model: CostModel, ratios: Floats, max_ratio: float) -> Floats:
    """Unfreeze what starves a parameter: in cut stages, the micro-batches with the smallest ratios train everything.

    Returns ratios, nowhere larger, with ``least_live_shares`` at ``live_floor(max_ratio)`` or above in every stage.
    """
    floor = live_floor(max_ratio) * model.num_microbatches
    mended = ratios
    for stage in range(model.base, model.num_stages):
        while True:
            live = np.where(model.freezable[stage], _live(model, mended)[stage], 1.0)
            # Ratios that are part of a step in its cut stage count for nothing there, though they train the top.
            wasted = np.where(model.freezable[stage], 1.0 - mended[stage] - live, 0.0)
            if live.sum() >= floor - 1e-9 or wasted.max() <= _LIVE:
                break
            mended = mended.copy()
            mended[stage, int(wasted.argmax())] = 0.0
    return mended


def _live(model: CostModel, ratios: Floats) -> Floats:
    stage = np.arange(model.num_stages)[:, None]
    cut = model.cuts(ratios)
    in_cut_stage = np.where(ratios <= _LIVE, 1.0, 0.0)
    above = np.where(ratios < FULL, 1.0 - ratios, 0.0)
    return np.where(stage == cut, in_cut_stage, np.where(stage > cut, above, 0.0))

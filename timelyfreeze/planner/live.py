"""No parameter is frozen for ever: how much of each stage stays live, and how plans that starve one are mended."""

from __future__ import annotations

import numpy as np

from timelyfreeze.planner.model import FULL, Bools, CostModel, Floats

_LIVE = 1e-9  # a ratio this small leaves everything live


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


def keep_microbatches_live(model: CostModel, ratios: Floats, most: Floats) -> Floats:
    """Let no ratio pass its limit.

    In the highest stage that trains, so that every micro-batch trains something: one that trained nothing would be a
    smaller batch, paid for in full. What is taken from one micro-batch goes to the others, evenly, as far as they have
    room, so that the stage's sum stays where it can.

    Args:
        most: the largest ratio of every place, of the shape of ``ratios``.
    """
    limited: Floats = ratios.copy()
    for stage in range(model.num_stages):
        places = np.flatnonzero(model.freezable[stage])
        limited[stage, places] = _spread(ratios[stage, places], most[stage, places])
    return limited


def _spread(ratios: Floats, limits: Floats) -> Floats:
    row = np.minimum(ratios, limits)
    spare = min(float(ratios.sum()), float(limits.sum())) - float(row.sum())
    while spare > 1e-12:
        room = limits - row
        open_places = room > 1e-12
        if not open_places.any():
            break
        share = min(spare / int(open_places.sum()), float(room[open_places].min()))
        row = row + share * open_places
        spare -= share * int(open_places.sum())
    return row


def starved_places(model: CostModel, ratios: Floats, live: Floats, *, is_exact: Bools | None = None) -> Bools:
    """Where to unfreeze so that the bottom of no stage starves, bool of the shape of ``ratios``.

    In each stage they are the places in their micro-batches' cut stage that are frozen least: their ratios are part of
    a step, yet nothing of it reaches the bottom parameters.

    Args:
        ratios: ``[num_stages, num_microbatches]``.
        live: in how many micro-batches every parameter has to be live, ``[num_stages]``.
        is_exact: in which stages masks above the cut spare the parameters that the cut stage's masks freeze, so that
            those micro-batches count whole, ``[num_stages]``; None: in none.
    """
    in_cut_stage = np.arange(model.num_stages)[:, None] == model.cuts(ratios)
    counted = _live(model, ratios)
    if is_exact is not None:
        counted = np.where((counted > 0) & ~in_cut_stage & is_exact[:, None], 1.0, counted)
    missing = live - np.where(model.freezable, counted, 1.0).sum(axis=1)
    hungry = in_cut_stage & model.freezable & (ratios > _LIVE)
    rank = np.where(hungry, ratios, np.inf).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    places: Bools = hungry & (rank < missing[:, None] - 1e-6)
    return places


def uneven_places(model: CostModel, ratios: Floats, live: Floats) -> Bools:
    """Where to unfreeze so that masks can leave every parameter live equally often, bool of the shape of ``ratios``.

    Micro-batches above their cut have to leave out what the cut stage's masks, which grow from the bottom up, keep. If
    a parameter may be frozen in n_p more of them, their ratios can be met if and only if for every j the j largest sum
    to no more than the sum over p of share_p min(j, n_p) (Gale, 1957). Where not, the cut stage's least ratio goes.

    Args:
        ratios: ``[num_stages, num_microbatches]``.
        live: in how many micro-batches every parameter is to be live, ``[num_stages]``.
    """
    stages, cuts = np.arange(model.num_stages)[:, None], model.cuts(ratios)
    partly = model.freezable & (ratios > _LIVE) & (ratios < FULL)
    in_cut_stage, above = partly & (stages == cuts), partly & (stages > cuts)
    whole = model.freezable & ((stages < cuts) | (ratios >= FULL))
    places = np.zeros_like(partly)
    for stage in np.flatnonzero(in_cut_stage.any(axis=1) & above.any(axis=1)):
        room = model.num_microbatches - live[stage] - whole[stage].sum()
        bottoms = np.sort(ratios[stage, in_cut_stage[stage]])
        widths = np.diff(np.concatenate([[0.0], bottoms, [1.0]]))
        left = room - np.arange(len(bottoms), -1, -1)  # for the parameters between two of the bottoms' ends
        largest = np.cumsum(np.sort(ratios[stage, above[stage]])[::-1])
        counts = np.arange(1, len(largest) + 1)
        if (largest > np.minimum(left, counts[:, None]) @ widths + 1e-6).any():
            places[stage, np.where(in_cut_stage[stage], ratios[stage], np.inf).argmin()] = True
    return places


def _live(model: CostModel, ratios: Floats) -> Floats:
    stage = np.arange(model.num_stages)[:, None]
    cut = model.cuts(ratios)
    in_cut_stage = np.where(ratios <= _LIVE, 1.0, 0.0)
    above = np.where(ratios < FULL, 1.0 - ratios, 0.0)
    return np.where(stage == cut, in_cut_stage, np.where(stage > cut, above, 0.0))

"""From the linear program's ratios, which know no cuts, to those of the plan, judged by the true cost model."""

from __future__ import annotations

import numpy as np

from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.live import keep_microbatches_live, top_stage
from timelyfreeze.planner.model import CostModel, Floats, Ints
from timelyfreeze.planner.patterns import first_patterns, neighbour_patterns

_SAME = 1e-9  # makespans this close, relatively, are equal
_MIN_ROUNDS = 2  # of local search, where time allows; more while the plan is slower than the linear program promised
_MAX_ROUNDS = 6
_KEPT = 4  # of the best of each search, since keeping parameters live may change their order
# Larger schedules are searched briefly: on 16 x 64 (2,048 actions) all of it would take as long as the program.
_MOST_ACTIONS_SEARCHED = 1024


def choose_ratios(model: CostModel, ratios: Floats, limits: Limits, *, target_s: float) -> Floats:
    """Deal the base stage's ratios out by micro-batch, so that some are cut, and take the best plan found.

    Tried are the sum of ratios that the program chose (it fits exactly, but dealt out in whole micro-batches it mostly
    makes a longer step: 3,410 for 3,040 ms on 1F1B 16 x 64 with 5 % scatter at cap 0.8) and as many whole micro-batches
    as the cap allows (3,006 ms, since cuts spare the next stage its input gradient). Best is the least makespan, then
    the fewest micro-batches that train nothing, then the least freezing.

    Args:
        ratios: ``[num_stages, num_microbatches]``, as the program chose them.
        limits: on the plan's ratios.
        target_s: the time that the program promises.

    Returns:
        ratios that obey the caps, starve no parameter and leave every micro-batch something to train.
    """
    ratios = keep_microbatches_live(model, ratios, limits.most)
    places = np.flatnonzero(model.freezable[model.base])
    if not len(places) or model.base == top_stage(model):
        return _feed(model, ratios, limits)
    thorough = len(model.upper_s) <= _MOST_ACTIONS_SEARCHED
    sets = []
    for num_full, part in _amounts(model, ratios[model.base, places], limits, thorough):
        found = _search(model, ratios, places, num_full, part, target_s, _MIN_ROUNDS if thorough else 0)
        sets.append(found[: _KEPT if thorough else 1])
    mended = np.stack([_feed(model, found, limits) for found in np.concatenate(sets)])
    return _thin_out(model, _best_first(model, mended)[0], places)


def _feed(model: CostModel, ratios: Floats, limits: Limits) -> Floats:
    """Unfreeze what starves a parameter: in cut stages, the micro-batches with the smallest ratios train everything."""
    while (starved := limits.starved(model, ratios)).any():
        ratios = np.where(starved, 0.0, ratios)
    return ratios


def _amounts(model: CostModel, weights: Floats, limits: Limits, thorough: bool) -> list[tuple[int, float]]:
    """How much to deal out, as (whole micro-batches, a part of one): the program's sum, and up to the cap."""
    num = len(weights)
    total = float(weights.sum())
    most = int(limits.most_full[model.base])
    num_full = min(int(total + 1e-6), most)  # where the sum is itself the limit, rounding may pass it
    part = total - num_full
    # A micro-batch frozen in part keeps the bottom parameters frozen too. Where few are left it is wholly live instead.
    if part < 1e-6 or num - num_full - 1 < limits.live[model.base]:
        part = 0.0
    amounts = {(num_full, part): None, (most, 0.0): None}
    if thorough:
        amounts[(num_full + most) // 2, 0.0] = None
    return [amount for amount in amounts if num_full <= amount[0] <= most]


def _search(
    model: CostModel, ratios: Floats, places: Ints, num_full: int, part: float, target_s: float, min_rounds: int
) -> Floats:
    """Sets of ratios with the base stage dealt out, best first: every pattern or a few, then a local search."""

    def rank(rows: Floats) -> tuple[Floats, float]:
        sets = np.repeat(ratios[None], len(rows), axis=0)
        sets[:, model.base, places] = rows
        makespans = model.makespans(sets)
        return _best_first(model, sets, makespans), float(makespans.min())

    ranked, makespan = rank(first_patterns(ratios[model.base, places], num_full, part))
    for number in range(_MAX_ROUNDS):
        if number >= min_rounds and makespan <= target_s:
            break
        found, better = rank(neighbour_patterns(ranked[0, model.base, places]))
        if better >= makespan * (1 - _SAME):
            break
        ranked, makespan = found, better
    return ranked


def _thin_out(model: CostModel, ratios: Floats, places: Ints) -> Floats:
    """Unfreeze micro-batches of the base stage that make the step no longer."""
    frozen = places[ratios[model.base, places] > 0]
    if not len(frozen):
        return ratios
    sets = np.repeat(ratios[None], len(frozen) + 1, axis=0)
    sets[np.arange(1, len(sets)), model.base, frozen] = 0.0
    makespans = model.makespans(sets)
    limit = makespans[0] * (1 + _SAME)
    spare = frozen[makespans[1:] <= limit]
    if not len(spare):
        return ratios
    sets = np.repeat(ratios[None], len(spare) + 1, axis=0)
    for number, place in enumerate(spare, 1):
        sets[number:, model.base, place] = 0.0
    fewest: Floats = sets[np.flatnonzero(model.makespans(sets) <= limit)[-1]]
    return fewest


def _best_first(model: CostModel, sets: Floats, makespans: Floats | None = None) -> Floats:
    """Order sets of ratios: least makespan, then fewest micro-batches that train nothing, then the least freezing."""
    makespans = model.makespans(sets) if makespans is None else makespans
    idle = (model.cuts(sets) == model.num_stages).sum(axis=1)
    frozen = np.round(sets.sum(axis=(1, 2)), 6)
    rounded = np.round(makespans / (makespans.min() or 1.0), 9)  # what differs by rounding is the same
    return sets[np.lexsort((frozen, idle, rounded))]

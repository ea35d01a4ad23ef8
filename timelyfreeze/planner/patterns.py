"""Which micro-batches of the base stage to freeze wholly: patterns to try.

The linear program spreads a stage's ratios as it likes. In the lowest stage masks grow from the bottom up, so middling
ratios everywhere would freeze its bottom parameters for ever, while a ratio of 1 also spares the stage above its input
gradient. So its ratios are dealt out again: some micro-batches wholly frozen, at most one in part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planner.model import Floats

_MAX_EXHAUSTIVE = 300
_MAX_NEIGHBOURS = 64


def first_patterns(weights: Floats, num_full: int, part: float) -> Floats:
    """Patterns to begin with: all of them where they are few, else a few dozen of different kinds.

    Args:
        weights: the ratios that the linear program chose, ``[num_places]``.
        num_full: how many places are 1.
        part: what one more place is; 0 for none.

    Returns:
        ``[num_patterns, num_places]``.

    >>> first_patterns(np.array([0.2, 0.0, 0.8]), 1, 0.0).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    num = len(weights)
    if math.comb(num, num_full) * (num - num_full if part else 1) <= _MAX_EXHAUSTIVE:
        return np.array(list(_all_patterns(num, num_full, part)))
    rows = []
    for chosen in _spread_sets(weights, num_full):
        row = np.zeros(num)
        row[list(chosen)] = 1.0
        if not part:
            rows.append(row)
            continue
        free = np.flatnonzero(row == 0)
        for place in sorted({int(free[0]), int(free[-1]), int(free[np.argmax(weights[free])])}):
            rows.append(row.copy())
            rows[-1][place] = part
    return np.array(rows)


def neighbour_patterns(pattern: Floats) -> Floats:
    """The pattern itself, then at most 64 in which two places near each other have changed their ratios."""
    pairs = [
        (left, left + distance)
        for distance in (1, 2, 4, 8)
        for left in range(len(pattern) - distance)
        if pattern[left] != pattern[left + distance]
    ]
    pairs = pairs[:: max(1, math.ceil(len(pairs) / _MAX_NEIGHBOURS))]
    rows = np.repeat(pattern[None], len(pairs) + 1, axis=0)
    for row, (left, right) in zip(rows[1:], pairs, strict=True):
        row[[left, right]] = row[[right, left]]
    return rows


def _all_patterns(num: int, num_full: int, part: float) -> Iterator[Floats]:
    for full in combinations(range(num), num_full):
        row = np.zeros(num)
        row[list(full)] = 1.0
        if not part:
            yield row
            continue
        for place in np.flatnonzero(row == 0):
            partly = row.copy()
            partly[place] = part
            yield partly


def _spread_sets(weights: Floats, num_full: int) -> list[tuple[int, ...]]:
    """Sets of places: where the program froze most, in its rhythm, at both ends, and evenly spread."""
    num = len(weights)
    sets: dict[tuple[int, ...], None] = {}  # in order, without repeats

    def add(chosen: NDArray[np.intp]) -> None:
        if len(chosen) == num_full:
            sets[tuple(sorted(chosen.tolist()))] = None

    add(np.argsort(-weights, kind="stable")[:num_full])
    add(num - 1 - np.argsort(-weights[::-1], kind="stable")[:num_full])
    for evenness in (1e-3, 0.1, 1.0):
        reached = np.cumsum(_share_out(weights + evenness, num_full))
        for phase in (
            0.999,
            0.875,
            0.75,
            0.5,
            0.25,
            0.001,
        ):  # the first freezes as early as the program does, or earlier
            add(np.flatnonzero(np.diff(np.floor(reached + phase), prepend=0.0)))
    for share in np.linspace(0.0, 1.0, 9):
        first = round(num_full * share)
        add(np.concatenate([np.arange(first), np.arange(num - num_full + first, num)]))
    return list(sets)


def _share_out(weights: Floats, total: float) -> Floats:
    """Scale positive weights to a sum below their number, with none above 1."""
    shares: Floats = weights * (total / weights.sum())
    while shares.max() > 1.0:  # at most once for every weight: each time at least one more is held at 1
        full = shares >= 1.0
        left = (total - full.sum()) / shares[~full].sum()
        shares = np.where(full, 1.0, shares * left)
    return shares

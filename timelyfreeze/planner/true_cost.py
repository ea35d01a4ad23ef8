"""What a plan's ratios really cost, by action: upper, lower or nothing, with every micro-batch's cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress

import numpy as np

from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import problem, raise_all
from timelyfreeze.planner.model import CostModel, Floats
from timelyfreeze.schedule import Action, Schedule
from timelyfreeze.schedule.checks import some
from timelyfreeze.schedule.graph import graph_of


@dataclass(frozen=True)
class PlannedDurations:
    """The true cost of a set of ratios.

    Attributes:
        durations_s: of every action of the schedule; 0 where it is skipped.
        skipped: backward actions below their micro-batch's cut; they do not run.
        cuts: for every micro-batch, the lowest stage that still trains something; ``num_stages`` if none does.
    """

    durations_s: dict[Action, float]
    skipped: frozenset[Action]
    cuts: list[int]


def planned_durations(schedule: Schedule, costs: ActionCosts, ratios: Mapping[Action, float]) -> PlannedDurations:
    """Turn freeze ratios into durations, knowing that below a micro-batch's cut no backward runs at all.

    With u and l an action's bounds, r its stage's ratio for that micro-batch, and c the lowest stage with r < 1:
    stages below c have no backward; in stage c masks grow from the bottom up, so that backward stops early and takes
    u (1 - r); above it takes u - (u - l) r. Forwards take their upper bound. A stage that cannot be frozen counts as
    training something, unless its backward takes no time at all.

    Args:
        ratios: by freezable action (kind B or W, lower < upper); those that are left out are 0.

    Raises:
        ValueError: a ratio is not in [0, 1] or belongs to an action that cannot be frozen, or the costs are not this
            schedule's.

    >>> from timelyfreeze.schedule import create_schedule
    >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=1)
    >>> backward = {Action.parse("0B0"): 0.0, Action.parse("1B0"): 0.5}
    >>> costs = ActionCosts({action: 1.0 for action in schedule.actions}, backward)
    >>> planned = planned_durations(schedule, costs, {Action.parse("0B0"): 1.0, Action.parse("1B0"): 0.5})
    >>> planned.cuts, planned.durations_s[Action.parse("1B0")]
    ([1], 0.5)
    """
    costs.check(schedule)
    grid = ratio_grid(schedule, costs, ratios)
    model = CostModel(schedule, costs)
    durations, skipped = model.durations(grid[None])
    actions = graph_of(schedule).actions
    return PlannedDurations(
        dict(zip(actions, durations[:, 0].tolist(), strict=True)),
        frozenset(compress(actions, skipped[:, 0].tolist())),
        model.cuts(grid).tolist(),
    )


def ratio_grid(schedule: Schedule, costs: ActionCosts, ratios: Mapping[Action, float]) -> Floats:
    """Ratios by action as ``[num_stages, num_microbatches]``, 0 where there is none.

    Raises:
        ValueError: a ratio is not in [0, 1], or belongs to an action that cannot be frozen.
    """
    known = graph_of(schedule).index
    grid = np.zeros((schedule.num_stages, schedule.num_microbatches))
    odd, bad = [], []
    for action, ratio in ratios.items():
        if action not in known or not costs.is_freezable(action):
            odd.append(str(action))
        elif not 0.0 <= ratio <= 1.0:
            bad.append(f"{action}: {ratio!r}")
        else:
            grid[action.stage, action.microbatch] = ratio
    faults = []
    if odd:
        faults.append(problem("ratios", expected="freezable actions (B or W with lower < upper)", got=some(odd)))
    if bad:
        faults.append(problem("ratios", expected="numbers in [0, 1]", got=some(bad)))
    raise_all(ValueError, faults)
    return grid

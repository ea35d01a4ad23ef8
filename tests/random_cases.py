"""Random planning problems: a schedule, costs and options, drawn from one number."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.random_schedules import random_costs, random_schedule
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import PlanOptions
from timelyfreeze.schedule import Kind, Schedule, create_schedule, schedule_names

# From this seed on schedules are those that have a name, mostly with several stages a rank and split backwards.
FIRST_NAMED = 5_000


@dataclass(frozen=True)
class Case:
    """A planning problem.

    Attributes:
        target_share: where ``target_makespan_s`` shall lie: 0 is the fastest plan, 1 nothing frozen, below 0 out of
            reach; None: no target. It cannot be drawn before the fastest plan is known.
    """

    schedule: Schedule
    costs: ActionCosts
    options: PlanOptions
    target_share: float | None = None


def random_case(seed: int) -> Case:
    """Everything about a case follows from its seed. Half of them have costs that some tool is likely to trip over."""
    draw = random.Random(seed)
    if seed >= FIRST_NAMED:
        schedule = _named(draw)
    else:
        schedule = _equal_stages(draw) if draw.random() < 0.3 else random_schedule(draw)
    costs = random_costs(schedule, draw)
    if draw.random() < 0.5:
        costs = draw.choice(DEGENERATE)(schedule, costs, draw)
    target_share = draw.choice([-0.2, 0.0, 1.0, draw.random(), draw.random()]) if draw.random() < 0.3 else None
    return Case(schedule, costs, random_options(schedule, draw), target_share)


def random_options(schedule: Schedule, draw: random.Random) -> PlanOptions:
    def share() -> float:
        return draw.choice([0.0, 0.3, 0.5, 0.8, 1.0, draw.random(), draw.random()])

    def by_stage(value: Any) -> Mapping[int, float] | None:
        return {stage: value() for stage in range(schedule.num_stages) if draw.random() < 0.5}

    options = PlanOptions(max_ratio=share())
    if draw.random() < 0.3:
        options = replace(options, stage_max_ratio=by_stage(share))
    elif draw.random() < 0.3:
        options = replace(options, live_microbatches=draw.randint(1, schedule.num_microbatches))
    if draw.random() < 0.3:
        options = replace(options, weights=by_stage(lambda: draw.choice([0.0, 3 * draw.random(), 100.0])))
    if draw.random() < 0.4:
        options = replace(options, min_live_ratio=share(), floor_ratio=share())
    return options


def _equal_stages(draw: random.Random) -> Schedule:
    name = draw.choice(["1f1b", "1f1b", "gpipe"])
    return create_schedule(name, num_ranks=draw.randint(1, 4), num_microbatches=draw.randint(1, 8))


def _named(draw: random.Random) -> Schedule:
    name = draw.choice(schedule_names()[2:])
    per_rank = 3 if name in ("looped_bfs", "interleaved_1f1b", "interleaved_zb") and draw.random() < 0.2 else None
    num_ranks = draw.randint(1, 3 if per_rank is None else 2)
    return create_schedule(name, num_ranks=num_ranks, num_microbatches=draw.randint(1, 5), stages_per_rank=per_rank)


def _uniform(schedule: Schedule, costs: ActionCosts, draw: random.Random) -> ActionCosts:
    """Equal stages, where many plans are equally fast."""
    upper = draw.uniform(0.5, 3.0)
    frozen = upper * draw.choice([0.0, 0.5, 1.0, draw.random()])
    return ActionCosts.uniform(schedule, forward_s=1.0, backward_s=upper, frozen_backward_s=frozen)


def _zeros(schedule: Schedule, costs: ActionCosts, draw: random.Random) -> ActionCosts:
    """All actions, or all of one kind, take no time at all."""
    kinds = draw.choice(["FBIW", "F", "BIW", "I", "W"])
    upper = {a: 0.0 if a.kind.value in kinds else t for a, t in costs.upper_s.items()}
    return replace(costs, upper_s=upper, lower_s={a: min(t, upper[a]) for a, t in costs.lower_s.items()})


def _huge(schedule: Schedule, costs: ActionCosts, draw: random.Random) -> ActionCosts:
    """A stage, or one action, a hundred to ten thousand times as long as the others."""
    one = draw.choice(schedule.actions)
    factor = 10.0 ** draw.randint(2, 4)
    whole = draw.random() < 0.5
    big = [a for a in schedule.actions if a == one or (whole and a.stage == one.stage)]
    upper, lower = dict(costs.upper_s), dict(costs.lower_s)
    for action in big:
        upper[action] *= factor
        lower[action] *= factor
    return replace(costs, upper_s=upper, lower_s=lower)


def _stiff_middle(schedule: Schedule, costs: ActionCosts, draw: random.Random) -> ActionCosts:
    """One stage trains whatever happens, so that nothing is cut above it."""
    stage = draw.randrange(schedule.num_stages)
    upper = {a: t or 1.0 if a.stage == stage else t for a, t in costs.upper_s.items()}
    return replace(costs, upper_s=upper, lower_s={a: t for a, t in costs.lower_s.items() if a.stage != stage})


def _frozen_front(schedule: Schedule, costs: ActionCosts, draw: random.Random) -> ActionCosts:
    """The lowest stages were frozen by the user."""
    first = draw.randint(1, schedule.num_stages)
    upper = {a: 0.0 if a.kind is not Kind.F and a.stage < first else t for a, t in costs.upper_s.items()}
    return replace(costs, upper_s=upper, lower_s={a: min(t, upper[a]) for a, t in costs.lower_s.items()})


def _slow_links(schedule: Schedule, costs: ActionCosts, draw: random.Random) -> ActionCosts:
    """Transfers take longer, some very much longer, than what they connect."""
    return replace(costs, transfer_s=10.0 ** draw.choice([0.3, 0.6, draw.uniform(1, 4)]) * max(costs.upper_s.values()))


def _nearly_frozen(schedule: Schedule, costs: ActionCosts, draw: random.Random) -> ActionCosts:
    """Freezing gains next to nothing: bounds a millionth apart."""
    return replace(costs, lower_s={a: t * (1 - 1e-6) if a.kind is not Kind.F else t for a, t in costs.upper_s.items()})


DEGENERATE = (_uniform, _zeros, _huge, _stiff_middle, _frozen_front, _slow_links, _nearly_frozen)

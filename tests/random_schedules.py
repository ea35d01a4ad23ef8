"""Random schedules that can run, random costs for them, and a plain executor as the oracle of what can run."""

from __future__ import annotations

import random

from timelyfreeze.cost import ActionCosts
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule


def published_costs(schedule: Schedule, forward: float, upper: float, lower: float) -> ActionCosts:
    """Equal stages, as in the published runs; stage 0 needs no input gradient."""
    return ActionCosts(
        {action: forward if action.kind is Kind.F else upper for action in schedule.actions},
        {action: lower * (action.stage > 0) for action in schedule.actions if action.kind is Kind.B},
    )


def scattered_costs(schedule: Schedule, seed: int, scatter: float = 0.05) -> ActionCosts:
    """The published times of LLaMA-3-8B on 4 GPUs in milliseconds, each off by some percent as measured times are."""
    draw = random.Random(seed)
    exact = published_costs(schedule, 15.0, 43.0, 20.0)
    factor = {action: max(0.1, draw.gauss(1.0, scatter)) for action in schedule.actions}
    return ActionCosts(
        {action: time * factor[action] for action, time in exact.upper_s.items()},
        {action: time * factor[action] for action, time in exact.lower_s.items()},
    )


def random_schedule(draw: random.Random) -> Schedule:
    """1F1B, GPipe, or any order that a run could have had: stages on any rank, backwards whole or split."""
    if draw.random() < 0.4:
        name = draw.choice(["1f1b", "gpipe"])
        return create_schedule(name, num_ranks=draw.randint(1, 5), num_microbatches=draw.randint(1, 6))
    num_stages, num_microbatches = draw.randint(1, 4), draw.randint(1, 5)
    num_ranks = draw.randint(1, num_stages)
    rank_of = [*range(num_ranks), *(draw.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    draw.shuffle(rank_of)
    todo = []
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            kinds = "FIW" if draw.random() < 0.4 else "FB"
            todo += [Action(stage, Kind(kind), microbatch) for kind in kinds]
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[Action] = set()
    while todo:
        ready = [action for action in todo if is_ready(action, done, num_stages)]
        action = draw.choice(ready)
        todo.remove(action)
        done.add(action)
        ranks[rank_of[action.stage]].append(action)
    return Schedule(ranks, name="random")


def random_costs(schedule: Schedule, draw: random.Random) -> ActionCosts:
    """Times over three orders of magnitude; some stages cannot be frozen, some have nothing to train."""
    scale = 10.0 ** draw.uniform(-3, 1)
    idle = {stage for stage in range(schedule.num_stages) if draw.random() < 0.1}
    stiff = {stage for stage in range(schedule.num_stages) if draw.random() < 0.15}
    upper, lower = {}, {}
    for action in schedule.actions:
        is_idle = action.kind is not Kind.F and (action.stage in idle or draw.random() < 0.03)
        upper[action] = 0.0 if is_idle else scale * draw.uniform(0.05, 1.0)
        if action.kind in (Kind.B, Kind.W) and action.stage not in stiff:
            lower[action] = upper[action] * draw.choice([0.0, draw.random(), draw.random(), 1.0])
    if draw.random() < 0.5:
        return ActionCosts(upper, lower, scale * draw.uniform(0, 0.2))
    pairs = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    pairs += [(after, before) for before, after in pairs]
    return ActionCosts(upper, lower, {pair: scale * draw.uniform(0, 0.2) for pair in pairs if draw.random() < 0.7})


def is_ready(action: Action, done: set[Action], num_stages: int) -> bool:
    """Whether everything that an action reads is there: written down once more, from what the kinds mean."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return stage == 0 or Action(stage - 1, Kind.F, microbatch) in done
    if Action(stage, Kind.F, microbatch) not in done:
        return False
    if kind is Kind.W:
        return Action(stage, Kind.I, microbatch) in done
    if stage == num_stages - 1:
        return True
    return any(Action(stage + 1, above, microbatch) in done for above in (Kind.B, Kind.I))


def can_run(ranks: list[list[Action]], num_stages: int) -> bool:
    """Run the orders like workers that wait: whether every rank gets to its end."""
    at = [0] * len(ranks)
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(ranks):
            while at[rank] < len(order) and is_ready(order[at[rank]], done, num_stages):
                done.add(order[at[rank]])
                at[rank] += 1
                moved = True
    return all(position == len(order) for position, order in zip(at, ranks, strict=True))

"""Passes: from one order of actions to another that trains the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from timelyfreeze.schedule.actions import Action, Kind
from timelyfreeze.schedule.core import Schedule
from timelyfreeze.schedule.simulate import simulate

# Seconds of every action where nothing is known about a model: input and weight gradient each cost as much as the
# forward (two matrix products a layer in a full backward, one in the others).
EQUAL_TIMES_S = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


def keep_microbatches(ranks: Iterable[Sequence[Action]], num_microbatches: int) -> list[list[Action]]:
    """Drop every micro-batch from ``num_microbatches`` on; a schedule that can run still can.

    >>> orders = [[Action.parse(text) for text in ("0F0", "0F1", "0B0", "0B1")]]
    >>> [str(action) for action in keep_microbatches(orders, 1)[0]]
    ['0F0', '0B0']
    """
    return [[action for action in order if action.microbatch < num_microbatches] for order in ranks]


def split_backward(order: Iterable[Action], delay: int) -> list[Action]:
    """Split every full backward of one rank, and leave ``delay`` weight gradients waiting.

    The weight gradient of the k-th backward stands behind the input gradient of the (k + delay)-th, the last ones at
    the end.

    >>> orders = [Action.parse(text) for text in ("0F0", "0B0", "0F1", "0B1")]
    >>> [str(action) for action in split_backward(orders, 1)]
    ['0F0', '0I0', '0F1', '0I1', '0W0', '0W1']
    """
    split: list[Action] = []
    waiting: deque[Action] = deque()
    for action in order:
        if action.kind is not Kind.B:
            split.append(action)
            continue
        split.append(action._replace(kind=Kind.I))
        waiting.append(action._replace(kind=Kind.W))
        if len(waiting) > delay:
            split.append(waiting.popleft())
    return [*split, *waiting]


def merge_backward(schedule: Schedule) -> Schedule:
    """Make a full backward of every I that its own W follows directly, where nobody waits for the input gradient alone.

    A full backward hands its input gradient on at its end. So the two are merged in stage 0, which hands on nothing,
    and where with equal times (``EQUAL_TIMES_S``, no transfers) the backward of the stage below starts no earlier than
    W ends. Nothing then starts later than before, and merging once more changes nothing.

    >>> print(merge_backward(Schedule([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])))
    rank 0 | 0F0         0B0
    rank 1 |     1F0 1I0 1W0
    """
    timeline = simulate(schedule, {action: EQUAL_TIMES_S[action.kind] for action in schedule.actions})

    def can_merge(before: Action, action: Action) -> bool:
        stage, kind, microbatch = action
        if kind is not Kind.W or before != Action(stage, Kind.I, microbatch):
            return False
        end_s = timeline.end_s[action]
        below = (Action(stage - 1, kind, microbatch) for kind in (Kind.I, Kind.B))  # neither is there below stage 0
        return all(timeline.start_s.get(reader, end_s) >= end_s for reader in below)

    ranks = []
    for order in schedule.ranks:
        merged: list[Action] = []
        for action in order:
            if merged and can_merge(merged[-1], action):
                merged[-1] = action._replace(kind=Kind.B)
            else:
                merged.append(action)
        ranks.append(merged)
    return schedule if ranks == schedule.ranks else Schedule(ranks, name=schedule.name)

"""A schedule as text: one row a rank, one column a time slot."""

from __future__ import annotations

from collections.abc import Sequence

from timelyfreeze.schedule.actions import Action
from timelyfreeze.schedule.graph import NOTHING, link_actions

_WINDOW_WIDTH = 50  # characters on either side of an arrow, so that a message about a long schedule stays readable
_WINDOW_RANKS = 3


def draw_grid(ranks: Sequence[Sequence[object]], arrow: tuple[int, int] | None = None) -> str:
    """Draw the orders of all ranks, every action one slot long and as early as what it waits for allows.

    ``arrow`` is a (rank, position): a line under that rank points at the action there, and only its surroundings are
    drawn. Orders that wait in a circle, and those with sends and receives, are drawn without waiting.

    >>> from timelyfreeze.schedule import create_schedule
    >>> print(draw_grid(create_schedule("1f1b", num_ranks=2, num_microbatches=2).ranks))
    rank 0 | 0F0 0F1     0B0     0B1
    rank 1 |     1F0 1B0 1F1 1B1
    """
    slots = _slots(ranks)
    width = max((len(str(action)) for order in ranks for action in order), default=1)
    num_slots = max((row[-1] + 1 for row in slots if row), default=0)
    first, last = 0, num_slots
    rows = range(len(ranks))
    pointed = NOTHING
    if arrow is not None:
        pointed = slots[arrow[0]][arrow[1]]
        reach = max(1, _WINDOW_WIDTH // (width + 1))
        first, last = max(0, pointed - reach), min(num_slots, pointed + reach + 1)
        rows = range(max(0, arrow[0] - _WINDOW_RANKS), min(len(ranks), arrow[0] + _WINDOW_RANKS + 1))
    label_width = len(f"rank {max(len(ranks) - 1, 0)}")
    lines = []
    for rank in rows:
        cells = {slot: str(action) for slot, action in zip(slots[rank], ranks[rank], strict=True)}
        shown = " ".join(cells.get(slot, "").ljust(width) for slot in range(first, last))
        before = "... " if first > 0 else ""
        after = " ..." if last < num_slots else ""
        lines.append((f"rank {rank}".ljust(label_width) + " | " + before + shown + after).rstrip())
        if arrow is not None and arrow[0] == rank:
            lines.append(" " * (label_width + 3 + len(before) + (pointed - first) * (width + 1)) + "^" * width)
    return "\n".join(lines)


def _slots(ranks: Sequence[Sequence[object]]) -> list[list[int]]:
    """The time slot of every action, or its position on its rank where the orders cannot run or are not all actions."""
    orders = [[item for item in order if isinstance(item, Action)] for order in ranks]
    num_stages = max((action.stage for order in orders for action in order), default=0) + 1
    graph = link_actions(orders, num_stages)
    if len(graph.order) < sum(len(order) for order in ranks):
        return [list(range(len(order))) for order in ranks]
    levels = iter(graph.levels)
    return [[next(levels) for _ in order] for order in orders]

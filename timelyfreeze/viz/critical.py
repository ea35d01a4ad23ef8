"""Which actions a step's time consists of."""

from __future__ import annotations

from timelyfreeze.schedule import Action
from timelyfreeze.viz.layout import lay_out
from timelyfreeze.viz.view import Track


def critical_path(track: Track) -> list[Action]:
    """The chain of actions that ends with the step, first to last.

    From the last action to end it goes back, action by action, to whatever was there latest: the action before it on
    its rank, or the one whose data it reads, the transfer included. In a simulated track every action of the chain so
    starts exactly when that one is done; in a measured one, gaps are what the runtime itself took. Skipped actions
    that a rank had to pass belong to it.

    >>> from timelyfreeze.schedule import create_schedule, simulate
    >>> schedule = create_schedule("gpipe", num_ranks=2, num_microbatches=1)
    >>> line = simulate(schedule, {action: 1.0 for action in schedule.actions})
    >>> track = Track("plain", schedule, line.start_s, line.end_s, {}, None, frozenset())
    >>> [str(action) for action in critical_path(track)]
    ['0F0', '1F0', '1B0', '0B0']
    """
    layout = lay_out(track)
    return [layout.graph.actions[node] for node in layout.path]

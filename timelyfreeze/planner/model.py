"""The true cost model: how long a step takes with given freeze ratios, for many sets of them at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import problem
from timelyfreeze.schedule import Schedule
from timelyfreeze.schedule.graph import NodeArrays, graph_of
from timelyfreeze.schedule.simulate import transfer_times

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]

# A share of work that was added up from many parameters' shares misses 1 by rounding: 1e-9 is far above float64's
# error over 1e6 terms and far below one parameter's share.
FULL = 1.0 - 1e-9
# Sets that are simulated together: 2,048 actions x 256 sets are 4 MB an array, which stays near the cache.
_CHUNK = 256


def predict_makespans(schedule: Schedule, costs: ActionCosts, ratios_samples: ArrayLike) -> Floats:
    """Predict the step time of many sets of ratios, such as those that drawn masks realise.

    The same model as ``planned_durations`` followed by ``simulate``, equal to the last bit.

    Args:
        ratios_samples: ``[num_samples, num_stages, num_microbatches]``, numbers in [0, 1]. What belongs to an action
            that cannot be frozen does not count.

    Returns:
        seconds, ``[num_samples]``.

    Raises:
        ValueError: the shape or a ratio is wrong, or the costs are not this schedule's.

    >>> from timelyfreeze.schedule import create_schedule
    >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=1)
    >>> costs = ActionCosts({action: 1.0 for action in schedule.actions}, {schedule.actions[1]: 0.0})
    >>> predict_makespans(schedule, costs, [[[0.0], [0.0]], [[1.0], [0.0]]]).tolist()
    [4.0, 3.0]
    """
    costs.check(schedule)
    ratios = np.asarray(ratios_samples, dtype=np.float64)
    shape = (schedule.num_stages, schedule.num_microbatches)
    if ratios.ndim != 3 or ratios.shape[1:] != shape:
        raise ValueError(
            problem("shape of ratios_samples", expected=f"[num_samples, {shape[0]}, {shape[1]}]", got=ratios.shape)
        )
    if not ((ratios >= 0) & (ratios <= 1)).all():
        raise ValueError(problem("ratios_samples", expected="numbers in [0, 1]"))
    return CostModel(schedule, costs).makespans(ratios)


class CostModel:
    """A schedule and its costs as arrays. Grids of ratios are ``[..., num_stages, num_microbatches]``.

    With u and l an action's bounds, r its stage's ratio for that micro-batch, and c the micro-batch's cut (the lowest
    stage with r < 1): stages below c have no backward; in stage c masks grow from the bottom up, so that backward stops
    early and takes u (1 - r); above it takes u - (u - l) r. Forwards take their upper bound.

    Attributes:
        graph: what waits for what, as linear programs over this model see it.
        num_stages, num_microbatches: the size of a grid.
        upper_s, lower_s: the bounds of every node; equal where it cannot be frozen, 0 where it never runs.
        is_freezable: of every node.
        freezable: ``[num_stages, num_microbatches]``, whether the stage's weight gradient can be frozen.
        base: the lowest stage that has anything to train: 0, unless the user has frozen the stages below.
            ``num_stages`` if there is none.
        is_above: of every node, whether it lies above the lowest stage that has anything to train in its micro-batch.
            That stage needs no input gradient, so with everything frozen nothing of its backward remains.
        transfer_s: seconds that every node's data takes to reach it.
    """

    def __init__(self, schedule: Schedule, costs: ActionCosts) -> None:
        graph = self.graph = graph_of(schedule)
        nodes = self.nodes = graph.arrays
        self.num_stages = schedule.num_stages
        self.num_microbatches = schedule.num_microbatches
        upper = np.array([costs.upper_s[action] for action in graph.actions])
        lower = np.array([costs.lower_s[action] for action in graph.actions])
        self.is_freezable = nodes.is_weight & (lower < upper)
        self.freezable = self._grid(self.is_freezable)
        self.always_trains = self._grid(nodes.is_weight & (upper > 0)) & ~self.freezable
        # With nothing frozen: where the user's own frozen stages cut.
        lowest = self.cuts(np.zeros(self.freezable.shape))
        self.base = int(lowest.min())
        never = nodes.is_backward & (nodes.stage < lowest[nodes.microbatch])
        self.is_above = nodes.stage > lowest[nodes.microbatch]
        self.upper_s = np.where(never, 0.0, upper)
        self.lower_s = np.where(self.is_freezable, lower, self.upper_s)
        self.transfer_s = np.where(never, 0.0, transfer_times(schedule, costs.transfer_s))
        self._order = LevelOrder(nodes)

    def makespans(self, ratios: Floats) -> Floats:
        """Seconds of every set of ratios ``[num_sets, num_stages, num_microbatches]``."""
        parts = []
        for first in range(0, len(ratios), _CHUNK):
            duration, skipped = self.durations(ratios[first : first + _CHUNK], self.nodes.by_level)
            parts.append(self._run(duration, skipped)[1].max(axis=0))
        return np.concatenate(parts) if parts else np.zeros(0)

    def timeline(self, ratios: Floats) -> tuple[Floats, Floats]:
        """Start and end of every node in seconds, for one grid of ratios."""
        start, end = self._run(*self.durations(ratios[None], self.nodes.by_level))
        place = np.argsort(self.nodes.by_level)
        return start[place, 0], end[place, 0]

    def frozen_makespan(self) -> float:
        """Seconds with every freezable action at its lower bound, which is 0 in the lowest stage that trains."""
        duration = self._frozen_s()[self.nodes.by_level, None]
        return float(self._run(duration, np.zeros_like(duration, dtype=bool))[1].max())

    def even_out(self, ratios: Floats, is_open: Bools, cuts: Ints) -> Floats:
        """Ratios that a linear program chose; where micro-batches are alike, others may do as well and vary less.

        Args:
            is_open: which of them it was free to choose, of the shape of ``ratios``.
            cuts: for every micro-batch, the lowest stage that it let train.
        """
        return ratios

    def cuts(self, ratios: Floats) -> Ints:
        """The lowest stage that trains something, ``[..., num_microbatches]``; num_stages if none does."""
        trains = np.where(self.freezable, ratios < FULL, self.always_trains)
        return np.where(trains.any(axis=-2), trains.argmax(axis=-2), self.num_stages)

    def durations(self, ratios: Floats, nodes: Ints | None = None) -> tuple[Floats, Bools]:
        """Seconds of every node and whether it is skipped, both ``[num_nodes, num_sets]``."""
        nodes = np.arange(len(self.upper_s)) if nodes is None else nodes
        stage, microbatch = self.nodes.stage[nodes], self.nodes.microbatch[nodes]
        backward, upper = self.nodes.is_backward[nodes][:, None], self.upper_s[nodes][:, None]
        ratios = np.where(self.freezable, ratios, 0.0)
        ratio = ratios.transpose(1, 2, 0)[stage, microbatch]
        cut = self.cuts(ratios).T[microbatch]
        skipped = backward & (stage[:, None] < cut)
        span = np.where(backward & (stage[:, None] == cut), upper, upper - self.lower_s[nodes][:, None])
        return np.where(skipped, 0.0, upper - span * ratio), skipped

    def _frozen_s(self) -> Floats:
        spared = self.is_freezable & ~self.is_above
        return np.where(spared, 0.0, self.lower_s)

    def _grid(self, is_there: Bools) -> Bools:
        grid = np.zeros((self.num_stages, self.num_microbatches), dtype=bool)
        grid[self.nodes.stage[is_there], self.nodes.microbatch[is_there]] = True
        return grid

    def _run(self, duration: Floats, skipped: Bools) -> tuple[Floats, Floats]:
        """Starts and ends ``[num_nodes, num_sets]`` from durations; all in level order."""
        # Nothing is sent to a backward that does not run; its rank still comes to it only after the one above it.
        delay = np.where(skipped, 0.0, self.transfer_s[self.nodes.by_level][:, None])
        return self._order.run(duration, delay)


class LevelOrder:
    """A graph's nodes in level order, behind a row 0 that stands for "waits for nothing"."""

    def __init__(self, nodes: NodeArrays) -> None:
        row = np.zeros(len(nodes.by_level) + 1, dtype=np.intp)
        row[nodes.by_level] = np.arange(1, len(row))
        self._previous, self._data = row[nodes.previous[nodes.by_level]], row[nodes.data[nodes.by_level]]
        self._bounds = nodes.bounds

    def run(self, duration: Floats, delay: Floats) -> tuple[Floats, Floats]:
        """Starts and ends ``[num_nodes, num_sets]``, in level order like what is given.

        Args:
            duration: of every node.
            delay: of the data that it waits for.
        """
        start = np.empty_like(duration)
        end = np.zeros((len(duration) + 1, duration.shape[1]))  # row 0: the end of nothing
        for first, last in zip(self._bounds, self._bounds[1:], strict=False):
            begin = end[self._data[first:last]]
            begin += delay[first:last]
            np.maximum(begin, end[self._previous[first:last]], out=start[first:last])
            np.add(start[first:last], duration[first:last], out=end[first + 1 : last + 1])
        return start, end[1:]

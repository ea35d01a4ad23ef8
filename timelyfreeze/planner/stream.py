"""The true cost model of a pipeline that is never flushed: the time from batch to batch once it runs steadily.

Its lower bound is the largest sum of a rank's durations, which linear programs minimise. Where a stage's durations vary
from micro-batch to micro-batch it can take longer: no stage has more than N - s of them between forward and backward,
so the others cannot work ahead. Four equal stages whose first one skips every other backward are no faster at all.
"""

from __future__ import annotations

import numpy as np

from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import problem
from timelyfreeze.planner.model import Bools, CostModel, Floats, Ints, LevelOrder
from timelyfreeze.schedule import Action, Kind, Schedule
from timelyfreeze.schedule.asynchronous import stream_order
from timelyfreeze.schedule.graph import graph_of, link_actions, without_data

_LEAST_BATCHES = 12  # that are simulated, the second half of them to measure the period
_FILLS = 10  # or so many times the micro-batches that fill the pipeline
_CHUNK = 64  # sets that are simulated together


class StreamModel(CostModel):
    """As ``CostModel``, where batches follow each other without a flush; a makespan is from batch to batch.

    Attributes:
        graph: without the data that ranks send each other, so that its longest path is the largest sum of a rank.

    Raises:
        ValueError: ranks hold several stages, or backwards are split: no pipeline without a flush runs these.

    >>> from timelyfreeze.schedule import create_schedule
    >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    >>> model = StreamModel(schedule, ActionCosts({action: 1.0 for action in schedule.actions}))
    >>> model.makespans(np.zeros((1, 2, 4))).tolist()
    [8.0]
    """

    def __init__(self, schedule: Schedule, costs: ActionCosts) -> None:
        super().__init__(schedule, costs)
        if schedule.num_stages != schedule.num_ranks or any(a.kind in (Kind.I, Kind.W) for a in schedule.actions):
            raise ValueError(
                problem(
                    'goal "period"',
                    expected="one stage a rank and whole backwards",
                    got=schedule.name,
                    hint='Take schedule "1f1b".',
                )
            )
        self.graph = without_data(graph_of(schedule))
        num_stages, batch = schedule.num_stages, schedule.num_microbatches
        self._half = (max(_LEAST_BATCHES, -(-_FILLS * num_stages // batch)) + 1) // 2
        num = 2 * self._half * batch
        ranks = [
            [Action(s, Kind(kind), m) for _, kind, m in stream_order(num_stages, s, num, num) if kind != "U"]
            for s in range(num_stages)
        ]
        stream = link_actions(ranks, num_stages)
        nodes, index = stream.arrays, graph_of(schedule).index
        self._stream_order = LevelOrder(nodes)
        actions = [stream.actions[node] for node in nodes.by_level]
        self._of_batch = np.array([index[a._replace(microbatch=a.microbatch % batch)] for a in actions])
        # What the first stage's last backward of a batch is, and the same half the stream later.
        row = {action: place for place, action in enumerate(actions)}
        first = (self._half - 1) * batch + max(0, batch - num_stages)  # the last ones run with fewer beside them
        self._marks = [row[Action(0, Kind.B, first + step * self._half * batch)] for step in (0, 1)]
        self._window = np.array(
            [row[a._replace(microbatch=a.microbatch + self._half * batch)] for a in schedule.actions]
        )

    def makespans(self, ratios: Floats) -> Floats:
        """Seconds from batch to batch of every set of ratios ``[num_sets, num_stages, num_microbatches]``."""
        parts = [np.zeros(0)]
        for first in range(0, len(ratios), _CHUNK):
            parts.append(self._periods_s(*self.durations(ratios[first : first + _CHUNK])))
        return np.concatenate(parts)

    def timeline(self, ratios: Floats) -> tuple[Floats, Floats]:
        """Start and end in seconds of every action of a batch from the middle of a stream, counted from its first."""
        start, end = self._stream(*self.durations(ratios[None]))
        begin = start[self._window].min()
        return start[self._window, 0] - begin, end[self._window, 0] - begin

    def frozen_makespan(self) -> float:
        duration = self._frozen_s()[:, None]
        return float(self._periods_s(duration, np.zeros_like(duration, dtype=bool))[0])

    def even_out(self, ratios: Floats, is_open: Bools, cuts: Ints) -> Floats:
        """The ratios, or every stage's sum dealt out evenly, apart in its micro-batches' cut stage and above.

        Linear programs end in corners, where some ratios are 1; durations that vary make the others wait.
        """
        candidates = [ratios, *(self._evened(ratios, is_open, by) for by in (cuts, self.cuts(ratios)))]
        best: Floats = candidates[int(self.makespans(np.stack(candidates)).argmin())]
        return best

    def _evened(self, ratios: Floats, is_open: Bools, cuts: Ints) -> Floats:
        stages = np.arange(self.num_stages)[:, None]
        even: Floats = ratios.copy()
        for places in (is_open & (stages == cuts), is_open & (stages > cuts)):
            mean = np.where(places, ratios, 0.0).sum(axis=1) / np.maximum(places.sum(axis=1), 1)
            even = np.where(places, mean[:, None], even)
        return even

    def _periods_s(self, duration: Floats, skipped: Bools) -> Floats:
        end = self._stream(duration, skipped)[1]
        periods: Floats = (end[self._marks[1]] - end[self._marks[0]]) / self._half
        return periods

    def _stream(self, duration: Floats, skipped: Bools) -> tuple[Floats, Floats]:
        """Starts and ends of the stream's actions, in level order, from those of a batch in the schedule's order."""
        delay = np.where(skipped, 0.0, self.transfer_s[:, None])
        return self._stream_order.run(duration[self._of_batch], delay[self._of_batch])


def cost_model(schedule: Schedule, costs: ActionCosts, goal: str) -> CostModel:
    """The model whose makespan a plan with this goal minimises."""
    return StreamModel(schedule, costs) if goal == "period" else CostModel(schedule, costs)

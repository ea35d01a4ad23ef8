"""The order of a pipeline that is never flushed (PACI), and when everything in it happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from timelyfreeze.errors import problem

STREAM_SCHEDULES = ("paci", "pipedream")
"""What ``AsyncPipeline`` calls them: backward by the newest weights, or by copies of those that forward had."""


class StreamAction(NamedTuple):
    """A forward "F" or backward "B" of a micro-batch in a stage, or, "U", the update that follows its backward."""

    stage: int
    kind: str
    microbatch: int


@dataclass(frozen=True)
class StreamTimeline:
    """What a stream of micro-batches takes.

    Attributes:
        end_s: when each action ends, from the stream's beginning.
        period_s: seconds a micro-batch once the stream runs steadily, by the second half of the backwards.
        drift: for every stage, how many of its updates fell between the forward and the backward of each micro-batch.
    """

    end_s: dict[StreamAction, float]
    period_s: float
    drift: list[list[int]]


def drift_bound(num_stages: int, stage: int, accumulation: int) -> int:
    """The most updates of a stage between a micro-batch's forward and its backward there.

    >>> [drift_bound(4, stage, 2) for stage in range(4)]
    [2, 1, 1, 0]
    """
    return -(-(num_stages - 1 - stage) // accumulation)


def stream_order(num_stages: int, stage: int, num_microbatches: int, accumulation: int) -> Iterator[StreamAction]:
    """What a stage does: ``num_stages - stage`` forwards, then backward and forward in turn, and its updates.

    >>> " ".join(f"{kind}{m}" for _, kind, m in stream_order(2, 0, 3, 2))
    'F0 F1 B0 F2 B1 U1 B2 U2'
    """
    forwards = 0
    for backwards in range(num_microbatches):
        while forwards < num_microbatches and forwards - backwards < num_stages - stage:
            yield StreamAction(stage, "F", forwards)
            forwards += 1
        yield StreamAction(stage, "B", backwards)
        if (backwards + 1) % accumulation == 0 or backwards + 1 == num_microbatches:
            yield StreamAction(stage, "U", backwards)


Times = Sequence[float] | Sequence[Sequence[float]]


def simulate_stream(
    forward_s: Times,
    backward_s: Times,
    num_microbatches: int,
    *,
    accumulation: int = 1,
    update_s: Sequence[float] | None = None,
) -> StreamTimeline:
    """Run a stream on paper: every action starts as soon as its stage is free and its data is there.

    Args:
        forward_s, backward_s: seconds in each stage: one number, or those of a batch's micro-batches, which recur.
        num_microbatches: of the whole stream.
        accumulation: backwards of a stage between two of its updates.
        update_s: seconds of an update in each stage; default: none.

    Raises:
        ValueError: the lists differ in length, or there is nothing to do.

    >>> simulate_stream([1.0, 1.0], [2.0, 2.0], 40).period_s
    3.0
    >>> simulate_stream([1.0, 1.0], [[2.0, 0.0], [1.0, 1.0]], 40).period_s
    2.5
    """
    num_stages = len(forward_s)
    updates_s = [0.0] * num_stages if update_s is None else list(update_s)
    if not num_stages or len({num_stages, len(backward_s), len(updates_s)}) > 1 or num_microbatches < 2:
        raise ValueError(
            problem(
                "a stream",
                expected="times for the same stages, at least one, and 2 micro-batches or more",
                got=f"{num_stages}, {len(backward_s)} and {len(updates_s)} times, {num_microbatches} micro-batches",
            )
        )
    seconds = {
        kind: [list(times) if isinstance(times, Sequence) else [times] for times in by_stage]
        for kind, by_stage in (("F", forward_s), ("B", backward_s), ("U", updates_s))
    }
    orders = [list(stream_order(num_stages, s, num_microbatches, accumulation)) for s in range(num_stages)]
    end_s: dict[StreamAction, float] = {}
    places = [0] * num_stages
    free_s = [0.0] * num_stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                action = order[places[stage]]
                source = _source(action, num_stages)
                if source is not None and source not in end_s:
                    break
                start_s = max(free_s[stage], 0.0 if source is None else end_s[source])
                end_s[action] = free_s[stage] = start_s + _recurring(seconds[action.kind][stage], action.microbatch)
                places[stage] += 1
    half = num_microbatches // 2
    last = end_s[StreamAction(0, "B", num_microbatches - num_stages)] if num_microbatches > 2 * num_stages else None
    begin = end_s[StreamAction(0, "B", half)]
    count = num_microbatches - num_stages - half
    if last is None or count <= 0:  # too short to be steady
        last, count = end_s[StreamAction(0, "B", num_microbatches - 1)], num_microbatches - 1 - half
    return StreamTimeline(end_s, (last - begin) / max(count, 1), [_drift(order) for order in orders])


def _recurring(times: Sequence[float], microbatch: int) -> float:
    return times[microbatch % len(times)]


def _source(action: StreamAction, num_stages: int) -> StreamAction | None:
    """The action of another stage that it waits for."""
    stage = {"F": action.stage - 1, "B": action.stage + 1}.get(action.kind, -1)
    return StreamAction(stage, action.kind, action.microbatch) if 0 <= stage < num_stages else None


def _drift(order: Sequence[StreamAction]) -> list[int]:
    updates = 0
    at_forward: dict[int, int] = {}
    drift = []
    for _, kind, microbatch in order:
        if kind == "F":
            at_forward[microbatch] = updates
        elif kind == "B":
            drift.append(updates - at_forward[microbatch])
        else:
            updates += 1
    return drift

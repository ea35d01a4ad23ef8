"""The orders of the known schedules: for every rank its actions, from counts alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from timelyfreeze.schedule.actions import Action, Kind
from timelyfreeze.schedule.passes import keep_microbatches, split_backward
from timelyfreeze.schedule.registry import register_schedule

# Looped schedules place stage s on rank s % num_ranks: the stages of one rank are num_ranks apart.
# V schedules place stages r and 2 * num_ranks - 1 - r on rank r: the pipeline goes down the ranks and comes back.


@register_schedule("gpipe")
def _gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965)."""
    return _breadth_first(num_ranks, num_microbatches, stages_per_rank)


@register_schedule("1f1b")
def _one_forward_one_backward(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """Forwards until the pipeline is full, then one backward for each forward (PipeDream-flush, arXiv 2006.09503)."""
    return _depth_first(num_ranks, num_microbatches, stages_per_rank, ahead_per_hop=1)


@register_schedule("looped_bfs", stages_per_rank=2, or_more=True)
def _looped_bfs(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """All micro-batches through one stage before the rank's next stage (breadth-first, arXiv 2211.05953)."""
    return _breadth_first(num_ranks, num_microbatches, stages_per_rank)


@register_schedule("interleaved_1f1b", stages_per_rank=2, or_more=True)
def _interleaved_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """1F1B over several stages a rank, num_ranks micro-batches at a time (Megatron-LM, arXiv 2104.04473)."""
    return _depth_first(num_ranks, num_microbatches, stages_per_rank, ahead_per_hop=2)


@register_schedule("zb_h1")
def _zb_h1(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """1F1B whose weight gradients wait, on rank r for r more backwards (Zero Bubble, arXiv 2401.10241)."""
    orders = _depth_first(num_ranks, num_microbatches, stages_per_rank, ahead_per_hop=1)
    return [split_backward(order, delay=rank) for rank, order in enumerate(orders)]


@register_schedule("interleaved_zb", stages_per_rank=2, or_more=True)
def _interleaved_zb(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """ZB-H1's waiting weight gradients on several stages a rank (Zero Bubble, arXiv 2401.10241)."""
    orders = _depth_first(num_ranks, num_microbatches, stages_per_rank, ahead_per_hop=1)
    return [split_backward(order, delay=rank) for rank, order in enumerate(orders)]


@register_schedule("zbv", stages_per_rank=2)
def _zbv(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """No bubble where F, I and W take equal times, with the memory of 1F1B (ZB-V, arXiv 2405.15362)."""
    number = max(num_microbatches, 2 * num_ranks - 1)  # what fills the V; the surplus is dropped

    def phases(rank: int) -> str:
        hops = num_ranks - 1 - rank  # to where the V turns
        return (
            "f" * (2 * hops + 1)
            + "Ff" * rank
            + "FIw" * (hops + 1)
            + "fiwFIw" * (number - 2 * num_ranks + 1 + rank)
            + "iwFIw" * hops
            + "iI" * rank
            + "iw" * (hops + 1)
            + "w" * (2 * rank)
        )

    orders = [_follow(phases(rank), rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    return keep_microbatches(orders, num_microbatches)


@register_schedule("dualpipev", stages_per_rank=2)
def _dualpipev(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """Forward of one end of the V beside backward of the other (DualPipe, arXiv 2412.19437, cut in half to a V).

    With fewer than 2 * num_ranks micro-batches, which fill the V, the main phase is shorter or none, and what the other
    phases hold too many is dropped.
    """

    def phases(rank: int) -> str:
        hops = num_ranks - 1 - rank  # to where the V turns
        return (
            "f" * (2 * hops)
            + "fF" * (rank + 1)
            + "IwF" * hops
            + "fBFb" * (num_microbatches - 2 * num_ranks + rank + 1)
            + "BFb" * hops
            + ("Bb" * (rank + 1))[: rank + 1]
            + ("Ii" * (rank + 1))[rank + 1 :]
            + "wi" * hops
            + "w" * (rank + 1)
        )

    orders = [_follow(phases(rank), rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    return keep_microbatches(orders, num_microbatches)


def _breadth_first(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """All forwards, stage by stage, then all backwards."""
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = _in_rounds(Kind.F, stages, num_microbatches, num_microbatches)
        backwards = _in_rounds(Kind.B, stages[::-1], num_microbatches, num_microbatches)
        orders.append([*forwards, *backwards])
    return orders


def _depth_first(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, *, ahead_per_hop: int
) -> list[list[Action]]:
    """Some forwards ahead, more of them the farther the last rank is; then one backward for each forward."""
    padded = -(-num_microbatches // num_ranks) * num_ranks  # rounds are whole; the surplus is dropped
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = _in_rounds(Kind.F, stages, padded, num_ranks)
        backwards = _in_rounds(Kind.B, stages[::-1], padded, num_ranks)
        num_ahead = (stages_per_rank - 1) * num_ranks + ahead_per_hop * (num_ranks - 1 - rank)
        orders.append(_alternate(forwards, backwards, num_ahead))
    return keep_microbatches(orders, num_microbatches)


def _in_rounds(kind: Kind, stages: Iterable[int], num_microbatches: int, per_round: int) -> list[Action]:
    """``per_round`` micro-batches through every stage in turn, then the next ones."""
    stages = list(stages)
    return [
        Action(stage, kind, microbatch)
        for first in range(0, num_microbatches, per_round)
        for stage in stages
        for microbatch in range(first, first + per_round)
    ]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], num_ahead: int) -> list[Action]:
    """``num_ahead`` forwards, then a forward before every backward while there are any."""
    order = list(forwards[:num_ahead])
    for number, backward in enumerate(backwards):
        order += forwards[num_ahead + number : num_ahead + number + 1]
        order.append(backward)
    return order


def _follow(phases: str, near: int, far: int) -> list[Action]:
    """The actions that letters stand for: small ones for the stage ``near`` the V's ends, capital ones for ``far``.

    f forward, b full backward, i input gradient, each of the stage's next micro-batch; w the weight gradient that has
    waited longest.
    """
    order: list[Action] = []
    num_done: Counter[tuple[int, bool]] = Counter()
    waiting: deque[Action] = deque()
    for letter in phases:
        if letter == "w":
            order.append(waiting.popleft())
            continue
        stage, kind = far if letter.isupper() else near, Kind(letter.upper())
        microbatch = num_done[stage, kind is Kind.F]
        num_done[stage, kind is Kind.F] += 1
        order.append(Action(stage, kind, microbatch))
        if kind is Kind.I:
            waiting.append(Action(stage, Kind.W, microbatch))
    return order

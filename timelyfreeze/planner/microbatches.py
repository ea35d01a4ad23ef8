"""The same gradients, sooner: more micro-batches than have to be live, so that the extra ones fill the bubble."""

from __future__ import annotations

from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import problem
from timelyfreeze.planner.make import make_plan
from timelyfreeze.planner.plan import Plan
from timelyfreeze.schedule import create_schedule, default_stages_per_rank


def choose_microbatches(
    schedule_name: str,
    costs: ActionCosts,
    *,
    live_microbatches: int,
    num_ranks: int | None = None,
    max_microbatches: int | None = None,
    mode: str = "cut",
    min_live_ratio: float = 0.25,
) -> Plan:
    """The fastest plan in which every parameter sees the gradients of so many micro-batches a step, of however many.

    Tried are M = live_microbatches, one more, two more, ...; with M > live_microbatches each stage leaves out the
    gradients of M - live_microbatches of them. Among equally fast plans the one with the fewest is taken.

    Args:
        schedule_name: as ``create_schedule`` takes it.
        costs: measured with any number of micro-batches: each stage's kind of action takes its median.
        num_ranks: default: as many as hold these stages, each the schedule's own number.
        max_microbatches: the most to try; default: one more for every rank, then no bubble is left to fill.
        mode, min_live_ratio: as for ``make_plan``.

    Returns:
        a plan whose ``schedule`` has the number of micro-batches that was chosen.

    Raises:
        ValueError: the schedule allows none of these numbers, or an argument is out of range.

    >>> from timelyfreeze.schedule import create_schedule
    >>> small = create_schedule("1f1b", num_ranks=4, num_microbatches=4)
    >>> costs = ActionCosts.uniform(small, forward_s=15.0, backward_s=43.0, frozen_backward_s=20.0)
    >>> plan = choose_microbatches("1f1b", costs, live_microbatches=4)
    >>> plan.unfrozen_makespan_s, round(plan.makespan_s, 1), plan.schedule.num_microbatches
    (522.0, 356.4, 6)
    """
    num_stages = 1 + max(action.stage for action in costs.upper_s)
    ranks = num_stages // default_stages_per_rank(schedule_name) if num_ranks is None else num_ranks
    if type(live_microbatches) is not int or live_microbatches < 1:
        raise ValueError(problem("live_microbatches", expected="a whole number from 1", got=repr(live_microbatches)))
    if ranks < 1 or num_stages % ranks:
        raise ValueError(problem("num_ranks", expected=f"a divisor of the {num_stages} stages", got=ranks))
    most = live_microbatches + ranks if max_microbatches is None else max_microbatches
    best: Plan | None = None
    refusal: ValueError | None = None
    for number in range(live_microbatches, most + 1):
        try:
            schedule = create_schedule(
                schedule_name, num_ranks=ranks, num_microbatches=number, stages_per_rank=num_stages // ranks
            )
        except ValueError as error:  # some schedules take only multiples of the ranks
            refusal = error
            continue
        plan = make_plan(
            schedule,
            costs.adapted(schedule),
            mode=mode,
            live_microbatches=live_microbatches,
            min_live_ratio=min_live_ratio,
        )
        if best is None or plan.makespan_s < best.makespan_s * (1 - 1e-6):
            best = plan
    if best is None:
        raise refusal or ValueError(
            problem("max_microbatches", expected=f"at least {live_microbatches}", got=max_microbatches)
        )
    return best

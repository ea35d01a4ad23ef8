"""How many micro-batches a step should have so that every parameter sees as many as in a smaller plain one, sooner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus
from timelyfreeze.cli.errors import TrainingError
from timelyfreeze.cli.progress import Reporter
from timelyfreeze.cli.stopping import StopRequest
from timelyfreeze.cli.trainer import Trainer
from timelyfreeze.cli.world import World
from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import problem
from timelyfreeze.freeze import FreezeConfig
from timelyfreeze.planner import choose_microbatches
from timelyfreeze.schedule import Schedule, simulate

_MEASURING = FreezeConfig(mode="lp")  # its plan is not followed: the first bounds are all that is wanted
_MOST_STEPS = 100  # 17 are the rule; solving takes longer on a busy machine


def choose_live(
    config: TrainConfig,
    corpus: Corpus,
    schedule: Schedule,
    modes: Sequence[str],
    *,
    reporter: Reporter,
    stop: StopRequest,
    world: World,
) -> tuple[dict[str, int], list[int]]:
    """Measure a plain step's actions on a throw-away model, and choose the number of micro-batches from that.

    Args:
        schedule: of the plain run, with ``config.live_microbatches`` micro-batches.
        modes: how the plans are to be made.

    Returns:
        For every mode, the number of micro-batches; and where the model was split, so that all runs split alike.

    Raises:
        StageError, TrainingError: a step failed, or nothing could be measured.
        StoppedError: an end was asked for.
    """
    live = schedule.num_microbatches
    begin_s = time.perf_counter()
    reporter.note(f"Measuring steps of {live} micro-batches on a copy of the model, to choose how many to take.")
    costs, split = _measure(config, corpus, schedule, stop, world)
    plain_s = plain_makespan_s(costs.adapted(schedule), schedule)
    chosen = {}
    for mode in modes:
        num_microbatches, makespan_s = world.first(partial(_chosen, config, costs, schedule, mode))
        chosen[mode] = num_microbatches
        reporter.note(
            f"mode {mode}: {chosen[mode]} micro-batches, of which every parameter sees {live}: "
            f"{1e3 * makespan_s:.2f} ms planned, a plain step of {live} takes {1e3 * plain_s:.2f} ms."
        )
    reporter.note(f"That took {time.perf_counter() - begin_s:.1f} s, which no run's times include.")
    return chosen, split


def _chosen(config: TrainConfig, costs: ActionCosts, schedule: Schedule, mode: str) -> list[Any]:
    """How many micro-batches, and how long their step takes."""
    plan = choose_microbatches(
        config.schedule,
        costs,
        live_microbatches=schedule.num_microbatches,
        num_ranks=schedule.num_ranks,
        mode=mode,
        min_live_ratio=config.min_live_ratio,
    )
    return [plan.schedule.num_microbatches, plan.makespan_s]


def plain_makespan_s(costs: ActionCosts, schedule: Schedule) -> float:
    """How long a step with nothing frozen takes, by costs that may be of another number of micro-batches."""
    same = costs.upper_s.keys() == set(schedule.actions)
    return simulate(schedule, (costs if same else costs.adapted(schedule)).upper_s, costs.transfer_s).makespan_s


def _measure(
    config: TrainConfig, corpus: Corpus, schedule: Schedule, stop: StopRequest, world: World
) -> tuple[ActionCosts, list[int]]:
    """The bounds of every action, from real training steps of a model that is then forgotten."""
    with Trainer(config, corpus, schedule, freeze=_MEASURING, name="measuring", world=world) as trainer:
        for step in range(1, _MOST_STEPS + 1):
            trainer.update(step)
            trainer.agree(stop)
            stop.check()
            if trainer.pipe.plan is not None:
                return trainer.pipe.plan.costs, list(trainer.pipe.report()["split_points"])
        failure = trainer.pipe.report()["failure"] or f"no plan within {_MOST_STEPS} steps"
    raise TrainingError(
        problem(
            "the number of micro-batches cannot be chosen",
            got=failure,
            hint="Leave out --live-microbatches, or try again on a quiet machine.",
        )
    )

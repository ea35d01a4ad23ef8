"""From the options of ``timelyfreeze plan`` to a schedule with its costs, and to the same stages in other schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.plan_options import PlanRequest, StageTimes, option_errors
from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import problem, raise_all
from timelyfreeze.files import read_json
from timelyfreeze.planner import Plan
from timelyfreeze.schedule import Schedule, create_schedule, default_stages_per_rank, schedule_names

_SCHEDULE, _NUM_RANKS, _NUM_MICROBATCHES = "1f1b", 4, 8


@dataclass(frozen=True)
class PlanCase:
    """A schedule and what its actions cost.

    Attributes:
        schedule, costs: what was asked for.
        is_named: whether the schedule is known by name, so that it has siblings with other numbers of micro-batches.
        times: of the stages, where they were typed; None where the costs come from a file.
    """

    schedule: Schedule
    costs: ActionCosts
    is_named: bool
    times: StageTimes | None

    @property
    def stages_per_rank(self) -> int:
        """How many stages a rank holds."""
        return self.schedule.num_stages // self.schedule.num_ranks

    def sibling(
        self, num_microbatches: int, *, name: str | None = None, stages_per_rank: int | None = None
    ) -> PlanCase:
        """The same model and ranks with another number of micro-batches, or in another schedule.

        A rank's share of the model stays the same: where it is cut into other stages than the typed times are for,
        each takes its part of them.

        Raises:
            ValueError: the schedule cannot have these counts, or nothing is known about such stages.
        """
        if num_microbatches == self.schedule.num_microbatches and name is None and stages_per_rank is None:
            return self
        if not self.is_named:
            raise ValueError(problem("a schedule from a file has no sibling", got=self.schedule.name))
        per_rank = stages_per_rank or self.stages_per_rank
        schedule = create_schedule(
            name or self.schedule.name,
            num_ranks=self.schedule.num_ranks,
            num_microbatches=num_microbatches,
            stages_per_rank=per_rank,
        )
        if schedule == self.schedule:
            return self
        if self.times is None:
            return replace(self, schedule=schedule, costs=self.costs.adapted(schedule))
        times = self.times.divided(per_rank / self.stages_per_rank)
        costs = replace(times.costs(schedule), transfer_s=self.costs.transfer_s)
        return PlanCase(schedule, costs, True, times)


def read_case(request: PlanRequest) -> PlanCase:
    """Make the schedule and the costs that were asked for.

    With ``live_microbatches`` the schedule has that many micro-batches: the plain step that sees as many gradients.

    Raises:
        CommandError: a file cannot be read, the counts do not fit the schedule, or the costs do not fit it.
    """
    if request.times is not None:
        with option_errors("reading the schedule"):
            schedule, is_named = _schedule(request, _SCHEDULE, _NUM_RANKS, _NUM_MICROBATCHES, None)
        with option_errors("reading the times"):
            costs = request.times.costs(schedule, request.transfer_ms or 0.0)
        return _checked(PlanCase(schedule, costs, is_named, request.times))
    assert request.costs is not None
    with option_errors("reading the costs"):
        costs, measured = read_costs(request.costs)
    if request.transfer_ms is not None:
        costs = replace(costs, transfer_s=request.transfer_ms / 1e3)
    with option_errors("reading the schedule"):
        schedule, is_named = _schedule_of_costs(request, costs, measured)
    with option_errors("reading the costs"):
        if set(costs.upper_s) != set(schedule.actions):
            costs = costs.adapted(schedule)
    return _checked(PlanCase(schedule, costs, is_named, None))


def _checked(case: PlanCase) -> PlanCase:
    if not any(case.costs.upper_s.values()):
        raise CommandError(problem("there is nothing to plan", expected="some action that takes time", got="0 ms each"))
    return case


def read_costs(path: str) -> tuple[ActionCosts, Schedule | None]:
    """Costs of a run's folder, a plan or a file of costs, and the schedule they were measured in, where it is known.

    Raises:
        CommandError: the folder has no plan yet, or there is nothing of that name.
        PlanError, OSError: the file holds something else, or cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file /= "plan.json"
        if not file.exists():
            hint = "A job writes it once it has measured; `timelyfreeze show` says how far it is."
            raise CommandError(
                problem("--costs names a folder without a plan", expected="plan.json in it", got=f"'{path}'", hint=hint)
            )
    data = read_json(file)
    if isinstance(data, dict) and data.get("format") == "timelyfreeze-costs":
        return ActionCosts.load(file), None
    plan = Plan.load(file)
    return plan.costs, plan.schedule


def _schedule(
    request: PlanRequest, name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None
) -> tuple[Schedule, bool]:
    """The schedule that was typed, with defaults for what was not; and whether it has a name rather than a file."""
    asked = request.schedule or name
    if asked.endswith(".csv"):
        schedule = Schedule.from_csv(asked)
        _check_counts(request, schedule)
        return schedule, False
    schedule = create_schedule(
        asked,
        num_ranks=request.num_ranks or num_ranks,
        num_microbatches=request.live_microbatches or request.num_microbatches or num_microbatches,
        stages_per_rank=request.stages_per_rank or stages_per_rank,
    )
    return schedule, True


def _check_counts(request: PlanRequest, schedule: Schedule) -> None:
    """Raise ValueError where a count was typed that a schedule's file contradicts."""
    counts = {
        "--ranks": (request.num_ranks, schedule.num_ranks),
        "--microbatches": (request.num_microbatches, schedule.num_microbatches),
        "--stages-per-rank": (request.stages_per_rank, schedule.num_stages // schedule.num_ranks),
    }
    faults = [
        problem(f"{option} and the schedule disagree", expected=f"{there}, as its file has it", got=typed)
        for option, (typed, there) in counts.items()
        if typed not in (None, there)
    ]
    for option, typed in (("--live-microbatches", request.live_microbatches), ("--compare", request.compare or None)):
        if typed is not None:
            faults.append(problem(f"{option} needs other numbers of micro-batches", expected="a schedule by name"))
    raise_all(ValueError, faults)


def _schedule_of_costs(request: PlanRequest, costs: ActionCosts, measured: Schedule | None) -> tuple[Schedule, bool]:
    """The schedule that costs were measured in, or what was typed with the rest taken from there."""
    num_stages = 1 + max((action.stage for action in costs.upper_s), default=0)
    num_microbatches = 1 + max((action.microbatch for action in costs.upper_s), default=0)
    if measured is not None and request.schedule is None and measured.name not in schedule_names():
        _check_counts(request, measured)  # its name means nothing here
        return measured, False
    name = request.schedule or (_SCHEDULE if measured is None else measured.name)
    if name.endswith(".csv"):
        return _schedule(request, name, _NUM_RANKS, num_microbatches, None)
    per_rank = request.stages_per_rank or default_stages_per_rank(name)
    if measured is not None and request.stages_per_rank is None and name == measured.name:
        per_rank = measured.num_stages // measured.num_ranks
    if request.num_ranks is None and num_stages % per_rank:
        raise ValueError(
            problem(
                f"the costs are of {num_stages} stages",
                expected=f"a multiple of {per_rank}, the stages that a rank holds under {name}",
                hint="Take another --schedule or --stages-per-rank.",
            )
        )
    return _schedule(request, name, num_stages // per_rank, num_microbatches, per_rank)

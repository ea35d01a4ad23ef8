"""The options of ``timelyfreeze plan``, and what they ask for, checked."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from timelyfreeze.cli.errors import CommandError, user_errors
from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import problem, raise_all
from timelyfreeze.planner.options import GOALS, MODES
from timelyfreeze.schedule import Schedule, schedule_names

STANDARD_OUTPUT = "-"
# What the library calls an option, and how it is typed.
_TYPED_AS = {
    "stage_max_ratio": "--stage-max-ratio",
    "max_ratio": "--max-ratio",
    "weights": "--weights",
    "target_makespan_s": "--target-ms",
    "live_microbatches": "--live-microbatches",
    "min_live_ratio": "--min-live-ratio",
    "num_ranks": "--ranks",
    "num_microbatches": "--microbatches",
    "stages_per_rank": "--stages-per-rank",
}
_DEFAULT_RATIO = 0.3
_COMPARED_RATIOS = (0.3, 0.5, 0.8)

_DESCRIPTION = """\
Say what freezing would do to a pipeline's step, from the times of its stages: nothing is trained, and torch is not
needed. Times may differ by stage: --forward-ms 15,15,16,14."""
_EXAMPLES = """\
examples:
  timelyfreeze plan --ranks 4 --microbatches 8 --forward-ms 15 --backward-ms 43 --frozen-backward-ms 20
  timelyfreeze plan --costs runs/first --max-ratio 0.5 --html plan.html     what a job measured, in a page
  timelyfreeze plan --costs runs/first --compare                            schedules, modes and caps side by side
  timelyfreeze plan --schedule zbv --forward-ms 7.5 --backward-ms 21.5 --frozen-backward-ms 10    two stages a rank"""


@dataclass(frozen=True)
class Outputs:
    """Files to write besides the text; ``json`` may be ``STANDARD_OUTPUT``, which then takes the place of the text."""

    json: str | None = None
    html: str | None = None
    png: str | None = None
    trace: str | None = None
    save: str | None = None


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of a stage's forward, whole backward and frozen backward: one number each, or one a stage."""

    forward_ms: list[float]
    backward_ms: list[float]
    frozen_backward_ms: list[float]

    def costs(self, schedule: Schedule, transfer_ms: float = 0.0) -> ActionCosts:
        """The costs of a schedule's actions; ValueError where the stages are not as many as the times."""
        given = {"--forward-ms": self.forward_ms, "--backward-ms": self.backward_ms}
        given["--frozen-backward-ms"] = self.frozen_backward_ms
        num_stages = schedule.num_stages
        faults = [
            problem(name, expected=f"one time, or {num_stages}, one a stage", got=f"{len(times)} times")
            for name, times in given.items()
            if len(times) not in (1, num_stages)
        ]
        raise_all(ValueError, faults)
        forward, backward, frozen = (times * (num_stages // len(times)) for times in given.values())
        faults = [
            problem(
                "--frozen-backward-ms",
                expected=f"at most --backward-ms, {whole:g}",
                got=f"{part:g}",
                where=f"stage {s}",
            )
            for s, (whole, part) in enumerate(zip(backward, frozen, strict=True))
            if part > whole
        ]
        raise_all(ValueError, faults[:1])
        return ActionCosts.uniform(
            schedule,
            forward_s=[time / 1e3 for time in forward],
            backward_s=[time / 1e3 for time in backward],
            frozen_backward_s=[time / 1e3 for time in frozen],
            transfer_s=transfer_ms / 1e3,
        )

    def divided(self, parts: float) -> StageTimes:
        """Of stages that are ``parts`` times as many; ValueError where each stage has times of its own."""
        lists = (self.forward_ms, self.backward_ms, self.frozen_backward_ms)
        if parts != 1 and any(len(times) > 1 for times in lists):
            raise ValueError(problem("times by stage are known for another number of stages"))
        return StageTimes(*([time / parts for time in times] for times in lists))


@dataclass(frozen=True)
class PlanRequest:
    """What was typed, checked as far as options can be checked alone.

    Attributes:
        schedule: name, or path of a .csv; None where it was left out, like the counts.
        times: of the stages; None where ``costs`` names a file or folder instead.
        transfer_ms: None keeps what ``costs`` says, or 0.
        mode: how to plan; None where it was left out.
        goal: of the plan.
        max_ratios: one cap, or several for ``compare``.
    """

    schedule: str | None
    num_ranks: int | None
    num_microbatches: int | None
    stages_per_rank: int | None
    times: StageTimes | None
    costs: str | None
    transfer_ms: float | None
    mode: str | None
    max_ratios: tuple[float, ...]
    stage_max_ratio: dict[int, float]
    weights: dict[int, float]
    target_ms: float | None
    live_microbatches: int | None
    min_live_ratio: float
    compare: bool
    goal: str
    outputs: Outputs = field(default_factory=Outputs)


def add_plan_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``plan`` command."""
    parser = commands.add_parser(
        "plan",
        help="what freezing would do to a step, from the times of its stages",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("pipeline")
    group.add_argument(
        "--schedule", metavar="NAME", help=f"{', '.join(schedule_names())}, or a .csv file (default: 1f1b)"
    )
    group.add_argument("--ranks", type=int, metavar="N", help="workers (default: 4)")
    group.add_argument("--microbatches", type=int, metavar="N", help="micro-batches of a step (default: 8)")
    group.add_argument(
        "--stages-per-rank", type=int, metavar="N", help="stages that a rank holds (default: the schedule's own)"
    )
    group = parser.add_argument_group("times of one stage and micro-batch, one number or one a stage")
    group.add_argument("--forward-ms", type=_numbers, metavar="MS", help="forward")
    group.add_argument("--backward-ms", type=_numbers, metavar="MS", help="whole backward")
    group.add_argument(
        "--frozen-backward-ms", type=_numbers, metavar="MS", help="backward with every weight of the stage frozen"
    )
    group.add_argument("--transfer-ms", type=float, metavar="MS", help="from rank to rank (default: 0)")
    group.add_argument("--costs", metavar="PATH", help="instead: a run's folder, its plan.json, or a file of costs")
    _add_freezing(parser)
    group = parser.add_argument_group("what to show")
    group.add_argument("--compare", action="store_true", help="schedules, modes and caps at equal live gradients")
    group.add_argument(
        "--json",
        nargs="?",
        const=STANDARD_OUTPUT,
        metavar="FILE",
        help="all of it as JSON; without FILE, instead of the text",
    )
    group.add_argument("--html", metavar="FILE", help="a page with both timelines")
    group.add_argument("--png", metavar="FILE", help="a picture of both timelines")
    group.add_argument("--trace", metavar="FILE", help="Chrome trace JSON, which Perfetto opens")
    group.add_argument("--save", metavar="FILE", help="the plan, for `timelyfreeze train --plan FILE`")
    return parser


def _add_freezing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("freezing")
    group.add_argument("--mode", choices=MODES, help="cut chooses cuts with the ratios (default: cut)")
    group.add_argument(
        "--goal", choices=GOALS, default="makespan", help="of a step, or, without a flush, from batch to batch: period"
    )
    group.add_argument(
        "--max-ratio",
        type=_numbers,
        metavar="R",
        help="cap on a stage's mean freeze ratio (default: 0.3; with --compare a list, by default 0.3,0.5,0.8)",
    )
    group.add_argument(
        "--stage-max-ratio", type=_by_stage, metavar="S=R,..", help="caps of single stages, such as 0=0.2,3=0.5"
    )
    group.add_argument("--weights", type=_by_stage, metavar="S=W,..", help="prices of freezing a stage (default: 1)")
    group.add_argument("--target-ms", type=float, metavar="MS", help="the least freezing that reaches this step time")
    group.add_argument(
        "--live-microbatches", type=int, metavar="K", help="no cap: every parameter sees K micro-batches, soonest"
    )
    group.add_argument(
        "--min-live-ratio",
        type=float,
        default=0.25,
        metavar="R",
        help="of each micro-batch's top stage (default: 0.25)",
    )


def read_request(parsed: argparse.Namespace) -> PlanRequest:
    """Check what was typed, as far as it can be checked without the schedule.

    Raises:
        CommandError: naming every option that is out of range, missing, or excluded by another.
    """
    outputs = Outputs(parsed.json, parsed.html, parsed.png, parsed.trace, parsed.save)
    faults = [*_out_of_range(parsed), *_missing_times(parsed), *_exclusions(parsed)]
    for output in fields(outputs):
        faults += unwritable(f"--{output.name}", getattr(outputs, output.name))
    raise_all(CommandError, faults)
    times = None
    if parsed.costs is None:
        times = StageTimes(parsed.forward_ms, parsed.backward_ms, parsed.frozen_backward_ms)
    return PlanRequest(
        schedule=parsed.schedule,
        num_ranks=parsed.ranks,
        num_microbatches=parsed.microbatches,
        stages_per_rank=parsed.stages_per_rank,
        times=times,
        costs=parsed.costs,
        transfer_ms=parsed.transfer_ms,
        mode=parsed.mode,
        max_ratios=tuple(parsed.max_ratio or (_COMPARED_RATIOS if parsed.compare else (_DEFAULT_RATIO,))),
        stage_max_ratio=parsed.stage_max_ratio or {},
        weights=parsed.weights or {},
        target_ms=parsed.target_ms,
        live_microbatches=parsed.live_microbatches,
        min_live_ratio=parsed.min_live_ratio,
        compare=parsed.compare,
        goal=parsed.goal,
        outputs=outputs,
    )


@contextmanager
def option_errors(doing: str) -> Iterator[None]:
    """``user_errors`` with the options called as they were typed.

    >>> with option_errors("planning"):
    ...     raise ValueError("max_ratio: expected a number in [0, 1].")
    Traceback (most recent call last):
    timelyfreeze.cli.errors.CommandError: --max-ratio: expected a number in [0, 1].
    """
    try:
        with user_errors(doing):
            yield
    except CommandError as error:
        text = re.sub(r"(?<![\w-])(" + "|".join(_TYPED_AS) + r")\b", lambda match: _TYPED_AS[match[0]], str(error))
        raise CommandError(text) from error


def unwritable(option: str, path: str | None) -> list[str]:
    """Why no file can be written there, as far as a look can tell, before work is spent on what goes in."""
    if path is None or path == STANDARD_OUTPUT:
        return []
    where = f"'{path}'"
    if Path(path).is_dir():
        return [problem(f"{option} names a folder", expected="a file to write", where=where)]
    if not Path(path).absolute().parent.is_dir():
        return [problem(f"{option} lies in no folder that exists", where=where, hint="Make the folder first.")]
    return []


def _out_of_range(parsed: argparse.Namespace) -> list[str]:
    faults = [
        problem(f"{name} is out of range", expected="at least 1", got=count)
        for name in ("--ranks", "--microbatches", "--stages-per-rank", "--live-microbatches")
        if (count := _typed(parsed, name)) is not None and count < 1
    ]
    for name, expected, allows in (
        *((name, "milliseconds, at least 0", _is_amount) for name in (*_TIMES, "--transfer-ms")),
        ("--max-ratio", "a share in [0, 1]", _is_share),
        ("--stage-max-ratio", "shares in [0, 1]", _is_share),
        ("--weights", "prices, at least 0", _is_amount),
        ("--target-ms", "milliseconds above 0", lambda value: _is_amount(value) and value > 0),
        ("--min-live-ratio", "a share in [0, 1]", _is_share),
    ):
        value = _typed(parsed, name)
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        bad = [number for number in values if number is not None and not allows(number)]
        if bad:
            faults.append(problem(f"{name} is out of range", expected=expected, got=bad[0]))
    return faults


def _missing_times(parsed: argparse.Namespace) -> list[str]:
    typed = [name for name in _TIMES if _typed(parsed, name) is not None]
    if parsed.costs is not None:
        excess = ", ".join(typed)
        return [problem(f"--costs and {excess} exclude each other", hint="Leave one of them out.")] if typed else []
    missing = [name for name in _TIMES if name not in typed]
    if not missing:
        return []
    hint = "Say how long a stage takes, such as --forward-ms 15 --backward-ms 43 --frozen-backward-ms 20, or --costs."
    return [problem(f"{', '.join(missing)} missing", expected="the times of a stage, or --costs PATH", hint=hint)]


def _exclusions(parsed: argparse.Namespace) -> list[str]:
    pairs = []
    if parsed.compare:
        single = ("--stage-max-ratio", "--target-ms", "--html", "--png", "--trace", "--save")
        pairs += [("--compare", name) for name in single]
    if parsed.live_microbatches is not None:
        pairs += [("--live-microbatches", name) for name in ("--max-ratio", "--stage-max-ratio", "--target-ms")]
    if parsed.goal == "period":
        pairs += [("--goal period", name) for name in ("--target-ms", "--live-microbatches")]
        pairs += [("--compare", "--goal period")] if parsed.compare else []
    faults = [
        problem(f"{first} and {second} exclude each other", hint="Leave one of them out.")
        for first, second in pairs
        if _typed(parsed, second) is not None
    ]
    live, most = parsed.live_microbatches, parsed.microbatches
    if live is not None and most is not None and live > most:
        expected = f"at most --microbatches, {most}"
        faults.append(problem("--live-microbatches is out of range", expected=expected, got=live))
    if not parsed.compare and len(parsed.max_ratio or ()) > 1:
        faults.append(
            problem("--max-ratio", expected="one cap", got=len(parsed.max_ratio), hint="Several need --compare.")
        )
    return faults


_TIMES = ("--forward-ms", "--backward-ms", "--frozen-backward-ms")


def _typed(parsed: argparse.Namespace, name: str) -> Any:
    return getattr(parsed, name[2:].partition(" ")[0].replace("-", "_"))


def _is_share(value: float) -> bool:
    return 0 <= value <= 1


def _is_amount(value: float) -> bool:
    return 0 <= value < math.inf


def _numbers(text: str) -> list[float]:
    """``15`` or ``15,15,16`` as numbers; argparse turns the error into a message that names the option."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(problem("not numbers", expected="15 or 15,15,16", got=repr(text))) from None


def _by_stage(text: str) -> dict[int, float]:
    """``0=0.2,3=0.5`` as numbers by stage."""
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        values = {int(stage): float(number) for stage, _, number in pairs}
    except ValueError:
        values = {}
    if len(values) < len(pairs) or min(values) < 0:
        what = problem("not numbers by stage", expected="each stage once, such as 0=0.2,3=0.5", got=repr(text))
        raise argparse.ArgumentTypeError(what) from None
    return values

"""The answer of ``timelyfreeze plan`` for people: step times, ratios by stage, cuts, and both timelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from timelyfreeze.cli.gantt import draw_gantt, gantt_legend
from timelyfreeze.cli.plan_answer import PlanAnswer, StepTime, plan_caps, stage_ratios
from timelyfreeze.planner import Plan
from timelyfreeze.viz.view import Track

_ABSENT = "-"
_FAINT = "bright_black"
_TIE = 0.005  # speeds this close to 1 are the same


def print_answer(console: Console, answer: PlanAnswer, tracks: Sequence[Track]) -> None:
    """Print the whole answer, as wide as the console; ``tracks`` are the timelines to draw, on one time axis."""
    say(console, headline(answer.plan), style="bold")
    console.print()
    console.print(_steps_table(answer))
    notes = "live: micro-batches whose gradients every parameter sees, at least."
    if answer.planned.makespan_s < answer.frozen.makespan_s:
        notes += " all frozen: with all input gradients, which cuts spare."
    say(console, notes, style=_FAINT)
    console.print()
    say(console, verdict(answer))
    if answer.plan.ratios:
        console.print()
        print_ratios(console, answer.plan)
    print_timelines(console, tracks)


def print_ratios(console: Console, plan: Plan) -> None:
    """Print the mean ratio of every stage, the ratio of every micro-batch as far as they fit, and the cuts."""
    num = plan.schedule.num_microbatches
    table = new_table("stage", "cap", "mean\nratio", "live")
    has_ranks = plan.schedule.num_stages > plan.schedule.num_ranks
    if has_ranks:
        table.add_column("rank", justify="right")
    cell = next((columns for columns in (4, 2, 1) if num * columns <= console.width - (42 if has_ranks else 35)), 0)
    if cell:
        header = "".join(f"{microbatch % 10 ** (cell - cell // 2):>{cell}}" for microbatch in range(num))
        table.add_column(f"{'of each micro-batch':>{num * cell}}\n{header:>19}", no_wrap=True, justify="right")
    caps = plan_caps(plan)
    for stage, (mean, total) in enumerate(stage_ratios(plan)):
        cells: list[str | Text] = [str(stage), number(caps[stage]), f"{mean:.3f}", number(num - total)]
        cells += [str(plan.schedule.stage_to_rank[stage])] if has_ranks else []
        table.add_row(*cells, *([_ratio_cells(plan, stage, cell)] if cell else []))
    console.print(table)
    if cell:
        unit = "percent" if cell == 4 else "tenths, ■ for all"
        say(console, f"Ratios of micro-batches: {unit}; · nothing frozen; × no backward, below the cut.", style=_FAINT)
    else:
        say(console, "Too many micro-batches for this width to show their ratios; --html shows them.", style=_FAINT)
    console.print()
    say(console, cuts_line(plan))


def print_timelines(console: Console, tracks: Sequence[Track]) -> None:
    """Print timelines one above the other, on one time axis."""
    span_s = max((track.makespan_s for track in tracks), default=0.0)
    drawn = []
    for track in tracks:
        console.print()
        say(console, f"{track.name}: {milliseconds(track.makespan_s)} ms", style="bold")
        lines = draw_gantt(track, width=console.width, span_s=span_s)
        drawn += lines
        for line in lines:
            console.print(line)
    console.print()
    for line in gantt_legend(drawn, console.width):
        console.print(line)


def headline(plan: Plan) -> str:
    """What was planned, in a line."""
    schedule = plan.schedule
    stages = "" if schedule.num_stages == schedule.num_ranks else f", {schedule.num_stages} stages"
    mode = "cut-aware plan" if plan.mode == "cut" else "plan by linear program"
    options = plan.options
    if plan.live_microbatches is not None:
        aim = f"{counted(plan.live_microbatches, 'live micro-batch', 'es')} a parameter"
    else:
        aim = f"cap {options.max_ratio:g}"
        if options.target_makespan_s is not None:
            aim += f", target {milliseconds(options.target_makespan_s)} ms"
    if options.goal == "period":
        aim += ", without a flush: times from batch to batch"
    size = f"{counted(schedule.num_ranks, 'rank')} × {counted(schedule.num_microbatches, 'micro-batch', 'es')}"
    return f"{schedule.name}, {size}{stages}: {mode}, {aim}"


def verdict(answer: PlanAnswer) -> str:
    """Whether freezing pays, at as many gradients a parameter, in a sentence."""
    plan, speed = answer.plan, answer.speed_at_equal_gradients
    if not plan.ratios:
        return "Nothing can be frozen: no backward is shorter with its weights frozen."
    if plan.options.goal == "period":
        return _stream_verdict(answer)
    if speed is None and answer.planned.live is not None and answer.planned.live < 1:
        return "Some parameters would see no gradient at all: take a lower --max-ratio."
    if speed is None:
        return "A schedule from a file has no sibling with fewer micro-batches to compare with at equal gradients."
    if plan.live_microbatches is not None:
        pays = f"every parameter sees {plan.live_microbatches} micro-batches either way"
        if speed > 1 + _TIE:
            return f"Same gradients, sooner: {pays}, and the planned step is {speed:.2f}x as fast as the plain one."
        return f"No gain: {pays}, and more of them do not shorten the step."
    live = f"{number(answer.planned.live)} live micro-batches"
    if answer.planned.live == plan.schedule.num_microbatches:
        return "The plan freezes nothing."
    if speed > 1 + _TIE:
        return (
            f"Freezing pays here: a plain step with as many gradients a parameter ({live}) would take "
            f"{milliseconds(answer.equal_time_s)} ms, so the plan is {speed:.2f}x as fast."
        )
    return (
        f"A smaller batch does better here: a plain step with as many gradients a parameter ({live}) takes "
        f"{milliseconds(answer.equal_time_s)} ms, {1 / speed:.2f}x as fast as the plan. Freezing gains with more "
        "ranks, fewer micro-batches and lower caps."
    )


def _stream_verdict(answer: PlanAnswer) -> str:
    plan, stages = answer.plan, range(answer.plan.schedule.num_stages)
    means = [mean for mean, _ in stage_ratios(plan)]
    whole = [str(stage) for stage in stages if means[stage] <= 0]
    speed = answer.plain.makespan_s / answer.planned.makespan_s
    kept = f" Nothing is frozen in stages {', '.join(whole)}." if whole else ""
    return (
        f"A batch takes {milliseconds(answer.planned.makespan_s)} ms instead of "
        f"{milliseconds(answer.plain.makespan_s)}, {speed:.2f}x as fast; the stage that is frozen most sees "
        f"{number(answer.planned.live)} of {plan.schedule.num_microbatches} micro-batches.{kept}"
    )


def cuts_line(plan: Plan) -> str:
    """Which micro-batches are cut where, in a sentence."""
    by_cut: dict[int, list[int]] = {}
    for microbatch, cut in enumerate(plan.cuts):
        by_cut.setdefault(cut, []).append(microbatch)
    parts = [f"below stage {cut} for {ranges(numbers)}" for cut, numbers in sorted(by_cut.items()) if cut]
    if not parts:
        return "No micro-batch is cut: each trains something in the lowest stage."
    return f"Cuts: no backward {'; '.join(parts)}."


def _steps_table(answer: PlanAnswer) -> Table:
    table = new_table("", "step\nms", "against\nplain", "bubble", "micro-\nbatches", "live")
    for step in answer.steps:
        _add_step(table, step, answer.plain)
    bound = "LP's optimum" if answer.plan.mode == "lp" else "proven bound"
    if answer.plan.ratios:
        gap_ratio = None if answer.plan.mode == "lp" else answer.plan.gap_ratio
        gap = "" if gap_ratio is None else f"gap {100 * gap_ratio:.1f}%"
        table.add_row(bound, milliseconds(answer.plan.objective_s), gap, "", "", "", style=_FAINT)
    return table


def _add_step(table: Table, step: StepTime, plain: StepTime) -> None:
    name = {"planned": "planned", "fewer": f"plain, M = {step.num_microbatches}"}.get(step.name, step.name)
    speed = f"{plain.makespan_s / step.makespan_s:.2f}x" if step.makespan_s > 0 else _ABSENT
    cells = [milliseconds(step.makespan_s), speed, percent(step.bubble_ratio), str(step.num_microbatches)]
    style = "bold" if step.name == "planned" else _FAINT if step.live is None else ""
    table.add_row(name, *cells, "none" if step.live is None else number(step.live), style=style)


def _ratio_cells(plan: Plan, stage: int, width: int) -> Text:
    """A stage's ratios, ``width`` columns each: percent, or tenths with ■ for all; × below the cut, · for none."""
    ratios = {action.microbatch: ratio for action, ratio in plan.ratios.items() if action.stage == stage}
    text = Text()
    for microbatch, cut in enumerate(plan.cuts):
        ratio = ratios.get(microbatch, 0.0)
        if stage < cut:
            shown, style = "×", "red"
        elif ratio <= 0:
            shown, style = "·", "bright_black"
        elif width == 4:
            shown, style = f"{100 * ratio:.0f}", "yellow"
        else:
            shown, style = ("■" if ratio >= 1 else str(min(9, max(1, round(10 * ratio))))), "yellow"
        text.append(f"{shown:>{width}}", style=style)
    return text


def new_table(first: str, *headings: str) -> Table:
    """A table in the command's form: a name, then numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence, wrapped at the console's width, with nothing in it taken for markup."""
    console.print(Text(text, style=style))


def counted(value: int, thing: str, ending: str = "s") -> str:
    """A number of things.

    >>> counted(1, "rank"), counted(8, "micro-batch", "es")
    ('1 rank', '8 micro-batches')
    """
    return f"{value} {thing}{'' if value == 1 else ending}"


def milliseconds(seconds: float | None) -> str:
    """With one decimal, as the tables have it; more where it is short.

    >>> milliseconds(0.6381), milliseconds(0.00002)
    ('638.1', '0.02')
    """
    if seconds is None:
        return _ABSENT
    return f"{1e3 * seconds:,.1f}" if seconds >= 0.001 or seconds == 0 else f"{1e3 * seconds:.2g}"


def percent(share: float | None) -> str:
    """A share in percent."""
    return _ABSENT if share is None else f"{100 * share:.1f}%"


def number(value: float | None) -> str:
    """With at most two decimals, and none where they say nothing.

    >>> number(5.6000001), number(2.0)
    ('5.6', '2')
    """
    return _ABSENT if value is None else f"{value:.2f}".rstrip("0").rstrip(".")


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers with runs drawn together.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

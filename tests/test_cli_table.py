"""The table at the end, the lines on the way, and Ctrl-C, from literal numbers."""

from __future__ import annotations

import io
import os
import re
import signal

import pytest
from rich.console import Console

from timelyfreeze.cli.errors import StoppedError
from timelyfreeze.cli.metrics import StepRow, interpolate
from timelyfreeze.cli.progress import LineReporter, LiveReporter, make_reporter
from timelyfreeze.cli.stopping import StopRequest
from timelyfreeze.cli.table import RunSummary, comparison_times, render, steady_steps, summarize_run


def rows(
    run: str, step_s: float, *, phases: str = "ssssssss", losses: tuple[float, ...] = (5.0, 3.0, 2.0)
) -> list[StepRow]:
    """Eight steps of ``step_s`` (the pipeline takes 0.9 of it), validated before the first, in the middle, at the end.

    A phase is written as its first letter: w(armup), s(teady). The last step counts bytes, and is slow.
    """
    made = [StepRow(run, 0, phase="start", validation_loss=losses[0])]
    elapsed_s = 0.0
    for step, letter in enumerate(phases, 1):
        time_s = step_s * (10 if step == len(phases) else 1)
        elapsed_s += step_s
        made.append(
            StepRow(
                run,
                step,
                loss=4.0,
                step_time_s=time_s,
                pipeline_time_s=0.9 * time_s,
                elapsed_s=elapsed_s,
                phase={"w": "warmup", "s": "steady"}[letter],
                freeze_ratio=0.75,
                tokens_per_s=100 / time_s,
                validation_loss={4: losses[1], 8: losses[2]}.get(step),
                predicted_s=0.8 * step_s,
                saved_bytes=3_000_000 if step == len(phases) else None,
            )
        )
    return made


def test_medians_run_over_the_steady_steps_that_counted_no_bytes() -> None:
    frozen = rows("timelyfreeze", 0.5, phases="wwwsssss")
    steady = steady_steps(frozen)
    assert steady == {4, 5, 6, 7}
    plain = [
        row if row.step in (4, 5, 6, 7, 8, 0) else row.__class__(**{**vars(row), "step_time_s": 99.0})
        for row in rows("plain", 1.0)
    ]
    summary = summarize_run(plain, steady, num_microbatches=8, tokens_per_step=400)
    assert summary.step_s == 1.0
    assert summary.pipeline_s == pytest.approx(0.9)
    assert summary.predicted_s == pytest.approx(0.8)
    assert summary.tokens_per_s == 400
    assert (summary.num_steps, summary.elapsed_s, summary.saved_bytes) == (8, 8.0, 3_000_000)
    assert summary.curve == [(0.0, 5.0), (4.0, 3.0), (8.0, 2.0)]


def three_runs() -> list[RunSummary]:
    frozen = rows("timelyfreeze", 0.5, losses=(5.0, 3.2, 2.4))
    steady = steady_steps(frozen)
    return [
        summarize_run(rows("plain", 1.0), steady, num_microbatches=8, tokens_per_step=400, predicted_s=0.99),
        summarize_run(frozen, steady, num_microbatches=8, tokens_per_step=400),
        summarize_run(rows("fewer", 0.25, losses=(5.0, 4.0, 3.0)), steady, num_microbatches=2, tokens_per_step=100),
    ]


def test_the_whole_table() -> None:
    # Plain at 2 s and 4 s of training lies on the line from 5 (0 s) to 3 (4 s); frozen at 2 s is its own 3.2.
    lines = render(three_runs(), 7).splitlines()
    assert lines[:6] == [
        "             step speed- tokens pipe  predicted loss at loss at loss at kept",
        "run            ms     up     /s   ms         ms   8 st.     2 s     4 s   MB",
        "─" * 76,
        "plain        1000  1.00x    400  900 990 +10.0%   2.000   4.000   3.000  3.0",
        "timelyfreeze  500  2.00x    800  450 400 -11.1%   2.400   3.200   2.400  3.0",
        "plain, M = 2  250  4.00x    400  225 200 -11.1%   3.000   3.000       -  3.0",
    ]
    assert "Times: medians over the same 7 steady steps of each run." in lines
    assert "  2 s: plain, M = 2 ended." in lines
    assert "  4 s: timelyfreeze ended." in lines


@pytest.mark.parametrize(("predicted_s", "said"), [(0.99, None), (0.80, None), (0.6, "+50%"), (1.8, "-50%")])
def test_a_plain_run_that_was_disturbed_is_not_passed_off_as_a_speedup(predicted_s: float, said: str | None) -> None:
    frozen = rows("timelyfreeze", 0.5)
    steady = steady_steps(frozen)
    plain = summarize_run(  # its pipeline takes 0.9 s
        rows("plain", 1.0), steady, num_microbatches=8, tokens_per_step=400, predicted_s=predicted_s
    )
    text = render([plain, summarize_run(frozen, steady, num_microbatches=8, tokens_per_step=400)], len(steady))
    assert ("CAUTION" in text) == (said is not None)
    if said is not None:
        assert f"plain took {said} against" in text


def said(runs: list[RunSummary], live_microbatches: int | None = None) -> str:
    return " ".join(render(runs, 7, live_microbatches).split("\n\n")[1].split("\n"))


def ended(run: str, loss: float, *, num_microbatches: int = 8) -> RunSummary:
    """A run whose loss falls from 5 to ``loss`` in 8 s."""
    made = rows(run, 1.0, losses=(5.0, (5.0 + loss) / 2, loss))
    return summarize_run(made, {1, 2}, num_microbatches=num_microbatches, tokens_per_step=400)


@pytest.mark.parametrize(
    ("plain", "frozen", "fewer", "expected"),
    [
        (2.0, 1.9, 1.95, "timelyfreeze 1.900; plain, M = 2 1.950; plain 2.000: here freezing pays."),
        (2.0, 1.9, 1.8, "plain, M = 2 1.800; timelyfreeze 1.900; plain 2.000: here a smaller batch pays more than fr"),
        (1.8, 1.9, 1.95, "plain 1.800; timelyfreeze 1.900; plain, M = 2 1.950: here freezing does not pay."),
        (1.8, 1.9, 1.85, "plain 1.800; plain, M = 2 1.850; timelyfreeze 1.900: here freezing does not pay."),
        (2.0, 1.9, 1.89, "timelyfreeze and plain, M = 2 are within 0.02, which another seed may turn round."),
        (1.91, 1.9, None, "timelyfreeze and plain are within 0.02, which another seed may turn round."),
        (2.0, 1.9, None, "timelyfreeze 1.900; plain 2.000: here freezing pays."),
    ],
)
def test_one_sentence_says_whether_freezing_paid(
    plain: float, frozen: float, fewer: float | None, expected: str
) -> None:
    runs = [ended("plain", plain), ended("timelyfreeze", frozen)]
    runs += [ended("fewer", fewer, num_microbatches=2)] if fewer is not None else []
    assert said(runs).startswith("After equal training time (8 s), best loss first: ")
    assert expected in said(runs)


def test_the_sentence_looks_where_the_fastest_run_ended() -> None:
    # After 2 s: plain is on its way from 5 to 3 (4 s), frozen at its 3.2 (2 s), the smaller batch at its end, 3.0.
    assert "(2 s), best loss first: plain, M = 2 3.000; timelyfreeze 3.200; plain 4.000" in said(three_runs())


def test_modes_are_set_side_by_side() -> None:
    runs = [ended("plain", 2.0), ended("timelyfreeze", 1.9), ended("lp", 1.8), ended("fewer", 1.7, num_microbatches=6)]
    lines = render(runs, 7).splitlines()
    assert [line[:12].strip() for line in lines[3:7]] == ["plain", "timelyfreeze", "mode lp", "plain, M = 6"]
    assert "plain, M = 6 1.700; mode lp 1.800; timelyfreeze 1.900; plain 2.000: here a smaller batch" in said(runs)
    assert "mode lp 1.800; timelyfreeze 1.900; plain 2.000: here freezing pays." in said(runs[:3])


def test_with_the_same_gradients_the_speedup_is_set_beside_the_planned_one() -> None:
    frozen = rows("timelyfreeze", 0.5, losses=(5.0, 3.2, 2.4))
    steady = steady_steps(frozen)
    runs = [
        summarize_run(rows("plain", 0.6), steady, num_microbatches=4, tokens_per_step=4, predicted_s=0.52),
        summarize_run(frozen, steady, num_microbatches=6, tokens_per_step=6),
    ]
    text = said(runs, live_microbatches=4)
    assert text == (
        "timelyfreeze, M = 6: every parameter gets 4 micro-batches' gradients a step, as in plain; the pipeline's step "
        "is 1.20x as fast, 1.30x planned; loss after 8 steps 2.400, plain 2.000."
    )
    assert render(runs, 7, 4).splitlines()[4].startswith("timelyfreeze, M = 6")


def test_a_run_alone_is_compared_with_nothing() -> None:
    text = render(three_runs()[1:2], 7)
    assert "timelyfreeze  500      -    800  450 400 -11.1%   2.400  3.0" in text
    assert "ended" not in text


def test_a_run_without_steady_steps_says_so() -> None:
    frozen = rows("timelyfreeze", 0.5, phases="wwwwwwww")
    steady = steady_steps(frozen)
    runs = [summarize_run(part, steady, num_microbatches=8, tokens_per_step=4) for part in (rows("plain", 1.0), frozen)]
    text = render(runs, len(steady))
    assert "plain           -      -      -    -         -   2.000   3.000  3.0" in text
    assert "Give it more --steps" in text
    assert "best loss first" not in text


def test_small_times_keep_their_digits() -> None:
    run = summarize_run(rows("plain", 0.00123), {1, 2}, num_microbatches=8, tokens_per_step=4)
    assert "plain 1.23  1.00x" in render([run], 2)


def test_losses_are_compared_where_runs_end() -> None:
    assert comparison_times(three_runs()) == [2.0, 4.0]
    assert comparison_times(three_runs()[:2]) == [4.0]
    assert comparison_times(three_runs()[:1]) == []


@pytest.mark.parametrize(
    ("at", "expected"), [(0.0, 6.0), (5.0, 4.0), (10.0, 2.0), (15.0, 1.5), (20.0, 1.0), (20.1, None), (-0.1, None)]
)
def test_interpolation(at: float, expected: float | None) -> None:
    assert interpolate([(0.0, 6.0), (10.0, 2.0), (20.0, 1.0)], at) == expected


def test_interpolation_of_almost_nothing() -> None:
    assert interpolate([], 1.0) is None
    assert interpolate([(1.0, 3.0)], 1.0) == 3.0
    assert interpolate([(1.0, 3.0)], 2.0) is None
    assert interpolate([(1.0, 3.0), (1.0, 2.0)], 1.0) == 2.0


def test_a_log_gets_a_line_every_few_seconds_and_at_what_matters() -> None:
    now_s = [0.0]
    console = Console(file=io.StringIO(), width=60)
    reporter = make_reporter(console)
    assert isinstance(reporter, LineReporter)
    reporter = LineReporter(console, clock=lambda: now_s[0])
    reporter.begin_run("plain", 100, 0)
    for step in range(1, 101):
        now_s[0] += 1.0
        loss = 2.125 if step == 50 else None
        phase = "warmup" if step < 3 else "steady"
        row = StepRow(
            "plain",
            step,
            loss=3.0,
            step_time_s=1.0,
            tokens_per_s=100.0,
            phase=phase,
            freeze_ratio=0.5,
            validation_loss=loss,
        )
        reporter.show(row)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, *range(3, 49, 5), 50, *range(55, 101, 5)]
    assert lines[0] == "plain           1/100  warmup        loss 3.000     100 tok/s  50% frozen"
    assert lines[11] == "plain          50/100  steady        loss 3.000     100 tok/s  50% frozen  validation 2.1250"


def test_a_terminal_gets_one_bar() -> None:
    console = Console(file=io.StringIO(), width=90, force_terminal=True, legacy_windows=False)
    reporter = make_reporter(console)
    assert isinstance(reporter, LiveReporter)
    reporter.begin_run("timelyfreeze", 10, 4)
    for step in range(5, 11):
        reporter.show(
            StepRow("timelyfreeze", step, loss=2.5, step_time_s=1.0, tokens_per_s=100.0, phase="ramp", freeze_ratio=0.4)
        )
    reporter.note("[notes] stay")
    reporter.end_run()
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert "[notes] stay" in text
    last = text.splitlines()[-1]
    for part in ("timelyfreeze", "10/10", "ramp", "loss 2.500", "100 tok/s", "40% frozen"):
        assert part in last, part


def test_the_first_ctrl_c_waits_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    told = []
    with StopRequest(lambda: told.append("stopping")) as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert told == ["stopping"]
        with pytest.raises(StoppedError) as caught:
            stop.check()
        assert caught.value.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before

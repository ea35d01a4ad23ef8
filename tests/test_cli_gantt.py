"""Timelines as text: true to time, told apart by fills alone, and plain ASCII where that is all there is."""

from __future__ import annotations

import io

from rich.console import Console

from timelyfreeze.cli.gantt import draw_gantt, gantt_legend
from timelyfreeze.cli.output import make_console
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import Plan, make_plan
from timelyfreeze.schedule import Action, Schedule, create_schedule, simulate
from timelyfreeze.viz import Track, tracks_of_plan


def gantt(track: Track, width: int) -> list[str]:
    return [str(line) for line in draw_gantt(track, width=width, span_s=track.makespan_s)]


def small_track(ratios: dict[str, float]) -> Track:
    """1F1B, 2 ranks, 2 micro-batches; forward 1 s, backward 2 s, half of it for the weights."""
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=2.0, frozen_backward_s=1.0)
    by_action = {Action.parse(text): ratio for text, ratio in ratios.items()}
    return tracks_of_plan(Plan.of_ratios(schedule, costs, by_action, objective_s=9.0, max_ratio=1.0))[1]


def test_gantt_is_true_to_time() -> None:
    # 9 s in 36 columns: a forward takes 4, a backward 8.
    assert gantt(small_track({}), 51) == [
        "rank 0 │0░░░1░░░········0███████····1███████│  33%",
        "rank 1 │····0░░░0███████1░░░1███████········│  33%",
        "        0                   5000 ms           idle",
    ]


def test_gantt_tells_parts_input_gradients_and_what_does_not_run() -> None:
    # 0B1 is cut, so 1B1 loses a quarter of its 2 s; 0B0 ends with it, 1B0 takes its frozen 1 s.
    track = small_track({"0B1": 1.0, "1B1": 0.25, "1B0": 1.0})
    lines = draw_gantt(track, width=51, span_s=9.0)
    assert [str(line) for line in lines[:2]] == [
        "rank 0 │0░░░1░░░····0███████·×              │  27%",
        "rank 1 │····0░░░0▒▒▒1░░░1▓▓▓▓▓              │  18%",
    ]
    legend = " ".join(str(line) for line in gantt_legend(lines, 200))
    assert legend == (
        "░░ forward   ██ backward   ▓▓ backward, partly frozen   ▒▒ input gradient only   "
        "×× no backward: below the cut   ·· idle"
    )


def test_gantt_of_a_split_backward_tells_its_halves() -> None:
    schedule = Schedule([["0F0", "0I0", "0W0"]])
    durations = dict(zip(schedule.actions, (1.0, 1.0, 2.0), strict=True))
    line = simulate(schedule, durations)
    track = Track("split", schedule, line.start_s, line.end_s, {}, None, frozenset())
    assert gantt(track, 16 + 15)[0] == "rank 0 │0░░░0▒▒▒0▚▚▚▚▚▚▚│   0%"


def test_gantt_tells_the_stages_of_a_rank() -> None:
    schedule = create_schedule("zbv", num_ranks=1, num_microbatches=1)
    line = simulate(schedule, {action: 1.0 if action.kind.value == "F" else 2.0 for action in schedule.actions})
    track = Track("v", schedule, line.start_s, line.end_s, {}, None, frozenset())
    lines = draw_gantt(track, width=24 + 15, span_s=6.0)
    assert str(lines[0]) == "rank 0 │0:0░1:0░1:0█████0:0█████│   0%"
    assert "1:2 stage 1, micro-batch 2" in str(gantt_legend(lines, 80)[-1])
    fills = [span.style for span in lines[0].spans if lines[0].plain[span.start] in "░█"]
    assert list(dict.fromkeys(fills)) == ["blue", "bright_blue", "bright_green", "green"]
    narrow = str(draw_gantt(track, width=16 + 15, span_s=6.0)[0])
    assert narrow == "rank 0 │0░░0░1:0███0:0██│   0%"


def test_gantt_of_many_ranks_says_what_it_leaves_out() -> None:
    schedule = create_schedule("gpipe", num_ranks=40, num_microbatches=1)
    costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=1.0, frozen_backward_s=1.0)
    lines = gantt(tracks_of_plan(make_plan(schedule, costs, 0.0))[0], 80)
    assert len(lines) == 32 + 2
    assert lines[32] == "and 8 more ranks; --html shows all"


def test_plain_ascii_where_the_output_knows_no_more() -> None:
    raw = io.BytesIO()
    console = make_console(io.TextIOWrapper(raw, encoding="latin-1", write_through=True))
    console.print("0░▒▓█▚×·■│")
    assert raw.getvalue() == b"0-+=#%x.#|\n"


def test_colours_only_add_to_what_the_fills_say() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    console.print(draw_gantt(small_track({}), width=51, span_s=9.0)[0])
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[" in console.file.getvalue()

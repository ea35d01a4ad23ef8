"""What is to be shown: checks of tracks, tracks of a plan, critical paths and the page's data."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest

from tests.random_schedules import random_costs, random_schedule
from tests.viz_views import cut_plan, full_view, measured_track, split_track
from timelyfreeze.planner import Plan
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule, data_dependencies, simulate
from timelyfreeze.viz import Track, critical_path, tracks_of_plan
from timelyfreeze.viz.layout import bar_heights, lay_out
from timelyfreeze.viz.page_data import page_data

F0, B0 = Action.parse("0F0"), Action.parse("0B0")
TINY = Track("tiny", Schedule([["0F0", "0B0"]]), {F0: 0.0, B0: 1.0}, {F0: 1.0, B0: 3.0}, {B0: 0.5}, [0], frozenset())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start_s": {F0: 0.0}}, "none of 0B0"),
        ({"end_s": {F0: 1.0, B0: float("nan")}}, "0B0: nan"),
        ({"end_s": {F0: 1.0, B0: 0.5}}, "expected no action to end before it starts, got 0B0"),
        ({"start_s": {F0: 0.0, B0: 1.0, Action.parse("7B7"): 1.0}}, "7B7"),
        ({"ratios": {B0: 1.5}}, "0B0: 1.5"),
        ({"ratios": {Action.parse("7B7"): 0.5}}, "7B7"),
        ({"skipped": frozenset({F0})}, "backward actions"),
        ({"skipped": frozenset({Action.parse("7B7")})}, "7B7"),
        ({"cuts": [0, 0]}, "1 stages, each in 0..1"),
        ({"cuts": [2]}, "[2]"),
        ({"measured_s": {B0: -1.0}}, "0B0: -1.0"),
    ],
)
def test_a_track_that_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="track 'tiny'") as error:
        replace(TINY, **change)
    assert said in str(error.value)


def test_every_fault_is_in_the_message() -> None:
    with pytest.raises(ValueError, match="2 problems") as error:
        replace(TINY, ratios={B0: 2.0}, cuts=[5])
    assert "0B0: 2.0" in str(error.value)
    assert "[5]" in str(error.value)


def test_tracks_of_a_plan_have_its_makespans() -> None:
    plan = cut_plan(4, 8, transfer_s=0.001)
    plain, planned = tracks_of_plan(plan)
    assert plain.makespan_s == plan.unfrozen_makespan_s
    assert planned.makespan_s == plan.makespan_s
    assert dict(planned.start_s) == plan.start_s
    assert planned.cuts == plan.cuts
    assert planned.skipped == {
        a for a in plan.schedule.actions if a.kind is Kind.B and a.stage < plan.cuts[a.microbatch]
    }
    assert plain.cuts is None
    assert not plain.skipped


def test_stage_ratios_and_bubble() -> None:
    assert split_track().stage_ratios() == [0.5, 0.5]
    assert replace(split_track(), ratios={}).stage_ratios() == [None, None]
    assert TINY.bubble_ratio == 0.0
    assert replace(TINY, start_s={F0: 0.0, B0: 2.0}).bubble_ratio == pytest.approx(1 / 3)


def test_critical_path_of_1f1b() -> None:
    # The first micro-batch goes down; the last stage is busy until its last backward, which comes back up.
    plain, _ = tracks_of_plan(cut_plan(2, 4))
    path = [str(action) for action in critical_path(plain)]
    assert path == ["0F0", "1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3", "0B3"]


@pytest.mark.parametrize("seed", range(60))
def test_every_action_of_a_critical_path_starts_when_the_one_before_it_is_done(seed: int) -> None:
    draw = random.Random(seed)
    schedule = random_schedule(draw)
    costs = random_costs(schedule, draw)
    ratios = {
        action: draw.choice([0.0, 1.0, draw.random()]) for action in schedule.actions if costs.is_freezable(action)
    }
    plan = Plan.of_ratios(schedule, costs, ratios, mode="lp", max_ratio=1.0, objective_s=0.0)
    edges = {(edge.before, edge.after): edge.transfer for edge in data_dependencies(schedule)}
    beside = {(a, b) for order in schedule.ranks for a, b in itertools.pairwise(order)}
    for track in tracks_of_plan(plan):
        path = critical_path(track)
        assert track.end_s[path[-1]] == track.makespan_s
        assert track.start_s[path[0]] == 0.0
        for before, after in itertools.pairwise(path):
            arrivals = [track.end_s[before]] if (before, after) in beside else []
            if (before, after) in edges:
                pair = (before.stage, after.stage)
                times = costs.transfer_s
                transfer_s = times if isinstance(times, float) else times.get(pair, 0.0)
                is_sent = edges[before, after] and after not in track.skipped
                arrivals.append(track.end_s[before] + (transfer_s if is_sent else 0.0))
            assert track.start_s[after] in arrivals, (before, after)


def test_critical_path_of_a_measured_track_follows_what_came_latest() -> None:
    schedule = create_schedule("gpipe", num_ranks=2, num_microbatches=2)
    durations_s = dict.fromkeys(schedule.actions, 1.0) | {Action.parse("0F1"): 5.0}
    line = simulate(schedule, durations_s)
    # A gap of 0.25 before every action, as a runtime leaves.
    start_s = {
        action: time + 0.25 * (1 + index)
        for index, (action, time) in enumerate(sorted(line.start_s.items(), key=lambda item: item[1]))
    }
    end_s = {action: time + durations_s[action] for action, time in start_s.items()}
    path = critical_path(Track("measured", schedule, start_s, end_s, {}, None, frozenset()))
    assert [str(action) for action in path][:3] == ["0F0", "0F1", "1F1"]


def test_cuts_are_marked_where_the_backward_ends() -> None:
    layout = lay_out(split_track())
    ends = [str(action) for action, mark in zip(layout.graph.actions, layout.ends_backward, strict=True) if mark]
    assert ends == ["1W1"]
    plan = cut_plan(4, 8)
    layout = lay_out(tracks_of_plan(plan)[1])
    ends = [str(action) for action, mark in zip(layout.graph.actions, layout.ends_backward, strict=True) if mark]
    assert ends == ["1B1", "1B5", "2B2", "2B6"]


def test_skipped_actions_need_no_times() -> None:
    track = measured_track(cut_plan(4, 8))
    bare = replace(
        track,
        start_s={action: time for action, time in track.start_s.items() if action not in track.skipped},
        end_s={action: time for action, time in track.end_s.items() if action not in track.skipped},
    )
    assert bare.makespan_s == track.makespan_s
    assert page_data(replace(full_view(), tracks=[bare])) == page_data(replace(full_view(), tracks=[track]))


def test_later_stages_of_a_rank_have_lower_bars() -> None:
    looped = create_schedule("looped_bfs", num_ranks=2, num_microbatches=2, stages_per_rank=3)
    assert bar_heights(looped) == pytest.approx([1.0, 1.0, 0.81, 0.81, 0.62, 0.62])
    assert bar_heights(create_schedule("dualpipev", num_ranks=2, num_microbatches=4)) == [1.0, 1.0, 0.62, 0.62]
    assert set(bar_heights(create_schedule("zb_h1", num_ranks=3, num_microbatches=2))) == {1.0}


def test_page_data_is_plain_json() -> None:
    data = json.loads(json.dumps(page_data(full_view()), allow_nan=False))
    assert data["unit"] == "ms"
    plain, planned, _ = data["tracks"]
    assert plain["start"][:2] == [0, 15_000_000]
    assert planned["ratio"][planned["cut_here"][0]] == 2500
    assert plain["ratio"] == [-1] * len(plain["kind"])
    assert data["runs"][0]["loss"][7] is None
    assert [phase for phase, _, _ in data["runs"][1]["phases"]] == ["warmup", "measure_upper", "ramp", "steady"]

"""The HTML page in a real browser. Skipped where there is no Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.viz_page import Page, needs_chromium, start_browser
from tests.viz_views import HOSTILE, cut_plan, full_view, looped_track, split_track, training_steps
from timelyfreeze.schedule import Action, Schedule
from timelyfreeze.viz import StepPoint, Track, View, tracks_of_plan

# After tests.viz_page, which skips this file where selenium is missing.
from selenium.webdriver.common.action_chains import ActionChains  # isort: skip
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin  # isort: skip
from selenium.webdriver.common.by import By  # isort: skip
from selenium.webdriver.common.keys import Keys  # isort: skip

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Page:
    return Page(browser, tmp_path)


def test_draws_everything_offline_and_without_complaint(page: Page) -> None:
    page.open(full_view("Step times"))
    assert page.text("h1") == "Step times"
    assert page.find(".facts").text.split("\n") == ["Schedule", "1f1b", "Cap", "0.3"]
    shown = page.run(
        "return [...document.querySelectorAll('main > section')].filter((s) => !s.hidden).map((s) => s.id)"
    )
    assert shown == ["timeline-section", "heat-section", "steps-section", "table-section"]
    names = page.run("return [...document.querySelectorAll('.track-name b')].map((name) => name.textContent)")
    assert names == ["plain", "planned", "measured"]
    assert page.requests() == [(page.folder / "page.html").as_uri()]
    assert page.complaints() == []


def test_a_page_cannot_reach_the_network(page: Page) -> None:
    # The policy in the page stops what a fault in it, or a browser's extension of the library, might ask for.
    page.open(View("t", [], []))
    outcome = page.driver.execute_async_script(
        "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('sent'), (e) => done(e.message))"
    )
    assert outcome == "Failed to fetch"
    assert any("Content Security Policy" in message for message in page.complaints())
    assert len(page.requests()) == 1


def test_summary_is_there_without_scripts(page: Page) -> None:
    page.open(full_view())
    rows = page.run("return [...document.querySelectorAll('header tbody tr')].map((row) => row.innerText.split('\\t'))")
    assert [row[0] for row in rows] == ["plain", "planned", "measured"]
    assert rows[0][1] == "654 ms"
    assert rows[1][4:] == ["50 %", "31 %", "6 %", "0 %"]


def test_zooms_and_moves_by_keyboard(page: Page) -> None:
    page.open(full_view())
    whole = page.range()
    assert whole[0] == 0
    page.find("body").send_keys(Keys.TAB)
    for _ in range(10):  # theme, critical path, zoom, keys: the timeline comes after them
        if page.run("return document.activeElement.id") == "timeline":
            break
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
    assert page.run("return document.activeElement.id") == "timeline"
    page.press("+", "+")
    begin, end = page.range()
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 2.25, rel=1e-3)
    page.press(Keys.ARROW_RIGHT)
    assert page.range()[0] == pytest.approx(begin + 0.15 * (end - begin), rel=1e-3)
    page.press(Keys.ARROW_LEFT)
    assert page.range() == pytest.approx((begin, end), rel=1e-3)
    page.press(Keys.END)
    assert page.range()[1] == pytest.approx(whole[1])
    page.press(Keys.HOME)
    assert page.range()[0] == pytest.approx(0, abs=1e-6)
    page.press("-")
    begin, end = page.range()
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 1.5, rel=1e-3)
    page.press("0")
    assert page.range() == pytest.approx(whole)
    assert page.complaints() == []


def test_buttons_and_mouse_zoom_and_move_too(page: Page) -> None:
    page.open(full_view())
    whole = page.range()
    page.find("#zoom-in").click()
    assert page.range()[1] - page.range()[0] == pytest.approx((whole[1] - whole[0]) / 1.5, rel=1e-3)
    x, y = page.point_of(0, sum(page.range()) / 2, 1)
    page.hover("#timeline", x, y)
    before = page.range()
    ActionChains(page.driver).click_and_hold().move_by_offset(-200, 0).release().perform()
    page.until(lambda: page.range()[0] > before[0] + 1)
    page.find("#zoom-out").click()
    page.find("#zoom-reset").click()
    assert page.range() == pytest.approx(whole)
    place = ScrollOrigin.from_element(page.find("#timeline"), 0, 0)
    page.run("scrollTo(0, 0)")
    ActionChains(page.driver).scroll_from_origin(place, 0, 50).perform()
    page.until(lambda: page.run("return scrollY") > 0)
    assert page.range() == pytest.approx(whole), "a plain wheel scrolls the page"
    ActionChains(page.driver).key_down(Keys.CONTROL).scroll_from_origin(place, 0, -120).key_up(Keys.CONTROL).perform()
    page.until(lambda: page.range()[1] - page.range()[0] < 0.99 * (whole[1] - whole[0]))


def test_tip_shows_planned_against_measured(page: Page) -> None:
    page.open(full_view())
    planned = full_view().tracks[1]
    action = Action.parse("2B2")
    middle_ms = 500 * (planned.start_s[action] + planned.end_s[action])
    page.hover("#timeline", *page.point_of(1, middle_ms, 2))
    page.until(lambda: page.find("#tip").is_displayed())
    terms = page.run("return [...document.querySelectorAll('#tip dt, #tip dd')].map((term) => term.textContent)")
    values = dict(zip(terms[::2], terms[1::2], strict=True))
    assert page.text("#tip h3") == "2B2backward, planned"
    assert values == {
        "Stage": "2",
        "Micro-batch": "2",
        "Rank": "2",
        "Start": f"{1e3 * planned.start_s[action]:.6g} ms",
        "Duration, plain": "43 ms",
        "Duration, planned": "32.25 ms",
        "Duration, measured": "38.7 ms",
        "Measured": "38.7 ms",
        "Freeze ratio": "25 %",
    }
    assert "cut here: no backward below" in page.text("#tip")
    # The same action is framed in every track.
    assert len(page.driver.find_elements(By.CSS_SELECTOR, ".outline")) == 3
    page.hover("#timeline", 5, 5)
    page.until(lambda: not page.find("#tip").is_displayed())


def test_actions_are_selected_by_keyboard_and_said(page: Page) -> None:
    page.open(full_view())
    said = lambda: page.text("#announcement")  # noqa: E731 - a name for what is read again and again
    page.press(Keys.ARROW_DOWN)
    assert said().startswith("0F0, forward, plain. Stage 0, Micro-batch 0, Rank 0, Start 0 ms")
    assert "on the critical path" in said()
    assert page.find("#tip").is_displayed()
    page.press(Keys.SHIFT, Keys.ARROW_RIGHT, Keys.NULL)
    assert said().startswith("0F1, ")
    page.press(*[Keys.ARROW_DOWN] * 4)
    assert said().startswith("0F1, forward, planned.")
    for _ in range(5):
        page.press(Keys.SHIFT, Keys.ARROW_RIGHT, Keys.NULL)
    assert said().startswith("0B1, backward, planned.")
    assert "skipped: its micro-batch is cut above" in said()
    page.press(Keys.ESCAPE)
    assert not page.find("#tip").is_displayed()
    assert page.driver.find_elements(By.CSS_SELECTOR, ".outline") == []


def test_selecting_brings_into_view(page: Page) -> None:
    page.open(full_view())
    page.press(Keys.ARROW_DOWN, *"++++++")
    assert page.range()[1] < 100
    for _ in range(15):
        page.press(Keys.SHIFT, Keys.ARROW_RIGHT, Keys.NULL)
    assert page.text("#announcement").startswith("0B7")
    plain = full_view().tracks[0]
    begin, end = page.range()
    assert begin <= 1e3 * plain.start_s[Action.parse("0B7")]
    assert end >= 1e3 * plain.end_s[Action.parse("0B7")]


def test_help_opens_and_closes(page: Page) -> None:
    page.open(full_view())
    button = page.find("#help-button")
    page.press("?")
    assert page.find("#help").is_displayed()
    assert button.get_attribute("aria-expanded") == "true"
    page.press(Keys.ESCAPE)
    assert not page.find("#help").is_displayed()
    button.click()
    assert page.find("#help").is_displayed()


def test_critical_path_is_drawn_and_can_be_hidden(page: Page) -> None:
    accent = (0xC4, 0x3E, 0x00)
    page.open(full_view())
    assert page.count_of(accent) > 1000
    page.press("c")
    assert not page.find("#show-path").is_selected()
    page.until(lambda: page.count_of(accent) == 0)
    page.find("#show-path").click()
    page.until(lambda: page.count_of(accent) > 1000)


def test_shade_is_the_freeze_ratio_and_cuts_are_drawn(page: Page) -> None:
    view = full_view()
    page.open(view)
    planned = view.tracks[1]

    def colour_of(text: str) -> tuple[int, ...]:
        action = Action.parse(text)
        quarter_ms = 1e3 * (0.8 * planned.start_s[action] + 0.2 * planned.end_s[action])
        x, y = page.point_of(1, quarter_ms, action.stage)
        return page.colour_at(x, y)

    live, frozen = (0x1B, 0x5A, 0x9E), (0xD5, 0xE4, 0xF3)
    quarter = tuple(round(a + 0.25 * (b - a)) for a, b in zip(live, frozen, strict=True))
    assert colour_of("3B0") == live
    assert colour_of("2B2") == pytest.approx(quarter, abs=1)
    assert colour_of("0F0") == (0xB9, 0xC0, 0xC8)
    x, y = page.point_of(1, 1e3 * planned.end_s[Action.parse("2B2")], 2)
    assert page.colour_at(x - 2, y) == (0x1B, 0x20, 0x25)


def test_stages_of_a_rank_are_told_apart_by_height(page: Page) -> None:
    page.open(View("", [], [looped_track()]))
    assert page.find("[data-mark=stages]").is_displayed()
    _, middle = page.point_of(0, 0.5, 0)
    lane, forward, inputs, weights = (0xF4, 0xF5, 0xF6), (0xB9, 0xC0, 0xC8), (0x6F, 0x8F, 0x87), (0xC9, 0x8A, 0x00)
    for number, colour in enumerate((forward, forward, inputs, (0x1B, 0x5A, 0x9E), weights)):
        x, _ = page.point_of(0, number + 0.2, 0)
        below, above = page.colour_at(x, middle + 8), page.colour_at(x, middle - 10)
        assert below == colour
        assert above == (colour if number in (0, 3) else lane)
    page.open(View("", [], [split_track()]))
    assert not page.find("[data-mark=stages]").is_displayed()


def test_dark_and_light(page: Page) -> None:
    ground = lambda: page.run("return getComputedStyle(document.body).backgroundColor")  # noqa: E731
    page.open(full_view(), theme="dark")
    assert ground() == "rgb(20, 23, 26)"
    place = page.point_of(0, 5.0, 0)
    dark_bar = page.colour_at(*place)
    assert dark_bar == (0x5B, 0x64, 0x6E)
    page.emulate("light")
    page.until(lambda: ground() == "rgb(255, 255, 255)")
    page.until(lambda: page.colour_at(*place) == (0xB9, 0xC0, 0xC8))
    button = page.find("#theme")
    button.click()
    button.click()
    assert button.text == "Theme: dark"
    assert ground() == "rgb(20, 23, 26)"
    page.until(lambda: page.colour_at(*place) == dark_bar)
    assert page.complaints() == []


def test_heat_map_steps_and_table_tell_their_values(page: Page) -> None:
    page.open(full_view())
    width = page.find("#heat").size["width"]
    cell = (width - 64 - 20) / 8
    page.hover("#heat", 64 + 2.5 * cell, 6 + 2.5 * 26)
    page.until(lambda: "Freeze ratio25 %" in page.text("#tip"))
    assert page.text("#tip h3") == "2B2planned"
    page.hover("#steps", width / 2, 180)
    page.until(lambda: "timelyfreeze: loss" in page.text("#steps"))
    assert "30 % frozen" in page.text("#steps")
    page.find("#actions summary").click()
    page.run("const s = document.getElementById('table-track'); s.value = 1; s.dispatchEvent(new Event('change'))")
    page.run("const s = document.getElementById('table-rank'); s.value = 2; s.dispatchEvent(new Event('change'))")
    rows = page.run(
        "return [...document.querySelectorAll('#action-table tr')].map((row) => row.innerText.split('\\t'))"
    )
    assert rows[0][:4] == ["Action", "Kind", "Stage", "Micro-batch"]
    row = next(row for row in rows if row[0] == "2B2")
    assert row[5:8] == ["32.25 ms", "38.7 ms", "25 %"]
    assert "cut here" in row[8]
    assert len(rows) == 1 + 16
    assert page.complaints() == []


def test_texts_stay_texts(page: Page) -> None:
    plan = cut_plan(2, 4)
    tracks = [replace(track, name=f"{track.name} {HOSTILE}") for track in tracks_of_plan(plan)]
    steps = [replace(point, phase=HOSTILE) for point in training_steps((HOSTILE, f"b {HOSTILE}"))]
    page.open(View(HOSTILE, [(HOSTILE, HOSTILE)], [*tracks, replace(split_track(), name=HOSTILE)], steps))
    assert page.text("h1") == HOSTILE
    assert page.driver.title == HOSTILE
    page.press(Keys.ARROW_DOWN)
    assert HOSTILE in page.text("#tip")
    page.hover("#steps", 700, 180)
    page.until(lambda: f"{HOSTILE}: loss" in page.text("#steps"))
    page.find("#actions summary").click()
    assert page.run("return document.querySelectorAll('img').length") == 0
    assert page.run("return window.hacked ?? 'nothing'") == "nothing"
    assert page.complaints() == []


def still_view(time_s: float) -> View:
    """One action that takes ``time_s``; the other takes none."""
    forward, backward = Action.parse("0F0"), Action.parse("0B0")
    start_s, end_s = {forward: 0.0, backward: time_s}, {forward: time_s, backward: time_s}
    return View(
        "one", [], [Track("one", Schedule([["0F0", "0B0"]]), start_s, end_s, {backward: 1.0}, [1], frozenset())]
    )


@pytest.mark.parametrize(
    "view",
    [
        View("", [], []),
        View(
            "steps only",
            [],
            [],
            [StepPoint("a", 1, None, "", None, None, None), StepPoint("a", 2, 1.0, "", None, None, None)],
        ),
        still_view(0.0),
        still_view(3e-9),
        still_view(1e7),
        View("split", [], [split_track()]),
    ],
    ids=["empty", "steps", "no-time", "nanoseconds", "months", "split"],
)
def test_unusual_views_are_drawn(page: Page, view: View) -> None:
    page.open(view)
    assert page.find("#timeline-section").is_displayed() == bool(view.tracks)
    assert page.find("#steps-section").is_displayed() == bool(view.steps)
    if view.tracks:
        page.press("+", Keys.ARROW_DOWN, Keys.ARROW_DOWN, "0")
        assert page.text("#announcement") != ""
        kinds = page.run(
            "return [...document.querySelectorAll('[data-kind]')].filter((i) => !i.hidden).map((i) => i.dataset.kind)"
        )
        assert kinds == sorted({action.kind.value for action in view.tracks[0].schedule.actions}, key="FBIW".index)
    assert page.complaints() == []


FRAMES = """
const done = arguments[0];
const element = document.getElementById("timeline");
const keys = ["+", "ArrowRight", "-", "ArrowLeft"].flatMap((key) => Array(25).fill(key));
const times = [];
let last = performance.now();
const frame = (now) => {
  times.push(now - last);
  last = now;
  if (!keys.length) return done(times.slice(2));
  element.dispatchEvent(new KeyboardEvent("keydown", { key: keys.shift(), bubbles: true }));
  requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
"""


BOXES = """
const chart = echarts.getInstanceByDom(document.getElementById("timeline"));
const shapes = chart.getZr().storage.getDisplayList(true);
return [shapes.length, shapes.reduce((sum, shape) => sum + (shape.shape?.boxes?.length ?? 0) / 4, 0)];
"""


def test_a_large_page_draws_only_what_can_be_seen(page: Page, record_property: Callable[[str, object], None]) -> None:
    page.open(View("64 x 256", [], tracks_of_plan(cut_plan(64, 256))))
    # 65,536 bars: as a whole an image, zoomed in those in view.
    num_shapes, num_boxes = page.run(BOXES)
    assert num_shapes < 400
    assert num_boxes < 1000
    times = sorted(page.driver.execute_async_script(FRAMES))
    record_property("median_frame_ms", times[len(times) // 2])
    print(f"frames while zooming and moving: median {times[len(times) // 2]:.1f} ms, 95 % {times[95]:.1f} ms")
    page.press("0")
    x, y = page.point_of(1, page.range()[1] / 2, 40)
    page.hover("#timeline", x, y)
    page.until(lambda: page.find("#tip").is_displayed())
    assert page.text("#tip h3").startswith("40")
    page.press(*"+" * 14)
    assert page.colour_at(*page.point_of(1, sum(page.range()) / 2, 63)) in ((0x1B, 0x5A, 0x9E), (0xB9, 0xC0, 0xC8))
    num_shapes, num_boxes = page.run(BOXES)
    assert num_shapes < 400
    assert 2 * 64 <= num_boxes < 2000
    assert page.complaints() == []

"""A written page, open in headless Chromium that selenium drives, and what tests ask of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from timelyfreeze.viz import View, write_html

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (requirements/dev.txt)")

from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402 - where selenium is there
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and its driver: apt-get install chromium chromium-driver"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--window-size=1400,1000", "--force-device-scale-factor=1"),
)
# A page that hangs fails its test and not the whole run.
LIMIT_S = 60


def start_browser(profile: Path) -> Any:
    """A driver with an empty profile; it logs the console and every request."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(LIMIT_S)
    driver.set_script_timeout(LIMIT_S)
    return driver


@dataclass
class Page:
    """An open page and what tests ask of it."""

    driver: Any
    folder: Path

    def open(self, view: View, theme: str = "light") -> None:
        path = self.folder / "page.html"
        write_html(view, path)
        self.emulate(theme)
        for log in ("browser", "performance"):
            self.driver.get_log(log)  # forgets what earlier pages logged
        self.driver.get(path.as_uri())
        WebDriverWait(self.driver, LIMIT_S).until(
            lambda driver: driver.execute_script(
                "return document.documentElement.dataset.ready || !document.getElementById('failure').hidden"
            )
        )
        assert self.text("#failure") == ""

    def emulate(self, theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], object]) -> None:
        WebDriverWait(self.driver, 20).until(lambda _: condition())

    def press(self, *keys: str) -> None:
        self.find("#timeline").send_keys(*keys)

    def range(self) -> tuple[float, float]:
        """Begin and end of what the timeline shows, in the axis's unit."""
        begin, end = self.run("const { begin, end } = document.getElementById('timeline').dataset; return [begin, end]")
        return float(begin), float(end)

    def hover(self, selector: str, x: float, y: float) -> None:
        """Move the mouse to a point of an element, in pixels from its upper left corner."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({ block: 'center' })", element)
        size = element.size
        chain = ActionChains(self.driver, duration=0)
        chain.move_to_element_with_offset(element, round(x - size["width"] / 2), round(y - size["height"] / 2))
        chain.perform()

    def point_of(self, track: int, time: float, rank: int) -> tuple[float, float]:
        """Where a time on a rank lies in the timeline."""
        x, y = self.run(
            "return echarts.getInstanceByDom(document.getElementById('timeline'))"
            ".convertToPixel({ xAxisIndex: arguments[0], yAxisIndex: arguments[0] }, [arguments[1], arguments[2]])",
            *(track, time, rank),
        )
        return x, y

    def colour_at(self, x: float, y: float) -> tuple[int, ...]:
        """Red, green and blue of a pixel of the timeline's drawing."""
        return tuple(
            self.run(
                "const canvas = document.querySelector('#timeline canvas');"
                "const point = [arguments[0], arguments[1], 1, 1].map(Math.round);"
                "return Array.from(canvas.getContext('2d').getImageData(...point).data).slice(0, 3)",
                *(x, y),
            )
        )

    def count_of(self, colour: tuple[int, int, int]) -> int:
        """How many pixels of the timeline's drawing have exactly this colour."""
        return self.run(
            "const canvas = document.querySelector('#timeline canvas');"
            "const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
            "let count = 0;"
            "for (let i = 0; i < data.length; i += 4) count += arguments[0].every((value, c) => data[i + c] === value);"
            "return count",
            list(colour),
        )

    def complaints(self) -> list[str]:
        """What the console got: errors, warnings, blocked requests."""
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        return [message for message in messages if "getImageData" not in message]  # from looking at pixels, above

    def requests(self) -> list[str]:
        """Every address that was asked for, without those whose data is in them."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

"""Colours: those of the page's light theme, read from its style sheet so that there is one list of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.schedule import Kind

_COLOUR = re.compile(r"--([a-z-]+):\s*(#[0-9a-f]{6})")


class Palette(dict[str, str]):
    """Colours as ``#rrggbb`` by the names that page.css gives them.

    >>> light_palette()["page"]
    '#ffffff'
    """

    def fills(self, kinds: Sequence[Kind], ratio: NDArray[np.float64]) -> NDArray[np.float64]:
        """Red, green and blue in [0, 1] of every action's bar, ``[num_actions, 3]``; NaN ratios count as trained."""
        share = np.nan_to_num(ratio)[:, None]
        fills = np.empty((len(kinds), 3))
        letters = np.array([kind.value for kind in kinds])
        fills[letters == Kind.F.value] = self.channels("forward")
        fills[letters == Kind.I.value] = self.channels("input")
        for kind, name in ((Kind.B, "backward"), (Kind.W, "weight")):
            shades = self.channels(f"{name}-live") * (1 - share) + self.channels(f"{name}-frozen") * share
            fills[letters == kind.value] = shades[letters == kind.value]
        return fills

    def label(self, fill: NDArray[np.float64]) -> str:
        """The colour of a text on a bar."""
        return self["on-light"] if fill @ (0.299, 0.587, 0.114) > 0.55 else self["on-dark"]

    def channels(self, name: str) -> NDArray[np.float64]:
        """Red, green and blue in [0, 1]."""
        return np.array([int(self[name][at : at + 2], 16) / 255 for at in (1, 3, 5)])


@cache
def light_palette() -> Palette:
    """The light theme's colours; the first block of page.css."""
    style = (files("timelyfreeze.viz") / "assets" / "page" / "page.css").read_text(encoding="utf-8")
    return Palette(_COLOUR.findall(style[: style.index("}")]))

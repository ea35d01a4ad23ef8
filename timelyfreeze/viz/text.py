"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6))


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit in which times up to ``longest_s`` read best, and how many of it make a second.

    >>> time_unit(0.638)
    ('ms', 1000.0)
    """
    # Two of a unit at least, so that an axis has mostly whole numbers: 1.3 s are shown as 1,300 ms.
    return next((name, per_s) for least, name, per_s in _UNITS if longest_s >= 2 * least)


def format_duration(seconds: float, longest_s: float) -> str:
    """Four significant digits in the unit that fits the longest of several times.

    >>> format_duration(0.638, 0.638), format_duration(0.638, 12.5), format_duration(3.2e-6, 3.2e-6)
    ('638 ms', '0.638 s', '3.2 µs')
    """
    unit, per_s = time_unit(longest_s)
    value = seconds * per_s
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{text} {unit}"


def format_ratio(ratio: float | None) -> str:
    """Whole percent, or a dash where there is no number.

    >>> format_ratio(0.496), format_ratio(None)
    ('50 %', '–')
    """
    return "–" if ratio is None else f"{100 * ratio:.0f} %"

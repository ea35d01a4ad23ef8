"""Checks of numbers that come from outside, and how faults are listed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from timelyfreeze.errors import problem, raise_all

# Seconds that data takes from one rank to another: one number, or by (from stage, to stage).
Transfers = float | Mapping[tuple[int, int], float]

_SHOWN = 5


def is_time(value: object) -> bool:
    """Whether a value is a finite number of seconds, at least 0.

    >>> is_time(0.5), is_time(-1.0), is_time(float("nan")), is_time("1")
    (True, False, False, False)
    """
    try:
        return not isinstance(value, bool) and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]
    except (TypeError, OverflowError):
        return False


def is_number(value: object) -> bool:
    """Whether a value is a plain number; True and False are none.

    >>> is_number(1), is_number(0.5), is_number(True), is_number("1")
    (True, True, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def some(texts: Sequence[str]) -> str:
    """The first few texts, and how many there are besides.

    >>> some(["0F0", "0F1"])
    '0F0, 0F1'
    """
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")


def check_transfers(transfer_s: Transfers, num_stages: int | None = None) -> None:
    """Raise ValueError unless all times are finite and not negative, and all pairs neighbouring stages."""
    times = transfer_s if isinstance(transfer_s, Mapping) else {None: transfer_s}
    faults = []
    for pair, time in times.items():
        where = f"stages {pair}" if pair is not None else None
        if not is_time(time):
            faults.append(problem("transfer_s", expected="finite seconds, at least 0", got=repr(time), where=where))
        if pair is None:
            continue
        limit = math.inf if num_stages is None else num_stages
        valid = isinstance(pair, tuple) and len(pair) == 2 and all(type(stage) is int for stage in pair)
        if not valid or abs(pair[0] - pair[1]) != 1 or min(pair) < 0 or max(pair) >= limit:
            expected = "(stage, neighbouring stage)" + (f" below {num_stages}" if num_stages is not None else "")
            faults.append(problem("transfer_s", expected=expected, got=repr(pair)))
    raise_all(ValueError, faults[:_SHOWN])

"""Side-by-side measuring, and the rows that keep what was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Comparison:
    """Two things measured in turn. The ratio is a / b, taken round by round, so that slow drift cancels out."""

    a_s: float
    b_s: float
    ratio: float
    ratio_low: float  # quartiles of the rounds' ratios
    ratio_high: float
    num_rounds: int

    def __str__(self) -> str:
        return (
            f"{self.a_s * 1e3:.2f} ms against {self.b_s * 1e3:.2f} ms: "
            f"{self.ratio:.3f} ({self.ratio_low:.3f} to {self.ratio_high:.3f})"
        )


def interleave(a: Callable[[], float], b: Callable[[], float], rounds: int, warmup: int = 3) -> Comparison:
    """Run a and b in turn, each returning its own seconds, and compare them by medians.

    Every other round runs b first, so that neither always meets the caches the other left.

    >>> print(interleave(iter([9.0, 2.0, 4.0, 3.0]).__next__, iter([9.0, 4.0, 4.0, 4.0]).__next__, rounds=3, warmup=1))
    3000.00 ms against 4000.00 ms: 0.750 (0.500 to 1.000)
    """
    for _ in range(warmup):
        a(), b()
    a_s: list[float] = []
    b_s: list[float] = []
    for index in range(rounds):
        for run, times in ((a, a_s), (b, b_s)) if index % 2 == 0 else ((b, b_s), (a, a_s)):
            times.append(run())
    return compare(a_s, b_s) if rounds > 1 else Comparison(a_s[0], b_s[0], *[a_s[0] / b_s[0]] * 3, rounds)


def interleave_all(runs: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """The seconds of several things that take turns, each round beginning with another one.

    >>> interleave_all({"a": iter([9.0, 1.0, 2.0]).__next__, "b": iter([9.0, 3.0, 4.0]).__next__}, 2, warmup=1)
    {'a': [1.0, 2.0], 'b': [3.0, 4.0]}
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(-warmup, rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            taken = runs[name]()
            if index >= 0:
                seconds[name].append(taken)
    return seconds


def compare(a_s: Sequence[float], b_s: Sequence[float]) -> Comparison:
    """Two of what ``interleave_all`` gave, at least two rounds of each.

    >>> print(compare([2.0, 4.0, 3.0], [4.0, 4.0, 4.0]))
    3000.00 ms against 4000.00 ms: 0.750 (0.500 to 1.000)
    """
    ratios = [x / y for x, y in zip(a_s, b_s, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return Comparison(median(a_s), median(b_s), middle, low, high, len(ratios))


def record(name: str, **values: object) -> None:
    """Append a row to bench/results/<name>.jsonl: the machine, the versions, the commit, the time, and ``values``.

    A value may be a number, a text, a list or dict of such, or a Comparison. Names carry their units, as in ``step_s``.
    """
    plain = {key: asdict(value) if isinstance(value, Comparison) else value for key, value in values.items()}
    row = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **environment(), **plain}
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def environment() -> dict[str, object]:
    """What a number depends on besides the code in question."""
    return {
        "commit": _commit(),
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: package_version(package) for package in ("torch", "numpy", "highspy", "timelyfreeze")},
    }


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit, with ``+`` where the tree differs from it; outside a git checkout GIT_COMMIT, or None."""
    described = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or os.environ.get("GIT_COMMIT")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())

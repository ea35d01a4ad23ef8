"""What ``make check-gpu`` runs: every check that needs a GPU, each in a process and a time limit of its own.

    python -m tests.gpu.check                     build with CUDA kernels, then all parts
    python -m tests.gpu.check --parts parity      one part, of the extension that was built before
    python -m tests.gpu.check --device cpu        what can run without a GPU, tiny, of the extension in this tree

Nothing is downloaded, and nothing of the tree is changed but bench/results; the rest goes to build/gpu-check. Exit
status: 0 all passed, 1 a part failed, 2 no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu-check"
SITE = WORK / "site"
BUDGET_S = 350.0
NO_SANITIZER = "compute-sanitizer is not installed"
# What compute-sanitizer says where it cannot work on the machine at all.
UNSUPPORTED = "Device not supported"
SANITIZERS = ("memcheck", "racecheck", "initcheck")


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        limit_s: it is ended after so long.
        missing: why it cannot run here, or None.
    """

    name: str
    command: list[str]
    limit_s: float
    env: dict[str, str] = field(default_factory=dict)
    missing: str | None = None


@dataclass(frozen=True)
class Outcome:
    part: Part
    result: str  # passed | failed | skipped
    seconds: float
    what: str


def module(name: str, *args: str) -> list[str]:
    return [sys.executable, "-m", name, *args]


def find_sanitizer() -> str | None:
    """compute-sanitizer, of CUDA_HOME, the path or the usual place."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(home))


def sanitizer_part(tool: str, limit_s: float) -> Part:
    program = find_sanitizer()
    # Without torch's cache every tensor is an allocation of its own, whose ends the tool knows.
    return Part(
        tool,
        [program or "", "--tool", tool, "--error-exitcode", "1", *module("tests.gpu.kernel_calls")],
        limit_s,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        None if program else NO_SANITIZER,
    )


def parts_on_gpu(wanted_share: float) -> list[Part]:
    """In the order of what is worth most, should the time not do."""
    tests = [str(ROOT / "tests" / "test_kernels_cuda.py"), "--import-mode=append", "-o", "pythonpath=", "-q"]
    return [
        Part("build", module("tests.gpu.build", str(WORK)), 150),
        Part("parity", module("tests.gpu.parity", "--device", "cuda"), 90),
        Part("pipeline", module("tests.gpu.pipeline_step", "--device", "cuda:0"), 60),
        Part("benchmark", module("bench.gpu.kernels", "--wanted-share", str(wanted_share)), 150),
        sanitizer_part("memcheck", 60),
        sanitizer_part("racecheck", 60),
        sanitizer_part("initcheck", 40),
        Part("compile", module("pytest", *tests, "-p", "no:cacheprovider", "-k", "compile or report"), 60),
    ]


def parts_on_cpu() -> list[Part]:
    """The same programs, tiny; rows go to the folder of this check."""
    bench = ["--device", "cpu", "--elements", "8192", "--rounds", "2", "--repeats", "1", "--wanted-share", "0"]
    return [
        Part("parity", module("tests.gpu.parity", "--device", "cpu", "--small"), 120),
        Part("pipeline", module("tests.gpu.pipeline_step", "--device", "cpu", "--width", "32"), 120),
        Part("benchmark", module("bench.gpu.kernels", *bench, "--results", str(WORK / "rows")), 120),
        Part("kernel calls", module("tests.gpu.kernel_calls", "--device", "cpu"), 120),
    ]


def run(part: Part, seconds_left: float, site: Path | None) -> Outcome:
    """Run a part to its end or its limit; what it prints goes through, and into <part>.log."""
    if part.missing is not None:
        return Outcome(part, "skipped", 0.0, part.missing)
    limit_s = min(part.limit_s, seconds_left)
    if seconds_left < 5:
        return Outcome(part, "failed", 0.0, "no time left")
    print(f"--- {part.name}", flush=True)
    folders = [str(folder) for folder in (site, WORK / "wheels", ROOT) if folder is not None]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1"} | part.env
    log, start = WORK / f"{part.name.replace(' ', '-')}.log", time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            part.command, cwd=WORK, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    print(text[-6000:], end="" if text.endswith("\n") else "\n", flush=True)
    seconds = time.monotonic() - start
    if status is None:
        return Outcome(part, "failed", seconds, f"not done after {limit_s:.0f} s; see {log.relative_to(ROOT)}")
    if part.name in SANITIZERS and UNSUPPORTED in text:
        return Outcome(part, "skipped", seconds, f"compute-sanitizer: {UNSUPPORTED}")
    if part.name in SANITIZERS and status and is_of_others(text):
        return Outcome(part, "passed", seconds, f"in other libraries' kernels alone: {last_words(text, 0)}")
    return Outcome(part, "failed" if status else "passed", seconds, last_words(text, status))


def is_of_others(text: str) -> bool:
    """Whether our calls ran to their end and compute-sanitizer named kernels of others only, such as cuBLAS's."""
    ran = " calls, 0 faults" in text and "Traceback" not in text
    return ran and "SUMMARY" in text and "timelyfreeze::kernels" not in text


def last_words(text: str, status: int) -> str:
    """The line that says most: the summary, or what a process died of."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
    last = (errors or lines or ["no output"])[-1].strip()
    return last if status <= 1 else f"exit status {status}: {last}"


def unpack(wheels: Path | None) -> None:
    """Install the wheels of a folder beside the build, where what they hold comes before the machine's own packages."""
    if wheels is None:
        return
    files = [str(path) for path in sorted(wheels.glob("*.whl"))]
    command = module("pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade", "--target")
    subprocess.run([*command, str(WORK / "wheels"), *files], check=True)


def gpu_name() -> str | None:
    """The GPU, or None."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def summary(outcomes: list[Outcome]) -> str:
    """The table at the end.

    >>> print(summary([Outcome(Part("parity", [], 1), "passed", 2.0, "9 comparisons, 0 faults")]))
    part          result      s  what
    parity        passed      2  9 comparisons, 0 faults
    """
    rows = [f"{'part':<14}{'result':<8}{'s':>5}  what"]
    rows += [f"{o.part.name:<14}{o.result:<8}{o.seconds:>5.0f}  {o.what[:120]}" for o in outcomes]
    return "\n".join(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every check that needs a GPU.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", help="names with commas between; the build is kept where it is not among them")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first, such as highspy's")
    parser.add_argument("--wanted-share", type=float, default=0.85, help="of a copy's bandwidth")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all parts together")
    return parser.parse_args()


def main() -> int:
    args, start = arguments(), time.monotonic()
    name = gpu_name() if args.device == "cuda" else "no GPU asked for"
    if name is None:
        print("check-gpu: no GPU that torch can use; nothing was checked.")
        return 2
    WORK.mkdir(parents=True, exist_ok=True)
    print(f"check-gpu: {name}, {sys.executable}, logs in {WORK.relative_to(ROOT)}", flush=True)
    unpack(args.wheels)
    site = SITE if args.device == "cuda" else None
    parts = parts_on_gpu(args.wanted_share) if args.device == "cuda" else parts_on_cpu()
    if args.parts is not None:
        wanted = args.parts.split(",")
        unknown = sorted(set(wanted) - {part.name for part in parts})
        if unknown:
            print(f"check-gpu: no part {', '.join(unknown)}; there are {', '.join(part.name for part in parts)}.")
            return 1
        parts = [part for part in parts if part.name in wanted]
    if importlib.util.find_spec("highspy") is None and not (WORK / "wheels" / "highspy").exists():
        print("highspy is not installed, which pipelines need: name a folder with its wheel, WHEELS=folder.")
    outcomes: list[Outcome] = []
    for part in parts:
        outcomes.append(run(part, args.budget_s - (time.monotonic() - start), site))
        if part.name == "build" and outcomes[-1].result == "failed":
            break  # the others would check something else
    print(f"\n{summary(outcomes)}\n{time.monotonic() - start:.0f} s in all")
    return 1 if any(outcome.result == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Finds CUDA's headers and compiler, compiles the kernels for every target, and reads what each kernel takes of a GPU.

``python -m tests.cuda_kernels > csrc/kernels/cuda/resources.txt`` writes the table anew; review what changed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "csrc/kernels/cuda").glob("*.cu"))
TABLE = ROOT / "csrc/kernels/cuda/resources.txt"
TARGETS = ("sm_80", "sm_90", "sm_100")
PTX = "compute_100"  # for later architectures

_KERNEL = re.compile(r"::(\w+_kernel<[^(]*>)\(")
_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(sm_\d+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers of a thread by target; a block's shared memory and spills, the largest of all."""

    registers: dict[str, int]
    shared_bytes: int
    spill_bytes: int


def _homes() -> list[Path]:
    """Where a CUDA toolkit may lie: CUDA_HOME, around nvcc on PATH, the usual place."""
    named = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    nvcc = shutil.which("nvcc")
    return [*named, *([Path(nvcc).resolve().parents[1]] if nvcc else []), Path("/usr/local/cuda")]


def find_nvcc() -> Path | None:
    """CUDA's compiler, or None."""
    return next((home / "bin" / "nvcc" for home in _homes() if (home / "bin" / "nvcc").exists()), None)


def find_headers() -> Path | None:
    """A folder with cuda_bf16.h: a toolkit's, or that of NVIDIA's packages in this environment; or None."""
    candidates = [home / "include" for home in _homes()]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        candidates += sorted(Path(folder).glob("*/include"))
    return next((path for path in candidates if (path / "cuda_bf16.h").exists()), None)


def demangled(text: str) -> str:
    """Text with C++ names as they are written."""
    return subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout


def kernel_name(name: str) -> str:
    """``norm_forward_kernel<float, 4>`` of a kernel's full name."""
    match = _KERNEL.search(demangled(name))
    assert match is not None, name
    return match[1].strip()


def compile_kernels(nvcc: Path, source: Path, folder: Path) -> str:
    """Compiles one file for every target, keeping its PTX in `folder`, and returns what ptxas reports."""
    targets = [
        option
        for code in (*TARGETS, PTX)
        for option in ("-gencode", f"arch={code.replace('sm', 'compute')},code={code}")
    ]
    command = [str(nvcc), "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command += ["--keep", "--keep-dir", str(folder), *targets, "-c", str(source), "-o", str(folder / "kernels.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{source.name}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def resources(report: str) -> dict[str, Resources]:
    """What ptxas reports, by kernel."""
    found: dict[str, Resources] = {}
    kernel = target = ""
    spill_bytes = 0
    for line in report.splitlines():
        if match := _ENTRY.search(line):
            kernel, target = kernel_name(match[1]), match[2]
        elif match := _SPILLS.search(line):
            spill_bytes = int(match[1]) + int(match[2])
        elif match := _USED.search(line):
            shared = _SHARED.search(line)
            before = found.get(kernel, Resources({}, 0, 0))
            found[kernel] = Resources(
                {**before.registers, target: int(match[1])},
                max(before.shared_bytes, int(shared[1]) if shared else 0),
                max(before.spill_bytes, spill_bytes),
            )
    return found


def nvcc_release(nvcc: Path) -> str:
    """Such as ``13.0``."""
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release ([\d.]+)", text)
    assert match is not None, text
    return match[1]


def rows(found: dict[str, Resources]) -> list[str]:
    """One row of the table for each kernel."""
    return [
        f"{kernel:<50}"
        + "".join(f"{used.registers[target]:>8}" for target in TARGETS)
        + f"{used.shared_bytes:>10}{used.spill_bytes:>10}"
        for kernel, used in sorted(found.items())
    ]


def main() -> None:
    """Prints the table."""
    nvcc = find_nvcc()
    assert nvcc is not None, "no nvcc: set CUDA_HOME"
    print(f"# nvcc {nvcc_release(nvcc)}: registers of a thread by target, then bytes of shared memory and of spills.")
    print(
        f"{'# kernel<type, elements of an access, ...>':<50}{''.join(f'{t:>8}' for t in TARGETS)}    shared    spills"
    )
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join(rows(resources(compile_kernels(nvcc, source, Path(folder))))))


if __name__ == "__main__":
    main()

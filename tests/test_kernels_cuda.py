"""The CUDA kernels: as CPU code against references in float64, and compiled for every GPU that they are built for.

Nothing here needs a GPU. The first part needs CUDA's headers, the second nvcc; without them they are skipped.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.cuda_kernels import (
    PTX,
    ROOT,
    SOURCES,
    TABLE,
    Resources,
    compile_kernels,
    demangled,
    find_headers,
    find_nvcc,
    kernel_name,
    nvcc_release,
    resources,
    rows,
)

NVCC = find_nvcc()
HEADERS = find_headers()


def run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.mark.skipif(HEADERS is None, reason="no CUDA headers: set CUDA_HOME, or install nvidia-cuda-runtime")
@pytest.mark.parametrize("sanitizer", ["", "address"])
def test_kernels_compute_what_their_formulas_say(sanitizer: str) -> None:
    """Every kernel, shape and option in both orders of threads (csrc/kernels/simt), plain and under a sanitizer."""
    build = ROOT / "build" / f"simt-{sanitizer or 'plain'}"
    options = [f"-DTIMELYFREEZE_SANITIZE={sanitizer}", f"-DCUDA_INCLUDE_DIR={HEADERS}"]
    run("cmake", "-S", ROOT / "csrc/kernels/simt", "-B", build, "-G", "Ninja", *options)
    run("cmake", "--build", build)
    run("ctest", "--test-dir", build, "--output-on-failure")


def expected_rows() -> dict[str, str]:
    """The reviewed table's rows by kernel."""
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return {line[:50].strip(): line for line in lines}


@pytest.mark.skipif(NVCC is None, reason="no nvcc: set CUDA_HOME")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_kernels_compile_without_spills(source: Path, tmp_path: Path) -> None:
    """For every target: no spills, the reviewed registers and shared memory, and 16-byte accesses in the PTX."""
    assert NVCC is not None
    found = resources(compile_kernels(NVCC, source, tmp_path))
    assert found
    assert {kernel: used.spill_bytes for kernel, used in found.items() if used.spill_bytes > 0} == {}
    expected = {name: row for name, row in expected_rows().items() if name.startswith(f"{source.stem}_")}
    assert set(found) == set(expected)
    # Another release of nvcc hands out registers in its own way.
    if f"# nvcc {nvcc_release(NVCC)}:" in TABLE.read_text():
        assert rows(found) == sorted(expected.values())
    assert narrow_kernels(tmp_path / f"{source.stem}.{PTX}.ptx") == []


def narrow_kernels(ptx: Path) -> list[str]:
    """Kernels for whole packs that do not load and store 16 bytes at a time."""
    narrow = []
    for text in ptx.read_text().split(".entry ")[1:]:
        name = kernel_name(text.split("(")[0])
        loads = re.search(r"ld\.global\S*\.(v4\.\w32|v2\.\w64)", text)
        stores = re.search(r"st\.global\S*\.(v4\.\w32|v2\.\w64)", text)
        if not re.search(r", 1\b", name) and not (loads and stores):
            narrow.append(name)
    return narrow


def test_report_of_ptxas_is_read() -> None:
    name = "_ZN12timelyfreeze7kernels11rope_kernelIfLi4EEEvNS0_9RopeShapeE"
    assert demangled(name).startswith("void timelyfreeze::kernels::rope_kernel<float, 4>")
    report = "\n".join(
        f"ptxas info    : Compiling entry function '{name}' for '{target}'\n"
        f"    16 bytes stack frame, {spills} bytes spill stores, 8 bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers, 512 bytes smem"
        for target, registers, spills in [("sm_80", 40, 4), ("sm_90", 44, 0)]
    )
    assert resources(report) == {"rope_kernel<float, 4>": Resources({"sm_80": 40, "sm_90": 44}, 512, 12)}

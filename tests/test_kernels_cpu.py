"""Builds and runs the C++ tests of the CPU kernels, for every instruction set that this processor has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("TIMELYFREEZE_BUILD_DIR") or ROOT / "build" / "ext")
SCRIPTS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cmake and ninja of this environment


def test_kernels_equal_their_formulas_in_double_precision() -> None:
    if not (BUILD / "build.ninja").exists() or shutil.which("cmake", path=SCRIPTS) is None:
        pytest.skip("the extension was not built here; `make setup` does")
    environment = os.environ | {"PATH": SCRIPTS, "OMP_NUM_THREADS": "2"}
    build = ["cmake", "--build", str(BUILD), "--target", "timelyfreeze_kernel_tests"]
    built = subprocess.run(build, capture_output=True, text=True, check=False, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    ran = subprocess.run(
        [BUILD / "timelyfreeze_kernel_tests"], capture_output=True, text=True, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

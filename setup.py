"""Builds the C++ extension ``timelyfreeze._C`` with CMake and Ninja.

It needs no CUDA toolkit, also for a CUDA build of torch: streams and events are reached through torch's own c10 layer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Runs configure, build and install; the module lands where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11
        import torch

        destination = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build_dir = Path(os.environ.get("TIMELYFREEZE_BUILD_DIR") or self.build_temp).resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTORCH_DIR={Path(torch.__file__).parent}",
            f"-DPYBIND11_INCLUDE_DIR={pybind11.get_include()}",
            f"-DCMAKE_INSTALL_PREFIX={destination}",
        ]
        configure += os.environ.get("CMAKE_ARGS", "").split()
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        for command in (
            configure,
            ["cmake", "--build", str(build_dir), "-j", jobs],
            ["cmake", "--install", str(build_dir)],
        ):
            subprocess.check_call(command)


setup(ext_modules=[Extension("timelyfreeze._C", sources=[])], cmdclass={"build_ext": CMakeBuild})

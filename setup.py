"""Builds the C++ extension ``timelyfreeze._C`` with CMake and Ninja."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_nvcc() -> str | None:
    """The CUDA compiler, or None where there is none or TIMELYFREEZE_CUDA=0 says not to use it."""
    if os.environ.get("TIMELYFREEZE_CUDA", "1") == "0":
        return None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for candidate in (os.environ.get("CUDACXX"), os.path.join(home, "bin", "nvcc"), shutil.which("nvcc")):
        if candidate and os.path.isfile(candidate):
            return str(Path(candidate).resolve())
    return None


class CMakeBuild(build_ext):
    """Runs configure, build and install; the module lands where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11
        import torch

        destination = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build_dir = Path(os.environ.get("TIMELYFREEZE_BUILD_DIR") or self.build_temp).resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        cuda_include = self._cuda_include() if torch.version.cuda else None
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTORCH_DIR={Path(torch.__file__).parent}",
            f"-DPYBIND11_INCLUDE_DIR={pybind11.get_include()}",
            f"-DCMAKE_INSTALL_PREFIX={destination}",
        ]
        if cuda_include is not None:
            configure.append(f"-DCUDA_INCLUDE_DIR={cuda_include}")
        configure += os.environ.get("CMAKE_ARGS", "").split()
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        for command in (
            configure,
            ["cmake", "--build", str(build_dir), "-j", jobs],
            ["cmake", "--install", str(build_dir)],
        ):
            subprocess.check_call(command)

    @staticmethod
    def _cuda_include() -> Path | None:
        nvcc = find_nvcc()
        return Path(nvcc).parent.parent / "include" if nvcc else None


setup(ext_modules=[Extension("timelyfreeze._C", sources=[])], cmdclass={"build_ext": CMakeBuild})

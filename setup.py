"""Builds the C++ extension ``timelyfreeze._C`` with CMake and Ninja.

Where torch is a CUDA build and nvcc is found (``CUDA_HOME``, or on the path), the CUDA kernels are built as well;
``TIMELYFREEZE_CUDA=0`` leaves them out. Without them tensors on a GPU take torch's own operators: streams and events
are reached through torch's c10 layer, which needs no toolkit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_nvcc(torch_cuda: str | None) -> str | None:
    """A CUDA compiler that fits torch's CUDA, of CUDA_HOME or else on the path, unless TIMELYFREEZE_CUDA=0."""
    if torch_cuda is None or os.environ.get("TIMELYFREEZE_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home) / "bin") if home else None)
    if nvcc is None:
        return None
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", told)
    version = tuple(map(int, release.groups())) if release else (0, 0)
    # 12.8 is the first that knows sm_100; extensions have to be of torch's own major release.
    if version < (12, 8) or version[0] != int(torch_cuda.partition(".")[0]):
        print(f"timelyfreeze: without CUDA kernels: nvcc {version} does not fit torch's CUDA {torch_cuda}", flush=True)
        return None
    return nvcc


def build(build_dir: Path, destination: Path) -> None:
    """Configure, build and install: the module lands in ``destination``."""
    import pybind11
    import torch

    build_dir.mkdir(parents=True, exist_ok=True)
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DTORCH_DIR={Path(torch.__file__).parent}",
        f"-DPYBIND11_INCLUDE_DIR={pybind11.get_include()}",
        f"-DCMAKE_INSTALL_PREFIX={destination}",
    ]
    nvcc = find_nvcc(torch.version.cuda)
    configure += [f"-DTIMELYFREEZE_CUDA={'ON' if nvcc else 'OFF'}"]
    configure += [f"-DCMAKE_CUDA_COMPILER={nvcc}"] if nvcc else []
    configure += os.environ.get("CMAKE_ARGS", "").split()
    jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
    for command in (
        configure,
        ["cmake", "--build", str(build_dir), "-j", jobs],
        ["cmake", "--install", str(build_dir)],
    ):
        subprocess.check_call(command)


class CMakeBuild(build_ext):
    """The extension where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        destination = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build(Path(os.environ.get("TIMELYFREEZE_BUILD_DIR") or self.build_temp).resolve(), destination)


if __name__ == "__main__":  # tests/gpu/build.py takes `build` alone
    setup(ext_modules=[Extension("timelyfreeze._C", sources=[])], cmdclass={"build_ext": CMakeBuild})

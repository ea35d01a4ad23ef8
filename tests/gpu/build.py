"""Builds the package with its CUDA kernels, for this machine's GPU alone: ``python -m tests.gpu.build FOLDER``.

The package lands in FOLDER/site, so that an extension that was built into the tree for another torch stays. Only what
changed since the last time is compiled.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, architecture: str) -> Path:
    """Build for an architecture such as ``90`` and return the extension.

    Raises:
        RuntimeError: the CUDA kernels were left out.
    """
    package = folder / "site" / "timelyfreeze"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "timelyfreeze", package, ignore=shutil.ignore_patterns("_C*.so", "__pycache__"))
    os.environ["CMAKE_ARGS"] = f"{os.environ.get('CMAKE_ARGS', '')} -DCMAKE_CUDA_ARCHITECTURES={architecture}"
    # Not by way of setuptools, so that any version of it will do.
    runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["build"](folder / "ext", package)
    (extension,) = (folder / "site" / "timelyfreeze").glob("_C*.so")
    found = {match.decode() for match in re.findall(rb"sm_\d+(?=\W)", extension.read_bytes())}
    if f"sm_{architecture}" not in found:
        raise RuntimeError(
            f"expected kernels for sm_{architecture} in {extension}, got {sorted(found) or 'none'}: nvcc was not "
            f"found, or does not fit torch's CUDA {torch.version.cuda}. Set CUDA_HOME to a toolkit of that release."
        )
    return extension


def main() -> int:
    major, minor = torch.cuda.get_device_capability()
    extension = build(Path(sys.argv[1]), f"{major}{minor}")
    print(f"kernels for sm_{major}{minor}, torch {torch.__version__}: {extension.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

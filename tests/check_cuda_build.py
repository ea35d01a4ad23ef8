"""Imports an installed CUDA build of the extension and looks for its kernels; run by ``make check-cuda-build``.

No GPU is needed: the extension holds a binary for each architecture and says which.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torch

import timelyfreeze
from timelyfreeze import _C, ops

ARCHITECTURES = {"sm_80", "sm_90", "sm_100"}


def main() -> None:
    assert torch.version.cuda, "expected a CUDA build of torch"
    extension = Path(_C.__file__)
    assert "site-packages" in extension.parts, f"expected the installed package, got {extension}"
    needed = subprocess.run(["ldd", extension], capture_output=True, text=True, check=True).stdout
    assert "libc10_cuda" in needed, needed
    assert "not found" not in needed, needed
    found = {match.decode() for match in re.findall(rb"sm_\d+(?=\W)", extension.read_bytes())}
    assert found >= ARCHITECTURES, f"expected kernels for {sorted(ARCHITECTURES)}, got {sorted(found)}"
    assert ops.silu(torch.zeros(2)).tolist() == [0.0, 0.0]
    print(f"{timelyfreeze.__name__} with torch {torch.__version__}: kernels for {', '.join(sorted(found))}")


if __name__ == "__main__":
    main()

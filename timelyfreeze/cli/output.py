"""Where text goes: standard output, in characters that it can show."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

# Every character beyond ASCII that the commands print, with what stands for it where the encoding has no such.
_ASCII = str.maketrans(
    {"░": "-", "▒": "+", "▓": "=", "█": "#", "▚": "%", "×": "x", "·": ".", "■": "#", "│": "|", "─": "-", "→": ">"}
)


class _AsciiFile:
    """A text file for encodings without block characters."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.encoding = "ascii"

    def write(self, text: str) -> int:
        return self._file.write(text.translate(_ASCII).encode("ascii", "replace").decode("ascii"))

    def flush(self) -> None:
        self._file.flush()

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()


def make_console(file: TextIO | None = None) -> Console:
    """A console on ``file``, by default standard output, whose text reads well in the file's encoding."""
    target = file or sys.stdout
    encoding = (target.encoding or "ascii").lower().replace("-", "")
    if encoding.startswith("utf"):
        return Console(file=target)
    return Console(file=_AsciiFile(target))  # type: ignore[arg-type]  # rich calls nothing else

"""Text as bytes: what is read, how it splits into training and validation, and the batch of every step.

A batch is a function of (seed, step) alone, so a resumed run needs no state of a loader.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from timelyfreeze.errors import problem, raise_all

_VALIDATION_PARTS = 20  # one file in twenty, 5 %
_SEPARATOR = b"\0"  # between files; text has none, because a file with a zero byte counts as binary
_LIBRARY_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Bytes to train and to validate on.

    Attributes:
        train, validation: uint8 arrays ``[num_bytes]``, files in order of their path with a zero byte after each.
        num_files: files read, both parts together.
        num_binary: files left out because they hold a zero byte.
        num_unreadable: files and folders left out because they could not be opened.
        split: ``"file"``, or ``"tail"`` where there were too few files and the last 5 % of the bytes were held out.
        fingerprint: SHA-256 of both parts; equal fingerprints give equal batches.
    """

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    num_files: int
    num_binary: int
    num_unreadable: int
    split: str
    fingerprint: str

    def describe(self) -> str:
        """One line for people.

        >>> part = np.zeros(2_000_000, np.uint8)
        >>> Corpus(part, part[:5000], 12, 1, 0, "file", "").describe()
        '12 files: 2.00 MB to train on, 0.01 MB held out by file; left out: 1 binary'
        """
        held = "held out by file" if self.split == "file" else "held out from the end (too few files to hold one out)"
        text = f"{self.num_files} files: {self.train.size / 1e6:.2f} MB to train on, "
        text += f"{self.validation.size / 1e6:.2f} MB {held}"
        skipped = [f"{n} {word}" for n, word in ((self.num_binary, "binary"), (self.num_unreadable, "unreadable")) if n]
        return text + (f"; left out: {', '.join(skipped)}" if skipped else "")


def read_corpus(paths: Iterable[str | os.PathLike[str]] = (), *, sequence_length: int) -> Corpus:
    """Read text files and folders (recursively); without any, the Python standard library's own sources.

    A file is held out for validation by a hash of its path below the folder that was named, so the split depends
    neither on where the folder lies nor on which other files there are. Hidden entries of folders, binary files and
    unreadable ones are left out; the last two are counted. A file named twice is read once.

    Raises:
        ValueError: a path does not exist, nothing is left to read, or a part is shorter than one sequence.
    """
    roots = [Path(path) for path in paths]
    raise_all(
        ValueError,
        [
            problem(
                "the text does not exist", expected="a file or folder", got=f"'{root}'", hint="Check --text for a typo."
            )
            for root in roots
            if not root.exists()
        ],
    )
    reader = _Reader()
    if roots:
        for root in roots:
            reader.add(root)
    else:
        reader.add_library(Path(sysconfig.get_path("stdlib")))
    named = ", ".join(f"'{root}'" for root in roots) or f"the standard library at '{sysconfig.get_path('stdlib')}'"
    if not reader.files:
        raise ValueError(
            problem(
                "there is no text to train on",
                expected="at least one file that is neither binary nor empty",
                got=f"{reader.num_binary} binary and {reader.num_unreadable} unreadable files",
                where=named,
                hint="Name files or folders with --text PATH.",
            )
        )
    return reader.corpus(sequence_length, named)


class _Reader:
    """Collects files; the order of calls and of directory entries does not matter to the result."""

    def __init__(self) -> None:
        self.files: dict[Path, tuple[str, bytes]] = {}
        self.num_binary = 0
        self.num_unreadable = 0

    def add(self, root: Path) -> None:
        if root.is_dir():
            for path in _walk(root, self._unreadable, skip=lambda name: name.startswith(".")):
                self._read(path, path.relative_to(root).as_posix())
        else:
            self._read(root, root.name)

    def add_library(self, root: Path) -> None:
        for path in _walk(root, self._unreadable, skip=lambda name: name in _LIBRARY_SKIPPED):
            if path.suffix == ".py":
                self._read(path, path.relative_to(root).as_posix())

    def _unreadable(self, error: OSError) -> None:
        self.num_unreadable += 1

    def _read(self, path: Path, key: str) -> None:
        try:
            resolved = path.resolve()
            if resolved in self.files:
                return
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe or device would block, or never end
                self.num_unreadable += 1
                return
            text = path.read_bytes()
        except OSError:
            self.num_unreadable += 1
            return
        if _SEPARATOR in text:
            self.num_binary += 1
        elif text:
            self.files[resolved] = (key, text)

    def corpus(self, sequence_length: int, named: str) -> Corpus:
        train, validation = bytearray(), bytearray()
        for key, text in sorted(self.files.values()):
            (validation if is_held_out(key) else train).extend(text + _SEPARATOR)
        split, needed = "file", sequence_length + 1
        if min(len(train), len(validation)) < needed:
            everything = b"".join(text + _SEPARATOR for _, text in sorted(self.files.values()))
            num_held_out = max(len(everything) // _VALIDATION_PARTS, needed)
            train, validation = bytearray(everything[:-num_held_out]), bytearray(everything[-num_held_out:])
            split = "tail"
        if len(train) < needed:
            raise ValueError(
                problem(
                    "the text is too short",
                    expected=f"at least {2 * needed} bytes, for one sequence to train and one to validate on",
                    got=f"{len(train) + len(validation)} bytes",
                    where=named,
                    hint="Add text with --text, or take a shorter --sequence-length.",
                )
            )
        digest = hashlib.sha256(len(train).to_bytes(8, "little") + train + validation).hexdigest()
        return Corpus(
            np.frombuffer(bytes(train), np.uint8),
            np.frombuffer(bytes(validation), np.uint8),
            len(self.files),
            self.num_binary,
            self.num_unreadable,
            split,
            digest,
        )


def _walk(root: Path, unreadable: Callable[[OSError], None], skip: Callable[[str], bool]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if not skip(name)]
        for name in names:
            if not skip(name):
                yield Path(folder, name)


def is_held_out(relative_path: str) -> bool:
    """Whether a file belongs to the validation set: about 5 % of all paths do.

    >>> is_held_out("json/decoder.py"), sum(is_held_out(f"{i}.py") for i in range(10_000)) / 10_000
    (False, 0.0479)
    """
    digest = hashlib.sha256(relative_path.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "little") % _VALIDATION_PARTS == 0


def training_batch(
    text: NDArray[np.uint8], *, batch_size: int, sequence_length: int, seed: int, step: int
) -> tuple[Tensor, Tensor]:
    """The batch of one step: windows at random places, a function of ``(text, seed, step)`` alone.

    Returns:
        Input and target, int64 ``[batch_size, sequence_length]``; the target is the input moved on by one byte.

    >>> x, y = training_batch(np.arange(100, dtype=np.uint8), batch_size=2, sequence_length=3, seed=0, step=7)
    >>> bool((x + 1 == y).all())
    True
    """
    draw = np.random.default_rng([seed, step])
    starts = draw.integers(0, text.size - sequence_length, size=batch_size)
    return _windows(text, starts, sequence_length)


def validation_batch(text: NDArray[np.uint8], *, batch_size: int, sequence_length: int) -> tuple[Tensor, Tensor]:
    """Windows spread evenly over the held-out text: input and target, int64 ``[batch_size, sequence_length]``."""
    starts = np.linspace(0, text.size - sequence_length - 1, batch_size).astype(np.int64)
    return _windows(text, starts, sequence_length)


def _windows(text: NDArray[np.uint8], starts: NDArray[np.int64], sequence_length: int) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(text[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

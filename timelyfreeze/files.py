"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from typing import BinaryIO, TypeVar

from timelyfreeze.errors import PlanError

Parsed = TypeVar("Parsed")


def write_atomically(path: str | PathLike[str], data: str | bytes) -> None:
    """Write ``data`` (text as UTF-8) so that a kill at any instant leaves either the old file or the new one.

    Raises OSError if the folder cannot be written; the old file is then untouched.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "note.txt"
    >>> write_atomically(path, "done")
    >>> path.read_text()
    'done'
    """
    with open_atomically(path) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


@contextmanager
def open_atomically(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """Open a binary file to write that takes its name only when the block ends without an error.

    It is written under a temporary name beside ``path``, fsynced and renamed; after an error nothing of it is left.
    """
    target = os.path.realpath(path)  # a link stays a link: what it points at is replaced
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        # Plain open() rather than tempfile: the file gets the permissions that the user's umask gives any other file.
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(folder)


def read_json(path: str | PathLike[str]) -> object:
    """Read the JSON value in a UTF-8 file.

    Raises:
        PlanError: the file does not hold whole JSON text.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        raw = file.read()
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"cannot read {os.fspath(path)}: it does not hold whole JSON text ({error})") from error


def load_json(path: str | PathLike[str], parse: Callable[[object], Parsed]) -> Parsed:
    """Read a JSON file and make something of it; a PlanError that ``parse`` raises gets the file's name.

    Raises:
        PlanError: the file does not hold whole JSON text, or ``parse`` refuses it.
        OSError: it cannot be read.
    """
    data = read_json(path)
    try:
        return parse(data)
    except PlanError as error:
        raise PlanError(f"{os.fspath(path)}: {error}") from error


def sync_folder(folder: str) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

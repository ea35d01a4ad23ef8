"""How a command ends when it does not end well; ``main`` turns each into a message and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from timelyfreeze.errors import TimelyFreezeError, problem


class CommandError(Exception):
    """A wrong use of the command, with a message for the person who typed it. Exit code 2."""


class TrainingError(Exception):
    """Training cannot go on, with a message that says at which step and why. Exit code 1."""


class StoppedError(Exception):
    """The person asked for an end, and the step that was running is done. Exit code 128 + the signal's number.

    Attributes:
        signal_number: which signal it was.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class ElsewhereError(Exception):
    """Another rank of the job failed, and tells why.

    Attributes:
        rank: which one; -1 where it is not known.
        exit_code: of this process.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


@contextmanager
def user_errors(doing: str) -> Iterator[None]:
    """Turn what the library says about wrong arguments, or the system about a file, into a ``CommandError``.

    >>> with user_errors("reading the plan"):
    ...     open("/nowhere/plan.json")
    Traceback (most recent call last):
    timelyfreeze.cli.errors.CommandError: reading the plan: got No such file or directory ('/nowhere/plan.json').
    """
    try:
        yield
    except (ValueError, TypeError, TimelyFreezeError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        where = None if error.filename is None else f"'{error.filename}'"
        raise CommandError(problem(doing, got=error.strerror or str(error), where=where)) from error

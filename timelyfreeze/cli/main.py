"""Entry point: reads the command line, runs the command, and turns errors into one message and an exit code."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout

import timelyfreeze
from timelyfreeze.cli.errors import CommandError, ElsewhereError, StoppedError, TrainingError
from timelyfreeze.cli.launch import Launch, find_launch
from timelyfreeze.cli.options import add_train_parser
from timelyfreeze.cli.plan_options import add_plan_parser
from timelyfreeze.cli.show_options import add_show_parser
from timelyfreeze.errors import TimelyFreezeError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 1: training failed (a stage raised, or a loss was not finite), a file could not be written, or a part of a
    run that is shown could not be read. 2: wrong use.
    130: stopped by Ctrl-C (143: by SIGTERM), where training saves the checkpoint if there is an ``--out``.
    Of several processes that torchrun has started, one tells what went wrong; the others end with 1 and a line that
    names it, or, stopped by a signal, without a word and with the same code.

    >>> main(["--version"])
    Traceback (most recent call last):
    SystemExit: 0
    """
    try:
        launch = find_launch()
    except CommandError as error:
        return _fail(str(error), EXIT_USAGE)
    # Of several processes that are told the same wrong thing, one complains.
    with ExitStack() as silence:
        if not launch.is_first:
            silence.enter_context(redirect_stdout(io.StringIO()))
            silence.enter_context(redirect_stderr(io.StringIO()))
        parsed = _parser().parse_args(argv)
    code = _exit_code(parsed, launch)
    if code and launch.size > 1:
        _leave_at_once(code)
    return code


def _exit_code(parsed: argparse.Namespace, launch: Launch) -> int:
    try:
        return _run(parsed, launch)
    except ElsewhereError as error:
        return _fail(str(error), error.exit_code) if str(error) else error.exit_code
    except CommandError as error:
        return _fail(str(error), EXIT_USAGE)
    except StoppedError as error:
        return _fail(str(error), 128 + error.signal_number)
    except TrainingError as error:
        return _fail(str(error), EXIT_FAILED)
    except (TimelyFreezeError, OSError) as error:  # OSError: the disk is full, or a step ran into its timeout
        return _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        kept = "; the last checkpoint stays as it is" if parsed.command == "train" else ""
        return _fail(f"stopped at once{kept}", EXIT_INTERRUPTED)


def _leave_at_once(code: int) -> None:
    """End without Python's own end, which takes a second or more with torch loaded, while torchrun waits for all."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(parsed: argparse.Namespace, launch: Launch) -> int:
    # Imported here: --help and typing mistakes need not wait for torch, nor planning and showing.
    if parsed.command == "plan":
        from timelyfreeze.cli.plan_command import plan

        return plan(parsed)
    if parsed.command == "show":
        from timelyfreeze.cli.show import show

        return show(parsed)
    from timelyfreeze.cli.options import train_options
    from timelyfreeze.cli.train import train

    files = {"out": getattr(parsed, "out", None), "resume": getattr(parsed, "resume", None)}
    return train(train_options(parsed), **files, launch=launch)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze",
        description="Pipeline-parallel training that leaves out weight gradients where the schedule can use the time.",
    )
    parser.add_argument("--version", action="version", version=f"timelyfreeze {timelyfreeze.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_train_parser(commands)
    add_plan_parser(commands)
    add_show_parser(commands)
    return parser


def _fail(message: str, code: int) -> int:
    print(f"timelyfreeze: error: {message}", file=sys.stderr)
    return code

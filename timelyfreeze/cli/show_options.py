"""The options of ``timelyfreeze show``."""

from __future__ import annotations

import argparse

_DESCRIPTION = """\
Show a job that `timelyfreeze train --out DIR` runs or ran: how far it is, what its steps took beside what was planned,
and a page with the measured timelines, RUN_DIR/timeline.html. All else in the folder stays as it is, so a job may be
looked at while it runs."""


def add_show_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``show`` command."""
    parser = commands.add_parser(
        "show",
        help="a finished or running job: its steps and timelines",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder that `timelyfreeze train --out` wrote")
    parser.add_argument("--html", metavar="FILE", help="where the page goes (default: RUN_DIR/timeline.html)")
    parser.add_argument("--png", metavar="FILE", help="a picture of the timelines")
    parser.add_argument("--trace", metavar="FILE", help="Chrome trace JSON, which Perfetto opens")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    return parser

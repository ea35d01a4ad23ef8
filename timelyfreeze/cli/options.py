"""The options of ``timelyfreeze train`` on the command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from timelyfreeze.cli.config import DEVICES, DTYPES, MODES, TrainConfig

_DESCRIPTION = """\
Train a LLaMA-style byte-level language model, split over pipeline stages, on real text: plainly, then with TimelyFreeze
from the same seed on the same batches, then plainly with fewer micro-batches; and print one table of what each took
and reached."""


def add_train_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``train`` command. Options that are not typed are absent from what is parsed."""
    parser = commands.add_parser(
        "train",
        help="train a pipelined language model, and compare",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    _add_data_and_model(parser)
    _add_pipeline(parser)
    _add_training(parser)
    _add_files(parser)
    return parser


def train_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """The options that were typed, as fields of ``TrainConfig``; paths made absolute, so that resuming finds them."""
    typed = {f.name: getattr(parsed, f.name) for f in fields(TrainConfig) if hasattr(parsed, f.name)}
    if "text" in typed:
        typed["text"] = tuple(str(Path(path).absolute()) for path in typed["text"])
    if "plan" in typed:
        typed["plan"] = str(Path(typed["plan"]).absolute())
    if typed.get("schedule", "").endswith(".csv"):
        typed["schedule"] = str(Path(typed["schedule"]).absolute())
    return typed


def _add_data_and_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text and model")
    group.add_argument(
        "--text", nargs="+", metavar="PATH", help="files and folders (default: the Python library's own)"
    )
    _add(group, "width", int, "features of the model")
    _add(group, "layers", int, "transformer blocks")
    _add(group, "heads", int, "attention heads")
    _add(group, "sequence_length", int, "bytes in a sequence")
    group.add_argument("--tied", action="store_true", help="let the head use the embedding's weight")


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pipeline and freezing")
    _add(group, "stages", int, "pipeline stages")
    _add(group, "microbatches", int, "micro-batches of a step")
    _add(group, "microbatch_size", int, "sequences in a micro-batch")
    _add(group, "schedule", str, "gpipe, 1f1b, or a .csv file", metavar="NAME")
    _add(group, "mode", str, "how the plan is made", choices=MODES)
    _add(group, "max_ratio", float, "cap on the mean freeze ratio of a stage", metavar="R")
    group.add_argument(
        "--plan", metavar="FILE", help="a fixed plan, for runs that must repeat (default: measure, plan)"
    )
    _add(group, "device", str, "auto takes all GPUs, else the CPU", choices=DEVICES)
    _add(group, "dtype", str, "bfloat16 trains under autocast", choices=DTYPES)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _add(group, "steps", int, "steps of each run")
    _add(group, "learning_rate", float, "constant after the warm-up", metavar="RATE")
    _add(group, "learning_rate_warmup", int, "steps of linear warm-up")
    _add(group, "weight_decay", float, "AdamW's", metavar="X")
    _add(group, "seed", int, "of weights, batches and masks")
    group.add_argument("--no-compare", dest="compare", action="store_false", help="run TimelyFreeze alone")
    _add(group, "evaluate_every", int, "steps between validations (default: a tenth of the run)", default=False)
    _add(group, "validation_sequences", int, "held-out sequences of a validation")


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument("--out", metavar="DIR", help="new folder for config, metrics, plan, table and checkpoint")
    group.add_argument("--resume", metavar="DIR", help="go on from the checkpoint in DIR")
    _add(group, "checkpoint_every", int, "steps between checkpoints (default: at each validation)", default=False)


def _add(
    group: argparse._ArgumentGroup, name: str, kind: type, text: str, *, default: bool = True, **more: Any
) -> None:
    if default:
        text += f" (default: {getattr(TrainConfig, name)})"
    if kind is int:
        more["metavar"] = "N"
    group.add_argument("--" + name.replace("_", "-"), type=kind, help=text, **more)

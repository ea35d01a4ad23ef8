"""The options of ``timelyfreeze train`` on the command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from timelyfreeze.cli.config import DEFAULT_RANKS, DEVICES, DTYPES, FLUSHED, MEMORIES, StageRatios, TrainConfig
from timelyfreeze.planner import MODES
from timelyfreeze.schedule import schedule_names
from timelyfreeze.schedule.asynchronous import STREAM_SCHEDULES

_DESCRIPTION = """\
Train a LLaMA-style byte-level language model, split over pipeline stages, on real text: plainly, then with TimelyFreeze
from the same seed on the same batches, then plainly with so few micro-batches that each parameter gets as many
gradients; and print one table of what each took and reached. With --live-microbatches K nothing is given up: plain
steps have K micro-batches, TimelyFreeze's have more, of which every parameter sees K. With --schedule paci nothing is
frozen and the pipeline is never flushed: every stage updates its own weights while micro-batches keep coming; that is
set beside 1F1B with a flush. Under torchrun every process is a rank of the pipeline; without it, ranks are threads of
this process."""


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
    _add_freezing(parser)
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
    elif typed.get("schedule", "").lower() in STREAM_SCHEDULES:  # in any case, as other schedules' names
        typed["schedule"] = typed["schedule"].lower()
    return typed


def stage_ratios(text: str) -> StageRatios:
    """Read ``stage=ratio`` pairs, in order of their stages; argparse's own error if they are none.

    >>> stage_ratios("1=0.5,0=0.2")
    ((0, 0.2), (1, 0.5))
    """
    pairs = (pair.partition("=") for pair in text.split(","))
    try:
        return tuple(sorted((int(stage), float(ratio)) for stage, _, ratio in pairs))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected S=R,..., got {text!r}") from error


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
    group = parser.add_argument_group("pipeline")
    _add(
        group,
        "stages",
        int,
        f"pipeline stages (default: enough for {DEFAULT_RANKS} ranks; under torchrun, for all of its processes)",
        default=False,
    )
    _add(group, "stages_per_rank", int, "stages that a rank holds (default: the schedule's own)", default=False)
    _add(group, "microbatches", int, "micro-batches of a step")
    _add(group, "microbatch_size", int, "sequences in a micro-batch")
    names = ", ".join(schedule_names())
    streams = " and ".join(STREAM_SCHEDULES)
    _add(group, "schedule", str, f"{names}, or a .csv file; {streams} never flush the pipeline", metavar="NAME")
    _add(
        group,
        "accumulation",
        int,
        f"with {streams}: backwards after which a stage updates its own weights. Between a micro-batch's forward and "
        "its backward then lie at most (stages - 1) / N updates, rounded up, which is the drift (default: "
        "--microbatches: one update a batch, as with a flush)",
        default=False,
    )
    _add(
        group,
        "memory",
        str,
        f"with {streams}: keep what backward needs, or recompute it from the stages' inputs",
        choices=MEMORIES,
    )
    group.add_argument(
        "--predict-weights",
        action="store_true",
        help=f"with {STREAM_SCHEDULES[0]}: forward by the weights that its backward is expected to find, in two copies",
    )
    _add(group, "data_parallel", int, "under torchrun: replicas of the pipeline, each with micro-batches of its own")
    _add(group, "device", str, "auto takes all GPUs, else the CPU", choices=DEVICES)
    _add(group, "dtype", str, "bfloat16 trains under autocast", choices=DTYPES)


def _add_freezing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("freezing")
    _add(
        group,
        "mode",
        str,
        "cut: choose where each micro-batch's backward ends, too; lp: the published LP",
        choices=MODES,
    )
    _add(group, "max_ratio", float, "cap on the mean freeze ratio of a stage", metavar="R")
    group.add_argument(
        "--stage-max-ratio", type=stage_ratios, metavar="S=R,...", help="caps of single stages, such as 0=0.2,1=0.5"
    )
    _add(group, "min_live_ratio", float, "least share of the highest stage that every micro-batch trains", metavar="R")
    group.add_argument(
        "--target-ms", type=float, metavar="MS", help="freeze as little as makes the pipeline's step this short"
    )
    group.add_argument(
        "--live-microbatches",
        type=int,
        metavar="K",
        help="no cap: every parameter sees K micro-batches a step, and how many a step has is chosen by measuring",
    )
    group.add_argument(
        "--plan", metavar="FILE", help="a fixed plan, for runs that must repeat (default: measure, plan)"
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _add(group, "steps", int, "steps of each run")
    _add(group, "learning_rate", float, "constant after the warm-up", metavar="RATE")
    _add(group, "learning_rate_warmup", int, "steps of linear warm-up")
    _add(group, "weight_decay", float, "AdamW's", metavar="X")
    _add(group, "seed", int, "of weights, batches and masks")
    group.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help=f"set it beside plain runs ({' and '.join(STREAM_SCHEDULES)}: beside {FLUSHED} with a flush), or run it "
        "alone (default: --compare)",
    )
    group.add_argument("--compare-modes", action="store_true", help="run TimelyFreeze with the other --mode, too")
    _add(
        group,
        "evaluate_every",
        int,
        "steps between validations (default: a tenth of the run; without a flush at least as many as make draining the "
        "pipeline for them cost 1%%)",
        default=False,
    )
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

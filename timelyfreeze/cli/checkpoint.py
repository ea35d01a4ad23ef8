"""Where a run stands, whole or not at all, for any number of ranks to go on with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.stream_optimizer import StreamOptimizer
from timelyfreeze.distributed import CheckpointError, load_checkpoint, save_checkpoint
from timelyfreeze.distributed.checkpoint_folder import SavedState, find_checkpoint
from timelyfreeze.distributed.checkpoint_storage import SavedValues
from timelyfreeze.distributed.checkpoint_values import CheckpointedPipeline
from timelyfreeze.errors import PlanError, problem, raise_all

_FORMAT = 3

SavedOptimizer: TypeAlias = torch.optim.Optimizer | StreamOptimizer


@dataclass(frozen=True)
class Checkpoint:
    """State after a whole step, beside that of pipeline and optimizer. Plain JSON data.

    Attributes:
        config: the run's options as JSON data, to be compared with config.json.
        corpus: fingerprint of the text.
        done: for every run so far, in order, its name and the steps done; the last one is the one whose weights are
            there.
        elapsed_s: training seconds of that run.
        split: children of the model in each stage, as they were balanced at the start, so that a resumed run splits
            alike; empty before the first step.
        chosen: with ``--live-microbatches``, the number of micro-batches that was chosen for every mode; else empty.
    """

    config: dict[str, Any]
    corpus: str
    done: list[tuple[str, int]]
    elapsed_s: float
    split: list[int]
    chosen: dict[str, int]

    def save(self, path: Path, pipe: CheckpointedPipeline, optimizer: SavedOptimizer) -> None:
        """Write it so that a kill at any instant leaves the old one. All ranks call it together.

        Raises CheckpointError on all of them if the folder cannot be written; the old checkpoint is then untouched.
        """
        save_checkpoint(
            path, pipe, cast(torch.optim.Optimizer, optimizer), extra={"format": _FORMAT, **asdict(self)}, keep_last=1
        )

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read all but the tensors, whose files must be there.

        Raises:
            CommandError: there is none, it is damaged, or no checkpoint of this command.
        """
        try:
            folder = find_checkpoint(path)
            state = SavedState.read(folder)
            saved = SavedValues(folder)
            raise_all(CheckpointError, saved.cut_files(saved.paths.values()))
            return cls.from_json(state.extra)
        except (CheckpointError, PlanError, OSError, ValueError) as error:
            raise _unusable(path, str(error)) from error

    @staticmethod
    def restore(
        path: Path, pipe: CheckpointedPipeline, optimizer: SavedOptimizer, *, with_freezing: bool = True
    ) -> None:
        """Let pipeline and optimizer go on, after a check of every byte. All ranks call it together.

        Args:
            with_freezing: False: times are measured anew, as another number of stages needs it.

        Raises:
            CommandError: on all ranks; it is damaged or does not fit.
        """
        try:
            load_checkpoint(
                path, pipe, cast(torch.optim.Optimizer, optimizer), freeze_state="load" if with_freezing else "skip"
            )
        except CheckpointError as error:
            raise _unusable(path, str(error)) from error

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Read ``save``'s form; ValueError if it is something else."""
        names = {f.name for f in fields(cls)}
        if data.keys() != {"format", *names}:
            raise ValueError("its entries are not a checkpoint's")
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r}, this version reads {_FORMAT}")
        values = {name: data[name] for name in names}
        kinds = {"config": dict, "corpus": str, "done": list, "split": list, "chosen": dict}
        if not values["done"] or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise ValueError("its entries have the wrong types")
        return cls(**{**values, "done": [(str(run), int(step)) for run, step in values["done"]]})


def _unusable(path: Path, what: str) -> CommandError:
    return CommandError(
        problem(
            "cannot resume from the checkpoint",
            expected="whole files that `timelyfreeze train --out` wrote",
            got=what,
            where=f"'{path}'",
            hint="Check the folder, or start a new run with another --out.",
        )
    )

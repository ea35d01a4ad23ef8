"""Checkpoints of a pipeline over any number of ranks, through torch.distributed.checkpoint.

A checkpoint is a folder ``step-000123``: ``.metadata`` and one ``__<rank>_0.distcp`` a rank are
``torch.distributed.checkpoint``'s, ``state.json`` has steps, freezing state and ``extra``. Weights and optimizer state
are kept by the model's own names (``model.<name>``, ``optim.state.<name>.<key>``, ``optim.param_groups.<name>.<key>``),
so that another number of ranks, another schedule, or one process can go on with them.

``.metadata`` is a pickle, of which this package reads the classes of such metadata and nothing else, so that a file
from elsewhere can run no code here; the other files are read without unpickling more than tensors and plain values.
``torch.distributed.checkpoint``'s own tools unpickle ``.metadata`` freely: give them only checkpoints that you trust.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from timelyfreeze.distributed import checkpoint_folder as folders
from timelyfreeze.distributed.checkpoint_load import Loading
from timelyfreeze.distributed.checkpoint_ranks import CheckpointError, Ranks, ranks_of
from timelyfreeze.distributed.checkpoint_storage import SavedValues, write_values
from timelyfreeze.distributed.checkpoint_values import CheckpointedPipeline, collect
from timelyfreeze.errors import PlanError, problem, raise_all

__all__ = [
    "CheckpointError",
    "CheckpointedPipeline",
    "export_state_dict",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]

FreezeStateChoice = Literal["load", "if_same_schedule", "skip"]


def save_checkpoint(
    path: str | PathLike[str],
    pipe: CheckpointedPipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int = 2,
) -> Path:
    """Write ``path/step-000123/``, complete or not at all: a kill at any instant leaves the ones before.

    A collective: every rank of the pipeline calls it between two steps, a rank without parameters too. The folder takes
    its name when all ranks' files are on disk. Where that step has a checkpoint already, the new one is called
    ``step-000123-2``, and then the old one goes.

    Args:
        path: a folder that all ranks share, and no other run saves to.
        pipe: its weights and buffers are saved, frozen ones too, and its freezing state.
        optimizer: over this rank's parameters; None on a rank that has none, or on all.
        extra: plain JSON data (learning-rate schedule, state of the data loader); rank 0's is kept. Tuples come back as
            lists.
        keep_last: how many checkpoints to leave under ``path``, with this one.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on every rank, whichever failed (full disk, a value that could not be loaded again, another
            step than on rank 0); there is no new checkpoint then.
        TransportError: a rank is lost, or keeps the others waiting for the pipeline's ``timeout_s``: for its files to
            be written, say. The checkpoints before are whole; the new one may be there or not.

    Example::

        save_checkpoint("run/checkpoints", pipe, optimizer, extra={"schedule": scheduler.state_dict()})
        ...
        extra = load_checkpoint("run/checkpoints", pipe, optimizer)
    """
    with ranks_of(pipe, "save_checkpoint") as ranks:
        return _save(ranks, Path(path), pipe, optimizer, extra, keep_last)


def load_checkpoint(
    path: str | PathLike[str],
    pipe: CheckpointedPipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    freeze_state: FreezeStateChoice = "if_same_schedule",
) -> dict[str, Any]:
    """Go on from the newest checkpoint under ``path`` (the one saved last), or from ``path`` if it is one.

    A collective, for any number of ranks. Names, shapes and types of everything on all ranks are checked before the
    first tensor is touched. Each rank reads only its own part, into the tensors that are there, and compares checksums.

    Args:
        path: the folder that ``save_checkpoint`` was given, or one checkpoint in it.
        pipe: with the same model; number of ranks, stages and schedule may be others.
        optimizer: over this rank's parameters, grouped alike; new or used. None on all ranks: weights only.
        freeze_state: what to do with the saved freezing state (measured times, plan, phase).
            ``"if_same_schedule"``: go on with it; where it does not fit the pipeline, take over the step count alone
            and warn that times will be measured again. ``"load"``: an error where it does not fit. ``"skip"``: take
            over the step count alone.

    Returns:
        ``extra``, as it was saved.

    Raises:
        CheckpointError: on every rank. Where the checkpoint does not fit, or lacks files, it names every fault, and
            model, optimizer and pipeline are unchanged. Where reading fails after that, it says that they are not.
        TransportError: as for ``save_checkpoint``.

    Example::

        extra = load_checkpoint("run/checkpoints", pipe, optimizer)
        scheduler.load_state_dict(extra["schedule"])
    """
    with ranks_of(pipe, "load_checkpoint") as ranks:
        return _load(ranks, Path(path), pipe, optimizer, freeze_state)


def latest_checkpoint(path: str | PathLike[str]) -> Path | None:
    """The checkpoint under ``path`` that was saved last, or None; incomplete ones are passed over with a warning.

    >>> import tempfile
    >>> latest_checkpoint(tempfile.mkdtemp()) is None
    True
    """
    found = folders.checkpoints(Path(path))
    return found[-1][0] if found else None


def export_state_dict(path: str | PathLike[str]) -> dict[str, torch.Tensor]:
    """The whole model's plain state dict from any checkpoint, on the CPU, in one process and without a group.

    Args:
        path: as for ``load_checkpoint``.

    Raises:
        CheckpointError: there is none, or it is damaged.

    Example::

        model.load_state_dict(export_state_dict("run/checkpoints"))
    """
    alone = Ranks()
    what = f"cannot export the checkpoint '{path}'"
    folder = alone.agree(what, lambda: folders.find_checkpoint(path))
    saved = alone.agree(what, lambda: SavedValues(folder))
    values: dict[tuple[str, ...], Any] = {}
    for saved_path in saved.paths.values():
        if saved_path[0] == "model":
            form = saved.tensor(saved_path)
            values[saved_path] = None if form is None else torch.empty(form[0], dtype=form[1])
    alone.agree(what, lambda: raise_all(CheckpointError, saved.cut_files(values)))
    saved.read(values, alone)
    return {saved_path[1]: value for saved_path, value in values.items()}


def _save(
    ranks: Ranks,
    root: Path,
    pipe: CheckpointedPipeline,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None,
    keep_last: int,
) -> Path:
    what = "cannot save a checkpoint"
    freeze_state, values = ranks.agree(what, lambda: _what_to_save(pipe, optimizer, extra, keep_last))
    step = _common_step(ranks, int(freeze_state["step"]))
    temporary = ""
    try:
        temporary, sequence = ranks.first(what, lambda: folders.begin_folder(root, step))
        ranks.agree(what, lambda: _check_shared(root / temporary))
        write_values(root / temporary, values, ranks)
        saved = folders.SavedState(
            folders.save_id_of(temporary), sequence, step, ranks.size, freeze_state, dict(extra or {})
        )

        def publish() -> str:
            saved.write(root / temporary)
            return folders.publish_folder(root, temporary, step)

        name = ranks.first(what, publish)
    except BaseException:
        if ranks.rank == 0 and temporary:
            folders.discard(root / temporary)
        raise
    ranks.first("cannot remove old checkpoints", lambda: folders.prune(root, keep_last, name))
    return root / name


def _load(
    ranks: Ranks,
    root: Path,
    pipe: CheckpointedPipeline,
    optimizer: torch.optim.Optimizer | None,
    freeze_state: FreezeStateChoice,
) -> dict[str, Any]:
    what = f"cannot load the checkpoint '{root}'"
    name = ranks.first(what, lambda: str(folders.find_checkpoint(root).relative_to(root)))
    ranks.agree(what, lambda: _check_choice(freeze_state))
    state, saved = ranks.agree(what, lambda: (folders.SavedState.read(root / name), SavedValues(root / name)))
    if len(set(ranks.share(what, lambda: state.save_id))) > 1:
        raise CheckpointError(problem(what, expected="the same files on all ranks", hint="Use a shared file system."))
    before = ranks.agree(what, pipe.freeze_state_dict)
    try:
        _take_over_freezing(ranks, pipe, before, state, freeze_state)
        loading = ranks.agree(what, lambda: Loading(pipe, optimizer, saved))
        loading.check(ranks, what)
    except CheckpointError:  # on all ranks
        ranks.agree("cannot undo what was loaded", lambda: pipe.load_freeze_state_dict(before))
        raise
    try:
        loading.read_tensors(ranks)
        ranks.agree(what, loading.apply)
    except CheckpointError as error:
        hint = "Part of the model or optimizer may be loaded already: load another checkpoint before going on."
        raise CheckpointError(f"{error} {hint}") from error
    return state.extra


def _what_to_save(
    pipe: CheckpointedPipeline,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None,
    keep_last: int,
) -> tuple[dict[str, Any], dict[tuple[str, ...], Any]]:
    freeze_state = pipe.freeze_state_dict()
    faults = folders.check_json(freeze_state, "freeze_state_dict()")
    faults += folders.check_json({} if extra is None else dict(extra), "extra")
    if keep_last < 1:
        faults.append(problem("keep_last", expected="at least 1", got=keep_last))
    raise_all(CheckpointError, faults)
    return freeze_state, collect(pipe, optimizer)


def _common_step(ranks: Ranks, step: int) -> int:
    steps = ranks.share("cannot save a checkpoint", lambda: step)
    if len(set(steps)) > 1:
        raise CheckpointError(
            problem(
                "cannot save a checkpoint",
                expected="the same number of steps done on all ranks",
                got=", ".join(f"{done} on rank {rank}" for rank, done in enumerate(steps)),
                hint="Call save_checkpoint after the same step on every rank.",
            )
        )
    return step


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            problem(
                "no such folder",
                expected=f"to see '{folder}', which rank 0 has created",
                hint="Save to a file system that all ranks share.",
            )
        )


def _check_choice(choice: str) -> None:
    if choice not in ("load", "if_same_schedule", "skip"):
        raise CheckpointError(problem("freeze_state", expected="load, if_same_schedule or skip", got=repr(choice)))


def _take_over_freezing(
    ranks: Ranks,
    pipe: CheckpointedPipeline,
    before: Mapping[str, Any],
    saved: folders.SavedState,
    choice: FreezeStateChoice,
) -> None:
    """Load the freezing state on all ranks or on none; what it does not fit gets the step count alone."""
    what = "cannot load the freezing state"
    text = ""
    if choice != "skip":
        refusals = ranks.share(what, lambda: _refusal(pipe, saved.freeze_state))
        refused = {rank: text for rank, text in enumerate(refusals) if text is not None}
        if not refused:
            return
        text = "; ".join(sorted(set(refused.values())))
        if choice == "load":
            raise CheckpointError(
                problem(what, got=text, hint='Pass freeze_state="if_same_schedule" to go on with the step count alone.')
            )

    def take_step() -> None:
        if text and ranks.rank == 0:
            warnings.warn(
                "the saved freezing state does not fit this pipeline; going on with the step count alone, times will "
                f"be measured again ({text})",
                stacklevel=9,  # who called load_checkpoint
            )
        # The pipeline's own state, which always fits, at the saved step.
        pipe.load_freeze_state_dict({**before, "step": saved.step})

    ranks.agree(what, take_step)


def _refusal(pipe: CheckpointedPipeline, freeze_state: Mapping[str, Any]) -> str | None:
    try:
        pipe.load_freeze_state_dict(freeze_state)
    except (PlanError, ValueError) as error:
        return str(error)
    return None

"""Loading a checkpoint: everything is compared on all ranks before anything is touched on one."""

from __future__ import annotations

from typing import Any

import torch

from timelyfreeze.distributed.checkpoint_ranks import CheckpointError, Ranks
from timelyfreeze.distributed.checkpoint_storage import SavedValues
from timelyfreeze.distributed.checkpoint_values import CheckpointedPipeline, OptimizerTarget, Path
from timelyfreeze.errors import problem, raise_all


class Loading:
    """One rank's part of a load.

    Args:
        saved: what the checkpoint holds.
    """

    def __init__(self, pipe: CheckpointedPipeline, optimizer: torch.optim.Optimizer | None, saved: SavedValues) -> None:
        self._pipe = pipe
        self._saved = saved
        self._model: dict[str, Any] = dict(pipe.state_dict())
        paths = list(saved.paths.values())
        self._saved_names = {path[1] for path in paths if path[0] == "model"}
        self._saved_parameters = {path[2] for path in paths if path[:2] == ("optim", "param_groups")}
        self._optimizer = None if optimizer is None else OptimizerTarget(pipe, optimizer, paths)
        self._values: dict[Path, Any] = {}
        self._groups: list[dict[str, Any]] = []

    def check(self, ranks: Ranks, what: str) -> None:
        """Compare on all ranks, and read what is no tensor; nothing is changed yet.

        Raises CheckpointError on all ranks, with all faults of all of them.
        """
        answers = ranks.share(what, lambda: (self._faults(), list(self._model), self._claimed()))
        faults = list(dict.fromkeys(fault for own, _, _ in answers for fault in own))
        names = {name for _, own, _ in answers for name in own}
        faults += _unexpected("entries that the model does not have", self._saved_names - names)
        parameters = [own for _, _, own in answers if own is not None]
        if parameters and not self._saved_parameters and any(parameters):
            hint = "Load it with optimizer=None."
            faults = [fault for fault in faults if not fault.startswith("the checkpoint's optimizer lacks")]
            faults.append(problem("the optimizer", expected="saved state", got="a checkpoint without", hint=hint))
        elif parameters:
            known = {name for own in parameters for name in own}
            faults += _unexpected("optimizer state of parameters not given", self._saved_parameters - known)
        if faults:
            raise CheckpointError(_together(what, faults))
        self._read_plain(ranks, what)

    def read_tensors(self, ranks: Ranks) -> None:
        """Read this rank's tensors in place."""
        places = ranks.agree("cannot load the checkpoint", self._places)
        with torch.no_grad():
            self._saved.read(places, ranks)
        self._values |= places

    def apply(self) -> None:
        """Hand over what was read."""
        self._pipe.load_state_dict({name: self._values[("model", name)] for name in self._model})
        if self._optimizer is not None:
            self._optimizer.apply(self._values, self._groups)

    def _claimed(self) -> list[str] | None:
        return None if self._optimizer is None else self._optimizer.claimed

    def _faults(self) -> list[str]:
        missing = [name for name in self._model if name not in self._saved_names]
        faults = [problem(f"the checkpoint lacks {', '.join(map(repr, missing))}")] if missing else []
        for name, present in self._model.items():
            if name in self._saved_names:
                faults += self._differs(("model", name), present)
        if self._optimizer is not None:
            faults += self._optimizer.faults
        if not faults:
            faults += self._saved.cut_files(self._wanted())
        return faults

    def _differs(self, path: Path, present: Any) -> list[str]:
        saved = self._saved.tensor(path)
        own = (present.shape, present.dtype) if isinstance(present, torch.Tensor) else None
        if own == saved:
            if own is None or present.device.type != "meta":
                return []
            hint = "Give the model memory first: model.to_empty(device=...)."
            return [problem(f"'{path[1]}'", expected="a tensor with data", got="one on the meta device", hint=hint)]
        return [
            problem(f"'{path[1]}'", expected=f"{_form(own)}, as in the model", got=f"{_form(saved)} in the checkpoint")
        ]

    def _wanted(self) -> list[Path]:
        wanted: list[Path] = [("model", name) for name in self._model]
        if self._optimizer is not None:
            wanted += [*self._optimizer.hyperparameters(), *self._optimizer.state()]
        return wanted

    def _read_plain(self, ranks: Ranks, what: str) -> None:
        """Values that are no tensors, and hyperparameters that are: few bytes, and groups may yet not fit."""
        plain: dict[Path, Any] = {path: None for path in self._wanted() if self._saved.tensor(path) is None}
        for path in self._optimizer.hyperparameters() if self._optimizer is not None else []:
            form = self._saved.tensor(path)
            if form is not None:
                plain[path] = torch.empty(form[0], dtype=form[1])
        self._saved.read(plain, ranks)
        self._values = plain
        if self._optimizer is not None:
            optimizer = self._optimizer
            self._groups = ranks.agree(what, lambda: optimizer.group_values(plain))
        else:
            ranks.agree(what, lambda: None)

    def _places(self) -> dict[Path, torch.Tensor]:
        places: dict[Path, torch.Tensor] = {}
        for name, value in self._model.items():
            if isinstance(value, torch.Tensor):
                places[("model", name)] = value
        if self._optimizer is not None:
            for path, parameter in self._optimizer.state().items():
                form = self._saved.tensor(path)
                if form is not None:
                    places[path] = self._optimizer.place_for(path, parameter, *form)
        return places


def _form(form: tuple[torch.Size, torch.dtype] | None) -> str:
    return "no tensor" if form is None else f"{tuple(form[0])} {form[1]}"


def _unexpected(what: str, names: set[str]) -> list[str]:
    return [problem(f"the checkpoint has {what}: {', '.join(map(repr, sorted(names)))}")] if names else []


def _together(what: str, faults: list[str]) -> str:
    try:
        raise_all(CheckpointError, faults)
    except CheckpointError as error:
        return f"{what}: {error}"
    return what

"""What a checkpoint holds, by the model's own names: weights, buffers, and the optimizer's state by parameter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from timelyfreeze.errors import problem, raise_all

Path = tuple[str, ...]  # ("model", name), ("optim", "state", name, key) or ("optim", "param_groups", name, key)
# Of a parameter group, what is not a hyperparameter of each of its parameters.
_NO_HYPERPARAMETERS = {"params", "param_names"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, torch.dtype, torch.device)


class CheckpointedPipeline(Protocol):
    """What is asked of a pipeline: entries of this rank's own stages, under the whole model's names.

    A name may be on several ranks (tied parameters), with the same values. Where it has ``together``, as
    ``FreezingPipeline`` has, that is how its ranks talk, and a rank that is lost ends it; else the group's collectives.
    """

    @property
    def process_group(self) -> Any:
        """The ``torch.distributed`` group of its ranks; None: this process has all of the model."""

    def state_dict(self) -> Any:
        """This rank's weights and buffers; the tensors share memory with the model's."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Take this rank's entries."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters."""

    def freeze_state_dict(self) -> dict[str, Any]:
        """Plain data, the same on every rank, with the number of steps done as ``"step"``."""

    def load_freeze_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where it was taken; PlanError or ValueError if it does not fit, and nothing has changed then."""


def key_of(path: Path) -> str:
    """The name in the checkpoint, as ``torch.distributed.checkpoint`` flattens nested state dicts.

    >>> key_of(("optim", "state", "0.weight", "exp_avg"))
    'optim.state.0.weight.exp_avg'
    """
    return ".".join(path)


def collect(pipe: CheckpointedPipeline, optimizer: torch.optim.Optimizer | None) -> dict[Path, Any]:
    """All of this rank's values; tensors are not copied.

    Raises ValueError for what could not be loaded again, all of it named at once.
    """
    values: dict[Path, Any] = {("model", name): value for name, value in pipe.state_dict().items()}
    faults: list[str] = []
    if optimizer is not None:
        values |= _optimizer_values(pipe, optimizer, faults)
    for path, value in values.items():
        values[path] = value if isinstance(value, torch.Tensor) else _plain(value, key_of(path), faults)
    raise_all(ValueError, faults)
    return values


def parameter_names(pipe: CheckpointedPipeline) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter: a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def unnamed(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, list[str]]) -> list[str]:
    """A fault for every parameter of the optimizer that has no name."""
    return [
        problem(
            "the optimizer has a parameter that the pipeline does not name",
            expected="one of pipe.named_parameters()",
            got=f"a tensor of shape {tuple(parameter.shape)}",
            where=f"parameter group {index}",
            hint="Save parameters that are not the model's, and their optimizer, apart.",
        )
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter not in names
    ]


def _optimizer_values(
    pipe: CheckpointedPipeline, optimizer: torch.optim.Optimizer, faults: list[str]
) -> dict[Path, Any]:
    """State and hyperparameters under every name of a parameter: another split may know a tied one by another."""
    names = parameter_names(pipe)
    missing = unnamed(optimizer, names)
    faults += missing
    if missing:
        return {}
    values: dict[Path, Any] = {}
    packed = optimizer.state_dict()  # a parameter's number there is its place in the groups
    states = dict(packed["state"])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = [group for group in packed["param_groups"] for _ in group["params"]]
    for number, (parameter, group) in enumerate(zip(parameters, groups, strict=True)):
        state = states.pop(number, {})
        for name in names[parameter]:
            values |= {("optim", "state", name, key): value for key, value in state.items()}
            values |= {
                ("optim", "param_groups", name, key): value
                for key, value in group.items()
                if key not in _NO_HYPERPARAMETERS
            }
    strange = [repr(key) for path in values for key in path[3:] if not isinstance(key, str)] + [
        repr(key) for key in states
    ]
    if strange:
        faults.append(problem("the optimizer's state", expected="by parameter and text", got=", ".join(strange)))
    return {path: value for path, value in values.items() if isinstance(path[3], str)}


def _plain(value: Any, name: str, faults: list[str]) -> Any:
    """The value, NumPy's scalars as Python's; a fault unless ``torch.load(weights_only=True)`` gives it back."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple, set, torch.Size):
        return type(value)(_plain(item, name, faults) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((_plain(key, name, faults), _plain(item, name, faults)) for key, item in value.items())
    faults.append(problem(name, expected="tensors and plain Python values", got=type(value).__name__))
    return None


class OptimizerTarget:
    """Where saved optimizer state goes: this rank's optimizer, whose parameters are found by name.

    Args:
        saved: paths of all that the checkpoint holds.

    Attributes:
        claimed: every name of this rank's parameters in the optimizer.
        faults: parameters that the checkpoint's optimizer does not have.
    """

    def __init__(self, pipe: CheckpointedPipeline, optimizer: torch.optim.Optimizer, saved: list[Path]) -> None:
        self._optimizer = optimizer
        names = parameter_names(pipe)
        self.faults = unnamed(optimizer, names)
        self._keys: dict[tuple[str, str], list[Path]] = {}
        for path in saved:
            if path[0] == "optim":
                self._keys.setdefault((path[1], path[2]), []).append(path)
        self._groups: list[list[tuple[nn.Parameter, str]]] = []
        self._group_of: dict[nn.Parameter, dict[str, Any]] = {}
        self.claimed: list[str] = []
        for group in optimizer.param_groups:
            self._groups.append([])
            for parameter in group["params"]:
                self._group_of[parameter] = group
                own = names.get(parameter, [])
                self.claimed += own
                name = next((name for name in own if ("param_groups", name) in self._keys), None)
                if name is not None:
                    self._groups[-1].append((parameter, name))
                elif own:
                    self.faults.append(problem("the checkpoint's optimizer lacks a parameter", expected=f"'{own[0]}'"))

    def hyperparameters(self) -> list[Path]:
        """What to read for the groups."""
        named = [name for group in self._groups for _, name in group]
        return [path for name in named for path in self._keys[("param_groups", name)]]

    def state(self) -> dict[Path, nn.Parameter]:
        """What to read for the parameters."""
        pairs = [pair for group in self._groups for pair in group]
        return {path: parameter for parameter, name in pairs for path in self._keys.get(("state", name), [])}

    def place_for(self, path: Path, parameter: nn.Parameter, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The tensor to read into: the optimizer's own where it fits, else a new one where the optimizer wants it."""
        key = path[3]
        present = self._optimizer.state.get(parameter, {}).get(key)
        if (
            isinstance(present, torch.Tensor)
            and present.shape == shape
            and present.dtype == dtype
            and present.device.type != "meta"
        ):
            return present.detach()
        group = self._group_of[parameter]
        # As Optimizer.load_state_dict has it: step counters are on the CPU where no kernel reads them.
        on_cpu = key == "step" and not group.get("capturable") and not group.get("fused")
        return torch.empty(shape, dtype=dtype, device="cpu" if on_cpu else parameter.device)

    def group_values(self, values: Mapping[Path, Any]) -> list[dict[str, Any]]:
        """Each group's hyperparameters; ValueError where those of one group were saved with different ones."""
        faults, merged = [], []
        for index, group in enumerate(self._groups):
            first: dict[str, Any] = {}
            for place, (_, name) in enumerate(group):
                own = {path[3]: values[path] for path in self._keys[("param_groups", name)]}
                first = own if place == 0 else first
                differing = [key for key in {**first, **own} if not _same(first.get(key), own.get(key))]
                if differing:
                    faults.append(
                        problem(
                            f"parameter group {index} of the optimizer",
                            expected=f"parameters saved with the same {', '.join(differing)}",
                            got=f"others for '{group[0][1]}' than for '{name}'",
                            hint="Put the same parameters together as in the saved run.",
                        )
                    )
            merged.append(first)
        raise_all(ValueError, faults)
        return merged

    def apply(self, values: Mapping[Path, Any], groups: list[dict[str, Any]]) -> None:
        """Give the optimizer what was read, through its own ``load_state_dict``."""
        optimizer = self._optimizer
        named = {id(parameter): name for group in self._groups for parameter, name in group}
        states: dict[int, dict[str, Any]] = {}
        packed_groups = []
        parameters: list[nn.Parameter] = []
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            numbers = range(len(parameters), len(parameters) + len(group["params"]))
            parameters += group["params"]
            packed_groups.append({**group, **saved, "params": list(numbers)})
        for number, parameter in enumerate(parameters):
            paths = self._keys.get(("state", named[id(parameter)]), [])
            if paths:
                states[number] = {path[3]: values[path] for path in paths}
        optimizer.load_state_dict({"state": states, "param_groups": packed_groups})
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            _undo_casts(optimizer, parameters, states)


def _undo_casts(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], states: Mapping[int, Mapping[str, Any]]
) -> None:
    """Optimizer.load_state_dict rounds state to the parameter's type: float32 moments of bfloat16 weights."""
    for number, state in states.items():
        loaded = optimizer.state[parameters[number]]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key in loaded and loaded[key].dtype != value.dtype:
                loaded[key] = value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)

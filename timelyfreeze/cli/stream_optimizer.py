"""The optimizers of an asynchronous pipeline's stages, as checkpoints take them: one optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from timelyfreeze import AsyncPipeline


class StreamOptimizer:
    """All stages' optimizers as one, in as far as checkpoints ask for it."""

    def __init__(self, pipe: AsyncPipeline) -> None:
        self._pipe = pipe

    @property
    def _own(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in self._pipe.optimizers if optimizer is not None]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all stages, in order."""
        return [group for optimizer in self._own for group in optimizer.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """By parameter."""
        return {parameter: state for optimizer in self._own for parameter, state in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer`` has it: a parameter's number is its place in the groups."""
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, optimizer in self._numbered():
            own = optimizer.state_dict()
            states |= {first + number: state for number, state in own["state"].items()}
            groups += [{**g, "params": [first + number for number in g["params"]]} for g in own["param_groups"]]
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hand each stage's optimizer its part."""
        groups = iter(state_dict["param_groups"])
        for first, optimizer in self._numbered():
            own = [next(groups) for _ in optimizer.param_groups]
            numbers = [number for group in own for number in group["params"]]
            states = {n - first: state_dict["state"][n] for n in numbers if n in state_dict["state"]}
            packed = [{**group, "params": [number - first for number in group["params"]]} for group in own]
            optimizer.load_state_dict({"state": states, "param_groups": packed})

    def _numbered(self) -> Iterator[tuple[int, torch.optim.Optimizer]]:
        """Each with the number of its first parameter."""
        first = 0
        for optimizer in self._own:
            yield first, optimizer
            first += sum(len(group["params"]) for group in optimizer.param_groups)

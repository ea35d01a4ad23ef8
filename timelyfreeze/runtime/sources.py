"""Where a pipeline's stages come from: a model, a list of stages, factories, or a model without memory."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import nn

from timelyfreeze.errors import problem
from timelyfreeze.runtime.arguments import children
from timelyfreeze.runtime.partition import balanced_split_points

InitFn = Callable[[nn.Module], None]


class StageSource:
    """What the user gave, and how to get the part of it that one process needs.

    Args:
        model: a model that comes apart, or a list of stage modules; None where ``stages`` is given.
        stages: functions without arguments, one a stage, that make the stage modules.
        init_fn: fills one module of a model on the meta device; default: the modules' ``reset_parameters``.

    Raises:
        TypeError: neither or both are given, or they are of the wrong kind.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None,
        stages: Sequence[Callable[[], nn.Module]] | None,
        init_fn: InitFn | None = None,
    ) -> None:
        if (model is None) == (stages is None):
            got = "neither" if model is None else "both"
            raise TypeError(problem("model and stages", expected="one of them", got=got))
        self._factories = None if stages is None else list(stages)
        if self._factories is not None and not (self._factories and all(map(callable, self._factories))):
            raise TypeError(problem("stages", expected="a non-empty list of functions that make stage modules"))
        self.model = model
        self._init_fn = init_fn
        self._children = [] if model is None else children(model)

    @property
    def gives_stages(self) -> bool:
        """Whether the children are the stages, one each."""
        return not isinstance(self.model, nn.Module)

    @property
    def num_children(self) -> int:
        return len(self._factories or self._children)

    def points_by_size(self, num_stages: int, stage_to_rank: Sequence[int]) -> list[int]:
        """Split points that deal the parameters out evenly: they can be known before any batch, on every rank alike."""
        sizes = [1.0 + sum(parameter.numel() for parameter in child.parameters()) for child in self._children]
        return balanced_split_points(sizes, num_stages, stage_to_rank)

    def everything(self) -> tuple[nn.Module, list[nn.Module | None]]:
        """The whole model, and its children."""
        made = self._make(range(self.num_children))
        return self.model if isinstance(self.model, nn.Module) else nn.ModuleList(made), list(made)

    def part(self, wanted: Collection[int]) -> tuple[nn.Module, list[nn.Module | None]]:
        """Some of the children, in a module that calls everything in them by the whole model's names; None: not wanted.

        Factories run, and modules without memory are filled, one after the other, also those that are not wanted,
        which are let go of at once: so all ranks draw the same random numbers as one process that makes them all.
        """
        made = self._make(wanted)
        here: list[nn.Module | None] = [made[i] if i in wanted else None for i in range(self.num_children)]
        if not isinstance(self.model, nn.Module):
            return nn.ModuleDict({str(i): child for i, child in enumerate(here) if child is not None}), here
        ids = {id(child) for child in here if child is not None}
        root = nn.Module()
        for name, module in self.model.named_modules(remove_duplicate=False):
            if id(module) in ids:
                _put(root, name, module)
        return root, here

    def tied_names(self) -> list[list[str]]:
        """Names of the whole model's parameters that are one and the same, the first place first."""
        if not isinstance(self.model, nn.Module):
            return []
        places: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append(name)
        return [names for names in places.values() if len(names) > 1]

    def _make(self, wanted: Collection[int]) -> list[nn.Module]:
        if self._factories is None:
            return [self._filled(child, index in wanted) for index, child in enumerate(self._children)]
        made: list[nn.Module] = []
        for index, factory in enumerate(self._factories):
            module: object = factory()
            if not isinstance(module, nn.Module):
                got = type(module).__name__
                raise TypeError(problem("stages", expected="functions that return a module", got=got, where=f"{index}"))
            filled = self._filled(module, index in wanted)
            made.append(filled if index in wanted else nn.Module())
            del module, filled  # what is not wanted goes before the next is made
        return made

    def _filled(self, child: nn.Module, wanted: bool) -> nn.Module:
        if not any(tensor.is_meta for tensor in itertools.chain(child.parameters(), child.buffers())):
            return child
        target = child if wanted else copy.deepcopy(child)
        target.to_empty(device="cpu")
        if self._init_fn is not None:
            target.apply(self._init_fn)
            return child
        faults: list[str] = []
        _reset(target, "", faults)
        if faults:
            raise ValueError(
                problem(
                    "a model on the meta device cannot be filled",
                    expected="reset_parameters() in every module with parameters or buffers of its own",
                    got=", ".join(faults),
                    hint="Pass init_fn=, which is called for every module, or stages= with functions.",
                )
            )
        return child


def _reset(module: nn.Module, name: str, faults: list[str]) -> None:
    """Draw the parameters as ``__init__`` did: children were made, and have drawn theirs, before their parent did."""
    for child_name, child in module.named_children():
        _reset(child, f"{name}.{child_name}" if name else child_name, faults)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()
    elif any(True for _ in itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))):
        faults.append(f"{name or 'itself'} ({type(module).__name__})")


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    """Let ``module`` be known in ``root`` by its dotted name."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        child = root._modules[part]
        assert child is not None
        root = child
    root.add_module(last, module)


def own_children(split_points: Sequence[int], num_children: int, stages: Collection[int]) -> set[int]:
    """The children of some stages.

    >>> sorted(own_children([1, 3], 5, {1}))
    [1, 2]
    """
    return set(_children_of(split_points, num_children, stages))


def _children_of(split_points: Sequence[int], num_children: int, stages: Collection[int]) -> Iterator[int]:
    for stage, (begin, end) in enumerate(itertools.pairwise([0, *split_points, num_children])):
        if stage in stages:
            yield from range(begin, end)


def own_device(devices: Sequence[torch.device | str] | None) -> list[torch.device]:
    """The device of a process that is one rank; default: the GPU of its local number, else the CPU.

    Raises:
        ValueError: several are given.
    """
    if devices is not None:
        if len(devices) != 1:
            raise ValueError(problem("devices", expected="one, this process's own", got=len(devices)))
        return [torch.device(devices[0])]
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())]

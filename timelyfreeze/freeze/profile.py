"""Watch one forward of a stage: what its modules take in, and in which order they use their parameters."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from timelyfreeze.compiled import is_compiled
from timelyfreeze.freeze.parameters import PALETTE_SIZE


@dataclass
class ModuleUse:
    """What one module took in and gave out, summed over its calls; the first tensor argument and the first output."""

    num_calls: int = 0
    input_numel: int = 0
    output_numel: int = 0
    num_tokens: int = 0  # rows of the input: numel / last dimension; of whole numbers: numel


@dataclass
class StageProfile:
    """What a stage's forward did. Filled by ``record_forward``.

    Attributes:
        names: of the stage's parameters, in the order of ``stage.parameters()``.
        places: for each, the modules that hold it, with the name there.
        uses: what each module did, by ``id(module)``; compiled modules are not watched.
        first_use: for each parameter, its module's place in the order of calls; missing where no call was seen.
        groups: for each parameter, the call that fed its module and perhaps others; missing where it shares none.
        in_graph: indices of the parameters that the forward's autograd graph leads to.
        num_passes: how often the stage ran.
        num_tokens: rows that the stage works on, summed over passes.
        opaque: whether the graph hides a part (reentrant checkpointing), so that ``in_graph`` may lack parameters.
        compiled: indices of the parameters that belong to compiled modules.
        autocast_dtype: what matrix products were computed in, if autocast was on.
    """

    names: list[str] = field(default_factory=list)
    places: list[list[tuple[nn.Module, str]]] = field(default_factory=list)
    uses: dict[int, ModuleUse] = field(default_factory=dict)
    first_use: dict[int, int] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    in_graph: set[int] = field(default_factory=set)
    num_passes: int = 0
    num_tokens: int = 0
    opaque: bool = False
    compiled: set[int] = field(default_factory=set)
    autocast_dtype: torch.dtype | None = None

    @property
    def palette_size(self) -> int | None:
        return PALETTE_SIZE if self.compiled else None


@contextmanager
def record_forward(stage: nn.Module) -> Iterator[StageProfile]:
    """While it lasts, record what ``stage`` does when it runs, on whatever thread; no hook stays behind.

    Calls of its modules count only from within the stage's own forward: neither a recomputation in backward nor another
    stage that shares a module is mistaken for it. A stage that is compiled as a whole is not watched at all, since a
    hook would make dynamo compile it again.

    >>> stage = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with record_forward(stage) as profile:
    ...     _ = stage(torch.ones(3, 5, 4))
    >>> profile.num_tokens, profile.first_use
    (15, {0: 0, 1: 0, 2: 1, 3: 1})
    """
    profile = StageProfile()
    watched = _survey(stage, profile)
    if is_compiled(stage):
        yield profile
        return
    recorder = _Recorder(stage, profile)
    with ExitStack() as hooks:
        hooks.callback(recorder.forget)
        hooks.enter_context(_removed(stage.register_forward_pre_hook(recorder.enter, with_kwargs=True, prepend=True)))
        for module in watched:
            hooks.enter_context(_removed(module.register_forward_pre_hook(recorder.before, with_kwargs=True)))
            hooks.enter_context(_removed(module.register_forward_hook(recorder.after, with_kwargs=True)))
        # The last hook of the stage, and called when forward raises as well.
        hooks.enter_context(_removed(stage.register_forward_hook(recorder.leave, always_call=True)))
        yield profile


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _survey(stage: nn.Module, profile: StageProfile) -> list[nn.Module]:
    """List the parameters and where they are held; return the modules to watch: those that hold some themselves."""
    index_of: dict[int, int] = {}
    for name, parameter in stage.named_parameters():
        index_of[id(parameter)] = len(profile.names)
        profile.names.append(name)
        profile.places.append([])
    watched: list[nn.Module] = []
    seen: set[int] = set()

    def visit(module: nn.Module, compiled: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        compiled = compiled or is_compiled(module)
        own = [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]
        for name, parameter in own:
            profile.places[index_of[id(parameter)]].append((module, name))
            if compiled:
                profile.compiled.add(index_of[id(parameter)])
        if own and not compiled:
            watched.append(module)
        for child in module._modules.values():
            if child is not None:
                visit(child, compiled)

    visit(stage, False)
    return watched


class _Recorder:
    """The hooks. Several threads may be inside modules of the stage; only those inside its forward count."""

    def __init__(self, stage: nn.Module, profile: StageProfile) -> None:
        self._profile = profile
        self._inside: set[int] = set()
        self._order = itertools.count()
        self._fed: tuple[torch.Tensor, int] | None = None
        self._indices: dict[int, list[int]] = {}
        for index, places in enumerate(profile.places):
            for module, _ in places:
                self._indices.setdefault(id(module), []).append(index)

    def enter(self, stage: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.add(threading.get_ident())
        profile = self._profile
        profile.num_passes += 1
        tensor = _first_tensor(args, kwargs)
        if tensor is not None:
            profile.num_tokens += _num_tokens(tensor)
            kind = tensor.device.type
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                profile.autocast_dtype = torch.get_autocast_dtype(kind)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if threading.get_ident() not in self._inside:
            return
        call = next(self._order)
        for index in self._indices[id(module)]:
            self._profile.first_use.setdefault(index, call)
        tensor = _first_tensor(args, kwargs)
        if not isinstance(module, nn.Linear) or tensor is None:
            return
        # Held until the next call, so that no other tensor can take its place in memory.
        first = self._fed[1] if self._fed is not None and self._fed[0] is tensor else call
        self._fed = (tensor, first)
        for index in self._indices[id(module)]:
            self._profile.groups.setdefault(index, first)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensor = _first_tensor(args, kwargs)
        if tensor is None or threading.get_ident() not in self._inside:
            return
        use = self._profile.uses.setdefault(id(module), ModuleUse())
        use.num_calls += 1
        use.input_numel += tensor.numel()
        use.num_tokens += _num_tokens(tensor)
        result = _first_tensor((output,), {})
        use.output_numel += 0 if result is None else result.numel()

    def leave(self, stage: nn.Module, args: Any, output: Any) -> None:
        self._inside.discard(threading.get_ident())
        self.forget()
        index_of = {
            id(module._parameters[name]): index
            for index, places in enumerate(self._profile.places)
            for module, name in places
        }
        _walk_graph(output, index_of, self._profile)

    def forget(self) -> None:
        self._fed = None


def _walk_graph(output: Any, index_of: Mapping[int, int], profile: StageProfile) -> None:
    """Note which parameters the output's autograd graph ends in."""
    pending = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in index_of:
            profile.in_graph.add(index_of[id(leaf)])
        profile.opaque |= "CheckpointFunction" in node.name()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _first_tensor(args: Any, kwargs: Any) -> torch.Tensor | None:
    return next(_tensors((args, kwargs)), None)


def _num_tokens(tensor: torch.Tensor) -> int:
    """Rows of features; whole numbers are tokens themselves."""
    if tensor.ndim == 0 or not tensor.is_floating_point():
        return tensor.numel()
    return tensor.numel() // max(tensor.shape[-1], 1)

"""Which part of the model goes to which stage."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from timelyfreeze.errors import problem
from timelyfreeze.runtime.values import encode, map_tensors, stage_entry

_SPLITTERS: dict[type[nn.Module], Callable[[nn.Module], Sequence[nn.Module]]] = {}


def register_splitter(kind: type[nn.Module], splitter: Callable[[Any], Sequence[nn.Module]]) -> None:
    """Say how models of class ``kind`` come apart: ``splitter(model)`` returns modules that, called one after the other
    on each other's output, compute what the model computes.

    >>> class Twice(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> register_splitter(Twice, lambda model: [model.a, model.b])
    """
    _SPLITTERS[kind] = splitter


def children_of(model: nn.Module) -> list[nn.Module]:
    """The modules that ``model`` runs one after the other.

    Raises:
        TypeError: the model is no ``nn.Sequential`` and no splitter is registered for it.
    """
    for kind in type(model).__mro__:
        if kind in _SPLITTERS:
            return list(_SPLITTERS[kind](model))
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return list(model)  # not children(): a module that stands there twice runs twice
    raise TypeError(
        problem(
            "model",
            expected="an nn.Sequential, a list of stage modules, or a module that a splitter is registered for",
            got=type(model).__name__,
            hint="Call timelyfreeze.runtime.register_splitter(type(model), ...), or pass the stages as a list.",
        )
    )


def check_split_points(split_points: Sequence[int], num_children: int, num_stages: int) -> list[int]:
    """The indices of the children that begin stages 1, 2, ...; see ``balanced_split_points``.

    Raises:
        ValueError: not ``num_stages - 1`` of them, not rising, or out of range.
    """
    points = [int(point) for point in split_points]
    bounds = [0, *points, num_children]
    if len(points) != num_stages - 1 or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise ValueError(
            problem(
                "split_points",
                expected=f"{num_stages - 1} rising indices between 1 and {num_children - 1}",
                got=list(split_points),
                hint="Each is the index of the child with which a stage begins, from stage 1 on.",
            )
        )
    return points


def known_split_points(
    split_points: Sequence[int] | None, num_children: int, num_stages: int, given_stages: bool
) -> list[int] | None:
    """The points as far as they are known before anything was measured; None: they are to be balanced.

    Args:
        split_points: what the user asks for.
        given_stages: the children are the stages, one each.

    Raises:
        ValueError: the points do not fit, or there is nothing to split.

    >>> known_split_points(None, 2, 2, False), known_split_points([3], 4, 2, False)
    ([1], [3])
    """
    if given_stages and split_points is not None:
        raise ValueError(
            problem("split_points", expected="None where the model is a list of stages", got=list(split_points))
        )
    if given_stages or num_children == num_stages:
        return list(range(1, num_stages))
    return None if split_points is None else check_split_points(split_points, num_children, num_stages)


def balanced_split_points(
    times_s: Sequence[float], num_stages: int, stage_to_rank: Sequence[int] | None = None
) -> list[int]:
    """Cut a row of times into ``num_stages`` runs, none empty, so that the busiest rank has as little as possible.

    Args:
        times_s: of the children, seconds.
        stage_to_rank: the rank of every stage; None: a rank each. Where ranks hold several stages, the points are
            searched from the best ones for single stages on, moving up to two at a time.

    >>> balanced_split_points([1.0, 1.0, 2.0, 4.0], 2)
    [3]
    >>> balanced_split_points([1.0, 1.0, 1.0, 1.0, 1.0, 5.0], 4, [0, 1, 1, 0])
    [1, 3, 5]
    """
    points = _shortest_longest_run(times_s, num_stages)
    if stage_to_rank is None or len(set(stage_to_rank)) == num_stages:
        return points
    prefix = [0.0, *itertools.accumulate(times_s)]

    def burden(points: Sequence[int]) -> tuple[float, ...]:
        runs_s = [prefix[b] - prefix[a] for a, b in itertools.pairwise([0, *points, len(times_s)])]
        ranks_s = [0.0] * (max(stage_to_rank) + 1)
        for rank, run_s in zip(stage_to_rank, runs_s, strict=True):
            ranks_s[rank] += run_s
        # Equal but for rounding is equal; then the other ranks, then the stages, as evenly as can be.
        return tuple(round(time_s / prefix[-1], 9) for time_s in (*sorted(ranks_s, reverse=True), max(runs_s)))

    def neighbours(points: list[int]) -> Iterator[list[int]]:
        for size in (1, 2):
            for chosen in itertools.combinations(range(len(points)), size):
                for moves in itertools.product((-1, 1), repeat=size):
                    moved = list(points)
                    for index, move in zip(chosen, moves, strict=True):
                        moved[index] += move
                    if all(a < b for a, b in itertools.pairwise([0, *moved, len(times_s)])):
                        yield moved

    while prefix[-1] > 0:
        best = min(neighbours(points), key=burden, default=points)
        if burden(best) >= burden(points):
            break
        points = best
    return points


def _shortest_longest_run(times_s: Sequence[float], num_stages: int) -> list[int]:
    """The points for which the longest run is as short as possible."""
    num = len(times_s)
    prefix = [0.0]
    for time_s in times_s:
        prefix.append(prefix[-1] + time_s)
    # best[k][i]: the longest run when the first i children make k stages; cut[k][i]: where the last of them begins.
    best = [[float("inf")] * (num + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for k in range(1, num_stages + 1):
        for i in range(k, num + 1):
            for j in range(k - 1, i):
                longest = max(best[k - 1][j], prefix[i] - prefix[j])
                if longest < best[k][i]:
                    best[k][i], cut[k][i] = longest, j
    points: list[int] = []
    end = num
    for k in range(num_stages, 1, -1):
        end = cut[k][end]
        points.append(end)
    return points[::-1]


def measure_children_s(
    children: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, rounds: int = 3
) -> list[float]:
    """Seconds that forward and backward of each child take on one micro-batch, the best of ``rounds``.

    Copies are measured, one at a time, so that statistics, gradients and the random state of the model stay untouched.
    """
    times_s: list[float] = []
    value: Any = None
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for index, child in enumerate(children):
            module = _copy_of(child, index).to(device)
            entry = stage_entry(module, takes_target=False)
            given_args, given_kwargs = (args, kwargs) if index == 0 else ((value,), {})
            call: Callable[..., Any] = module if index == 0 else entry
            best_s = float("inf")
            for _ in range(rounds):
                fresh = map_tensors((given_args, given_kwargs), lambda t: _leaf(t, device))
                begin_s = time.perf_counter()
                output = call(*fresh[0], **fresh[1])
                _backward(output)
                best_s = min(best_s, time.perf_counter() - begin_s)
            times_s.append(best_s)
            value = map_tensors(output, torch.Tensor.detach)
    return times_s


def _copy_of(child: nn.Module, index: int) -> nn.Module:
    try:
        return copy.deepcopy(child)
    except Exception as error:  # whatever a user's module holds: activations, locks, open files
        raise ValueError(
            problem(
                "the stages cannot be balanced by time",
                expected="child modules that can be copied",
                got=f"{type(error).__name__}: {error}",
                where=f"child {index}, {type(child).__name__}",
                hint="Pass split_points=[...].",
            )
        ) from error


def _leaf(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.detach().to(device)
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def _backward(output: Any) -> None:
    roots = [tensor for tensor in encode(output)[0] if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    for root in roots:
        if root.is_cuda:
            torch.cuda.synchronize(root.device)

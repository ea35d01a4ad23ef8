"""How exact an operator is: its errors against float64, beside those of plain torch in the same precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.op_cases import OpCase, outputs

Results = tuple[list[Tensor], dict[str, "Tensor | None"]]  # outputs, gradients by name


def random_like(made: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Float64 output gradients; the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device) for o in made]


def run(
    function: Callable[..., Any],
    tensors: dict[str, Tensor],
    live: set[str],
    grads: Sequence[Tensor] | None = None,
    as_they_lie: bool = False,
) -> Results:
    """Outputs, and gradients of what is live for random output gradients (or those given).

    Args:
        as_they_lie: the function gets the tensors' own memory, not contiguous copies.
    """
    tensors = {
        name: (t.detach() if as_they_lie else t.detach().clone()).requires_grad_(name in live)
        for name, t in tensors.items()
    }
    made = outputs(function(*tensors.values()))
    if grads is None:
        grads = random_like(made, seed=5)
    roots = [(o, g.to(o.dtype)) for o, g in zip(made, grads, strict=True) if o.requires_grad]
    if roots:
        torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
    return [o.detach() for o in made], {name: t.grad for name, t in tensors.items()}


def layouts(x: Tensor) -> Iterator[Tensor]:
    """The same numbers, laid out otherwise."""
    yield x.clone()
    yield x.mT.contiguous().mT
    yield torch.stack([x, x + 1], -1)[..., 0]
    yield torch.cat([x, x], 0)[: x.shape[0]]
    yield x[:1].expand_as(x)


def strided(grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients that are no contiguous tensors: what attention sends back, or an expanded sum."""
    return [torch.stack([g, g], -1)[..., 0] if g.dim() else g for g in grads]


def _named(results: Results) -> dict[str, Tensor]:
    made, grads = results
    named = {f"output {i}": output for i, output in enumerate(made)}
    return named | {f"gradient of {name}": grad for name, grad in grads.items() if grad is not None}


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


class Worst:
    """The worst errors of an operator and of plain torch over many samples."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._eps = torch.finfo(dtype).eps
        self._dtype = dtype
        self._errors: dict[str, tuple[float, float, float]] = {}  # ours, plain torch's, one rounding
        self._faults: list[str] = []

    def add(self, fused: Results, plain: Results, exact: Results) -> None:
        ours, theirs, right = (_named(results) for results in (fused, plain, exact))
        if ours.keys() != right.keys():
            self._faults.append(f"expected {sorted(right)}, got {sorted(ours)}")
        for what, got in ours.items():
            if what not in right:
                continue
            truth = right[what]
            if got.shape != truth.shape or got.dtype not in (self._dtype, torch.float32):  # losses are float32
                self._faults.append(f"{what}: got {tuple(got.shape)} {got.dtype}, expected {tuple(truth.shape)}")
                continue
            found = (
                _largest(got.double() - truth),
                _largest(theirs[what].double() - truth),
                self._eps * _largest(truth),
            )
            if not found[0] < float("inf"):  # max() would drop a NaN
                self._faults.append(f"{what}: not finite")
            before = self._errors.get(what, (0.0, 0.0, 0.0))
            self._errors[what] = tuple(map(max, before, found))

    def share(self) -> float:
        """The largest error as a share of what is allowed."""
        return max((e / (2 * p + r) for e, p, r in self._errors.values() if e > 0), default=0.0)

    def faults(self) -> list[str]:
        """What breaks the rule: at most twice plain torch's error, and one rounding of the result."""
        return self._faults + [
            f"{what}: error {error:.3g}, plain torch {plain:.3g}, one rounding {rounding:.3g}"
            for what, (error, plain, rounding) in self._errors.items()
            if error > 2 * plain + rounding
        ]


def worst_errors(
    case: OpCase,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    live: set[str] | None = None,
    seeds: Sequence[int] = range(20),
) -> Worst:
    """The operator's errors over the samples of ``seeds``; ``live``: what requires grad (default: everything)."""
    live = set(case.shapes) if live is None else live
    worst = Worst(dtype)
    for seed in seeds:
        tensors = {name: tensor.to(device) for name, tensor in case.tensors(dtype, seed).items()}
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        grads = [g.to(dtype) for g in random_like(run(case.plain, wide, set())[0], seed)]
        exact = run(case.plain, wide, live, grads)
        worst.add(run(case.fused, tensors, live, grads), run(case.plain, tensors, live, grads), exact)
    return worst


def worst_layout_errors(case: OpCase, dtype: torch.dtype, *, device: str = "cpu") -> Worst:
    """The operator's errors where its first tensor and the gradients that come back are not contiguous."""
    tensors = {name: tensor.to(device) for name, tensor in case.tensors(dtype).items()}
    first, live, worst = next(iter(tensors)), set(tensors), Worst(dtype)
    for laid in layouts(tensors[first]):
        given = {**tensors, first: laid}
        wide = {name: tensor.contiguous().double() for name, tensor in given.items()}
        grads = strided([g.to(dtype) for g in random_like(run(case.plain, wide, set())[0], 5)])
        fused = run(case.fused, given, live, grads, as_they_lie=True)
        worst.add(fused, run(case.plain, given, live, grads), run(case.plain, wide, live, grads))
    return worst

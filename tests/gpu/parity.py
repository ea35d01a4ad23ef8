"""The fused operators on a device against their plain formulas: ``python -m tests.gpu.parity --device cuda``.

Forward, the backward of frozen and of trained weights, three dtypes, odd shapes, tensors that are not contiguous, empty
ones, and more elements than 32 bits count. The rule is that of the CPU's tests: at most twice the error of plain torch
in the same dtype, against float64, and one rounding of the result.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import torch

from tests.op_cases import CASES, OpCase, activation_cases, linear_cases, loss_case, norm_cases, rope_cases
from tests.op_parity import Worst, worst_errors, worst_layout_errors
from timelyfreeze import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL_SHAPES = ((1, 3), (3, 7), (0, 8), (2, 0, 8))  # a norm of 1 or 2 numbers has a gradient of nothing but rounding
# Around what a thread, a warp and a block take of a row, and rows that no block divides.
LARGE_SHAPES = ((5, 64), (17, 1000), (2, 3, 1024), (3, 4097), (2, 8208), (70000, 2))


def sized_cases(large: bool) -> Iterator[tuple[str, OpCase]]:
    """Name and case of every operator at shapes that kernels have to take apart in odd ways."""
    for shape in SMALL_SHAPES + (LARGE_SHAPES if large else ()):
        for name, case in (norm_cases(shape) | activation_cases(shape)).items():
            yield f"{name} of {list(shape)}", case
    for sizes in [(1, 1, 1, 1, 2), (2, 3, 1, 7, 10)] + ([(2, 8, 2, 130, 64), (1, 4, 4, 33, 128)] if large else []):
        for name, case in rope_cases(*sizes).items():
            yield f"{name} of {list(sizes)}", case
    for rows, width, num_classes in [(3, 4, 2), (5, 3, 7)] + ([(130, 64, 1003), (70, 32, 32001)] if large else []):
        target = torch.arange(rows) * 31 % num_classes
        target[rows // 2] = -100
        options = {"label_smoothing": 0.1, "z_loss": 0.01}
        yield f"linear_cross_entropy of {[rows, width, num_classes]}", loss_case(options, target, width, num_classes)
    if large:
        for name, case in linear_cases((2, 65, 96), (40, 24)).items():
            yield f"{name} of [2, 65, 96]", case


def states(case: OpCase) -> Iterator[tuple[str, set[str]]]:
    """What requires grad: everything, and everything but the weights."""
    names = set(case.shapes)
    yield "trained", names
    if case.weights:
        yield "frozen", names - set(case.weights)


def comparisons(device: str, large: bool) -> Iterator[tuple[str, Worst]]:
    """What is compared, and the errors found."""
    for dtype in DTYPES:
        short = str(dtype).removeprefix("torch.")
        for name, case in CASES.items():
            for state, live in states(case):
                yield f"{name}, {short}, {state}", worst_errors(case, dtype, device=device, live=live, seeds=range(10))
            yield f"{name}, {short}, not contiguous", worst_layout_errors(case, dtype, device=device)
        for name, case in sized_cases(large):
            # Of few numbers plain torch may get all right by luck, so take more of them.
            is_small = max(math.prod(shape) for shape in case.shapes.values()) < 1000
            for state, live in states(case):
                seeds = range(20 if is_small else 2)
                yield f"{name}, {short}, {state}", worst_errors(case, dtype, device=device, live=live, seeds=seeds)


def faults_beyond_32_bits(device: str) -> list[str]:
    """An activation and a norm of 2^31 + 4096 numbers: the last row is that of the same row alone."""
    x = torch.zeros(2**31 // 4096 + 1, 4096, dtype=torch.bfloat16, device=device)
    x[-1] = torch.linspace(-3, 3, 4096, device=device)
    return [
        f"{name} of {x.numel()} numbers: the last row is wrong"
        for name, op in (("silu", ops.silu), ("rms_norm", lambda t: ops.rms_norm(t, None, 1e-5)))
        if not torch.allclose(op(x)[-1], op(x[-1:])[0], rtol=0.01)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="leave out what takes long on a CPU")
    args = parser.parse_args()
    num_compared, num_faults, worst_share, worst_name = 0, 0, 0.0, "none"
    for name, worst in comparisons(args.device, large=not args.small):
        num_compared += 1
        for fault in worst.faults():
            num_faults += 1
            print(f"FAULT {name}: {fault}", flush=True)
        if worst.share() > worst_share:
            worst_share, worst_name = worst.share(), name
    if args.device.startswith("cuda"):
        num_compared += 2
        for fault in faults_beyond_32_bits(args.device):
            num_faults += 1
            print(f"FAULT {fault}", flush=True)
    print(
        f"{num_compared} comparisons, {num_faults} faults; largest error {worst_share:.2f} of what is allowed "
        f"({worst_name})"
    )
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())

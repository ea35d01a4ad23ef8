"""Steps of the main job's model in a pipeline on a device: ``python -m tests.gpu.pipeline_step --device cuda:0``.

Two stages on one device, each with its streams and events, against the same pipeline on the CPU in float64. Loss and
gradients may be off by twice what float32 is without a pipeline, on the CPU or on the device, and some last bits.
Plain, accelerated, with split backward, and under a plan that freezes and cuts.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

from tests.models import plain_step
from tests.pipelines import ratio_plan
from timelyfreeze import FreezeConfig, FreezingPipeline
from timelyfreeze.cli.config import ModelConfig
from timelyfreeze.cli.model import build_model, byte_loss

Results = dict[str, Tensor]
CHUNKS, NUM_STEPS = 4, 3
MODES = {
    "plain": {"accelerate": False},
    "accelerated": {},
    "split backward": {"schedule": "zb_h1"},
    "frozen": {"freeze": True},
}


def made(width: int, dtype: torch.dtype) -> nn.Module:
    return build_model(ModelConfig(width=width, num_layers=4, num_heads=4, sequence_length=16), 0).to(dtype)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (8, 17), generator=generator) for _ in range(NUM_STEPS)]


def results(model: nn.Module, loss: Tensor) -> Results:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach().cpu().double() for name, tensor in {"loss": loss, **grads}.items()}


def steps(device: str, dtype: torch.dtype, width: int, schedule: str = "1f1b", **options: object) -> Results:
    """A pipeline's last loss, and the gradients that the steps have added up, by name."""
    model = made(width, dtype)
    if options.pop("freeze", False):
        # All or nothing of a stage: what a share of it is depends on times that are measured.
        plan = ratio_plan([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]], schedule)
        options["freeze"] = FreezeConfig(plan=plan, ramp_steps=0)
    with FreezingPipeline(
        model, 2, CHUNKS, schedule=schedule, loss_fn=byte_loss, devices=[device] * 2, split_points=[3], **options
    ) as pipe:
        for tokens in batches():
            loss = pipe.step(tokens[:, :-1], target=tokens[:, 1:]).loss
        return results(model, loss)


def plain_steps(device: str, dtype: torch.dtype, width: int) -> Results:
    """The same without a pipeline, and without freezing."""
    model = made(width, dtype).to(device)
    for tokens in batches():
        tokens = tokens.to(device)
        loss = plain_step(model, byte_loss, tokens[:, :-1], tokens[:, 1:], CHUNKS)
    return results(model, loss)


def relative_errors(found: Results, exact: Results) -> dict[str, float]:
    return {name: ((found[name] - truth).norm() / truth.norm()).item() for name, truth in exact.items()}


def allowed_errors(device: str, width: int) -> dict[str, float]:
    """By name: twice float32's own error, the larger of the CPU's and the device's, and some last bits."""
    exact = plain_steps("cpu", torch.float64, width)
    sides = [relative_errors(plain_steps(side, torch.float32, width), exact) for side in ("cpu", device)]
    return {name: 2 * max(side[name] for side in sides) + 8 * torch.finfo(torch.float32).eps for name in exact}


def faults(mode: str, device: str, width: int, allowed: dict[str, float]) -> list[str]:
    """What is farther from the CPU's pipeline in float64 than is allowed."""
    options = MODES[mode]
    exact = steps("cpu", torch.float64, width, **{**options, "accelerate": False})
    found = steps(device, torch.float32, width, **options)
    if found.keys() != exact.keys():
        return [f"{mode}: gradients of {sorted(found.keys() ^ exact.keys())} on one side alone"]
    return [
        f"{mode}: {name}: relative error {error:.3g}, allowed {allowed[name]:.3g}"
        for name, error in relative_errors(found, exact).items()
        if not error <= allowed[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    allowed = allowed_errors(args.device, args.width)
    wrong = [fault for mode in MODES for fault in faults(mode, args.device, args.width, allowed)]
    for fault in wrong:
        print(f"FAULT {fault}", flush=True)
    print(f"{len(MODES)} modes of {NUM_STEPS} steps, {len(wrong)} faults: {', '.join(MODES)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

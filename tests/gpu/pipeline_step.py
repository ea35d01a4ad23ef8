"""Steps of the main job's model in a pipeline on a device: ``python -m tests.gpu.pipeline_step --device cuda``.

Two stages on one device, each with its streams and events, against the same pipeline on the CPU in float32 and in
float64: loss and gradients may be off by twice what the CPU's float32 is, and some last bits. Plain, accelerated, with
split backward, and under a plan that freezes and cuts.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

from tests.pipelines import cut_plan
from timelyfreeze import FreezeConfig, FreezingPipeline
from timelyfreeze.cli.config import ModelConfig
from timelyfreeze.cli.model import build_model, byte_loss

CHUNKS, NUM_STEPS = 4, 3
MODES = {
    "plain": {"accelerate": False},
    "accelerated": {},
    "split backward": {"schedule": "zb_h1"},
    "frozen": {"freeze": True},
}


def steps(device: str, dtype: torch.dtype, width: int, schedule: str = "1f1b", **options: object) -> dict[str, Tensor]:
    """The last loss, and the gradients that the steps have added up, by name."""
    config = ModelConfig(width=width, num_layers=4, num_heads=4, sequence_length=16)
    model: nn.Module = build_model(config, 0).to(dtype)
    generator = torch.Generator().manual_seed(1)
    if options.pop("freeze", False):
        plan = cut_plan([0, 1, 0, 0], 2, at_cut=0.5, above=0.5, schedule=schedule)
        options["freeze"] = FreezeConfig(plan=plan, ramp_steps=0)
    with FreezingPipeline(
        model, 2, CHUNKS, schedule=schedule, loss_fn=byte_loss, devices=[device] * 2, split_points=[3], **options
    ) as pipe:
        for _ in range(NUM_STEPS):
            tokens = torch.randint(0, 256, (8, 17), generator=generator)
            loss = pipe.step(tokens[:, :-1], target=tokens[:, 1:]).loss
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: tensor.detach().cpu() for name, tensor in {"loss": loss, **found}.items()}


def faults(mode: str, device: str, width: int) -> list[str]:
    """What is farther from float64 than twice the CPU's float32, and some last bits of the largest gradient."""
    options = MODES[mode]
    exact = steps("cpu", torch.float64, width, **{**options, "accelerate": False})
    plain = steps("cpu", torch.float32, width, **{**options, "accelerate": False})
    found = steps(device, torch.float32, width, **options)
    if found.keys() != exact.keys():
        return [f"{mode}: gradients of {sorted(found.keys() ^ exact.keys())} on one side alone"]
    wrong = []
    for name, truth in exact.items():
        error, allowed = ((side[name].double() - truth).norm().item() for side in (found, plain))
        last_bits = 8 * torch.finfo(torch.float32).eps * truth.norm().item()
        if not error <= 2 * allowed + last_bits:
            wrong.append(f"{mode}: {name}: error {error:.3g}, the CPU's {allowed:.3g}, last bits {last_bits:.3g}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    wrong = [fault for mode in MODES for fault in faults(mode, args.device, args.width)]
    for fault in wrong:
        print(f"FAULT {fault}", flush=True)
    print(f"{len(MODES)} modes of {NUM_STEPS} steps, {len(wrong)} faults: {', '.join(MODES)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

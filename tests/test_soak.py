"""A long run holds memory, threads and file descriptors flat."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

SCRIPT = """
    import json, os, threading, torch
    from torch import nn
    from timelyfreeze import FreezeConfig, FreezingPipeline

    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def state():
        return resident_bytes(), threading.active_count(), len(os.listdir("/proc/self/fd"))

    if __name__ == "__main__":
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU()) for _ in range(4)])
        config = FreezeConfig(max_ratio=0.6, replan_interval_steps=100, replan_drift_ratio=0.2)
        x = torch.randn(64, 64)
        seen = []
        with FreezingPipeline(model, 2, 8, loss_fn=nn.functional.mse_loss, freeze=config) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters())
            for step in range(2000):
                pipe.step(x[: 64 - step % 3], target=x[: 64 - step % 3])
                optimizer.step()
                optimizer.zero_grad()
                if step % 250 == 249:
                    seen.append(state())
        print(json.dumps(seen))
"""


def test_two_thousand_steps_hold_memory_flat():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    resident, threads, files = zip(*seen, strict=True)
    # By step 500 every buffer has been made once. 1,500 steps that leaked one 64 x 64 gradient each would add 24 MB.
    assert max(resident[2:]) - resident[1] < 2 * 2**20, resident
    assert max(threads) - min(threads) <= 1, threads  # a plan may be solved just then
    assert max(files) == min(files), files

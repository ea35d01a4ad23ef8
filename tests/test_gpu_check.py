"""``make check-gpu`` without a GPU: it says so; and what it runs there, at sizes for a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import check, kernel_calls, parity
from tests.gpu.check import Outcome, Part
from tests.op_cases import CASES, OpCase
from tests.op_parity import worst_errors, worst_layout_errors

ROOT = Path(__file__).resolve().parent.parent


def run_check(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.check", *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_without_a_gpu_it_says_so_in_one_line():
    done = run_check(CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == "check-gpu: no GPU that torch can use; nothing was checked.\n"


def test_every_program_of_it_runs_on_a_cpu():
    """Parity, pipeline, benchmark and kernel calls pass, and the benchmark leaves a row for each kernel."""
    done = run_check("--device", "cpu", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout
    table = done.stdout[done.stdout.rindex("part ") :].splitlines()
    assert [line.split("  ")[0].strip() for line in table[1:5]] == ["parity", "pipeline", "benchmark", "kernel calls"]
    rows = [json.loads(line) for line in (check.WORK / "rows" / "fused_kernels_cuda.jsonl").read_text().splitlines()]
    kernels = {row["op"] for row in rows if "share_of_copy" in row}
    assert kernels >= {"rms_norm and residual, frozen backward", "swiglu, backward", "rope_qkv, backward"}
    assert {"commit", "torch", "device", "cuda", "num_bytes", "gb_per_s", "copy_gb_per_s"} <= set(rows[0])
    contests = {row["op"]: row["seconds_by_library"] for row in rows if "seconds_by_library" in row}
    assert contests["swiglu, backward"].keys() == {"fused", "eager"}


def parts(*bodies, limit_s=60.0):
    return [Part(f"part {i}", [sys.executable, "-c", body], limit_s) for i, body in enumerate(bodies)]


def outcome_of(part, monkeypatch, tmp_path, seconds_left=60.0):
    monkeypatch.setattr(check, "WORK", tmp_path)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    return check.run(part, seconds_left, None)


@pytest.mark.parametrize(
    ("body", "result", "what"),
    [
        ("print('all well')", "passed", "all well"),
        ("print('one fault'); raise SystemExit(1)", "failed", "one fault"),
        ("import os; print('then', flush=True); os.abort()", "failed", "then"),
        ("import nothing_of_this_name", "failed", "No module named"),
        ("print('=== ERROR SUMMARY: 3 errors'); print('more'); raise SystemExit(1)", "failed", "3 errors"),
    ],
)
def test_a_part_is_what_its_process_ends_with(body, result, what, monkeypatch, tmp_path):
    found = outcome_of(parts(body)[0], monkeypatch, tmp_path)
    assert found.result == result
    assert what in found.what


def test_a_part_that_hangs_is_ended_with_what_it_started(monkeypatch, tmp_path):
    body = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    found = outcome_of(parts(body, limit_s=1.0)[0], monkeypatch, tmp_path)
    assert found.result == "failed"
    assert "not done after 1 s" in found.what


def test_a_part_without_its_tool_or_time(monkeypatch, tmp_path):
    missing = Part("memcheck", ["nothing"], 60.0, missing=check.NO_SANITIZER)
    assert outcome_of(missing, monkeypatch, tmp_path) == Outcome(missing, "skipped", 0.0, check.NO_SANITIZER)
    late = outcome_of(parts("print(1)")[0], monkeypatch, tmp_path, seconds_left=3.0)
    assert (late.result, late.what) == ("failed", "no time left")


def test_what_compute_sanitizer_says(monkeypatch, tmp_path):
    """Errors in other libraries' kernels are told, and are no failure; a machine that it cannot work on is none."""
    ours = "========= at void timelyfreeze::kernels::norm_forward_kernel<float, 4>"
    theirs = "========= at sgemm_kernel"
    end = "9 calls, 0 faults\n========= ERROR SUMMARY: 1 error"
    for text, result in [
        (f"{ours}\n{end}", "failed"),
        (f"{theirs}\n{end}", "passed"),
        (f"{theirs}\n========= ERROR SUMMARY: 1 error", "failed"),  # our calls did not come to their end
        ("========= Error: Device not supported", "skipped"),
    ]:
        part = Part("racecheck", [sys.executable, "-c", f"print({text!r}); raise SystemExit(1)"], 60.0)
        assert outcome_of(part, monkeypatch, tmp_path).result == result, text


def test_a_failed_part_fails_the_check_and_hides_no_other(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(check, "parts_on_cpu", lambda: parts("raise SystemExit(1)", "print('ran')"))
    monkeypatch.setattr(check, "WORK", tmp_path)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["check", "--device", "cpu"])
    assert check.main() == 1
    assert "part 1        passed" in capsys.readouterr().out


def test_parts_fit_into_six_minutes():
    assert check.BUDGET_S < 360
    names = [part.name for part in check.parts_on_gpu(0.85)]
    assert names[0] == "build"
    assert {"parity", "pipeline", "benchmark", "memcheck", "racecheck"} < set(names)


def off_by(amount):
    """An activation whose results and gradients are wrong by a share."""
    case = CASES["silu"]
    return OpCase(lambda x: case.fused(x) * (1 + amount), case.plain, case.shapes)


def test_errors_are_found():
    for dtype in parity.DTYPES:
        eps = torch.finfo(dtype).eps
        assert worst_errors(off_by(0.0), dtype).faults() == []
        assert [fault.split(":")[0] for fault in worst_errors(off_by(8 * eps), dtype).faults()] == [
            "output 0",
            "gradient of x",
        ]
        assert worst_layout_errors(off_by(8 * eps), dtype).faults() != []
    nan = OpCase(lambda x: CASES["silu"].fused(x) * float("nan"), CASES["silu"].plain, CASES["silu"].shapes)
    assert "output 0: not finite" in worst_errors(nan, torch.float32).faults()
    flat = OpCase(lambda x: CASES["silu"].fused(x).flatten(), CASES["silu"].plain, CASES["silu"].shapes)
    with pytest.raises((RuntimeError, ValueError)):
        worst_errors(flat, torch.float32)


def test_kernel_calls_notice_what_differs():
    x = torch.randn(100)
    assert kernel_calls.is_close(x, x.clone(), torch.float32)
    assert not kernel_calls.is_close(x, x + 1e-3, torch.float32)
    assert len({name.split(" of ")[0] for name, *_ in kernel_calls.calls()}) >= 18

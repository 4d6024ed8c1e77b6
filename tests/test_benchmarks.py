"""The shell scripts of benchmarks/."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import ROOT

GPU = ROOT / "benchmarks/gpu.sh"
PARTS = ["attention", "training", "decoding", "kernels"]


def stand_in(folder: Path, body: str) -> Path:
    """Write an interpreter for `gpu.sh` that runs shell code with the name of the script as `$script`."""
    file = folder / "python"
    file.write_text(f'#!/bin/bash\nscript=$(basename "$1")\necho "ran $script ${{*:2}}"\n{body}\n')
    file.chmod(0o755)
    return file


def gpu(python: Path, *options: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environment |= {"PYTHON": str(python)}
    return subprocess.run([GPU, *options], env=environment, capture_output=True, text=True, timeout=300, check=False)


def started(output: str) -> list[str]:
    """Return the parts that were started, in order."""
    return [line.split()[1].rstrip(",") for line in output.splitlines() if line.endswith(" s") and "==" in line]


def test_attention_comes_first_and_all_parts_fit_into_nine_minutes(tmp_path):
    result = gpu(stand_in(tmp_path, "true"), "--results", "somewhere")
    assert result.returncode == 0, result.stderr
    assert started(result.stdout) == PARTS and result.stdout.endswith("== all parts succeeded\n")
    assert "ran train_gpu.py gpt2_124m --results somewhere\n" in result.stdout
    assert "ran decode.py --device gpu --batch-sizes 1 64 --rounds 5 --results somewhere\n" in result.stdout
    limits = [int(line.split()[-2]) + 5 for line in result.stdout.splitlines() if line.endswith(" s")]  # and to kill it
    assert len(limits) == 4 and sum(limits) < 9 * 60


def test_failing_part_leaves_the_others_and_is_named_in_the_end(tmp_path):
    python = stand_in(tmp_path, "case $script in attention*) exit 1 ;; decode*) exit 124 ;; esac")
    result = gpu(python)
    assert result.returncode == 1 and started(result.stdout) == PARTS
    assert result.stderr == "== failed: attention (status 1) decoding (out of time)\n"


def test_machine_without_a_gpu_ends_after_the_first_part(tmp_path):
    result = gpu(stand_in(tmp_path, "exit 2"))
    assert result.returncode == 2 and started(result.stdout) == ["attention"]


@pytest.mark.slow
def test_benchmark_of_a_gpu_ends_at_once_on_a_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    result = gpu(Path(sys.executable))
    assert (result.returncode, result.stderr) == (2, "error: there is no GPU; --smoke runs on any device.\n")
    assert started(result.stdout) == ["attention"]


def test_parts_are_chosen_by_name(tmp_path):
    python = stand_in(tmp_path, "true")
    assert started(gpu(python, "kernels", "attention").stdout) == ["attention", "kernels"]
    for wrong in ("decode", "60", "train_gpu.py"):
        result = gpu(python, wrong)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == f"error: there is no part {wrong}; there are: {' '.join(PARTS)} \n"
    assert "error: --results needs a folder" in gpu(python, "--results").stderr


def test_interruption_ends_the_part_that_runs(tmp_path):
    python = stand_in(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 50")
    with subprocess.Popen([GPU], env=os.environ | {"PYTHON": str(python)}, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 130
    number = int((tmp_path / "pid").read_text())
    while Path(f"/proc/{number}").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.exhaustive
def test_all_parts_run_at_tiny_shapes_on_a_cpu(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    result = gpu(Path(sys.executable), "--smoke", "--results", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    names = ("gpu_attention", "gpu_gpt2_124m", "decode_gpu", "gpu_kernels")
    figures = [json.loads((tmp_path / f"{name}.json").read_text())["figures"] for name in names]
    attention, training, decoding, kernels = figures
    assert attention["attention"] == "attention: xla (cpu has no fused kernel)" and attention["fused"] is False
    assert result.stdout.splitlines()[1] == "cpu: attention: xla (cpu has no fused kernel): NOT FUSED"
    assert training["share_of_matmul_rate"]["jaxformer"] > 0
    assert set(training["median_ms_a_step"]) == {"jaxformer", "torch_compiled"}
    assert decoding["batch_1"]["same_text_as_transformers"]["jaxformer float32"] == 1
    assert kernels["kernels_ms_a_step"]["total"] > 0

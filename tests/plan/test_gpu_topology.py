"""Plans for NVIDIA GPUs by XLA's real compiler, which needs no GPU."""

import subprocess
import sys

import pytest

from jaxformer.plan.topology import GPU
from tests.cli.test_plan import SMALL, lines, number
from tests.helpers import ROOT, changed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GPU.is_installed, reason="the compiler for NVIDIA GPUs is not installed"),
]


def test_plan_for_absent_gpus():
    options = ["--mesh", "fsdp=8", "--model.context-length", "128", "--compute.remat", "block", "--model.n-blocks", "3"]
    command = [sys.executable, "-m", "jaxformer", *changed(SMALL, *options, "--compute.scan-blocks")]
    done = subprocess.run([*command, "--topology", "h100:8"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    values = lines(done.stdout)
    assert "8 x NVIDIA H100 80GB HBM3, mesh fsdp 8" in done.stdout
    assert "attention: cudnn, precision: bfloat16" in done.stdout
    assert values["memory needed"].endswith("GB of 63.7 GB, 75% of the GPU's")  # 0.75 x 84,942,979,072 bytes
    assert float(values["sent in all"].split(", ")[1].split()[0]) < 1.25
    assert number(values["all-reduce"]) < 0.1 * number(values["reduce-scatter"])
    *_, estimate, unseen, last = done.stdout.splitlines()
    assert "MFU" in estimate and unseen.startswith("not seen without a GPU: ") and last.startswith("fits: ")

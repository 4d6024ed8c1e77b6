"""Plans for NVIDIA GPUs by XLA's real compiler, which needs no GPU."""

import os
import re
import subprocess
import sys

from tests.cli.test_plan import SMALL, lines, number
from tests.helpers import ROOT, changed
from tests.plan.gpu import needs_compiler

pytestmark = needs_compiler

SLOW_COMPILE = re.compile(r"slow_operation_alarm|\] Very slow compile\?|\] The operation took |^\**$")
"""Pattern of the lines that XLA prints when a busy machine takes minutes to compile."""


def plan(*options: str) -> subprocess.CompletedProcess[str]:
    """Plan a step of a small model, where the user has set no platform."""
    env = {name: x for name, x in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-m", "jaxformer", *changed(SMALL, *options)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def test_plan_for_absent_gpus():
    options = ["--mesh", "fsdp=8", "--model.context-length", "128", "--compute.remat", "block", "--model.n-blocks", "3"]
    done = plan(*options, "--compute.scan-blocks", "--topology", "h100:2x4")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    values = lines(done.stdout)
    assert "8 x NVIDIA H100 80GB HBM3, mesh fsdp 8" in done.stdout
    assert "attention: cudnn, precision: bfloat16" in done.stdout
    assert values["memory needed"].endswith("GB of 63.7 GB, 75% of the GPU's")  # 0.75 x 84,942,979,072 bytes
    assert values["all-gather"].endswith(", between hosts, by 4 GPU(s) of each")
    assert float(values["sent in all"].split(", ")[1].split()[0]) < 1.25
    assert number(values["all-reduce"]) < 0.1 * number(values["reduce-scatter"])
    *_, estimate, unseen, last = done.stdout.splitlines()
    assert "MFU" in estimate and unseen.startswith("not included without a GPU: ") and last.startswith("fits: ")


def test_plugin_without_a_gpu_is_one_line():
    done = plan("--mesh", "data=8")
    assert done.returncode == 0, done.stderr
    assert "on 8 x cpu" in done.stdout
    lines = [line for line in done.stderr.splitlines() if not SLOW_COMPILE.search(line)]
    assert len(lines) <= 1 and "Traceback" not in done.stderr

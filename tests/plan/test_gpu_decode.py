"""Decode steps as XLA compiles them for NVIDIA GPUs, which needs no GPU."""

import json
import subprocess
import sys

import pytest

from benchmarks import decode_kernels
from jaxformer.plan.topology import GPU
from tests.helpers import ROOT

SCRIPT = [sys.executable, "-m", "benchmarks.decode_kernels"]
KERNELS = 34
"""Of two blocks; jax 0.10 makes 32 to 34, 36 where Q, K and V are multiplied with apart, and 50 where norms and
matrices are as in training."""


@pytest.mark.slow
@pytest.mark.skipif(not GPU.is_installed, reason="the compiler for NVIDIA GPUs is not installed")
def test_a_decode_step_has_few_kernels_and_reads_each_weight_once(tmp_path):
    options = ["--n-blocks", "2", "--batch-sizes", "1", "--results", str(tmp_path)]
    done = subprocess.run([*SCRIPT, *options], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = json.loads((tmp_path / "decode_kernels.json").read_text())["figures"]["batch_1"]
    assert all(count["kernels_per_step"] <= KERNELS for count in counts.values())
    block, embedding, cache = 12 * 768**2, 50_257 * 768, 2 * 2 * 1024 * 768 * 2
    for weights, size in {"float32": 4, "bfloat16": 2, "int8": 1}.items():
        read = size * (2 * block + embedding) + cache
        assert read < 1e6 * counts[weights]["mb_per_step"] < 1.05 * read


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:2", "h100:0"])
def test_a_topology_that_is_not_one_gpu_is_refused(topology, capsys):
    assert decode_kernels.main(["--topology", topology]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and topology in err and err.count("\n") == 1

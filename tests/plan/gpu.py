"""The compiler for NVIDIA GPUs, in a process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from jaxformer.plan.topology import GPU
from tests.helpers import ROOT

needs_compiler = [
    pytest.mark.slow,
    pytest.mark.skipif(not GPU.is_installed, reason="the compiler for NVIDIA GPUs is not installed"),
]
"""Marks of tests that compile for GPUs."""


def run_with_compiler(program: str, *arguments: str) -> Any:
    """Return the JSON that a program prints last; `plan.topology.topology_devices` gives it GPUs to compile for."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        env={name: x for name, x in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])

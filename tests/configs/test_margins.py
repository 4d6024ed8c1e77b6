"""Stability margins of `configs/quick.py`; `studies/margins.py` measures more of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from studies import margins
from tests.helpers import ROOT

STEPS = 60
"""Some more than the warm-up, the steps of which count in an excursion, too, as they are more than half of all."""


@pytest.mark.slow
def test_first_steps_at_twice_the_learning_rate_have_no_loss_spike(tmp_path: Path) -> None:
    configs = ["quick.py:modern"]  # of the README
    # Compiled as for a user: unoptimised code, as other tests run it, takes minutes.
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    subprocess.run(
        [sys.executable, "-m", "studies.margins", "--out", str(tmp_path), "--only", *configs, "--seeds", "1",
         "--devices", "2", "--factors", "2", "--steps", str(STEPS), "--seconds", "700"],
        cwd=ROOT, env=env, check=True, capture_output=True, timeout=800,
    )  # fmt: skip
    pieces = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert [(p["config"], p["seed"], p["factor"]) for p in pieces] == [(config, 0, 2.0) for config in configs]
    for piece in pieces:
        assert (piece["devices"], piece["of"], piece["status"]) == (2, 1200, "interrupted")
        assert STEPS <= piece["steps"] <= STEPS + 2
        assert piece["excursion"] <= margins.SPIKE_NATS
        assert piece["last_loss"] < piece["first_loss"] - 1.5

"""Training speed on the CPU beside torch, at the shape of `configs/quick.py:modern`.

    python benchmarks/train_cpu.py [--batch-size B] [--python-torch PATH]

Three processes take turns, so that whatever else the machine does falls on all alike: jaxformer as `train.py`
sets it up, and the same model in torch, eager and compiled. They start from the same weights, learn from the same
random tokens with the same optimizer and schedule, and their losses have to agree before anything is timed.
A step's time goes from a batch in NumPy to its loss as a Python float.

torch may live in an environment of its own (`--python-torch`), which then needs NumPy but neither JAX nor jaxformer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import record
from peers import WARM_UP, Job, software, start
from processes import Failed, Worker, has, take_turns

PEERS = {"torch_eager": ["--eager"], "torch_compiled": []}


def report(workers: Sequence[Worker], ms: dict[str, float], rounds: int, steps: int) -> None:
    """Print a table and store the figures."""
    facts = workers[0].facts
    tokens = facts["batch_size"] * facts["context_length"]
    print(f"configs/quick.py:modern, {facts['parameters']:,} parameters, {facts['batch_size']} x "
          f"{facts['context_length']} tokens a step, {record.cores()} cores")  # fmt: skip
    print(f"{'':16}{'ms a step':>10}{'tokens/s':>10}{'jaxformer is':>16}")
    for name, each in ms.items():
        print(f"{name:16}{each:10.1f}{1e3 * tokens / each:10,.0f}{each / ms['jaxformer']:11.2f} x as fast")
    figures = {
        "config": "configs/quick.py:modern",
        **{name: facts[name] for name in ("parameters", "batch_size", "context_length")},
        "rounds": rounds,
        "steps_a_round": steps,
        "median_ms_a_step": {name: round(each, 2) for name, each in ms.items()},
        "speed_over_torch_compiled": round(ms["torch_compiled"] / ms["jaxformer"], 3),
        "speed_over_torch_eager": round(ms["torch_eager"] / ms["jaxformer"], 3),
    }
    print(f"written: {record.write('train_cpu', figures, software(workers))}")


def main() -> int:
    """Measure; 0, 1 if that failed, or 2 without torch."""
    parser = argparse.ArgumentParser(description="Training speed on the CPU beside torch.")
    parser.add_argument("--batch-size", type=int, help="windows a step (default: the config's)")
    parser.add_argument("--python-torch", default=sys.executable, help="an interpreter that has torch and NumPy")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each takes")
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    asked = parser.parse_args()
    if not has(asked.python_torch, "torch", "numpy"):
        print(f"error: {asked.python_torch} has no torch; pip install torch, or give --python-torch.", file=sys.stderr)
        return 2
    batch = {"batch_size": asked.batch_size} if asked.batch_size else {}
    job = Job("quick:modern", WARM_UP + asked.rounds * asked.steps, {"train": batch})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        try:
            workers = start(job, Path(folder), PEERS, asked.python_torch, stack)
            report(workers, take_turns(workers, asked.rounds, asked.steps), asked.rounds, asked.steps)
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Training speed on the CPU beside torch, at the shape of `configs/quick.py:modern`.

    python benchmarks/train_cpu.py [--batch-size B] [--python-torch PATH]

Three processes take turns, so that whatever else the machine does falls on all alike: jaxformer as `train.py`
sets it up, and the same model in torch, eager and compiled. They start from the same weights, learn from the same
random tokens with the same optimizer and schedule, and their losses have to agree before anything is timed.
A step's time goes from a batch in NumPy to its loss as a Python float.

torch may live in an environment of its own (`--python-torch`), which then needs NumPy but neither JAX nor jaxformer:
this file imports each library only in the process that measures it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import record

CONFIG = record.ROOT / "configs" / "quick.py"
BATCHES = 8
"""Different batches; the steps go round them."""
WARM_UP = 5
"""Steps before the first that is timed."""
AGREE = 1e-3
"""Nats by which losses may differ in the warm-up."""
WORKERS = {"jaxformer": "jaxformer", "torch_eager": "torch", "torch_compiled": "torch"}
"""Each process, and the library it imports."""


class Worker:
    """A process that trains when asked, and waits meanwhile."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.name = name
        command = [python, __file__, "--worker", name, "--folder", str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._read()

    def train(self, steps: int) -> dict[str, list[float]]:
        """Take steps; the loss of each, and the milliseconds it took."""
        assert self.process.stdin is not None
        print(json.dumps(steps), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"error: the process of {self.name} ended; what it said stands above.")
        return json.loads(line)


def serve(step: Callable[[int, Any], float], folder: Path, **facts: Any) -> None:
    """A worker's life: say what it is, then for each number read take so many steps and say how they went."""
    import numpy as np

    batches, taken = np.load(folder / "batches.npy"), 0
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        losses, times = [], []
        for _ in range(json.loads(line)):
            began = time.perf_counter()
            losses.append(step(taken, batches[taken % BATCHES]))
            times.append(1e3 * (time.perf_counter() - began))
            taken += 1
        print(json.dumps({"losses": losses, "ms": times}), flush=True)


def jaxformer_worker(folder: Path) -> None:
    """Train with the project's own step; leave shape, weights and batches in the folder for the others."""
    from dataclasses import replace

    import jax
    import numpy as np
    from flax.traverse_util import flatten_dict

    from jaxformer.cli import machine
    from jaxformer.cli.arguments import load_config
    from jaxformer.config import to_dict
    from jaxformer.runs import count_parameters
    from jaxformer.sharding import batch_split, make_mesh
    from jaxformer.train.optimizer import make_optimizer, make_schedule
    from jaxformer.train.step import init_state, make_train_step

    asked = json.loads((folder / "asked.json").read_text())
    config = load_config(f"{CONFIG}:modern")
    config = replace(config, train=replace(config.train, batch_size=asked["batch_size"] or config.train.batch_size))
    machine.set_up(config.train.batch_size)
    mesh, model = make_mesh(config.train.batch_size), config.model.build()
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = init_state(config, model, optimizer, mesh)
    train_step = make_train_step(config, model, optimizer, mesh)

    shape = (BATCHES, config.train.batch_size, config.model.context_length + 1)
    tokens = np.random.default_rng(config.seed).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    np.save(folder / "batches.npy", tokens)
    np.savez(folder / "weights.npz", **flatten_dict(jax.tree.map(np.asarray, state.params), sep="."))
    schedule = make_schedule(config.optimizer, config.steps)
    rates = [float(schedule(step)) for step in range(asked["steps"])]
    (folder / "config.json").write_text(json.dumps(to_dict(config) | {"learning_rates": rates}))

    def step(taken: int, batch: np.ndarray) -> float:
        nonlocal state
        state, loss = train_step(state, jax.device_put(batch, batch_split(mesh)), taken)
        return float(loss)

    serve(
        step, folder, parameters=count_parameters(state.params), batch_size=config.train.batch_size,
        context_length=config.model.context_length, versions=record.versions("jax", "jaxlib", "flax"),
    )  # fmt: skip


def torch_worker(folder: Path, compiled: bool) -> None:
    """Train the same model in torch as one writes it there, on all cores."""
    import numpy as np
    import torch
    from torch_decoder import Decoder, Shape, translate

    torch.set_num_threads(record.cores())
    config = json.loads((folder / "config.json").read_text())
    shape, o = Shape(config["model"]), config["optimizer"]
    model = Decoder(shape)
    with np.load(folder / "weights.npz") as weights:
        model.load_state_dict(translate(weights, shape.n_blocks))
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": o["weight_decay"]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if o["name"] != "adamw":
        raise ValueError(f"the torch peer trains with adamw only, not {o['name']}")
    optimizer = torch.optim.AdamW(groups, betas=(o["b1"], o["b2"]), fused=True)
    loss_of = torch.compile(model) if compiled else model

    def step(taken: int, batch: np.ndarray) -> float:
        for group in optimizer.param_groups:
            group["lr"] = config["learning_rates"][taken]
        loss = loss_of(torch.from_numpy(batch).long())
        optimizer.zero_grad()
        loss.backward()
        if o["clip_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(parameters, o["clip_norm"])
        optimizer.step()
        return loss.item()

    serve(step, folder, parameters=sum(p.numel() for p in parameters), versions=record.versions("torch"))


def measure(workers: Sequence[Worker], rounds: int, steps: int) -> dict[str, float]:
    """Median milliseconds a step of each worker, in rounds in which each takes its turn."""
    times: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for _ in range(rounds):
        for worker in workers:
            times[worker.name] += worker.train(steps)["ms"]
    return {name: median(ms) for name, ms in times.items()}


def warm_up(workers: Sequence[Worker]) -> None:
    """Compile everything, and make sure that all compute the same."""
    first, *others = workers
    ours = first.train(WARM_UP)["losses"]
    for worker in others:
        theirs = worker.train(WARM_UP)["losses"]
        apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        if worker.facts["parameters"] != first.facts["parameters"] or not apart <= AGREE:
            sys.exit(
                f"error: {worker.name} is another model than {first.name}: {worker.facts['parameters']:,} against "
                f"{first.facts['parameters']:,} parameters, losses {apart:.1e} nats apart."
            )


def has_torch(python: str) -> bool:
    """Whether an interpreter exists and has torch and NumPy."""
    look = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('numpy')))"
    try:
        return subprocess.run([python, "-c", look], check=False).returncode == 0
    except OSError:
        return False


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
    software = {name: version for worker in reversed(workers) for name, version in worker.facts["versions"].items()}
    print(f"written: {record.write('train_cpu', figures, software).relative_to(record.ROOT)}")


def main() -> int:
    """Measure; 0, or 2 without torch."""
    parser = argparse.ArgumentParser(description="Training speed on the CPU beside torch.")
    parser.add_argument("--batch-size", type=int, help="windows a step (default: the config's)")
    parser.add_argument("--python-torch", default=sys.executable, help="an interpreter that has torch and NumPy")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each takes")
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker == "jaxformer":
        jaxformer_worker(asked.folder)
    elif asked.worker:
        torch_worker(asked.folder, compiled=asked.worker == "torch_compiled")
    elif not has_torch(asked.python_torch):
        print(f"error: {asked.python_torch} has no torch; pip install torch, or give --python-torch.", file=sys.stderr)
        return 2
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            total = WARM_UP + asked.rounds * asked.steps
            (folder / "asked.json").write_text(json.dumps({"batch_size": asked.batch_size, "steps": total}))
            pythons = {"jaxformer": sys.executable, "torch": asked.python_torch}
            # One after another: the first leaves in the folder what the others read.
            workers = [Worker(name, pythons[library], folder) for name, library in WORKERS.items()]
            warm_up(workers)
            report(workers, measure(workers, asked.rounds, asked.steps), asked.rounds, asked.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())

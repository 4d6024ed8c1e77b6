"""Divergence detection: is a divergence noticed, and is a healthy run left alone? Runs that diverge, and twenty others.

    JAX_PLATFORMS=cpu python -m studies.divergence [--jobs N] [--steps 300] [--only WORD] --out FOLDER

Each piece is a separate process: it trains with the full schedule, stopped early, feeds the `DivergenceMonitor` as the
training loop does, and writes the loss, gradient norm and update norm of each step to its own file below the folder. A
piece whose file exists is done. The table then shows when the loss permanently exceeded its running minimum by
`MARGIN_NATS`, and when that was noticed. The diverging runs are `quick` as it was before its updates were bounded, with
its own optimizer and others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

from benchmarks import record
from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig
from jaxformer.models.decoder import DecoderConfig

LIMIT = 20
"""Maximum steps from the loss's departure until it must be noticed."""
AFTER = 60
"""Steps for which a piece continues after a divergence was noticed, which show whether the loss recovers."""
BEFORE = Config(
    name="before",
    model=DecoderConfig(
        vocab_size=2048, context_length=128, d_model=128, n_blocks=4, n_heads=4,
        d_ff=(512,), activation="relu", bias=True,
    ),
    data=TextConfig(), steps=1200,
    optimizer=OptimizerConfig("nesterov_sgd", learning_rate=1.0, schedule="cosine", warmup_steps=50),
    train=TrainConfig(batch_size=16),
)  # fmt: skip
"""`quick` as it was before its updates were bounded."""
RATES = {"nesterov_sgd": (10.0, 1000.0), "adamw": (100.0,), "muon": (100.0,), "lion": (1.0,), "schedule_free": (10.0,)}
HEALTHY = ("quick:quick", "quick:modern", "moe:moe", "dates:bahdanau", "ladder:head_scale")
SEEDS = range(4)
LADDER_BATCH = 32
"""Windows per step of the ladder's rung, whose own 4,096 take minutes on a CPU."""


@dataclass(frozen=True)
class Piece:
    """One run."""

    name: str
    config: Config
    diverges: bool
    devices: int = 2


def pieces() -> dict[str, Piece]:
    """Return all runs by name."""
    runs = [Piece(f"before-{seed}", replace(BEFORE, seed=seed), True) for seed in SEEDS]
    for name, rates in RATES.items():
        for rate in rates:
            schedule = "constant" if name == "schedule_free" else "cosine"
            optimizer = OptimizerConfig(name, learning_rate=rate, schedule=schedule, warmup_steps=50)  # type: ignore[arg-type]
            runs.append(Piece(f"{name}-{rate:g}", replace(BEFORE, optimizer=optimizer), True))
    for which in HEALTHY:
        config = load(which)
        if which.startswith("ladder"):
            config = replace(config, train=replace(config.train, batch_size=LADDER_BATCH))
        runs += [Piece(f"{config.name}-{seed}", replace(config, seed=seed), False) for seed in SEEDS]
    return {piece.name: piece for piece in runs}


def load(which: str) -> Config:
    """Return a committed config, `FILE:NAME`."""
    sys.path.insert(0, str(record.ROOT))
    file, _, name = which.partition(":")
    config: Config = getattr(import_module(f"configs.{file}"), name)
    return config


def trace(piece: Piece, steps: int) -> dict[str, Any]:
    """Train, as `jaxformer.train.loop` does, and return the monitor's inputs and results."""
    import jax
    import numpy as np

    from jaxformer.cli import machine
    from jaxformer.parallel.mesh import batch_sharding, global_device_put, make_mesh
    from jaxformer.train.divergence import DivergenceMonitor, chance_loss
    from jaxformer.train.setup import TrainSetup
    from jaxformer.train.step import make_train_step

    config = piece.config
    machine.set_up(config.train.batch_size, config.mesh)
    mesh = make_mesh(config.mesh)
    data = config.data.load(config.model, config.train.batch_size, config.seed)
    setup = TrainSetup(config, mesh)
    state, step = setup.init_state(), make_train_step(setup)
    monitor, noticed, rows, broken = DivergenceMonitor(chance_loss(config.model)), [], [], None
    for number, batch in enumerate(data.stream(0, min(steps, config.steps)), start=1):
        state, metrics = step(state, global_device_put(batch, batch_sharding(mesh)), np.int32(number - 1))
        if not metrics.finite:
            broken = number
            break
        norms = metrics.loss, metrics.grad_norm, metrics.update_norm
        rows.append([float(f"{float(x):.5g}") for x in norms])
        if divergence := monitor.update(number, rows[-1][0], float(metrics.grad_norm)):
            noticed.append(asdict(divergence))
        if noticed and number >= noticed[0]["step"] + AFTER:
            break
    return {
        "diverges": piece.diverges, "seed": config.seed, "chance": chance_loss(config.model), "not_finite": broken,
        "noticed": noticed, "columns": ["loss", "grad_norm", "update_norm"],
        "rows": [[x if isfinite(x) else None for x in row] for row in rows],
        "cpu": record.cpu(), "devices": len(jax.devices()), "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }  # fmt: skip


def departed(losses: list[float], margin: float) -> int | None:
    """Return the first step, counted from 1, whose loss exceeds the running minimum by a margin and never returns."""
    began, minimum = None, float("inf")
    for step, loss in enumerate(losses, start=1):
        if loss < minimum + margin:
            began = None
        elif began is None:
            began = step
        minimum = min(minimum, loss)
    return began


def judge(piece: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of a piece: when the loss departed, when that was noticed, and whether it is correct."""
    from jaxformer.train.divergence import MARGIN_NATS

    losses = [float("inf") if row[0] is None else row[0] for row in piece["rows"]]
    began = departed(losses, MARGIN_NATS) or piece["not_finite"]
    stops = [piece["noticed"][0]["step"]] if piece["noticed"] else []
    stops += [piece["not_finite"]] if piece["not_finite"] else []
    noticed = min(stops, default=None)
    if piece["diverges"] and began is None and noticed is None:  # for some pieces, it depends on rounding
        outcome = "did not diverge"
    elif piece["diverges"]:
        in_time = noticed is not None and began is not None and noticed <= began + LIMIT
        outcome = "detected in time" if in_time else "WRONG"
    else:
        outcome = "not stopped" if noticed is None else "WRONG"
    return {
        "began": began, "noticed": noticed, "reason": piece["noticed"][0]["reason"] if piece["noticed"] else None,
        "not_finite": piece["not_finite"], "minimum": min(losses), "last": losses[-1], "steps": len(losses),
        "outcome": outcome,
    }  # fmt: skip


def run(piece: Piece, steps: int, out: Path) -> None:
    """Train one piece in a separate process, unless its file exists."""
    file = out / f"{piece.name}.json"
    if file.exists():
        return
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(piece.devices)}
    if piece.diverges:  # rounding as on a machine without AVX-512
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX2".strip()
    options = ["--out", str(out.absolute()), "--steps", str(steps), "--piece", piece.name]
    command = [sys.executable, "-m", "studies.divergence", *options]
    began = time.monotonic()
    status = subprocess.run(command, cwd=record.ROOT, env=environment, check=False).returncode
    print(f"{piece.name}: status {status}, {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    """Train all pieces, and print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="pieces at once")
    parser.add_argument("--steps", type=int, default=300, help="steps of the full schedule that a healthy run takes")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the pieces")
    parser.add_argument("--only", default="", help="pieces whose name holds this")
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    every = pieces()
    if asked.piece:
        file = asked.out / f"{asked.piece}.json"
        scratch = file.with_suffix(".new")
        scratch.write_text(json.dumps(trace(every[asked.piece], asked.steps)), encoding="utf-8")
        scratch.replace(file)
        return 0
    chosen = [piece for name, piece in every.items() if asked.only in name]
    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(lambda piece: run(piece, asked.steps, asked.out), chosen))
    found = {name: json.loads(file.read_text()) for name in every if (file := asked.out / f"{name}.json").exists()}
    table = {name: judge(piece) for name, piece in found.items()}
    for name, row in table.items():
        print(f"{name:<20} {row['outcome']:<16} {row}")
    if len(table) == len(every):
        # Record the CPUs that ran the pieces, not the one that collects them.
        cpus = sorted({piece["cpu"] for piece in found.values()})
        figures, software = {"pieces": table, "cpus": cpus}, record.versions("jax", "flax", "optax")
        print(record.write("divergence", figures, software, record.STUDY_RESULTS))
    return 0 if all(row["outcome"] != "WRONG" for row in table.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

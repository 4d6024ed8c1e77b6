"""Margin of every committed recipe: does it train without a loss spike, whatever the seed, the number of devices, and
at twice its learning rate?

    python -m studies.margins --out runs/margins --data DATA    # train the missing pieces, print the table
    python -m studies.margins --out runs/margins --write        # and write studies/results/margins.json

A piece is one training run: a config, a seed, a number of virtual CPU devices, a factor on the learning rate. It writes
one JSON file below --out when it is done, so the study can be killed and restarted, or distributed over machines
whose files are then merged. A piece has as many cores to itself as it has devices, as far as available.

A loss spike is a mean of the training loss over `SMOOTHED` consecutive steps, after the warm-up, that exceeds the
smallest such mean before it by more than `SPIKE_NATS`; for a run that ends before twice its warm-up, all steps count. A
single batch is less informative: in `quick` it has 1,024 tokens, and the loss varies by half a nat with the text alone.

DATA is a folder with `images` (Fashion-MNIST), `emoji` (`jaxformer.data.captions`) and `translation/en-fr.*.tsv`;
configs whose data is missing are reported and skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks import record

SMOOTHED = 10
SPIKE_NATS = 0.5
EARLY = 300
"""Steps of the full schedule after which the cheaper pieces end."""
OUTCOMES = ("done", "interrupted")
"""Statuses of a stable training run: finished, or interrupted by this study."""


@dataclass(frozen=True)
class Recipe:
    """A committed config and the training runs that it must survive."""

    config: str
    """FILE.py:NAME below configs/."""
    seeds: int
    devices: tuple[int, ...] = (1,)
    """Numbers of virtual CPU devices; each seed is trained on each."""
    steps: int | None = EARLY
    """Number of steps to run; None for the whole schedule."""
    doubled: int = 0
    """Number of seeds that are also trained at twice the learning rate, on the second number of devices."""
    data: str | None = None
    """Path below DATA; None for the config's own data."""
    length: int | None = None
    """Length of the schedule in steps; None for the config's."""

    def pieces(self, data: Path | None) -> Iterator[Piece]:
        """Yield every piece whose data is available."""
        path = None
        if self.data is not None:
            if data is None or not list(data.glob(f"{self.data}*")):
                return
            path = str(data / self.data)
        for n in self.devices:
            for seed in range(self.seeds):
                yield Piece(self.config, seed, n, 1.0, self.steps, path, self.length)
        for seed in range(self.doubled):
            yield Piece(self.config, seed, self.devices[1], 2.0, self.steps, path, self.length)


@dataclass(frozen=True)
class Piece:
    """One training run."""

    config: str
    seed: int
    devices: int
    factor: float
    steps: int | None
    path: str | None
    length: int | None

    @property
    def name(self) -> str:
        """Name of the piece's file, without suffix."""
        config = self.config.removesuffix(".py").replace(".py:", "-")
        length = f"-{self.length}steps" if self.length else ""
        return f"{config}-seed{self.seed}-{self.devices}x-lr{self.factor:g}{length}"


RECIPES = (
    Recipe("quick.py:quick", 8, (1, 2, 4), None, doubled=3),
    Recipe("quick.py:modern", 8, (1, 2, 4), None, doubled=3),
    Recipe("quick.py:llama", 8, (1, 2, 4), None, doubled=3),
    # Some five minutes on two cores.
    Recipe("quick.py:quick", 5, steps=None, length=3000),
    Recipe("quick.py:modern", 5, steps=None, length=3000),
    Recipe("translation.py:gru", 2, (2,), data="translation/en-fr"),
    Recipe("translation.py:bahdanau", 2, (2,), data="translation/en-fr"),
    Recipe("translation.py:transformer", 2, (2,), data="translation/en-fr"),
    Recipe("clip.py:clip", 2, data="emoji"),
    Recipe("moe.py:moe", 3),
    Recipe("moe.py:dense", 3),
    Recipe("mlm.py:mlm", 3),
    Recipe("prefix.py:prefix", 3),
    Recipe("dates.py:bahdanau", 3),
    Recipe("dates.py:fixed", 3),
    Recipe("vision.py:vit", 3, data="images"),
    Recipe("vision.py:vivit", 2, data="images"),
    Recipe("vision.py:vivit_class", 2, data="images"),
)


def train_piece(piece: Piece, out: Path) -> None:
    """Train in this process and write the piece's file."""
    import jax

    from jaxformer.cli import machine
    from jaxformer.cli.arguments import load_config
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.train.log import console, read_metrics
    from jaxformer.train.loop import Callback, train
    from jaxformer.train.setup import TrainSetup

    config = load_config(str(record.ROOT / "configs" / piece.config))
    rate = config.optimizer.learning_rate * piece.factor
    data: Any = config.data
    data_config = data if piece.path is None else replace(data, path=piece.path)
    never = 2**31 - 1
    config = replace(
        config,
        steps=piece.length or config.steps,
        seed=piece.seed,
        data=data_config,
        optimizer=replace(config.optimizer, learning_rate=rate),
        # Only the training itself and the loss of every step matter.
        train=replace(
            config.train,
            log_every=1,
            eval_every=never,
            report_every=never,
            gradients_every=never,
            checkpoint_every=never,
        ),
        mesh=f"data={piece.devices}",
    )
    machine.set_up(config.train.batch_size, config.mesh)
    console.quiet = True
    data = config.data.load(config.model, config.train.batch_size, config.seed)
    setup = TrainSetup(config, make_mesh(config.mesh))
    cut = piece.steps or config.steps
    began: list[float] = []

    def look(step: int, *_: object) -> None:
        began.append(time.perf_counter())
        if step == cut < config.steps:
            os.kill(os.getpid(), signal.SIGTERM)  # a clean stop

    with tempfile.TemporaryDirectory() as scratch:
        outcome = train(setup, data, Path(scratch), [Callback(1, look, at_start=True)])
        losses = np.array([row["loss"] for row in read_metrics(Path(scratch)) if "loss" in row], float)
    seconds = np.diff(began)
    result: dict[str, Any] = {
        "config": piece.config, "seed": piece.seed, "devices": piece.devices, "factor": piece.factor,
        "steps": len(losses), "of": config.steps, "learning_rate": rate, "status": outcome.status,
        "first_loss": round(float(losses[0]), 4),
        "last_loss": round(float(losses[-SMOOTHED:].mean()), 4),
        "excursion": round(excursion(losses, SMOOTHED, config.optimizer.warmup_steps), 4),
        "excursion_of_one_step": round(excursion(losses, 1, config.optimizer.warmup_steps), 4),
        "step_ms": round(1e3 * float(np.median(seconds)), 1),
        "val_bpb": None if outcome.evaluation is None else outcome.evaluation.bits_per_byte,
        "val_loss": None if outcome.evaluation is None else outcome.evaluation.loss,
        "device": jax.devices()[0].device_kind if jax.devices()[0].platform != "cpu" else record.cpu(),
        "instructions": instructions(), "versions": record.versions("jax", "jaxlib", "flax", "optax"),
        "commit": record.commit(),
    }  # fmt: skip
    scratch_file = out / f".{piece.name}.json"
    scratch_file.write_text(json.dumps(result) + "\n", encoding="utf-8")
    scratch_file.rename(out / f"{piece.name}.json")


def excursion(losses: np.ndarray, width: int, warmup: int) -> float:
    """Return the largest excess, in nats, of a mean of `width` losses over the smallest one before it. Considers the
    steps after the warm-up, or all steps if the warm-up is more than half of them; infinite if a loss is not finite."""
    means = np.convolve(losses, np.ones(width) / width, "valid")[warmup if 2 * warmup <= len(losses) else 0 :]
    return float((means - np.minimum.accumulate(means)).max()) if np.isfinite(means).all() else float("inf")


def instructions() -> str:
    """Return the widest vector instruction set that XLA may use on this machine."""
    if "xla_cpu_max_isa=" in (flags := os.environ.get("XLA_FLAGS", "")):
        return flags.partition("xla_cpu_max_isa=")[2].split()[0]
    info = Path("/proc/cpuinfo")
    flags = info.read_text() if info.exists() else ""
    return next((name for name in ("avx512", "avx2", "avx") if name in flags), record.platform.machine())


def measure(pieces: list[Piece], out: Path, jobs: int, seconds: float) -> None:
    """Train the pieces without a file, as many in parallel as cores allow, until the time is up."""
    free = sorted(os.sched_getaffinity(0))[: jobs or None]
    total = len(free)
    waiting = [p for p in pieces if not (out / f"{p.name}.json").exists()]
    running: dict[subprocess.Popen, tuple[Piece, list[int]]] = {}
    ends = time.monotonic() + seconds
    try:
        while (waiting or running) and time.monotonic() < ends:
            for piece in list(waiting):
                need = min(piece.devices, total)
                if need <= len(free):
                    mine, free = free[:need], free[need:]
                    waiting.remove(piece)
                    running[start(piece, out, mine)] = (piece, mine)
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                piece, mine = running.pop(process)
                free += mine
                said = f"failed with exit status {process.returncode}" if process.returncode else "done"
                print(f"{piece.name}: {said}", flush=True)
    finally:
        for process in running:
            process.kill()
    if waiting or running:
        print(f"time is up: {len(waiting) + len(running)} pieces are left; run this again", flush=True)


def start(piece: Piece, out: Path, cores: list[int]) -> subprocess.Popen:
    """Start a process for one piece, on its own cores."""
    fields = json.dumps(astuple(piece))
    command = [sys.executable, "-m", "studies.margins", "--out", str(out), "--piece", fields]
    return subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        cwd=record.ROOT,
        env={"JAX_PLATFORMS": "cpu", **os.environ},
    )


def table(out: Path) -> str:
    """Return a Markdown table with one row per config, number of devices and learning-rate factor."""
    rows: dict[tuple, list[dict]] = {}
    for file in sorted(out.glob("[!.]*.json")):
        piece = json.loads(file.read_text(encoding="utf-8"))
        row = (piece["config"], piece["of"], piece["device"], piece["devices"], piece["factor"])
        rows.setdefault(row, []).append(piece)
    order = [recipe.config for recipe in RECIPES]
    lines = [
        "| config | learning rate | devices | seeds | steps | loss spikes | largest excursion, nats | bits per byte |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for (config, _, device, devices, factor), pieces in sorted(
        rows.items(), key=lambda item: (order.index(item[0][0]), item[0][1], item[0][4], *item[0][2:4])
    ):
        spikes = sum(not p["excursion"] <= SPIKE_NATS or p["status"] not in OUTCOMES for p in pieces)
        bits = [p["val_bpb"] for p in pieces if p["val_bpb"] is not None]
        spread = f"{mean(bits):.3f} ± {stdev(bits):.3f}" if len(bits) > 1 else "".join(f"{b:.3f}" for b in bits)
        taken = sorted({p["steps"] for p in pieces})
        lines.append(
            f"| `{config}` | {pieces[0]['learning_rate']:g}{' (twice)' if factor == 2 else ''} | {devices} x {device} "
            f"| {len(pieces)} | {taken[0]:,} of {pieces[0]['of']:,} | {spikes} "
            f"| {max(p['excursion'] for p in pieces):.2f} | {spread} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the pieces, or write the record; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pieces' files")
    parser.add_argument("--data", type=Path, help="folder with images, emoji and translation")
    parser.add_argument("--only", nargs="*", default=[], help="configs to measure, such as quick.py:quick; all without")
    parser.add_argument("--cores", type=int, default=0, help="most cores to use; all without")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--seeds", type=int, help="most seeds per row (default: all)")
    parser.add_argument("--devices", type=int, nargs="+", help="numbers of devices (default: all)")
    parser.add_argument("--factors", type=float, nargs="+", help="factors on the learning rate (default: all)")
    parser.add_argument("--steps", type=int, help="steps of the schedule to take (default: the recipe's)")
    parser.add_argument("--write", action="store_true", help="train nothing; write the record of what is there")
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.piece:
        train_piece(Piece(*json.loads(options.piece)), options.out)
        return
    if options.write:
        results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(options.out.glob("[!.]*.json"))]
        software = record.versions("jax", "jaxlib", "flax")
        print(f"written: {record.write('margins', {'pieces': results}, software, record.STUDY_RESULTS)}")
    else:
        pieces = []
        for recipe in (r for r in RECIPES if not options.only or r.config in options.only):
            planned = [
                replace(p, steps=options.steps or p.steps)
                for p in recipe.pieces(options.data)
                if (options.seeds is None or p.seed < options.seeds)
                and (options.devices is None or p.devices in options.devices)
                and (options.factors is None or p.factor in options.factors)
            ]
            if recipe.data and not any(recipe.pieces(options.data)):
                print(f"{recipe.config} is left out: {options.data} has no {recipe.data}")
            pieces += planned
        # Start pieces of several cores first: later, they would wait for enough cores to be free at once.
        measure(sorted(pieces, key=lambda p: -p.devices), options.out.absolute(), options.cores, options.seconds)
    print(table(options.out))


if __name__ == "__main__":
    main()

"""Transfer of the best learning rate across widths, with `optimizer.base_width` and without.

    python -m studies.width_transfer train --data.path books/train [--data.val-path TEXT] [--folder FOLDER]
        [--widths N ...] [--seeds N]
    python -m studies.width_transfer write [--folder FOLDER]

`train` trains the rung `small_embeddings` of `configs/ladder.py`, whose width is 128, at several widths: heads keep
their width, and MLPs scale with the model. Learning rates are the rung's times powers of 1.5, searched from the best of
the previous width in both directions until the best has a neighbour on either side. 'fixed' is one learning rate for
all parameters; 'scaled' is the rung with `base_width`, and W_out initialised as in muP, with a standard deviation
proportional to 1 / width. At the rung's own width, the two are equal. Losses are on text held out from the training
books, or on --data.val-path, which should not be text that other figures are measured on. Each training run writes one
JSON file below --folder when it is done, so the study can be stopped and restarted.

`write` fits a parabola through these three losses over the logarithm of the learning rate, for each width and seed,
stores the minima in `width_transfer.json`, and writes their table into `docs/measurements.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import record
from jaxformer.cli import machine
from jaxformer.cli.arguments import load_config
from jaxformer.cli.command import as_command
from jaxformer.cli.options import CommandLine
from jaxformer.config import Config
from jaxformer.data.dataset import Dataset
from jaxformer.errors import UserError
from jaxformer.files import write_atomically
from jaxformer.models.objective import Params
from jaxformer.parallel.mesh import batch_sharding, global_device_put, make_mesh
from jaxformer.runs.run import count_parameters
from jaxformer.train.evaluate import Evaluator
from jaxformer.train.optimizer import make_optimizer, make_schedule
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_gradient
from studies.recipe import markdown
from studies.sources import insert

BEGIN, END = "<!-- outcomes of studies/width_transfer.py -->\n", "<!-- end of width transfer -->\n"
RUNG = "ladder:small_embeddings"
WIDTHS = (64, 128, 256)
FACTOR = 1.5
"""Ratio of neighbouring learning rates."""
STEPS, BATCH_SIZE, HELD_OUT = 120, 8, 128
"""Optimizer steps, a tenth of which are warm-up; windows per step; windows for the held-out loss."""
RULES = ("fixed", "scaled")
HEAD = ("learning rates", "width", "parameters", "best learning rate by seed", "mean", "held-out loss at best")


def config_at(width: int, rule: str, path: str, val_path: str | None, seed: int) -> Config:
    """Return the rung at another width."""
    rung = load_config(RUNG)
    model: Any = rung.model
    base = model.d_model
    if width % (base // model.n_heads):
        raise UserError(f"the width {width} is no multiple of {base // model.n_heads}, that of a head; use 64 or 192.")
    std = {"unembedding_std": base**0.5 / width} if rule == "scaled" else {}
    wider = replace(
        model, d_model=width, n_heads=model.n_heads * width // base,
        d_ff=tuple(d * width // base for d in model.d_ff), **std,
    )  # fmt: skip
    data: Any = rung.data
    return replace(
        rung,
        model=wider,
        steps=STEPS,
        seed=seed,
        data=replace(data, path=path, val_path=val_path),
        optimizer=replace(
            rung.optimizer, warmup_steps=STEPS // 10, base_width=base if rule == "scaled" and width != base else None
        ),
        train=replace(rung.train, batch_size=BATCH_SIZE),
    )


class Training:
    """Training of one config at any learning rate, compiled once: the learning rate is an argument of the step."""

    def __init__(self, config: Config, data: Dataset) -> None:
        self.setup, self.data = TrainSetup(config, make_mesh("", jax.devices()[:1])), data
        self.n_parameters = count_parameters(self.setup.abstract_params)
        self._split, self._evaluate = batch_sharding(self.setup.mesh), Evaluator(self.setup, data)
        shape = make_schedule(replace(config.optimizer, learning_rate=1.0), config.steps)
        gradient, axes = make_gradient(self.setup), self.setup.state_axes
        width = config.model.contract.scaled_width

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Params, opt_state: Any, batch: Any, keys_B: jax.Array, rate: jax.Array) -> Any:
            optimizer = make_optimizer(config.optimizer, lambda count: rate * shape(count), axes, width)
            _, grads = gradient(params, batch, keys_B)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        state = self.setup.init_state()
        self._step, self._start = step, (state.params, state.opt_state)

    def loss(self, rate: float) -> float:
        """Return the held-out loss in nats per token after training with a peak learning rate."""
        params, opt_state = jax.tree.map(jnp.copy, self._start)  # a step donates its inputs
        for k in range(self.setup.config.steps):
            batch = global_device_put(self.data.batch(k), self._split)
            params, opt_state = self._step(params, opt_state, batch, self.setup.example_keys(k), np.float32(rate))
        return self._evaluate(params, HELD_OUT).loss


def search(loss: Callable[[int], float], start: int) -> dict[int, float]:
    """Return the loss by exponent of `FACTOR`, searched from `start` in both directions until the smallest loss has a
    neighbour on either side."""
    losses: dict[int, float] = {}
    best = start
    while missing := [k for k in (best, best - 1, best + 1) if k not in losses]:
        losses[missing[0]] = loss(missing[0])
        best = min(losses, key=lambda k: losses[k] if isfinite(losses[k]) else inf)
    return losses


def best_rate(losses: Mapping[float, float | None]) -> tuple[float, float] | None:
    """Return the learning rate and the loss at the minimum of the parabola, over the logarithm of the learning rate,
    through the smallest loss and its two neighbours; the smallest loss itself if a neighbour is not finite; None if one
    has not been trained yet."""
    rates = sorted(losses)
    values = [inf if (value := losses[rate]) is None else value for rate in rates]
    i = values.index(min(values))
    if not 0 < i < len(rates) - 1:
        return None
    below, best, above = values[i - 1 : i + 2]
    if not isfinite(below + above) or below + above == 2 * best:
        return rates[i], best
    slope, curvature = (above - below) / 2, above + below - 2 * best
    return rates[i] * FACTOR ** (-slope / curvature), best - slope**2 / (2 * curvature)


def train(folder: Path, path: str, val_path: str | None, widths: Sequence[int], seeds: int) -> None:
    """Train the pieces that the folder does not contain yet."""
    base: Any = load_config(RUNG)
    machine.set_up()
    data: dict[int, Dataset] = {}
    for seed in range(seeds):
        start = dict.fromkeys(RULES, 0)
        for width in sorted(widths):
            for rule in RULES if width != base.model.d_model else RULES[:1]:
                config = config_at(width, rule, path, val_path, seed)
                if seed not in data:
                    data[seed] = config.data.load(config.model, config.train.batch_size, seed)
                losses = search(_Measured(folder, rule, config, data[seed]), start[rule])
                best = min(losses, key=lambda k: losses[k])
                start |= {rule: best} if width != base.model.d_model else dict.fromkeys(RULES, best)


class _Measured:
    """Losses by exponent, from files or, if there is none yet, from training."""

    def __init__(self, folder: Path, rule: str, config: Config, data: Dataset) -> None:
        self.folder, self.rule, self.config, self.data = folder, rule, config, data
        self.training: Training | None = None

    def __call__(self, exponent: int) -> float:
        model: Any = self.config.model
        file = self.folder / f"{self.rule}-{model.d_model}-seed{self.config.seed}-{exponent:+d}.json"
        rate = self.config.optimizer.learning_rate * FACTOR**exponent
        piece = {
            "rule": self.rule, "width": model.d_model, "seed": self.config.seed, "learning_rate": rate,
            "steps": self.config.steps, "targets": self.config.steps * BATCH_SIZE * model.context_length,
            "data": self.data.fingerprint,
        }  # fmt: skip
        if not file.exists():
            self.training = self.training or Training(self.config, self.data)
            loss = self.training.loss(rate)
            piece |= {"parameters": self.training.n_parameters, "loss": loss if isfinite(loss) else None}
            write_atomically(file, json.dumps(piece | {"commit": record.commit()}) + "\n")
            print(f"{self.rule}, width {model.d_model}, seed {self.config.seed}, {rate:.2g}: {loss:.4f}", flush=True)
        stored = json.loads(file.read_text(encoding="utf-8"))
        if other := [name for name in piece if name not in ("parameters", "loss") and stored[name] != piece[name]]:
            raise UserError(f"{file} has another {other[0]}, {stored[other[0]]}; name another --folder.")
        return inf if stored["loss"] is None else stored["loss"]


def outcomes(pieces: Sequence[Mapping[str, Any]], base_width: int) -> dict[str, Any]:
    """Return the best learning rate for each complete rule, width and seed, its geometric mean and the mean loss over
    seeds, and for each rule the largest ratio of two widths' means."""
    rules: dict[str, Any] = {}
    for rule in RULES:
        widths: dict[str, Any] = {}
        for width in sorted({x["width"] for x in pieces}):
            mine = [x for x in pieces if x["width"] == width and (x["rule"] == rule or width == base_width)]
            seeds: dict[str, dict[float, float | None]] = {}
            for x in mine:
                seeds.setdefault(str(x["seed"]), {})[x["learning_rate"]] = x["loss"]
            fits = {seed: best_rate(losses) for seed, losses in sorted(seeds.items())}
            if best := {seed: fit for seed, fit in fits.items() if fit is not None}:
                widths[str(width)] = {
                    "parameters": mine[0]["parameters"],
                    "best": {seed: rate for seed, (rate, _) in best.items()},
                    "mean": prod(rate for rate, _ in best.values()) ** (1 / len(best)),
                    "loss": sum(loss for _, loss in best.values()) / len(best),
                }
        means = [x["mean"] for x in widths.values()]
        rules[rule] = {"widths": widths, "ratio": max(means) / min(means) if means else None}
    return {"base_width": base_width, "rules": rules, "pieces": list(pieces)}


def section(figures: Mapping[str, Any]) -> str:
    """Return the section for the page: a table, and the largest ratio between the widths' best learning rates."""
    if not figures:
        return "Not measured yet.\n"
    rows = [HEAD]
    for rule, outcome in figures["rules"].items():
        for width, x in outcome["widths"].items():
            by_seed = ", ".join(f"{rate:.4f}" for rate in x["best"].values())
            rows.append((rule, width, f"{x['parameters']:,}", by_seed, f"{x['mean']:.4f}", f"{x['loss']:.3f}"))
    ratios = " and ".join(f"{outcome['ratio']:.2f} ({rule})" for rule, outcome in figures["rules"].items())
    pieces = figures["pieces"]
    return (
        f"{markdown(rows)}\nRatio of the largest to the smallest mean: {ratios}; {len(pieces)} training runs of "
        f"{pieces[0]['targets']:,} targets each.\n"
    )


@as_command()
def main(line: CommandLine) -> int:
    """Train or write; return the exit status."""
    parser = argparse.ArgumentParser(description="Best learning rate by width.", allow_abbrev=False)
    parser.add_argument("what", choices=("train", "write"))
    parser.add_argument("--folder", type=Path, default=Path("runs/width_transfer"), help="folder of the piece files")
    parser.add_argument("--data.path", dest="path", help="folder of the books")
    parser.add_argument("--data.val-path", dest="val_path", help="text to evaluate (default: held out of the books)")
    parser.add_argument("--widths", type=int, nargs="+", default=[*WIDTHS], help="widths (default: 64 128 256)")
    parser.add_argument("--seeds", type=int, default=2, help="seeds per width (default: 2)")
    options = parser.parse_args(line.words())
    for option, number in (("--seeds", options.seeds), ("--widths", min(options.widths))):
        if number < 1:
            parser.error(f"{option} is {number}; it must be 1 or more")
    if options.what == "train":
        if options.path is None:
            parser.error("--data.path is missing; name the folder of the books")
        options.folder.mkdir(parents=True, exist_ok=True)
        train(options.folder, options.path, options.val_path, options.widths, options.seeds)
        return 0
    pieces = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(options.folder.glob("[!.]*.json"))]
    if not pieces:
        raise UserError(f"{options.folder} holds no training that has ended; train first.")
    base: Any = load_config(RUNG).model
    figures = outcomes(pieces, base.d_model)
    if not all(x["widths"] for x in figures["rules"].values()):
        raise UserError(f"{options.folder} holds no width that is complete; train on.")
    software = record.versions("jax", "jaxlib", "flax", "optax")
    record.write("width_transfer", figures, software, record.STUDY_RESULTS)
    insert(record.ROOT / "docs" / "measurements.md", BEGIN, section(figures), END)
    return 0


if __name__ == "__main__":
    sys.exit(main())

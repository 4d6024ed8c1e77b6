"""Candidates for the ladder's recipe: the gain of each at equal tokens, over seeds, and its time per target.

    python -m studies.recipe train --data.path books/train --data.val-path books/val [--folder FOLDER] [--seeds N]
        [--rungs NAME ...] [--long] [OPTIONS OF ladder]
    python -m studies.recipe time [--folder FOLDER] [--rungs NAME ...] [--rounds N]
    python -m studies.recipe trials --folder FOLDER
    python -m studies.recipe write [--folder FOLDER]

`train` trains the rungs of `RECIPE` in `configs/ladder.py`, each with every seed, and with --long also the first rung
for ten times as many tokens. It can be stopped and restarted: a finished run is not trained again, and others are
resumed. `time` measures training steps of all rungs, interleaved. `trials` stores the outcomes of other runs in
`recipe_trials.json`: those from which the rungs' options were chosen, by the loss on text that no other figure uses.
`write` stores the outcomes of the folder in `recipe.json`, and writes their table, and that of the trials, into
`docs/alternatives.md`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import jax
import numpy as np

from benchmarks import record
from benchmarks.report import row
from jaxformer.cli import machine
from jaxformer.cli.arguments import load_config
from jaxformer.cli.command import as_command
from jaxformer.cli.options import CommandLine
from jaxformer.config import Config
from jaxformer.config.fields import flatten, to_dict
from jaxformer.config.files import load_module
from jaxformer.data.windows import next_token_batch
from jaxformer.errors import UserError
from jaxformer.ladder.results import ended_early, has_ended
from jaxformer.parallel.mesh import batch_sharding, global_device_put, make_mesh
from jaxformer.runs.run import abstract_params, count_parameters, read_config
from jaxformer.train.log import read_metrics
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import CompiledStep
from studies.sources import insert

BEGIN, END = "<!-- outcomes of studies/recipe.py -->\n", "<!-- end of the recipe -->\n"
LONG = 10
"""Factor on the tokens for the long run of the first rung, whose loss the others should reach."""
TIMED_TARGETS = 8_192
"""Targets per rung and round of `time`, whatever the batch."""
QUIET = ("--train.report-every", "0", "--train.gradients-every", "0")
"""Options that disable reports during training."""
HEAD = ("rung", "change", "parameters", "targets", "seeds", "held-out loss", "gain", "ms per 1,000 targets")


def train(folder: Path, rungs: Sequence[str], seeds: int, long: bool, options: Sequence[str]) -> int:
    """Train all rungs with one seed after another; return the exit status of the ladder."""
    first = next(iter(load_module("ladder").RECIPE))
    steps = load_config(f"ladder:{first}").steps * LONG
    for seed in range(seeds):
        jobs = [(f"seed-{seed}", rungs, ())] + [(f"long-{seed}", [first], ("--steps", str(steps)))] * long
        for name, names, more in jobs:
            command = [
                sys.executable, "-m", "jaxformer", "ladder", "--rungs", *names, "--folder", str(folder / name),
                "--seed", str(seed), *QUIET, *more, *options,
            ]  # fmt: skip
            if status := subprocess.run(command).returncode:
                return status
    return 0


def _long(first: str) -> str:
    """Return the name of the first rung with `LONG` times the targets."""
    return f"{first}, {LONG} times the targets"


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the outcomes of each rung's finished runs: the rung's change from the one before, its parameters, and by
    seed the targets and the held-out loss in nats at each evaluation, the last of which covers the whole held-out text;
    for the first rung, which is the sources' own, also why seeds ended early."""
    recipe = load_module("ladder").RECIPE
    first = next(iter(recipe))
    long, before = _long(first), {after: name for name, after in pairwise(recipe)}
    rungs: dict[str, dict[str, Any]] = {}
    for name, change in {**recipe, long: ""}.items():
        pattern = f"long-*/{first}" if name == long else f"seed-*/{name}"
        for run in sorted(folder.glob(pattern)):
            if not has_ended(run):
                continue
            cause = ended_early(run)
            if cause and name not in (first, long):
                raise UserError(f"{run} {cause}, which no rung of the recipe may; change its settings.")
            config: Any = read_config(run)
            per_step = config.train.batch_size * config.model.context_length
            curve = [[row["step"] * per_step, row["val_loss"]] for row in read_metrics(run) if "val_loss" in row]
            n_parameters = count_parameters(abstract_params(config.model.build()))
            rung = rungs.setdefault(
                name,
                {"change": change, "before": before.get(name), "parameters": n_parameters, "seeds": {}, "ended": {}},
            )
            if cause:
                rung["ended"][str(config.seed)] = cause
            else:
                rung["seeds"][str(config.seed)] = curve
    return rungs


def measure_time(rungs: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds per 1,000 targets for each rung and round, from training steps on random tokens. Rungs are
    interleaved, so that other load on the machine affects all alike."""
    measures = {name: _timer(load_config(f"ladder:{name}")) for name in rungs}
    for measure in measures.values():
        measure()  # warms caches
    times: dict[str, list[float]] = {name: [] for name in rungs}
    for _ in range(rounds):
        for name, measure in measures.items():
            times[name].append(round(measure(), 3))
    return times


def _timer(config: Config) -> Callable[[], float]:
    """Return a function that runs training steps of a config and returns milliseconds per 1,000 targets."""
    model: Any = config.model
    B, T = config.train.batch_size, model.context_length
    setup = TrainSetup(config, make_mesh(config.mesh))
    tokens_BT = np.random.default_rng(0).integers(model.vocab_size, size=(B, T + 1), dtype=np.int32)
    batch = global_device_put(next_token_batch(tokens_BT), batch_sharding(setup.mesh))
    step, state = CompiledStep(setup, print), setup.init_state()
    step.compile(batch)

    def measure() -> float:
        nonlocal state
        n = max(1, TIMED_TARGETS // (B * T))
        began = time.perf_counter()
        for i in range(n):
            state, metrics = step(state, batch, i)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - began) / (n * B * T) * 1e6

    return measure


def _seeds(rung: Mapping[str, Any]) -> str:
    """Return the number of completed seeds, and why other seeds ended early."""
    causes = [f"seed {seed} {cause}" for seed, cause in rung["ended"].items()]
    return ", ".join([str(len(rung["seeds"])), *causes])


def last_losses(rung: Mapping[str, Any]) -> dict[str, float]:
    """Return the last held-out loss by seed."""
    return {seed: curve[-1][1] for seed, curve in rung["seeds"].items()}


def with_spread(values: Sequence[float]) -> str:
    """Return the mean and, for several values, the standard deviation; "-" without values."""
    if not values:
        return "-"
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def table(figures: Mapping[str, Any]) -> str:
    """Return the outcomes as a Markdown table. A rung's gain is over the rung before it, seed by seed."""
    rows, rungs = [HEAD], figures["rungs"]
    for name, rung in rungs.items():
        losses, times = last_losses(rung), figures["ms_per_1000_targets"].get(name)
        before = last_losses(rungs[rung["before"]]) if rung["before"] in rungs else {}
        gains = [before[seed] - losses[seed] for seed in sorted(losses.keys() & before.keys())]
        targets = [f"{curve[-1][0]:,}" for curve in rung["seeds"].values()]
        rows.append((
            f"`{name}`" if rung["change"] else name, rung["change"] or "-", f"{rung['parameters']:,}",
            targets[0] if targets else "-", _seeds(rung), with_spread([*losses.values()]), with_spread(gains),
            f"{median(times):.0f}" if times else "-",
        ))  # fmt: skip
    return markdown(rows)


def goal(figures: Mapping[str, Any]) -> str:
    """Return text about the goal: the loss of the last rung compared with the first rung's with more tokens, the number
    of tokens after which the first reached it, and the time of both; empty unless both have a completed seed."""
    rungs, times = figures["rungs"], figures["ms_per_1000_targets"]
    first, *_, last = [name for name in rungs if rungs[name]["change"]] * 2
    long = _long(first)
    if long not in rungs or not (rungs[long]["seeds"] and rungs[last]["seeds"]):
        return ""
    small, best = ([*last_losses(rungs[name]).values()] for name in (long, last))
    curves = list(rungs[long]["seeds"].values())
    curve = [(points[0][0], mean(loss for _, loss in points)) for points in zip(*curves, strict=True)]
    targets = {name: next(iter(rungs[name]["seeds"].values()))[-1][0] for name in (long, last)}
    text = (
        f"After {targets[last]:,} targets, the held-out loss of `{last}` is {with_spread(best)}. That of `{first}` is "
        f"{with_spread(small)} after {targets[long]:,}"
    )
    if (equal := targets_at(curve, mean(best))) is not None:
        about, times_as_many = float(f"{equal:.2g}"), equal / targets[last]
        text += f", and equalled that of `{last}` after about {about:,.0f}, {times_as_many:.1f} times as many"
    elif mean(small) > mean(best):
        text += f", {targets[long] / targets[last]:.1f} times as many, and still higher"
    if first in times and last in times:
        ratio = median(a / b for a, b in zip(times[last], times[first], strict=True))
        text += f". The time per target of `{last}` is {ratio:.2f} times that of `{first}`"
    return f"{text}.\n"


def targets_at(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Return the number of targets, interpolated, after which a loss curve first reaches a loss; None if it does
    not."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def trials(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the outcome of each finished run in a folder: the rung with the most similar config, the differences, the
    targets, the held-out loss in nats, and why it ended early, if so."""
    rungs = {name: load_config(f"ladder:{name}") for name in load_module("ladder").RECIPE}
    ended: dict[str, dict[str, Any]] = {}
    for run in sorted(file.parent for file in folder.glob("*/config.json") if has_ended(file.parent)):
        config: Any = read_config(run)
        changes = {name: _changes(rung, config) for name, rung in rungs.items()}
        rung = min(changes, key=lambda name: len(changes[name]))
        losses = [row["val_loss"] for row in read_metrics(run) if "val_loss" in row]
        ended[run.name] = {
            "rung": rung,
            "with": ", ".join(changes[rung]),
            "targets": config.steps * config.train.batch_size * config.model.context_length,
            "loss": None if ended_early(run) else losses[-1],
            "ended": ended_early(run),
        }
    return ended


def _changes(before: Config, after: Config) -> list[str]:
    """Return the differing fields that affect training on the same data."""
    old, new = (flatten(to_dict(config)) for config in (before, after))
    names = [n for n in {**old, **new} if n.startswith(("model.", "optimizer.", "train.batch_size", "data.stride"))]
    return [f"{name.partition('.')[2]} {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def trials_table(trials: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the trials from which the options were chosen as a Markdown table, best first."""
    rows = [("held-out loss", "nearest rung", "with", "targets")]
    for x in sorted(trials.values(), key=lambda x: x["loss"] or inf):
        loss = f"{x['loss']:.3f}" if x["loss"] else x["ended"]
        rows.append((loss, f"`{x['rung']}`", x["with"] or "-", f"{x['targets']:,}"))
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first row is its head, with columns of numbers to the right."""
    head, *others = (f"{row([*cells])}\n" for cells in rows)
    is_number = [
        all(re.fullmatch(r"-|-?[\d,.]+( ± [\d.]+)?", x) for x in column[1:]) for column in zip(*rows, strict=True)
    ]
    return "".join([head, *("|---:" if right else "|---" for right in is_number), "|\n", *others])


def section(figures: Mapping[str, Any], trials: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the section for the page about the ladder."""
    measured = "No candidate of this size has been trained yet.\n"
    if figures:
        missing = [f"`{name}`" for name in load_module("ladder").RECIPE if name not in figures["rungs"]]
        measured = "\n".join([
            table(figures), *[f"Not trained yet: {', '.join(missing)}.\n"] * bool(missing),
            *[text for text in [goal(figures)] if text],
        ])  # fmt: skip
    return (
        f"{measured}\nThe options were chosen from these {len(trials)} trials, with one seed each. The first 150,000\n"
        "bytes of three training books were held out, and the rest trained on. Changes without an option were made in\n"
        f"the code, and reverted:\n\n{trials_table(trials)}"
    )


def read(name: str) -> Any:
    """Return the figures in a results file; empty if there is no file."""
    path = record.STUDY_RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["figures"] if path.exists() else {}


@as_command()
def main(line: CommandLine) -> int:
    """Train, measure or write; return the exit status."""
    recipe: dict[str, str] = load_module("ladder").RECIPE
    parser = argparse.ArgumentParser(description="The recipe of the ladder.", allow_abbrev=False)
    parser.add_argument("what", choices=("train", "time", "trials", "write"))
    parser.add_argument("--folder", type=Path, default=Path("runs/recipe"), help="folder of the runs")
    parser.add_argument("--rungs", nargs="+", choices=[*recipe], default=[*recipe], help="rungs (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds per rung (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of time (default: 5)")
    parser.add_argument("--long", action="store_true", help=f"the first rung also with {LONG} times the tokens")
    own, options = parser.parse_known_args(line.words())
    for option, number in (("--seeds", own.seeds), ("--rounds", own.rounds)):
        if number < 1:
            parser.error(f"{option} is {number}; it must be 1 or more")
    times = own.folder / "times.json"
    if own.what == "train":
        if not any(option.split("=")[0] == "--data.path" for option in options):
            parser.error("--data.path is missing; name the folder of the books")
        return train(own.folder, own.rungs, own.seeds, own.long, options)
    if options:
        parser.error(f"{own.what} has no option {options[0]}")
    if own.what == "time":
        machine.set_up(min(load_config(f"ladder:{name}").train.batch_size for name in own.rungs))
        own.folder.mkdir(parents=True, exist_ok=True)
        times.write_text(json.dumps(measure_time(own.rungs, own.rounds)) + "\n", encoding="utf-8")
        return 0
    software = record.versions("jax", "jaxlib", "flax", "optax")
    if own.what == "trials":
        if not (tried := trials(own.folder)):
            raise UserError(f"{own.folder} holds no run that has ended; name the folder of the trials.")
        record.write("recipe_trials", tried, software, record.STUDY_RESULTS)
        return 0
    if not (rungs := outcomes(own.folder)):
        raise UserError(f"{own.folder} holds no run of the recipe that has ended; train them first.")
    taken = json.loads(times.read_text(encoding="utf-8")) if times.exists() else {}
    figures = {"rungs": rungs, "ms_per_1000_targets": taken}
    record.write("recipe", figures, software, record.STUDY_RESULTS)
    page = record.ROOT / "docs" / "alternatives.md"
    insert(page, BEGIN, section(figures, read("recipe_trials")), END)
    return 0


if __name__ == "__main__":
    sys.exit(main())

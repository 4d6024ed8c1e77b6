"""The ladder at the sources' own size, in pieces of nine minutes, and the table of outcomes.

    python -m studies.sources --data.path books/train --data.val-path books/val [--seconds 540] [--folder FOLDER]
        [--results FOLDER] [OPTIONS OF ladder]

Each call continues training `configs/ladder.py` from where the last one stopped, and saves and stops in time. Then it
stores the outcomes so far in `sources.json` and, at the sources' own size, writes them into `docs/alternatives.md`.
Outcomes of another size, such as with `--steps 4`, need `--results`, and are written into its `alternatives.md` if
that exists.

The exit status is 0 when all rungs have finished, 3 when the time ran out (the same command continues), 1 if training
failed, 2 for wrong input.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks import record
from jaxformer.cli.arguments import load_config
from jaxformer.cli.ladder import Arguments
from jaxformer.cli.options import CommandLine
from jaxformer.config import Config
from jaxformer.config.fields import differences, nonfinite_to_none
from jaxformer.config.files import load_module
from jaxformer.errors import UserError
from jaxformer.files import write_atomically
from jaxformer.ladder.results import has_ended, rung_result
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.run import read_config
from jaxformer.train.log import read_metrics
from jaxformer.train.setup import resolve_precision

SAVING_SECONDS, STORING_SECONDS = 45, 15
"""Seconds reserved at the end of a call for the checkpoint, and for the outcomes."""
TIME_OVER = 3
BEGIN, END = "<!-- outcomes of studies/sources.py -->\n", "<!-- end of outcomes -->\n"
HEAD = ("rung", "parameters", "steps", "perplexity", "bits/byte", "entropy by heads; blocks", "minutes", "device",
        "the sources")  # fmt: skip
OF_NO_EFFECT = re.compile(r"name|mesh|compute\..*|data\.(path|val_path)|train\.(?!batch_size|label_smoothing|skip).*")
"""Fields that may differ from the sources'."""


def train(options: Sequence[str], folder: Path, seconds: float) -> int:
    """Train the ladder for at most `seconds`; return its exit status, or `TIME_OVER`."""
    command = [sys.executable, "-m", "jaxformer", "ladder", "--size", "sources", "--folder", str(folder), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(record.ROOT), os.environ.get("PYTHONPATH", "")])}
    # A new session, so that the rung gets a signal only once, from the ladder: a second one would kill it.
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(SAVING_SECONDS)
            except subprocess.TimeoutExpired:
                print("the rung did not save in time; the next call continues from its last checkpoint")
            return TIME_OVER
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def outcomes(folder: Path, sources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the outcome so far of each started rung, by name, with the local device and its matmul dtype."""
    rungs, mesh = dict[str, dict[str, Any]](), make_mesh(devices=jax.devices()[:1])
    for name, reported in sources.items():
        run = folder / name
        if run.is_dir() and read_metrics(run):
            config = read_config(run)
            rungs[name] = nonfinite_to_none(asdict(rung_result(run, reported))) | {
                "of_steps": config.steps, "ended": has_ended(run),
                "device": f"{jax.devices()[0].device_kind}, {resolve_precision(config.compute, mesh).name}",
            }  # fmt: skip
    return rungs


def merge(stored: Mapping[str, Any], new: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Merge stored and new outcomes, in the order of the ladder. A rung without progress keeps its stored outcome, with
    the device that it was trained on."""
    progress = lambda x: (x["ended"], x["steps"])  # noqa: E731
    newer = {name: x for name, x in new.items() if name not in stored or progress(x) > progress(stored[name])}
    both = {**stored, **newer}
    return {name: both[name] for name in order if name in both}


def table(rungs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the outcomes as a Markdown table, or a sentence if there are none."""
    if not rungs:
        return "No rung of this size has been trained yet.\n"

    def cells(x: Mapping[str, Any]) -> tuple[str, ...]:
        steps = f"{x['steps']:,}" if x["steps"] == x["of_steps"] else f"{x['steps']:,} of {x['of_steps']:,}"
        number = lambda value, digits: "-" if value is None else f"{value:.{digits}f}"  # noqa: E731
        return (
            f"`{x['rung']}`", f"{x['parameters']:,}", x["ended_early"] or steps, number(x["perplexity"], 2),
            number(x["bits_per_byte"], 3), x["entropy"] or "-", number(x["minutes"], 1), x["device"], x["sources"],
        )  # fmt: skip

    head, *rows = (f"| {' | '.join(row)} |\n" for row in (HEAD, *map(cells, rungs.values())))
    return "".join([head, "|---" * len(HEAD) + "|\n", *rows])


def fill_page(page: Path, rungs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the table into a page; see `insert`."""
    insert(page, BEGIN, table(rungs), END)


def insert(page: Path, begin: str, text: str, end: str) -> None:
    """Replace the text between two lines of a page.

    Raises:
      UserError: the page lacks the lines.
    """
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise UserError(f"{page} lacks the lines {begin.strip()} and {end.strip()}; put them where the table goes.")
    write_atomically(page, f"{before}{begin}\n{text}\n{end}{after}")


def chosen_configs(options: Sequence[str]) -> dict[str, Config]:
    """Return the config of each rung that the ladder's options select, with these options applied. Raises `UserError`
    for options that the ladder would reject."""
    line = CommandLine(options)
    rungs = line.value("--rungs", tuple[str, ...]) or list(load_module("ladder").REPORTED)
    configs = {name: load_config(f"ladder:{name}") for name in rungs}
    return {name: line.parse(Arguments(config), "sources.sh", "").run_config for name, config in configs.items()}


def check_size(configs: Mapping[str, Config]) -> None:
    """Raise `UserError` if a rung does not have the sources' size or recipe."""
    for name, config in configs.items():
        for field, sources, given in differences(load_config(f"ladder:{name}"), config):
            if not OF_NO_EFFECT.fullmatch(field):
                remedy = "name a folder for other results with --results"
                raise UserError(f"{name} has {field} {given}, the sources {sources}; {remedy}.")


def read_outcomes(file: Path) -> dict[str, Any]:
    """Return the outcomes in `sources.json`, empty if there is no file. Raises `UserError` if it has another format."""
    if not file.exists():
        return {}
    try:
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["figures"]["rungs"]
        table(stored)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file} holds no outcomes of the ladder; restore or remove it.") from error
    return stored


def main() -> int:
    """Train, store and print the outcomes; return the exit status."""
    parser = argparse.ArgumentParser(description="The ladder at the sources' own size.", allow_abbrev=False)
    parser.add_argument("--seconds", type=int, default=540, help="time of this call (default: 540)")
    parser.add_argument("--folder", type=Path, default=Path("runs/sources"), help="folder of the runs")
    parser.add_argument("--results", type=Path, help="folder of sources.json, and of another alternatives.md")
    own, options = parser.parse_known_args()
    training_seconds = own.seconds - SAVING_SECONDS - STORING_SECONDS
    if training_seconds <= 0:
        parser.error(f"--seconds is {own.seconds}; it must be above {SAVING_SECONDS + STORING_SECONDS}, to save")
    if not any(option.split("=")[0] == "--data.path" for option in options):
        parser.error("--data.path is missing; name the folder of the books")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # save, as when the time is over
    page = (own.results or record.ROOT / "docs") / "alternatives.md"
    file = (own.results or record.STUDY_RESULTS) / "sources.json"
    try:  # check options before minutes of training
        configs, stored = chosen_configs(options), read_outcomes(file)
        if own.results is None:
            check_size(configs)
        status = train(options, own.folder, training_seconds)
        reported = load_module("ladder").REPORTED
        rungs = merge(stored, outcomes(own.folder, reported), list(reported))
        if rungs:
            record.write("sources", {"rungs": rungs}, record.versions("jax", "jaxlib", "flax"), file.parent)
            if page.exists():
                fill_page(page, rungs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rungs), end="")
    if status not in (0, 2, TIME_OVER):
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())

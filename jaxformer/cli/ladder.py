"""`python -m jaxformer ladder`: train the ladder's rungs on the same text, and compare their results."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jaxformer.cli.arguments import RUNS, folder_named, load_config
from jaxformer.cli.command import as_command, command
from jaxformer.cli.options import MERGED, CommandLine
from jaxformer.config import Config
from jaxformer.config.files import load_module
from jaxformer.errors import UserError
from jaxformer.parallel.processes import DistributedOptions
from jaxformer.terminal import align, echo

RUNGS = "ladder"
"""Config file with the rungs at the sources' size, and the candidates for a recipe."""
Size = Literal["small", "sources"]
SIZES = {"small": "ladder_small", "sources": RUNGS}
"""Config file of each size."""
SET_PER_RUNG = {"--config", "--run", "--resume", "--name", "--allow-changed-data"}
"""Options of train.py that the ladder sets."""
DESCRIPTION = """Train the rungs of configs/ladder.py in order, each in its own run below the folder, with the same
options: --steps, --data.path, --train.batch-size and all others of the config; the defaults shown here are those of the
first rung. On two cores, the small size takes about two minutes per rung. A rung that has ended is skipped, and an
interrupted one is resumed, so that the same command continues the ladder. A rung that diverges or becomes non-finite
has also ended. The results are shown in one table beside the sources' figures: in the terminal, and in the folder as
ladder.csv and ladder.html, a page that needs no network. Before any rung trains, forecast.json states what theory
and counts in the text forecast for each; it is scored after each rung."""


@dataclass(frozen=True)
class Arguments:
    """Options of ladder: these, and every field of the rungs' configs."""

    run_config: Annotated[Config, MERGED]
    rungs: tuple[str, ...] = ()
    """Rungs to train, in the order of the ladder; by default, all but the candidates for a recipe."""
    size: Size = "small"
    """Size of models and training: small, or that of the sources, which needs a GPU."""
    folder: str = str(RUNS / "ladder")
    """Folder of the runs."""
    distributed: DistributedOptions = field(default_factory=DistributedOptions)


@as_command(output_optional=True)
def main(line: CommandLine) -> int:
    """Train the ladder; return the exit status: 0 done, 2 wrong input, 128 + signal if interrupted."""
    if conflicting := sorted(SET_PER_RUNG & line.given):
        raise UserError(f"{conflicting[0]} is set by the ladder for each rung; omit it.")
    module = load_module(RUNGS)
    sources: dict[str, str] = module.REPORTED
    rungs = [*sources, *module.RECIPE]
    chosen = line.value("--rungs", tuple[str, ...], tuple(sources))
    if not chosen or not {*chosen} <= {*rungs}:
        raise UserError(f"--rungs is {' '.join(chosen) or 'empty'}; name some of {', '.join(rungs)}.")
    size = line.value("--size", Size, Arguments.size)
    folder = folder_named("--folder", line.value("--folder", str, Arguments.folder))
    # Check all options before hours of training.
    specs = {name: f"{SIZES[size] if name in sources else RUNGS}:{name}" for name in rungs if name in chosen}
    defaults = {name: Arguments(load_config(spec)) for name, spec in specs.items()}
    configs = {name: line.parse(x, command("ladder"), DESCRIPTION).run_config for name, x in defaults.items()}

    import jax

    # This process forecasts and samples, and leaves an accelerator's memory to the ones that train.
    jax.config.update("jax_platforms", "cpu")

    from jaxformer.ladder.forecasts import describe_forecast
    from jaxformer.ladder.page import write_results
    from jaxformer.ladder.results import (
        FORECAST_HEAD,
        FORECASTS,
        as_text,
        forecast_rows,
        forecast_rungs,
        has_ended,
        rung_result,
        score_rung,
    )
    from jaxformer.runs.run import read_config
    from jaxformer.train.resume import fixed_differences

    forecasts = forecast_rungs(configs, folder)  # before any rung trains
    for name, config in configs.items():
        run = folder / name
        echo(f"{name}: forecast: {describe_forecast(forecasts[name])}")
        if name in module.DIVERGING_RUNGS:
            echo(f"{name} is expected to diverge; training stops when it does")
        if run.exists():
            stored = read_config(run)
            for field, old, new in fixed_differences(stored, config):
                remedy = "choose another --folder, or remove it"
                raise UserError(f"{run} was trained with {field} {old}, not {new}; {remedy}.")
            if has_ended(run) and (config.steps, config.data) == (stored.steps, stored.data):
                echo(f"{name}: already trained, in {run}")
                score_rung(run)
                continue
        status = _train(run, specs[name], line.words(without={"--rungs", "--size", "--folder"}))
        if status not in (0, 1):
            return status if status > 0 else 128 - status
        if not run.exists() or not has_ended(run):
            raise UserError(f"rung {name} ended with status {status} before its last step; the same command resumes.")
        score_rung(run)
    results = [rung_result(folder / name, sources.get(name, "-")) for name in configs]
    echo(as_text(results))
    echo("\n".join(align([FORECAST_HEAD, *forecast_rows(folder, list(configs))], "<<<<<")))
    written = [*write_results(results, folder), FORECASTS]
    echo(f"also written to {folder}: {', '.join(written)}")
    return 0


def _train(run: Path, spec: str, options: Sequence[str]) -> int:
    """Train or resume the rung with this config; return the exit status of `train.py`, or 128 + the signal that stopped
    it."""
    if run.exists():
        echo(f"{run.name}: resuming {run}")
        start = ["--resume", "--run", str(run)]
    else:
        echo(f"{run.name}: training in {run}")
        start = ["--config", spec, "--run", str(run)]
    with subprocess.Popen([sys.executable, "-m", "jaxformer", "train", *start, *options]) as process:
        stopped = 0

        def stop(number: int, _: object) -> None:
            nonlocal stopped
            stopped = number
            if number == signal.SIGTERM:  # the terminal sends Ctrl-C to the rung itself
                process.send_signal(number)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 128 + stopped if stopped else status  # even if the rung finished its last step

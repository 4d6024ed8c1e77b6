"""`python -m jaxformer verify-resume`: kill a run, resume it, and compare it with one that was not interrupted."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxformer.cli.arguments import DEFAULT_CONFIG, load_config
from jaxformer.cli.command import as_command, command
from jaxformer.cli.options import MERGED, CommandLine
from jaxformer.config import Config
from jaxformer.errors import UserError
from jaxformer.terminal import echo

DETERMINISTIC = "--compute.deterministic"
DESCRIPTION = f"Kill a run, resume it, and compare it with an uninterrupted run. {DETERMINISTIC} is added unless given."
EVERY = "--train.checkpoint-every"
MAX_LINES = 12
"""Maximum differences shown."""
POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Arguments:
    """Options of verify-resume: these, and every field of the config; compute.deterministic is true unless given."""

    run_config: Annotated[Config, MERGED]
    config: str = DEFAULT_CONFIG
    """Config to train: quick, quick:modern, or FILE.py:NAME for your own file."""
    kill_at: int | None = None
    """Earliest step at which the run is killed, once it has a checkpoint to resume from; by default half of all
    steps."""
    folder: str | None = None
    """Folder in which both runs are kept; by default, they are removed at the end."""


@as_command(output_optional=True)
def main(line: CommandLine) -> int:
    """Verify that resuming is exact; return the exit status: 0 identical, 1 not, 2 wrong input."""
    spec = line.value("--config", str, DEFAULT_CONFIG)
    options = line.parse(Arguments(load_config(spec), spec), command("verify-resume"), DESCRIPTION)
    config, words = options.run_config, line.words(without={"--config", "--folder", "--kill-at"})
    kill_at = config.steps // 2 if options.kill_at is None else options.kill_at
    if not 1 <= kill_at < config.steps:
        raise UserError(f"--kill-at is {kill_at}; it must be at least 1 and below the {config.steps} steps.")
    every = config.train.checkpoint_every
    if not 0 < every <= kill_at:
        if EVERY in line.given:
            problem = f"{EVERY} is {every}, so there is no checkpoint to resume from at step {kill_at}"
            raise UserError(f"{problem}; omit it, or set it to at most --kill-at.")
        words += [EVERY, str(kill_at)]
        echo(f"both runs save a checkpoint every {kill_at:,} steps, so that there is one to resume from")
    if DETERMINISTIC not in line.given:
        words += [DETERMINISTIC]
    with contextlib.ExitStack() as stack:
        if options.folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verify-resume-")))
        else:
            folder = Path(options.folder)
            folder.mkdir(parents=True)  # raises if it exists
        return _verify(["--config", options.config, *words], kill_at, folder)


def _verify(options: list[str], kill_at: int, folder: Path) -> int:
    from jaxformer.runs.checkpoints import CheckpointReader

    uninterrupted, resumed = folder / "uninterrupted", folder / "resumed"
    theirs = CheckpointReader(resumed)
    echo("training without interruption")
    with _training([*options, "--run", str(uninterrupted)], folder / "uninterrupted.log") as process:
        _check_success(process, folder / "uninterrupted.log")
    echo(f"training again, to be killed at step {kill_at:,}")
    with _training([*options, "--run", str(resumed)], folder / "killed.log") as process:
        while (_last_step(resumed) < kill_at or not theirs) and process.poll() is None:
            time.sleep(POLL_SECONDS)
        process.kill()
        if process.wait() >= 0:
            _check_success(process, folder / "killed.log")
            raise UserError(f"the run ended before it could be killed at step {kill_at}; lower --kill-at.")
    echo(f"killed after step {_last_step(resumed):,}; resuming from the checkpoint of step {theirs.step():,}")
    with _training(["--resume", "--run", str(resumed)], folder / "resumed.log") as process:
        _check_success(process, folder / "resumed.log")
    return _compare(uninterrupted, resumed)


def _compare(uninterrupted: Path, resumed: Path) -> int:
    """Print the differences of two runs, or that there are none; return the exit status."""
    from jaxformer.inspect.comparison import exact_differences
    from jaxformer.runs.checkpoints import CheckpointReader
    from jaxformer.train.log import read_metrics

    if differences := exact_differences(uninterrupted, resumed):
        echo("\n".join(differences[:MAX_LINES]))
        return 1
    reader = CheckpointReader(uninterrupted)
    arrays = reader.arrays(reader.step())
    echo(
        f"bit-identical: {len(read_metrics(uninterrupted)):,} rows of metrics over "
        f"{_last_step(uninterrupted):,} steps, and {sum(a.size for a in arrays.values()):,} values in {len(arrays)} "
        "arrays of parameters and optimizer state"
    )
    return 0


def _last_step(run: Path) -> int:
    """Return the last step of a run's log, -1 before the first."""
    from jaxformer.train.log import read_metrics

    return max((row["step"] for row in read_metrics(run)), default=-1)


@contextlib.contextmanager
def _training(options: list[str], output: Path) -> Iterator[subprocess.Popen]:
    """Yield a training process whose output goes to a file; it is killed at the end of the block."""
    with output.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "jaxformer", "train", *options]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _check_success(process: subprocess.Popen, output: Path) -> None:
    """Wait for a process to end; raise `UserError` with its last line of output if it failed."""
    if status := process.wait():
        last = output.read_text(encoding="utf-8").strip().rpartition("\n")[2].removeprefix("error: ")
        raise UserError(f"training ended with status {status}: {last or 'no output'}")

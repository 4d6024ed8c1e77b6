"""`python -m jaxformer verify-resume`: show that a run which is killed and resumed ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from jaxformer.cli.arguments import load_config, options_given, parse, peek, run_command
from jaxformer.cli.options import MERGED
from jaxformer.cli.train import DEFAULT_CONFIG
from jaxformer.config import Config
from jaxformer.errors import UserError
from jaxformer.terminal import echo

PROGRAM = "python -m jaxformer verify-resume"
EVERY = "--train.checkpoint-every"


@dataclass(frozen=True)
class Arguments:
    """Options of verify-resume: these, and every field of the config."""

    fields: Annotated[Config, MERGED]
    config: str = DEFAULT_CONFIG
    """FILE.py or FILE.py:NAME, the config to train."""
    kill_at: int | None = None
    """The step from which on the run is killed, once it has a checkpoint to resume from; without it, half of all."""
    folder: str | None = None
    """Where to keep both runs; without it they are removed at the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify; the exit status: 0 identical, 1 not, 2 wrong input."""
    return run_command(_main, arguments, ignore_closed=True)


def _main(arguments: list[str]) -> int:
    value = {"nargs": "?"}
    own = {"--config": value, "--folder": value, "--kill-at": value, "--kill_at": value}
    known, fields = peek(arguments, own)
    config = load_config(known.config or DEFAULT_CONFIG)
    defaults = Arguments(config, known.config or DEFAULT_CONFIG)
    asked = parse(arguments, defaults, PROGRAM, "Kill a run, resume it, and compare.")
    kill_at = asked.fields.steps // 2 if asked.kill_at is None else asked.kill_at
    if not 1 <= kill_at < asked.fields.steps:
        raise UserError(f"kill-at is {kill_at}; it must be at least 1 and below the {asked.fields.steps} steps.")
    every = asked.fields.train.checkpoint_every
    if not 0 < every <= kill_at:
        if EVERY in options_given(fields):
            raise UserError(
                f"{EVERY} is {every}, so that there is no checkpoint to resume from at step {kill_at}; leave it "
                "out, or set it to at most --kill-at."
            )
        fields += [EVERY, str(kill_at)]
        echo(f"both runs save a checkpoint every {kill_at:,} steps, so that there is one to resume from")
    with contextlib.ExitStack() as stack:
        if asked.folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verify-resume-")))
        else:
            folder = Path(asked.folder)
            if folder.exists():
                raise UserError(f"{folder} exists; choose another --folder.")
            folder.mkdir(parents=True)
        return _verify(["--config", asked.config, *fields], kill_at, folder)


def _verify(options: list[str], kill_at: int, folder: Path) -> int:
    from jaxformer.checkpoints import CheckpointReader
    from jaxformer.train.log import read_metrics

    straight, resumed = folder / "straight", folder / "resumed"
    echo("training undisturbed")
    with _training([*options, "--run", str(straight)], folder / "straight.log") as process:
        _must_succeed(process, folder / "straight.log")
    echo(f"training again, to be killed at step {kill_at:,}")
    stored = CheckpointReader(resumed)
    with _training([*options, "--run", str(resumed)], folder / "killed.log") as process:
        while (_last_step(resumed) < kill_at or not stored) and process.poll() is None:
            time.sleep(0.005)
        process.kill()
        if process.wait() >= 0:
            _must_succeed(process, folder / "killed.log")
            raise UserError(f"the run ended before it could be killed at step {kill_at}; lower --kill-at.")
    echo(f"killed after step {_last_step(resumed):,}; resuming from the checkpoint of step {stored.step():,}")
    with _training(["--resume", "--run", str(resumed)], folder / "resumed.log") as process:
        _must_succeed(process, folder / "resumed.log")
    if apart := parting(straight, resumed):
        echo("\n".join(apart))
        return 1
    arrays = CheckpointReader(straight).arrays(CheckpointReader(straight).step())
    echo(
        f"identical to the last bit: {len(read_metrics(straight)):,} rows of metrics over "
        f"{_last_step(straight):,} steps, and {sum(a.size for a in arrays.values()):,} numbers in {len(arrays)} arrays "
        "of parameters and optimizer state"
    )
    return 0


def parting(a: Path, b: Path) -> list[str]:
    """Where two runs part, in sentences: the first metric in their logs, the first array of their last checkpoints.

    Everything counts but the time that things took. Empty if they are the same to the last bit.
    """
    from jaxformer.checkpoints import CheckpointReader
    from jaxformer.train.log import read_metrics, without_timings

    said: list[str] = []
    no_row: dict[str, Any] = {}
    logs = [map(without_timings, read_metrics(folder)) for folder in (a, b)]
    for one, other in zip_longest(*logs, fillvalue=no_row):
        if difference := _first_difference(one, other):
            step = one.get("step", other.get("step"))
            said.append(f"the logs part at step {step:,}, in {difference}")
            break
    ours, theirs = CheckpointReader(a), CheckpointReader(b)
    if (step := ours.step()) != (their_step := theirs.step()):
        return [*said, f"the last checkpoints are of steps {step:,} and {their_step:,}"]
    arrays, others = ours.arrays(step), theirs.arrays(step)
    changed = [name for name in {**arrays, **others} if not _same(arrays.get(name), others.get(name))]
    if changed:
        name = changed[0]
        said.append(
            f"the checkpoints of step {step:,} part in {len(changed)} of {len({**arrays, **others})} arrays, first in "
            f"{name}: {_apart(arrays.get(name), others.get(name))}"
        )
    return said


def _first_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    for name in {**one, **other}:
        if one.get(name) != other.get(name) or (name in one) != (name in other):
            values = [str(row.get(name, "nothing")) for row in (one, other)]
            return f"{name}: {values[0]:.60} and {values[1]:.60}" if max(map(len, values)) <= 60 else name
    return None


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Bit for bit, so that 0 is not -0 and a NaN is itself."""
    return a is not None and b is not None and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def _apart(a: np.ndarray | None, b: np.ndarray | None) -> str:
    if a is None or b is None:
        return "only one has it"
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.dtype} {a.shape} and {b.dtype} {b.shape}"
    return f"the largest difference is {np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))):.3g}"


@contextlib.contextmanager
def _training(options: list[str], output: Path) -> Any:
    """A process that trains and writes what it says to a file; it does not outlive the block."""
    with output.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "jaxformer", "train", *options]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _must_succeed(process: subprocess.Popen, output: Path) -> None:
    """Wait for the end; raise `UserError` with the last thing that was said if it was not a good one."""
    if status := process.wait():
        last = output.read_text(encoding="utf-8").strip().rpartition("\n")[2].removeprefix("error: ")
        raise UserError(f"training ended with status {status}: {last or 'it said nothing'}")


def _last_step(run: Path) -> int:
    """The last step that a run has logged, -1 before the first."""
    from jaxformer.train.log import read_metrics

    return max((row["step"] for row in read_metrics(run)), default=-1)

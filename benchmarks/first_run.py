"""The README's first commands on a GPU: a training, its sample and its page, and a run that is stopped and resumed.

As a program, it trains as `train.py` does, and writes the seconds of its phases:
`python -m benchmarks.first_run PHASES.json OPTIONS`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.harness import Figures, MeasurementError

CONFIG = ("--config", "quick:modern")
BEGAN = "BEGAN"
"""Environment variable with the time at which a process was started, in seconds since 1970."""
COMPILE = "/jax/core/compile/"


def run(folder: Path, part: str, options: Sequence[str] = ()) -> tuple[None, Figures]:
    """Run one part, each after 'train' in its run; return figures."""
    parts = {"train": train, "again": again, "sample": sample, "inspect": inspect, "resume": resume}
    return None, parts[part](folder, options)


def start(command: Sequence[str], folder: Path, log: Path, is_alone: bool = True) -> subprocess.Popen[bytes]:
    """Start a command whose output goes to a file, with caches in the folder."""
    environment = os.environ | {
        "JAXFORMER_CACHE": str(folder / "cache"), BEGAN: str(time.time()), "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(record.ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    if is_alone:  # as users have it
        environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *command], cwd=record.ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def output_of(command: Sequence[str], folder: Path) -> tuple[str, float]:
    """Run a command; return its output and its seconds."""
    began = time.monotonic()
    log = folder / "output.log"
    check(start(command, folder, log).wait(), log)
    return log.read_text(), round(time.monotonic() - began, 2)


def check(status: int, log: Path) -> None:
    """Raise `MeasurementError` with the end of the output if a command failed."""
    if status:
        print(log.read_text()[-3000:], file=sys.stderr)
        raise MeasurementError(f"status {status}: {log.read_text().strip().rpartition(chr(10))[2]}")


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log; none before it has one."""
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last(rows: list[dict[str, Any]], key: str) -> Any:
    """Return the last value of a key in the rows of a log, or None."""
    return next((row[key] for row in reversed(rows) if key in row), None)


def without_steps(options: Sequence[str]) -> list[str]:
    """Return options without the number of steps."""
    at = options.index("--steps") if "--steps" in options else len(options)
    return [*options[:at], *options[at + 2 :]]


def train(folder: Path, options: Sequence[str]) -> Figures:
    """Train with empty caches."""
    return timed_training(folder, "cold", options)


def again(folder: Path, options: Sequence[str]) -> Figures:
    """Train for a few steps with the caches that `train` has filled."""
    return timed_training(folder, "warm", [*without_steps(options), "--steps", "20"])


def timed_training(folder: Path, name: str, options: Sequence[str]) -> Figures:
    """Train in a run of this name; return figures."""
    run, phases, log = folder / name, folder / f"{name}.json", folder / f"{name}.log"
    began = time.monotonic()
    process = start(["-m", "benchmarks.first_run", str(phases), *CONFIG, *options, "--run", str(run)], folder, log)
    figures: Figures = {}
    while process.poll() is None:
        if any("loss" in row for row in metrics(run)):
            figures.setdefault("to the first logged steps, seconds", round(time.monotonic() - began, 2))
        time.sleep(0.01)
    check(process.wait(), log)
    seconds = round(time.monotonic() - began, 2)
    figures |= {f"{phase}, seconds": each for phase, each in json.loads(phases.read_text()).items()}
    rows = metrics(run)
    figures |= {"whole, seconds": seconds, "held-out bits per byte": last(rows, "val_bpb")}
    figures |= {key: last(rows, key) for key in ("step", "loss", "step_ms")}
    return figures | {"header": log.read_text().splitlines()[:6]}


def sample(folder: Path, options: Sequence[str]) -> Figures:
    """Continue the README's prompt."""
    command = ["sample.py", "--run", str(folder / "cold"), "--prompt", "We must", "--max-new-tokens", "60",
               "--temperature", "0.6", "--seed", "0"]  # fmt: skip
    text, seconds = output_of(command, folder)
    return {"text": text.strip(), "seconds": seconds}


def inspect(folder: Path, options: Sequence[str]) -> Figures:
    """Write the page."""
    page = folder / "page.html"
    text, seconds = output_of(["-m", "jaxformer", "inspect", str(folder / "cold"), "--out", str(page)], folder)
    return {"seconds": seconds, "page bytes": page.stat().st_size, "output": text.strip().splitlines()[-3:]}


def resume(folder: Path, options: Sequence[str]) -> Figures:
    """Compare a run that SIGTERM stops and that is resumed with one beside it that is not stopped."""
    from jaxformer.inspect.comparison import exact_differences

    steps = int(options[options.index("--steps") + 1]) if "--steps" in options else 400
    command = [
        "train.py", *CONFIG, *without_steps(options), "--steps", str(steps), "--compute.deterministic",
        "--train.log-every", "1", "--train.report-every", "0", "--run",
    ]  # fmt: skip
    whole, stopped = folder / "whole", folder / "stopped"
    beside = start([*command, str(whole)], folder, folder / "whole.log", is_alone=False)
    process = start([*command, str(stopped)], folder, folder / "stopped.log", is_alone=False)
    try:
        while process.poll() is None and not any(row["step"] >= steps // 8 for row in metrics(stopped)):
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        if (status := process.wait()) != 128 + signal.SIGTERM:
            raise MeasurementError(f"the run that was to be stopped ended with status {status}.")
        stopped_at = max(row["step"] for row in metrics(stopped))
        again = folder / "resumed.log"
        check(start(["train.py", "--resume", "--run", str(stopped)], folder, again, is_alone=False).wait(), again)
        check(beside.wait(), folder / "whole.log")
    finally:
        process.kill()
        beside.kill()
    differences = exact_differences(whole, stopped)
    return {
        "steps": steps, "stopped at step": stopped_at, "bit-identical": not differences,
        "differences": differences[:20],
    }  # fmt: skip


def main(phases: Path, arguments: Sequence[str]) -> int:
    """Train, and write the seconds of each phase up to the first evaluation."""
    began, now = float(os.environ[BEGAN]), time.time
    seconds = {"Python": now() - began}
    gc.disable()  # as in train.py
    import jax

    seconds["import of JAX"] = now() - began
    of_kind: dict[str, float] = defaultdict(float)

    def add(event: str, duration_secs: float, **of: str | int) -> None:
        if event.startswith(COMPILE):
            kind = event.removeprefix(COMPILE).removesuffix("_duration").replace("_", " ")
            of_kind[kind] += duration_secs
            if of.get("fun_name") in ("train_step", "jit(train_step)"):
                of_kind[f"{kind} of the step"] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(add)
    from jaxformer.cli import train

    seconds["import of jaxformer"] = now() - began
    # A phase is seen to begin where the command calls these.
    for name in ("_start_processes", "_prepare", "_train"):
        function = getattr(train, name)

        def timed(*arguments: Any, function: Any = function, name: str = name, **named: Any) -> Any:
            seconds[f"until {name.strip('_').replace('_', ' ')}"] = now() - began
            return function(*arguments, **named)

        setattr(train, name, timed)
    try:
        return train.main(arguments)
    finally:
        seconds["until the end"] = now() - began
        phases.write_text(json.dumps({name: round(each, 2) for name, each in (seconds | of_kind).items()}))


if __name__ == "__main__":
    from jaxformer.cli.command import exit_program

    exit_program(main(Path(sys.argv[1]), sys.argv[2:]))

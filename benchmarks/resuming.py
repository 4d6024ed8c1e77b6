"""Exact resumption of a training run that is killed many times.

A small model is trained without interruption, and again with `kill -9` at random moments, some of them while a
checkpoint is being written; after each kill the run is resumed. In the end, all metrics that do not measure time and
the generated samples must be equal, and parameters and optimizer state must be bit-identical.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import record
from benchmarks.harness import Figures
from jaxformer.inspect.comparison import exact_differences
from jaxformer.runs.checkpoints import CHECKPOINTS, TEMPORARY, CheckpointReader
from jaxformer.runs.run import SAMPLES
from jaxformer.train.log import read_metrics

LONGEST = 0.6
"""Maximum seconds of training before a kill: a few dozen steps, and several checkpoints."""
STEPS_PER_KILL = 150
"""Total steps per kill, enough that some remain after the last kill."""
OPTIONS = (
    "--config configs/quick.py --model.vocab-size 280 --model.context-length 16 --model.d-model 32 --model.n-blocks 2 "
    "--model.n-heads 2 --model.d-ff 64 --train.batch-size 4 --train.log-every 10 --train.eval-every 50 "
    "--train.eval-examples 8 --train.report-every 500 --train.sample-tokens 16 --train.checkpoint-every 25 "
    "--optimizer.learning-rate 0.1"
)


def train(folder: Path, steps: int, log: Path, resume: bool) -> subprocess.Popen:
    """Start a process that trains in a folder, with its output appended to a file."""
    options = ["--run", str(folder), "--steps", str(steps), *OPTIONS.split(), *(["--resume"] if resume else [])]
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, "-m", "jaxformer", "train", *options]
        return subprocess.Popen(command, cwd=record.ROOT, stdout=file, stderr=subprocess.STDOUT)


def writes(folder: Path) -> bool:
    """Return whether a checkpoint is being written."""
    return any((folder / CHECKPOINTS).glob(f"*{TEMPORARY}"))


def wait_and_kill(process: subprocess.Popen, folder: Path, delay: float, in_a_write: bool) -> bool:
    """Kill a process `delay` seconds after its training began, or during the first checkpoint write after that; return
    False if it ended before."""
    rows = len(read_metrics(folder)) if folder.exists() else 0
    while process.poll() is None and not (folder.exists() and len(read_metrics(folder)) > rows):
        time.sleep(0.01)
    time.sleep(delay)
    while in_a_write and process.poll() is None and not writes(folder):
        time.sleep(0.0005)  # a write takes a few milliseconds
    process.kill()
    return process.wait() < 0


def kill_and_compare(scratch: Path, kills: int, in_a_write: int) -> tuple[None, Figures]:
    """Kill and resume a run, and compare it with an uninterrupted one.

    Raises:
      SystemExit: a process failed, or the runs differ.
    """
    straight, killed, log = (scratch / part for part in ("straight", "killed", "log.txt"))
    steps = STEPS_PER_KILL * kills
    if train(straight, steps, log, resume=False).wait():
        sys.exit(log.read_text())
    figures = kill_and_resume(killed, steps, log, kills, in_a_write, random.Random(0))
    differences = exact_differences(straight, killed)
    if (straight / SAMPLES).read_text() != (killed / SAMPLES).read_text():
        differences.append("the samples are not the same")
    if differences:
        sys.exit("\n".join(differences))
    stored = CheckpointReader(killed)
    values = sum(array.size for array in stored.arrays(stored.step()).values())
    rows = len(read_metrics(straight))
    return None, figures | {"steps": steps, "rows_compared": rows, "values_compared": values, "bit_identical": True}


def kill_and_resume(folder: Path, steps: int, log: Path, kills: int, in_a_write: int, draw: random.Random) -> Figures:
    """Train with at least `kills` kills, `in_a_write` of them during a write; return the counts."""
    done = halves = 0
    while done < kills or halves < in_a_write:
        process = train(folder, steps, log, resume=done > 0)
        aimed = draw.random() < (in_a_write - halves) / max(1, kills - done)
        if not wait_and_kill(process, folder, draw.uniform(0, LONGEST), aimed):
            sys.exit(f"error: the run ended before kill {done + 1}; what it said: {log.read_text()[-2000:]}")
        done += 1
        halves += writes(folder)  # a write that finished before the signal does not count
        stored = CheckpointReader(folder)
        last = stored.step() if stored else "none"
        print(f"kill {done}{', in a write' if writes(folder) else ''}; last checkpoint {last}", flush=True)
    if train(folder, steps, log, resume=True).wait():
        sys.exit(log.read_text())
    return {"kills": done, "kills_in_a_write": halves, "corrupt_checkpoints": log.read_text().count("is corrupt")}

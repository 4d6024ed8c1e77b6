"""Kill a training run again and again, and show that it ends as if nothing had happened.

    python benchmarks/kill_resume.py [--kills 50] [--in-a-write 10]

A small model is trained undisturbed, and once more with `kill -9` at random moments, so many of them while a
checkpoint was being written; after each the run is resumed. In the end every metric that does not measure time, the
generated samples, and every bit of parameters and optimizer state have to be the same.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record

from jaxformer.checkpoints import CHECKPOINTS, TEMPORARY, CheckpointReader
from jaxformer.comparison import exact_differences
from jaxformer.runs import SAMPLES
from jaxformer.train.log import read_metrics

LONGEST = 0.6
"""Seconds of training before a kill, at most; a few dozen steps, and several checkpoints."""
STEPS_A_KILL = 150
"""So that there is something left to train after the last one."""
OPTIONS = (
    "--config configs/quick.py --model.vocab-size 280 --model.context-length 16 --model.d-model 32 --model.n-blocks 2 "
    "--model.n-heads 2 --model.d-ff 64 --train.batch-size 4 --train.log-every 10 --train.eval-every 50 "
    "--train.eval-examples 8 --train.report-every 500 --train.sample-tokens 16 --train.checkpoint-every 25 "
    "--optimizer.learning-rate 0.1"
)


def train(folder: Path, steps: int, log: Path, resume: bool) -> subprocess.Popen:
    """Start a process that trains in a folder; what it says goes to a file."""
    options = ["--run", str(folder), "--steps", str(steps), *OPTIONS.split(), *(["--resume"] if resume else [])]
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, "-m", "jaxformer", "train", *options]
        return subprocess.Popen(command, cwd=record.ROOT, stdout=file, stderr=subprocess.STDOUT)


def writes(folder: Path) -> bool:
    """Return whether a checkpoint is being written."""
    return any((folder / CHECKPOINTS).glob(f"*{TEMPORARY}"))


def wait_and_kill(process: subprocess.Popen, folder: Path, delay: float, in_a_write: bool) -> bool:
    """Kill a process so many seconds after its training began, or in the first write of a checkpoint after that;
    False if it ended before."""
    rows = len(read_metrics(folder)) if folder.exists() else 0
    while process.poll() is None and not (folder.exists() and len(read_metrics(folder)) > rows):
        time.sleep(0.01)
    time.sleep(delay)
    while in_a_write and process.poll() is None and not writes(folder):
        time.sleep(0.0005)  # a write takes some milliseconds
    process.kill()
    return process.wait() < 0


def main() -> int:
    """Kill, resume, compare, and write the result; 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description="Kill a training run again and again, and compare its end.")
    parser.add_argument("--kills", type=int, default=50, help="how often in all")
    parser.add_argument("--in-a-write", type=int, default=10, help="of these, while a checkpoint is being written")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        straight, killed, log = (Path(name) / part for part in ("straight", "killed", "log.txt"))
        steps = STEPS_A_KILL * asked.kills
        if train(straight, steps, log, resume=False).wait():
            sys.exit(log.read_text())
        found = kill_and_resume(killed, steps, log, asked.kills, asked.in_a_write, random.Random(asked.seed))
        apart = exact_differences(straight, killed)
        if (straight / SAMPLES).read_text() != (killed / SAMPLES).read_text():
            apart.append("the samples are not the same")
        stored = CheckpointReader(killed)
        numbers = sum(array.size for array in stored.arrays(stored.step()).values())
        figures = {
            **found, "steps": steps, "rows_compared": len(read_metrics(straight)), "numbers_compared": numbers,
            "identical_to_the_last_bit": not apart, "minutes": round((time.monotonic() - began) / 60, 1),
        }  # fmt: skip
    print(*apart, *(f"{key:<30}{value}" for key, value in figures.items()), sep="\n")
    file = record.write("kill_resume", figures, record.versions("jax", "orbax-checkpoint"))
    print(f"written: {file.relative_to(record.ROOT)}")
    return bool(apart)


def kill_and_resume(
    folder: Path, steps: int, log: Path, kills: int, in_a_write: int, draw: random.Random
) -> dict[str, Any]:
    """Train with so many kills, so many of them at least in a write; what happened, in figures."""
    done = halves = 0
    while done < kills or halves < in_a_write:
        process = train(folder, steps, log, resume=done > 0)
        aimed = draw.random() < (in_a_write - halves) / max(1, kills - done)
        if not wait_and_kill(process, folder, draw.uniform(0, LONGEST), aimed):
            sys.exit(f"error: the run ended before kill {done + 1}; what it said: {log.read_text()[-2000:]}")
        done += 1
        halves += writes(folder)  # one that was over before the signal came does not count
        stored = CheckpointReader(folder)
        last = stored.step() if stored else "none"
        print(f"kill {done}{', in a write' if writes(folder) else ''}; last checkpoint {last}", flush=True)
    if train(folder, steps, log, resume=True).wait():
        sys.exit(log.read_text())
    return {"kills": done, "kills_in_a_write": halves, "checkpoints_found_corrupt": log.read_text().count("is corrupt")}


if __name__ == "__main__":
    sys.exit(main())

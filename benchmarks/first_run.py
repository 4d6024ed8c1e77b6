"""What a reader's first two commands print: those of the README's first screen, run as they stand there.

    python -m benchmarks.first_run

The lines that the README shows of the log, the minutes until the run ended, and the sampled text are written to
benchmarks/results/first_run.json. `python -m docs.scripts.story README.md` puts them into the README.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import record

README = record.ROOT / "README.md"


def commands(readme: str) -> list[list[str]]:
    """Return the words after `python` of the commands that train and sample."""
    lines = [re.search(rf"python ({name}\.py.*)", readme) for name in ("train", "sample")]
    return [shlex.split(line[1]) for line in lines if line]


def output(words: Sequence[str], run: Path) -> str:
    """Return what a command prints to its standard output."""
    command = [sys.executable, str(record.ROOT / words[0]), *words[1:], "--run", str(run)]
    print("+", shlex.join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "COLUMNS": "100"})
    return done.stdout


def shown(log: str) -> list[str]:
    """Return the lines of a log that the README shows: data, model, and of the steps the first two and the last."""
    lines = log.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    return [line for line in lines if line.startswith(("data:", "model:"))] + [*steps[:2], steps[-1]]


def main() -> None:
    """Train, sample and store."""
    parser = argparse.ArgumentParser(description="The first two commands of the README.", allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of first_run.json")
    options = parser.parse_args()
    train, sample = commands(README.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        log = output(train, Path(folder) / "quick")
        minutes = (time.perf_counter() - start) / 60
        figures = {"log": shown(log), "minutes": round(minutes, 1), "sample": output(sample, Path(folder) / "quick")}
    print(f"written: {record.write('first_run', figures, record.versions('jax', 'jaxlib', 'flax'), options.results)}")


if __name__ == "__main__":
    main()

"""Run the first two commands of the README, and store their output.

    python -m studies.first_run [--run FOLDER]

The log lines that the README shows and the sampled text are written to studies/results/first_run.json, and
`python -m docs.scripts.story README.md` inserts them into the README.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import record

README = record.ROOT / "README.md"


def commands(readme: str) -> list[list[str]]:
    """Return the words after `python` in the commands that train and sample."""
    lines = [re.search(rf"python ({name}\.py.*)", readme) for name in ("train", "sample")]
    return [shlex.split(line[1]) for line in lines if line]


def output(words: Sequence[str], run: Path) -> str:
    """Run a command and return its standard output."""
    command = [sys.executable, str(record.ROOT / words[0]), *words[1:], "--run", str(run)]
    print("+", shlex.join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "COLUMNS": "100"})
    return done.stdout


def shown(log: str) -> list[str]:
    """Return the log lines that the README shows: data, model, and the first two and the last step, without the
    throughput, which depends on the machine and its load."""
    lines = [re.sub(r"  [\d,]+ tokens/s.*", "", line) for line in log.splitlines()]
    steps = [line for line in lines if line.startswith("step ")]
    return [line for line in lines if line.startswith(("data:", "model:"))] + [*steps[:2], steps[-1]]


def main() -> None:
    """Train, sample and store."""
    parser = argparse.ArgumentParser(description="The first two commands of the README.", allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=record.STUDY_RESULTS, help="folder of first_run.json")
    parser.add_argument("--run", type=Path, help="new folder to keep the run in, such as for the picture of its page")
    options = parser.parse_args()
    train, sample = commands(README.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or Path(folder) / "run"
        figures = {"log": shown(output(train, run)), "sample": output(sample, run)}
    print(f"written: {record.write('first_run', figures, record.versions('jax', 'jaxlib', 'flax'), options.results)}")


if __name__ == "__main__":
    main()

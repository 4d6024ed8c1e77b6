"""Processes that take turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import record


class Failed(RuntimeError):
    """A measurement cannot be made; says why."""


class Turn(NamedTuple):
    """Measurements of one turn of a worker."""

    values: list[float]
    """Result of each step, such as its loss."""
    ms: list[float]
    """Milliseconds a step, of each burst."""


class Worker:
    """A process that works when asked, and waits meanwhile. It ends with this one."""

    def __init__(self, name: str, python: str, script: str, *arguments: str) -> None:
        """Start `benchmarks/<script>`, which has to end in `serve`, and wait for what it says of itself."""
        self.name = name
        paths = [str(record.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        self.facts: dict[str, Any] = self._read()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def take(self, bursts: int, steps: int = 1, trace: Path | None = None) -> Turn:
        """So many bursts of so many steps; a profile of them goes to the folder `trace`."""
        assert self._process.stdin is not None
        try:
            print(json.dumps([bursts, steps, trace and str(trace)]), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise self._ended() from error
        return Turn(*self._read())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> Failed:
        return Failed(f"the process of {self.name} ended; what it said stands above.")


def serve(
    step: Callable[[int], Any],
    tracer: Callable[[str], AbstractContextManager] = nullcontext,
    **facts: Any,
) -> None:
    """Serve as a worker: describe itself, then take the requested steps and report their times.

    The steps of a burst are begun one after another, and only then waited for, as in training: a device that works
    by itself always has the next step at hand. A burst of one step is timed with all that goes around it.

    Args:
      step: begins the step of that number; `float` of what it gives waits for the step.
      tracer: given a folder, a context that writes a profile there.
      facts: JSON types.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is not an answer
    print(json.dumps(facts), file=answers, flush=True)
    taken = 0
    for line in sys.stdin:
        bursts, steps, trace = json.loads(line)
        turn = Turn([], [])
        with tracer(trace) if trace else nullcontext():
            for _ in range(bursts):
                began = time.perf_counter()
                begun = [step(taken + i) for i in range(steps)]
                turn.values.extend(map(float, begun))
                turn.ms.append(1e3 * (time.perf_counter() - began) / steps)
                taken += steps
        print(json.dumps(turn), file=answers, flush=True)


def take_turns(workers: Sequence[Worker], rounds: int, bursts: int, steps: int = 1) -> dict[str, float]:
    """Median milliseconds a step of each worker, over all bursts of all rounds."""
    ms: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for _ in range(rounds):
        for worker in workers:
            ms[worker.name] += worker.take(bursts, steps).ms
    return {name: median(each) for name, each in ms.items()}


def has(python: str, *packages: str) -> bool:
    """Return whether an interpreter exists and has these packages."""
    look = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    try:
        return subprocess.run([python, "-c", look, *packages], check=False).returncode == 0
    except OSError:
        return False

"""Process of one side of a case: `python -m benchmarks.worker MODULE:FUNCTION FOLDER`, see `harness.Side`.

It reads requests, a line of JSON each, and answers each with one: `{"prepare": SETTINGS}` with the facts of a point,
`{"steps": N}` with the milliseconds per step.

The steps of a turn are begun one after another, and only then waited for, as in training: a device that works by itself
always has the next step at hand.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import Milliseconds


def timed(step: Callable[[int], Any], first: int, steps: int) -> float:
    """Return the milliseconds per step."""
    began = time.perf_counter()
    results = [step(number) for number in range(first, first + steps)]
    for result in results:
        float(result)
    ms = 1e3 * (time.perf_counter() - began)
    return (sum(results) if isinstance(results[0], Milliseconds) else ms) / steps


def main(target: str, folder: Path) -> None:
    """Answer requests until there are no more."""
    module, _, function = target.partition(":")
    make = getattr(import_module(module), function)
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    step, taken = None, 0
    for line in sys.stdin:
        request = json.loads(line)
        if "prepare" in request:
            step, facts = make(folder, **request["prepare"])
            answer: Any = facts | {"_untimed": step is None}
        else:
            assert step is not None
            answer = timed(step, taken, request["steps"])
            taken += request["steps"]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

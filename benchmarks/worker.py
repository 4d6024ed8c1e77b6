"""Process of one side of a case: `python -m benchmarks.worker MODULE:FUNCTION FOLDER`, see `harness.Side`.

It reads requests, one line of JSON each, and answers each with one line: `{"prepare": SETTINGS}` with the facts of a
point, `{"steps": N}` with the milliseconds per step; or with `{"error": MESSAGE}`.

As in training, the result of a step is read after the next one is dispatched, so that an asynchronous device always has
a step queued. With more than 32 in flight, XLA's CPU devices may wait for each other forever.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import Milliseconds


def timed(step: Callable[[int], Any], first: int, steps: int) -> float:
    """Run steps; return milliseconds per step."""
    began = time.perf_counter()
    results = [step(first)]
    for number in range(first + 1, first + steps):
        results.append(step(number))
        float(results[-2])
    float(results[-1])
    ms = 1e3 * (time.perf_counter() - began)
    return (sum(results) if isinstance(results[0], Milliseconds) else ms) / steps


def main(target: str, folder: Path) -> None:
    """Answer requests until there are no more."""
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # keep library output out of the answers,
    os.dup2(2, 1)  # also that of C++ and of other processes
    module, _, function = target.partition(":")
    make = getattr(import_module(module), function)
    step, taken = None, 0
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "prepare" in request:
                step, facts = make(folder, **request["prepare"])
                answer: Any = facts | {"_untimed": step is None}
            else:
                assert step is not None
                answer = timed(step, taken, request["steps"])
                taken += request["steps"]
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

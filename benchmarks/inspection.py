"""Overhead of inspection in a training run: the default config of `train.py`, with its default reports.

    python benchmarks/inspection.py [OPTIONS OF train.py]

The training is an ordinary one, in this process; what is looked at (attention entropy, gradient table, samples, what
the initialisation gave, report.html) is timed where it is called, after the step before it has been waited for. The
other side, of the same run and the same minutes, is all the rest: steps, validation, checkpoints. The target is 3 % at
most, of a start whose programs are in the cache already; what compiling them takes is recorded apart.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import record

from jaxformer import callbacks, training_page
from jaxformer.cli import train
from jaxformer.train import loop

TARGET = 0.03


class Stopwatch:
    """Seconds spent inside what it wraps, the first call of each apart: that compiles."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.later: dict[str, float] = {}

    def timing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, timed."""

        def timed(*given: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = jax.block_until_ready(call(*given, **options))
            took = time.perf_counter() - began
            seconds = self.later if name in self.first else self.first
            seconds[name] = seconds.get(name, 0.0) + took
            return found

        return timed


def main() -> None:
    """Train, print, and write the result."""
    watch, whole = Stopwatch(), Stopwatch()
    make_callbacks, page_sink, training = callbacks.make_callbacks, training_page.page_sink, loop.train

    def timed_callbacks(*given: Any) -> list[loop.Callback]:
        made = make_callbacks(*given)
        return [replace(callback, call=watch.timing(f"callback {i}", callback.call)) for i, callback in enumerate(made)]

    callbacks.make_callbacks = timed_callbacks  # type: ignore[assignment]
    training_page.page_sink = lambda folder: watch.timing("report.html", page_sink(folder))
    loop.train = whole.timing("training", training)
    with tempfile.TemporaryDirectory() as folder:
        status = train.main(["--run", str(Path(folder) / "run"), *sys.argv[1:]])
    if status:
        sys.exit(status)
    total, first, later = sum(whole.first.values()), sum(watch.first.values()), sum(watch.later.values())
    ratio = total / (total - first - later)
    steady = (total - first) / (total - first - later)
    print(f"inspection: {first + later:.2f} of {total:.1f} s, of which first calls {first:.2f} s")
    print(f"with it over without: {ratio:.4f}; without first calls: {steady:.4f}; target {1 + TARGET}")
    figures = {
        "training_s": total, "first_calls_s": watch.first, "later_calls_s": watch.later, "ratio": ratio,
        "ratio_without_first_calls": steady, "target": 1 + TARGET, "options": sys.argv[1:],
    }  # fmt: skip
    software = record.versions("jax", "jaxlib", "flax")
    print(record.write("inspection", figures, software, devices=jax.device_count(), kind=jax.devices()[0].device_kind))


if __name__ == "__main__":
    main()

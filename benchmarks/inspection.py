"""Overhead of inspection in a training run: the default config of `train.py`, with its default reports.

The run trains as usual; its inspections (attention entropy, gradient table, samples, initialisation, report.html) are
timed at their calls, after the preceding step has completed. They are compared with the rest of the same run: steps,
validation, checkpoints. First calls, which compile, are counted separately.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import Figures
from jaxformer.cli import train
from jaxformer.inspect import callbacks
from jaxformer.inspect.pages import training as training_page
from jaxformer.train import loop


class Stopwatch:
    """Seconds spent inside wrapped functions, with the first call of each, which compiles, counted separately."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.later: dict[str, float] = {}

    def timing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = jax.block_until_ready(call(*arguments, **options))
            seconds = self.later if name in self.first else self.first
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
            return result

        return timed


def overhead(folder: Path, options: list[str]) -> tuple[None, Figures]:
    """Train; return seconds and ratios."""
    watch, total = Stopwatch(), Stopwatch()
    make_callbacks, page_writer, training = callbacks.make_callbacks, training_page.page_writer, loop.train

    def timed_callbacks(*arguments: Any) -> list[loop.Callback]:
        each = enumerate(make_callbacks(*arguments))
        return [replace(callback, call=watch.timing(f"callback {i}", callback.call)) for i, callback in each]

    callbacks.make_callbacks = timed_callbacks  # type: ignore[assignment]
    training_page.page_writer = lambda folder: watch.timing("report.html", page_writer(folder))
    loop.train = total.timing("training", training)
    if status := train.main(["--run", str(folder / "run"), *options]):
        raise SystemExit(status)
    seconds, first, later = (sum(each.values()) for each in (total.first, watch.first, watch.later))
    rest = seconds - first - later
    return None, {
        "training, s": round(seconds, 2), "first calls, s": round(first, 2), "later calls, s": round(later, 2),
        "with over without": round(seconds / rest, 4), "without first calls": round((seconds - first) / rest, 4),
    }  # fmt: skip

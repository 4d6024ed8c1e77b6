"""`report.html` in a run's folder: a page with its log, updated during training."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformer.inspect.pages.page import write_page
from jaxformer.inspect.pages.training_sections import Row, training_sections
from jaxformer.runs import read_config
from jaxformer.train.log import Sink, print_line, read_metrics, read_samples

REPORT = "report.html"
MAX_TIME_SHARE = 0.01
"""Maximum fraction of the training time spent on the page."""


def page_sink(folder: Path) -> Sink:
    """Return a sink that updates the page at evaluations, within `MAX_TIME_SHARE`, until a write fails."""
    rows: list[dict[str, Any]] = []
    next_update = 0.0

    def sink(row: dict[str, Any]) -> None:
        nonlocal next_update
        rows.extend([row] if rows else read_metrics(folder))  # initially including rows from before a resumption
        start = time.perf_counter()
        if "val_loss" in row and start >= next_update:
            is_written = write_training_page(folder, rows)
            next_update = start + (time.perf_counter() - start) / MAX_TIME_SHARE if is_written else math.inf

    return sink


def write_training_page(folder: Path, rows: Sequence[Row]) -> bool:
    """Write the page from rows of the log; if it cannot be written, print the reason and return False. A failure is not
    an error, because the page can be written again later. Without rows, nothing is written."""
    if not rows:
        return True
    config, last = read_config(folder), rows[-1]
    loss = "" if last.get("val_loss") is None else f": held-out loss {last['val_loss']:.4f} nats"
    fact = f"{type(config.model.build()).__name__}, step {last['step']:,} of {config.steps:,}{loss}."
    title = f"{folder.resolve().name}: training"
    try:
        write_page(folder / REPORT, title, [fact], training_sections(rows, config.model, read_samples(folder)))
    except OSError as error:
        print_line(f"{REPORT} cannot be written: {error.strerror or error}; training continues")
        return False
    return True

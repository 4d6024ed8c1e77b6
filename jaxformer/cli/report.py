"""`report.html` in a run's folder: what its log says, as a page that can be reloaded while it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformer.inspect.page import write_page
from jaxformer.inspect.training_sections import Row, training_sections
from jaxformer.runs import read_config
from jaxformer.train.log import Sink, read_metrics, read_samples, say

REPORT = "report.html"
SHARE = 0.01
"""Of the time, at most, that goes into the page while a run trains."""


def reporter(folder: Path) -> Sink:
    """What takes rows of the run's log and keeps the page up to date, as far as `SHARE` allows, and until it cannot be
    written."""
    rows: list[dict[str, Any]] = []
    due = 0.0

    def take(row: dict[str, Any]) -> None:
        nonlocal due
        rows.extend([row] if rows else read_metrics(folder))  # at first also those from before it was resumed
        began = time.perf_counter()
        if "val_loss" in row and began >= due:
            written = write_report(folder, rows)
            due = began + (time.perf_counter() - began) / SHARE if written else math.inf

    return take


def write_report(folder: Path, rows: Sequence[Row]) -> bool:
    """Write the page of some rows of the log, and tell whether it could be; if not, that is said.

    It is no error: a page can be made again, steps cannot. Without rows there is nothing to write.
    """
    if not rows:
        return True
    config, last = read_config(folder), rows[-1]
    loss = "" if last.get("val_loss") is None else f": held-out loss {last['val_loss']:.4f} nats"
    fact = f"{type(config.model.build()).__name__}, step {last['step']:,} of {config.steps:,}{loss}."
    title = f"{folder.resolve().name}: training"
    try:
        write_page(folder / REPORT, title, [fact], training_sections(rows, read_samples(folder)))
    except OSError as error:
        say(f"{REPORT} cannot be written: {error.strerror or error}; all else goes on")
        return False
    return True

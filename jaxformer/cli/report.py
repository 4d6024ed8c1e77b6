"""`report.html` in a run's folder: what its log says, as a page, made anew with every validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxformer.errors import writing
from jaxformer.inspect.curves import training
from jaxformer.inspect.page import write_page
from jaxformer.runs import read_config
from jaxformer.train.log import Sink, read_metrics, read_samples

REPORT = "report.html"


def reporter(folder: Path) -> Sink:
    """What takes rows of the run's log and keeps the page up to date."""
    rows: list[dict[str, Any]] = []

    def take(row: dict[str, Any]) -> None:
        rows.extend([row] if rows else read_metrics(folder))  # at first also those from before it was resumed
        if "val_loss" in row:
            with writing(folder, REPORT):
                write_report(folder, rows)

    return take


def write_report(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write the page of some rows of the log."""
    config, last = read_config(folder), rows[-1]
    loss = "" if last.get("val_loss") is None else f": held-out loss {last['val_loss']:.4f} nats"
    fact = f"{type(config.model.build()).__name__}, step {last['step']:,} of {config.steps:,}{loss}."
    write_page(folder / REPORT, f"{folder.name}: training", [fact], training(rows, read_samples(folder)))

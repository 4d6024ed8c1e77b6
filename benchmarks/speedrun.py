"""GPT-2's architecture on the books of the ladder, for about one epoch: bits per byte against time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import record
from benchmarks.first_run import check, last, metrics, start
from benchmarks.harness import Figures, MeasurementError

BOOKS = "BOOKS"
"""Environment variable with the folder that `studies/books.py` fills."""


def train(folder: Path, options: Sequence[str], data: str = "") -> tuple[None, Figures]:
    """Train on the books, or on `data`; return the seconds since the start, which include the tokenizer's training and
    compiling, and held-out bits per byte at each evaluation."""
    books = os.environ.get(BOOKS)
    if not (books or data):
        raise MeasurementError(f"{BOOKS} is not set; name the folder that studies/books.py fills.")
    texts = ["--data.path", data or f"{books}/train", *([] if data else ["--data.val-path", f"{books}/val"])]
    own = folder / str(len(list(folder.iterdir())))  # also for caches: no optimizer finds what another has made
    own.mkdir()
    run, log = own / "run", own / "speedrun.log"
    began, evaluations = time.monotonic(), dict[str, Figures]()
    process = start([str(record.ROOT / "train.py"), *texts, *options, "--run", str(run)], own, log)
    try:
        while True:
            has_ended = process.poll() is not None  # asked first, so that the last rows are read after it
            for row in metrics(run):
                if "val_bpb" in row and str(row["step"]) not in evaluations:
                    seconds = round(time.monotonic() - began, 2)
                    evaluations[str(row["step"])] = {"seconds": seconds, "bits per byte": row["val_bpb"]}
            if has_ended:
                break
            time.sleep(0.05)
    finally:
        process.kill()
    check(process.wait(), log)
    rows = metrics(run)
    return None, {"at step": evaluations, **{key: last(rows, key) for key in ("step", "epoch", "loss", "step_ms")}}

"""Training log: lines in the terminal, `metrics.jsonl`, and samples."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jaxformer.config.fields import nonfinite_to_none
from jaxformer.errors import UserError, folder_vanished_error, parse_json, user_error_on_write
from jaxformer.files import write_atomically
from jaxformer.runs.run import METRICS, SAMPLES
from jaxformer.terminal import escape_control, wrap_columns

UNITS = ("tokens", "examples")
"""Units of throughput; see `Dataset.unit`."""
VAL_METRICS = {
    "val_bpb": "{:.3f} bits/byte",
    "val_image_to_text_recall_at_5": "{:.1%} recall at 5",
    "val_accuracy": "{:.1%} accuracy",
}
"""Format of each validation metric in a line; the first that an evaluation has is printed next to the loss."""
LITTLE_SECONDS = 30
"""Time left from which on it is printed early."""
SMOOTHING = 0.8
"""Weight of earlier step times in the exponential moving average that estimates the time left."""

Row = dict[str, Any]
"""Entries of one step by name, such as losses, norms, notes, and measurements of heads."""
MetricWriter = Callable[[Row], None]
"""Receiver of each row, in the form stored in `metrics.jsonl`."""

console = Console(highlight=False, soft_wrap=True)
"""Terminal output of training; processes other than the first are quiet."""


def print_line(text: str) -> None:
    """Print a line; on a terminal, control characters in it are shown as symbols."""
    console.print(escape_control(text) if console.is_terminal else text, markup=False)


class Log:
    """Writer of metrics to the run's folder and to `writers`, with a progress bar in the terminal."""

    def __init__(
        self, folder: Path | None, start: int, steps: int, writers: Sequence[MetricWriter] = (), show_every: int = 0
    ) -> None:
        """Open the log for appending.

        Args:
          folder: the run's folder; None writes nothing.
          start: step at which training begins.
          steps: step at which training ends.
          writers: receivers of each row, once it is stored and printed.
          show_every: steps between printed rows without an evaluation, in addition to the last step; 0 prints none.
        """
        self._folder, self._writers, self._show_every = folder, writers, show_every
        self._steps, self._time_left = steps, TimeLeft(steps)
        self._is_estimated = False
        if folder is not None:
            with user_error_on_write(folder, METRICS):
                self._file = (folder / METRICS).open("a", encoding="utf-8")
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=steps, completed=start, note="")

    def __enter__(self) -> Log:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # every row was flushed, or its failure raised
                self._file.close()

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        self._progress.update(self._task, completed=step)

    def estimate(self, step: int, step_ms: float) -> None:
        """Print the time per step and the time left, once, unless little is left."""
        seconds = step_ms / 1e3
        left = seconds * (self._steps - step)
        if not self._is_estimated and left >= LITTLE_SECONDS:
            self._is_estimated = True
            pace = f"{seconds:.2g} s" if seconds < 10 else duration(seconds)
            print_line(f"step {step:>7,}  {pace} per step, about {duration(left)} left")

    def row(self, row: Row) -> None:
        """Store a row and show its loss in the progress bar; print it if it has an evaluation, a note or a warning.

        Raises:
          UserError: the row cannot be written, or the folder has vanished.
        """
        if self._folder is None:
            return
        if not (self._folder / METRICS).exists():  # writes to the open file would succeed, but the rows would be lost
            raise folder_vanished_error(self._folder, METRICS)
        stored = nonfinite_to_none(row)
        with user_error_on_write(self._folder, METRICS):
            self._file.write(json.dumps(stored) + "\n")
            self._file.flush()
        self._show(row)
        for writer in self._writers:
            writer(stored)

    def _show(self, row: Row) -> None:
        left = self._time_left(row)
        if "step_ms" in row:
            self._progress.update(self._task, note="  ".join([f"loss {row['loss']:.3f}", *_speed(row), *left]))
        step, every = row["step"], self._show_every
        shows_loss = every and "step_ms" in row and (step % every == 0 or step == self._steps)
        if "val_loss" in row or shows_loss:
            print_line(format_row(row, left))
            self._is_estimated |= bool(left)
        elif left:
            self.estimate(row["step"], row["step_ms"])
        for kind in ("note", "warning"):
            if kind in row:
                print_line(f"step {row['step']:,}  {kind}: {row[kind]}")


class TimeLeft:
    """Estimator of the time until the last step, from step times that exclude evaluations."""

    def __init__(self, steps: int) -> None:
        self._steps, self._is_first, self._mean_ms = steps, True, 0.0

    def __call__(self, row: Row) -> list[str]:
        """Return `["3 min left"]`, or `[]` for the first row with a step time, which includes compilation."""
        ms, is_first = row.get("step_ms"), self._is_first
        self._is_first &= ms is None
        if ms is None or is_first or row["step"] >= self._steps:
            return []
        self._mean_ms = SMOOTHING * (self._mean_ms or ms) + (1 - SMOOTHING) * ms
        return [f"{duration(self._mean_ms * (self._steps - row['step']) / 1e3)} left"]


def duration(seconds: float) -> str:
    """Return a time in a readable unit: "45 s", "12 min", "3 h 05 min"."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def format_row(row: Row, left: Sequence[str] = ()) -> str:
    """Return a row for the terminal, wrapped to `WIDTH`: losses in nats, throughput, time left."""
    parts = [f"step {row['step']:>7,}"]
    if "loss" in row:
        parts.append(f"loss {row['loss']:.3f}")
    if "val_loss" in row:
        shown = [text.format(row[name]) for name, text in VAL_METRICS.items() if name in row]
        parts.append(f"held-out {row['val_loss']:.3f}" + (f" ({shown[0]})" if shown else ""))
    return "\n".join(wrap_columns([*parts, *_speed(row), *left], indent=14))


def _speed(row: Row) -> list[str]:
    return [f"{row[f'{unit}_per_s']:,.0f} {unit}/s" for unit in UNITS if f"{unit}_per_s" in row]


def read_metrics(folder: Path) -> list[Row]:
    """Return the rows of `metrics.jsonl`, ignoring a truncated last line.

    Raises:
      UserError: any other line is not a row of metrics.
    """
    rows = []
    file = folder / METRICS
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for number, text in enumerate(lines, start=1):
        try:
            row = parse_json(text)
        except ValueError:
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        elif number < len(lines):
            raise UserError(f"line {number} of {file} is not a row of metrics; remove or repair it.")
    return rows


def without_timings(row: Row) -> Row:
    """Return a row without the metrics `…_ms` and `…_per_s`, which depend on the speed of the machine."""
    return {name: value for name, value in row.items() if not name.endswith(("_ms", "_per_s"))}


def truncate_log(folder: Path, step: int) -> None:
    """Remove metrics and samples after a step, so that a resumed run does not duplicate them."""
    rows = [json.dumps(row) + "\n" for row in read_metrics(folder) if row["step"] <= step]
    with user_error_on_write(folder, METRICS):
        write_atomically(folder / METRICS, "".join(rows))
    if (folder / SAMPLES).is_file():
        samples = [e for e in read_samples(folder) if int(e[6 : e.index(", temp")].replace(",", "")) <= step]
        with user_error_on_write(folder, SAMPLES):
            write_atomically(folder / SAMPLES, "".join(samples))


def read_samples(folder: Path) -> list[str]:
    """Return the entries of `samples.txt`, each with its header of step and temperature."""
    file = folder / SAMPLES
    samples = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return re.split(r"^(?=\[step \d[\d,]*, temperature )", samples, flags=re.MULTILINE)[1:]

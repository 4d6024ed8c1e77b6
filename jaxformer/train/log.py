"""What a run tells: lines in the terminal, `metrics.jsonl`, and plots."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jaxformer.config import nonfinite_to_none
from jaxformer.errors import UserError, folder_vanished_error, parse_json, user_error_on_write
from jaxformer.runs import METRICS, PLOTS, SAMPLES, write_atomically
from jaxformer.terminal import escape_control, wrap_columns

UNITS = ("tokens", "examples")
"""What a `Dataset` may count."""
SHOWN = {
    "val_bpb": "{:.3f} bits/byte",
    "val_image_to_text_recall_at_5": "{:.1%} recall at 5",
    "val_accuracy": "{:.1%} accuracy",
}
"""How an evaluation's metric is shown beside the loss: the first of these that it has."""
SMOOTHING = 0.8
"""Weight of the earlier step times in the mean that the time left is estimated from."""

ANY = "any name"
ROW: dict[str, Any] = {
    **dict.fromkeys(("epoch", "loss", "ppl", "val_loss", "val_ppl", "val_bpb", "lr", "step_ms"), 0.0),
    "note": "",
    "warning": "",
    "diverged": {"began": 0},
    "entropy": [[0.0]],
    "router": {ANY: {"share": [0.0]}},
    "gradients": [{"name": "", "g": 0.0, "w": 0.0, "u": 0.0, "update": 0.0}],
    "check_init": {"expected": [{ANY: 0.0}], "observed": [{ANY: 0.0}]},
}
"""How the fields of a row are built that pages and plots are drawn from; a row has some of them."""

Sink = Callable[[dict[str, Any]], None]
"""What takes a row besides, as the file holds it."""

console = Console(highlight=False, soft_wrap=True)
"""Where training talks to people; of several processes only the first does."""


def say(text: str) -> None:
    """Show a line; control characters in it as signs, where that is a terminal."""
    console.print(escape_control(text) if console.is_terminal else text, markup=False)


class Log:
    """Writes rows of metrics to the run's folder and to `sinks`, and shows them with a progress bar."""

    def __init__(
        self, folder: Path | None, start: int, steps: int, sinks: Sequence[Sink] = (), show_entropy: bool = False,
        show_every: int = 0,
    ) -> None:  # fmt: skip
        """Without a folder, nothing is written.

        Args:
          show_every: steps between lines of rows without an evaluation, of which the last step has one, too; 0: none.
        """
        self._folder, self._sinks, self._show_entropy = folder, sinks, show_entropy
        self._steps, self._show_every, self._time_left = steps, show_every, TimeLeft(steps)
        if folder is not None:
            with user_error_on_write(folder, METRICS):
                self._file = (folder / METRICS).open("a", encoding="utf-8")
        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            console=console, disable=not console.is_terminal, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("training", total=steps, completed=start, note="")

    def __enter__(self) -> Log:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # every row was flushed, or its failure told
                self._file.close()

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def row(self, row: dict[str, Any]) -> None:
        """Store a row; show it in the bar, and as a line if it holds an evaluation, a note or a warning.

        Raises:
          UserError: it cannot be written, or the folder has vanished.
        """
        if self._folder is None:
            return
        if not (self._folder / METRICS).exists():  # the open file would take rows that nobody can read
            raise folder_vanished_error(self._folder, METRICS)
        stored = nonfinite_to_none(row)
        with user_error_on_write(self._folder, METRICS):
            self._file.write(json.dumps(stored) + "\n")
            self._file.flush()
        for sink in self._sinks:
            sink(stored)
        left = self._time_left(row)
        if "step_ms" in row:
            self._progress.update(self._task, note="  ".join([f"loss {row['loss']:.3f}", *_speed(row), *left]))
        if "val_loss" in row or ("step_ms" in row and self._shows(row["step"])):
            say("\n".join([line(row, left), *(entropy_lines(row) if self._show_entropy else [])]))
        for kind in ("note", "warning"):
            if kind in row:
                say(f"step {row['step']:,}  {kind}: {row[kind]}")

    def _shows(self, step: int) -> bool:
        return self._show_every > 0 and (step % self._show_every == 0 or step == self._steps)


class TimeLeft:
    """Estimates the time until the last step from the rows so far, in which steps are timed without evaluations."""

    def __init__(self, steps: int) -> None:
        self._steps, self._first, self._mean_ms = steps, True, 0.0

    def __call__(self, row: dict[str, Any]) -> list[str]:
        """Return a phrase such as "3 min left"; none before there are steps beyond the first ones, which are slow."""
        if "step_ms" not in row:
            return []
        if self._first:
            self._first = False
            return []
        ms = row["step_ms"]
        self._mean_ms = SMOOTHING * self._mean_ms + (1 - SMOOTHING) * ms if self._mean_ms else ms
        seconds = self._mean_ms * (self._steps - row["step"]) / 1e3
        return [f"{duration(seconds)} left"] if row["step"] < self._steps else []


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: "45 s", "12 min", "3 h 05 min"."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def line(row: dict[str, Any], left: Sequence[str] = ()) -> str:
    """Return a row of the log for the terminal: losses in nats, throughput, the share of tokens that each expert gets,
    and the time left; wrapped between these where they are longer than `WIDTH`."""
    parts = [f"step {row['step']:>7,}"]
    if "loss" in row:
        parts.append(f"loss {row['loss']:.3f}")
    if "val_loss" in row:
        shown = [text.format(row[name]) for name, text in SHOWN.items() if name in row]
        parts.append(f"held-out {row['val_loss']:.3f}" + (f" ({shown[0]})" if shown else ""))
    parts += [*_speed(row), *left]
    if "router" in row:
        shares = [share for layer in row["router"].values() for share in layer["share"]]
        parts.append(f"tokens per expert {100 * min(shares):.1f} to {100 * max(shares):.1f} %")
    return "\n".join(wrap_columns(parts, indent=14))


def final_line(step: int, row: dict[str, Any]) -> str:
    """Return a run's last line in the words of `line`: the held-out loss with all other metrics of the evaluation in a
    row, or the loss of the last batch where there is no evaluation."""
    if "val_loss" not in row:
        return f"final: step {step:,}" + (f"  loss {row['loss']:.3f}" if row.get("loss") is not None else "")
    others = {name: x for name, x in row.items() if isinstance(x, float) and name.startswith("val_")}
    loss = others.pop("val_loss")
    words = {name: name.removeprefix("val_").replace("ppl", "perplexity").replace("_", " ") for name in others}
    shown = [SHOWN.get(name, f"{words[name]} {{:.4g}}").format(x) for name, x in others.items()]
    return f"final: step {step:,}  held-out {loss:.3f}" + (f" ({', '.join(shown)})" if shown else "")


def entropy_lines(row: dict[str, Any]) -> list[str]:
    """Return the attention entropy of each head, in nats, block by block, in lines no longer than `WIDTH`."""
    blocks = [f"{i}: {' '.join(f'{head:.2f}' for head in heads)}" for i, heads in enumerate(row.get("entropy", []))]
    return wrap_columns(["     entropy (nats) of heads per block", *blocks], indent=14) if blocks else []


def _speed(row: dict[str, Any]) -> list[str]:
    return [f"{row[f'{unit}_per_s']:,.0f} {unit}/s" for unit in UNITS if f"{unit}_per_s" in row]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run; a last line that was cut off in the middle is left out.

    Raises:
      UserError: another line is no row.
    """
    rows = []
    file = folder / METRICS
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for number, text in enumerate(lines, start=1):
        try:
            row = parse_json(text)
        except ValueError:
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int and _is_like({**ROW, **row}, ROW):
            rows.append(row)
        elif number < len(lines):
            raise UserError(f"line {number} of {file} is no row of metrics; remove it, or put it right.")
    return rows


def _is_like(value: Any, model: Any) -> bool:
    """Whether JSON is built like a model of it; its numbers may be null, and its dicts hold more."""
    if isinstance(model, dict):
        models = dict.fromkeys(value, model[ANY]) if ANY in model and isinstance(value, dict) else model
        return isinstance(value, dict) and all(name in value and _is_like(value[name], models[name]) for name in models)
    if isinstance(model, list):
        return isinstance(value, list) and all(_is_like(item, model[0]) for item in value)
    if isinstance(model, str):
        return isinstance(value, str)
    return value is None or (type(value) in (int, float) and not abs(value) >= 2**63)


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what depends on how fast the machine is: the metrics called `…_ms` and `…_per_s`."""
    return {name: value for name, value in row.items() if not name.endswith(("_ms", "_per_s"))}


def cut_log(folder: Path, step: int) -> None:
    """Keep the metrics and samples up to a step, so that a resumed run writes none twice."""
    kept = [json.dumps(row) + "\n" for row in read_metrics(folder) if row["step"] <= step]
    with user_error_on_write(folder, METRICS):
        write_atomically(folder / METRICS, "".join(kept))
    if (folder / SAMPLES).is_file():
        kept = [e for e in read_samples(folder) if int(e[6 : e.index(", temp")].replace(",", "")) <= step]
        with user_error_on_write(folder, SAMPLES):
            write_atomically(folder / SAMPLES, "".join(kept))


def read_samples(folder: Path) -> list[str]:
    """What the model wrote on the way, each as it stands in the file, after its step and temperature."""
    file = folder / SAMPLES
    samples = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return re.split(r"^(?=\[step \d[\d,]*, temperature )", samples, flags=re.MULTILINE)[1:]


def plot(folder: Path) -> None:
    """Draw losses and entropies over steps as PNG files in the run's plots/."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    rows = read_metrics(folder)
    (folder / PLOTS).mkdir(exist_ok=True)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "training batch"), ("val_loss", "held out")):
        points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1 if key == "loss" else 2)
    axes.set(xlabel="step", ylabel="loss (nats)")
    axes.legend()
    figure.savefig(folder / PLOTS / "loss.png", dpi=120)
    traced = [r for r in rows if r.get("entropy")]
    if not traced:
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for layer, heads in enumerate(traced[0]["entropy"]):
        for head in range(len(heads)):
            axes.plot(
                [r["step"] for r in traced], [r["entropy"][layer][head] for r in traced],
                color=f"C{layer % 10}", label=f"layer {layer}" if head == 0 else None,
            )  # fmt: skip
    axes.set(xlabel="step", ylabel="mean attention entropy (nats), a line a head")
    axes.legend()
    figure.savefig(folder / PLOTS / "entropy.png", dpi=120)

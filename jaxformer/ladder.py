"""The ladder's outcomes: one rung per run, beside the sources' figures, as a table, a picture and a page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxformer.checkpoints import CheckpointReader
from jaxformer.extras import import_extra, missing_extras
from jaxformer.files import write_atomically
from jaxformer.inspect.charts import STEP, Axis, Line, Lines
from jaxformer.inspect.page import Table, write_page
from jaxformer.runs import abstract_params, count_parameters, read_config
from jaxformer.terminal import align
from jaxformer.train.log import read_metrics

ABOUT = "Each rung is the one before with one idea changed, trained on the same text."
LOSS_AXIS = "held-out loss, nats per token"
HEAD = (
    "rung", "parameters", "steps", "loss", "perplexity", "bits/byte", "minutes", "ended early", "entropy",
    "the sources",
)  # fmt: skip
SIDES = "<>>>>>><"
"""Alignment of the first columns, which a terminal has room for side by side; see `terminal.align`."""


@dataclass(frozen=True)
class RungResult:
    """Outcome of one rung."""

    rung: str
    parameters: int
    steps: int
    loss: float
    """Held-out loss in nats per token, as are perplexity and bits per byte; NaN without a finite one."""
    perplexity: float
    bits_per_byte: float
    minutes: float
    """Training time, without evaluations."""
    ended_early: str
    """Cause and step, such as 'diverged at step 118' or 'not finite at step 6'; empty after the last step."""
    entropy: str
    """Attention entropy at the last evaluation in nats: heads separated by spaces, blocks by semicolons."""
    sources: str


def has_ended(run: Path) -> bool:
    """Return whether a run has saved its last step or has ended early."""
    return bool(ended_early(run)) or CheckpointReader(run).steps()[-1:] == [read_config(run).steps]


def ended_early(run: Path) -> str:
    """Return the cause and step at which a run diverged or became not finite; empty for any other."""
    rows = read_metrics(run)
    if rows and "diverged" in rows[-1]:
        return f"diverged at step {rows[-1]['diverged']['began']}"
    steps = [int(number) for path in run.glob("autopsy/step-*") if (number := path.name[5:]).isdigit()]
    last = max((row["step"] for row in rows), default=0)
    if steps and last < read_config(run).steps:  # otherwise it was resumed past the step
        return f"not finite at step {max(steps)}"
    return ""


def rung_result(run: Path, sources: str) -> RungResult:
    """Return the outcome that a run's folder records, beside the sources' figures for this rung; `UserError` if it is
    no run."""
    config, rows = read_config(run), read_metrics(run)
    cause = ended_early(run)
    evaluated = [row for row in rows if "val_loss" in row]
    last: dict[str, Any] = evaluated[-1] if evaluated else {}

    def metric(name: str) -> float:
        # Evaluations before a run ended early are not its outcome; JSON has null for what is not finite.
        return math.nan if cause or last.get(name) is None else float(last[name])

    entropy = [" ".join("-" if x is None else f"{x:.3g}" for x in heads) for heads in last.get("entropy", [])]
    timed = [(0, 0.0)] + [(row["step"], row["step_ms"]) for row in rows if "step_ms" in row]
    minutes = sum(ms * (step - before) for (before, _), (step, ms) in pairwise(timed)) / 60_000
    n_parameters, steps = count_parameters(abstract_params(config.model.build(), config.model)), rows[-1:]
    return RungResult(
        run.name, n_parameters, steps[0]["step"] if steps else 0, metric("val_loss"), metric("val_ppl"),
        metric("val_bpb"), minutes, cause, "; ".join(entropy), sources,
    )  # fmt: skip


def as_text(results: Sequence[RungResult]) -> str:
    """Return the table for the terminal: short columns side by side, and one line per rung for the others."""

    def number(x: float, digits: int) -> str:
        return "" if math.isnan(x) else f"{x:.{digits}f}"

    cells = [
        (
            r.rung, f"{r.parameters:,}", f"{r.steps:,}", number(r.loss, 4), number(r.perplexity, 2),
            number(r.bits_per_byte, 4), f"{r.minutes:.1f}", r.ended_early,
        )
        for r in results
    ]  # fmt: skip
    width = max(map(len, ("rung", *(r.rung for r in results))))
    lines = [*align([HEAD[: len(SIDES)], *cells], SIDES), "", "entropy by heads; blocks | the sources' report"]
    lines += [f"{r.rung:<{width}}  {r.entropy or '-'} | {r.sources}" for r in results]
    return "\n".join(line.rstrip() for line in lines)


def write_results(results: Sequence[RungResult], folder: Path) -> list[str]:
    """Write ladder.csv, ladder.html and, where its extra is installed, ladder.png below the folder that holds the runs;
    return the names of the files."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([field.name for field in fields(RungResult)])
    rows.writerows(["" if isinstance(x, float) and math.isnan(x) else x for x in astuple(r)] for r in results)
    write_atomically(folder / "ladder.csv", text.getvalue())
    curves = [_loss_curve(folder / r.rung, r.ended_early) for r in results]
    written = ["ladder.csv"]
    if not missing_extras("matplotlib"):
        write_atomically(folder / "ladder.png", _picture(curves))
        written.append("ladder.png")
    note = "Losses are of held-out text; entropies of heads, separated by ; between blocks."
    table = Table("Outcomes", HEAD, [astuple(r) for r in results], about=note)
    lines = [Line(steps, losses, label, points=True) for label, steps, losses in curves]
    chart = Lines("Held-out loss", lines, STEP, Axis(LOSS_AXIS, log=True), 460)
    write_page(folder / "ladder.html", "The ladder", [ABOUT], [table, chart])
    return [*written, "ladder.html"]


Curve = tuple[str, list[int], list[float]]
"""Label of a run, and the steps and held-out losses of its evaluations."""


def _loss_curve(run: Path, cause: str) -> Curve:
    rows = [row for row in read_metrics(run) if row.get("val_loss") is not None]
    label = f"{run.name} ({cause})" if cause else run.name
    return label, [row["step"] for row in rows], [row["val_loss"] for row in rows]


def _picture(curves: Sequence[Curve]) -> bytes:
    """Return held-out losses over steps, one curve per rung, as a PNG."""
    picture = import_extra("matplotlib.figure", "drawing curves").Figure(figsize=(9, 5), layout="constrained")
    axes = picture.subplots()
    for label, steps, losses in curves:
        axes.plot(steps, losses, "o-", markersize=3, label=label)
    axes.set(xlabel="step", ylabel=LOSS_AXIS, yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with io.BytesIO() as file:
        picture.savefig(file, dpi=120)
        return file.getvalue()

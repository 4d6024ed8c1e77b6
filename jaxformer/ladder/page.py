"""Files with the ladder's results: a table, and a page with each rung's change, losses, attention entropies and
continuations."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

from jaxformer.config import Config
from jaxformer.config.fields import flatten, to_dict
from jaxformer.data.dataset import evenly_spaced
from jaxformer.files import write_atomically
from jaxformer.inspect.pages.charts import STEP, Axis, Grid, Line, Lines, heads_heatmap
from jaxformer.inspect.pages.page import Section, Table, as_preformatted, write_page
from jaxformer.inspect.pages.training import Row
from jaxformer.ladder.results import FORECAST_HEAD, RungResult, continue_validation, forecast_rows
from jaxformer.runs.run import read_config
from jaxformer.train.log import read_metrics

ABOUT = "Each rung is the one before with one idea changed, trained on the same text."
LOSS_AXIS = "held-out loss, nats per token"
Continuation = tuple[str, str, float, str]
"""Rung, prompt, temperature and continuation."""
MAX_POINTS = 300
"""Maximum points of a line in a chart."""
HEAD = (
    "rung", "change", "perplexity", "loss", "bits per byte", "ended early", "the sources", "parameters", "targets",
    "minutes",
)  # fmt: skip
OUTCOME = attrgetter(
    "perplexity", "loss", "bits_per_byte", "ended_early", "sources", "parameters", "targets", "minutes"
)
"""Fields of a `RungResult` in the columns of `HEAD` after the first two."""


@dataclass(frozen=True)
class Continuations(Section):
    """Continuations of the same prompts by each rung, with the prompts highlighted."""

    texts: Sequence[tuple[str, Sequence[tuple[str, str, str]]]]
    """Headings, such as "temperature 0, after “The”", and for each the rungs with prompt and continuation."""

    def body(self) -> str:
        """Return the HTML."""
        parts = []
        for heading, rows in self.texts:
            parts.append(f'<p class="name">{html.escape(heading)}</p>')
            parts += [
                f"<pre><b>{html.escape(rung)}</b>  <mark>{html.escape(prompt)}</mark>{as_preformatted(text)}</pre>"
                for rung, prompt, text in rows
            ]
        return "\n".join(parts)


def ladder_sections(
    results: Sequence[RungResult], folder: Path, continuations: Sequence[Continuation] = ()
) -> list[Section]:
    """Return the sections of the page for some rungs, whose runs are in `folder`."""
    configs = [read_config(folder / r.rung) for r in results]
    changes = ["", *(describe_change(before, after) for before, after in pairwise(configs))]
    logs = {r.rung: read_metrics(folder / r.rung) for r in results}
    rows = [[r.rung, change, *OUTCOME(r)] for r, change in zip(results, changes, strict=True)]
    about = "Each rung is the one before with one change. Losses are on held-out text."
    forecasts = forecast_rows(folder, [r.rung for r in results])
    forecast_about = (
        "Forecast from the config and counts in the text, before training; losses in nats per held-out token."
    )
    return [
        Table("Outcomes", HEAD, rows, about=about),
        *([Table("Forecasts", FORECAST_HEAD, forecasts, about=forecast_about)] if forecasts else []),
        _validation_losses(results, configs, logs),
        _small_multiples(results, changes, logs),
        *_entropies(results, logs),
        *_continuations(continuations),
    ]


DESCRIBED = ("model.", "data.", "optimizer.", "train.batch_size")
"""Prefixes of the fields that define a rung."""


def describe_change(before: Config, after: Config) -> str:
    """Return a description of the fields that differ, such as "n_heads 1 → 4", or of the model's new class."""
    old, new = type(before.model).__name__, type(after.model).__name__
    if old != new:
        return f"{new.removesuffix('Config')} instead of {old.removesuffix('Config')}"
    fields = [flatten(to_dict(config)) for config in (before, after)]
    names = [name for name in {**fields[0], **fields[1]} if name.startswith(DESCRIBED)]
    changed = [name for name in names if fields[0].get(name) != fields[1].get(name)]
    return ", ".join(f"{name.removeprefix('model.')} {fields[0].get(name)} → {fields[1].get(name)}" for name in changed)


def _losses(log: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    rows = [row for row in log if row.get(key) is not None]
    rows = [rows[i] for i in evenly_spaced(len(rows), MAX_POINTS)]
    return [row["step"] for row in rows], [row[key] for row in rows]


def _validation_losses(
    results: Sequence[RungResult], configs: Sequence[Config], logs: Mapping[str, Sequence[Row]]
) -> Lines:
    """Return the losses of the rungs that do not read the tokens they predict, or of all if there are none. Next to a
    loss near 0, the other losses would be indistinguishable."""
    pairs = zip(results, configs, strict=True)
    shown = [r for r, config in pairs if flatten(to_dict(config)).get("model.causal", True)] or results
    left_out = " and ".join(r.rung for r in results if r not in shown)
    about = f"Without {left_out}: the loss of a rung that reads its own targets is near 0." if left_out else ""
    names = [f"{r.rung} ({r.ended_early})" if r.ended_early else r.rung for r in shown]
    lines = [Line(*_losses(logs[r.rung], "val_loss"), name, points=True) for r, name in zip(shown, names, strict=True)]
    return Lines("Held-out loss", lines, STEP, Axis(LOSS_AXIS, log=True), 420, about=about)


def _small_multiples(
    results: Sequence[RungResult], changes: Sequence[str], logs: Mapping[str, Sequence[Row]]
) -> Section:
    """Return charts of each rung's training and held-out loss over the same range, marking the step at which a rung
    ended early."""
    ended = [loss for r in results if not r.ended_early for loss in _losses(logs[r.rung], "val_loss")[1]]
    limits = (min(ended) * 0.95, max(ended) * 1.05) if ended else None
    panels = []
    for r, change in zip(results, changes, strict=True):
        train, val = (_losses(logs[r.rung], key) for key in ("loss", "val_loss"))
        lines = [Line(*train, "training batch"), Line(*val, "held-out", points=len(val[0]) < 30)]
        step = int(r.ended_early.rpartition(" ")[2]) if r.ended_early else 0
        marks = [(step, r.ended_early)] if r.ended_early else []
        axis = Axis("loss, nats", limits=limits)
        panels.append(Lines(r.rung, lines, STEP, axis, 190, marks, about=change))
    about = "All over the same range of losses; a rung that diverged ends at the red line."
    return Grid("Rung by rung", panels, about=about)


def _entropies(results: Sequence[RungResult], logs: Mapping[str, Sequence[Row]]) -> list[Section]:
    """Return a heatmap of each head's attention entropy at a rung's last evaluation; `[]` if no rung has attention."""
    rows: dict[str, list[float]] = {}
    for r in results:
        layers: list[list[float | None]] = next(
            (row["entropy"] for row in reversed(logs[r.rung]) if row.get("entropy")), []
        )
        for i, heads in enumerate(layers):
            rows[f"{r.rung}, layer {i}"] = [math.nan if x is None else x for x in heads]
    if not rows:
        return []
    about = (
        "Mean entropy in nats of a row of each head's attention map at the last evaluation: 0 if it attends to one "
        "position. e to that power is the number of positions in a uniform row of the same entropy."
    )
    note = lambda x: f"{x:.3g} nats, as if {math.exp(x):.1f} positions"  # noqa: E731
    return [heads_heatmap("Attention entropy", rows, "{:.3g}", note, cell=(64, 26), about=about)]


def _continuations(continuations: Sequence[Continuation]) -> list[Section]:
    """Return a section with the continuations by temperature and prompt; `[]` without any."""
    by_heading: dict[str, list[tuple[str, str, str]]] = {}
    for rung, prompt, temperature, text in continuations:
        by_heading.setdefault(f"temperature {temperature:g}, after “{prompt}”", []).append((rung, prompt, text))
    about = "The same held-out prompts, continued by each rung."
    return [Continuations("Continuations", list(by_heading.items()), about=about)] if by_heading else []


def write_results(results: Sequence[RungResult], folder: Path) -> list[str]:
    """Write ladder.csv and ladder.html to the folder that contains the runs, and `CONTINUATIONS` to each run's folder;
    return the names of the files."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([field.name for field in fields(RungResult)])
    rows.writerows(["" if isinstance(x, float) and math.isnan(x) else x for x in astuple(r)] for r in results)
    write_atomically(folder / "ladder.csv", text.getvalue())
    sections = ladder_sections(results, folder, continue_validation([folder / r.rung for r in results]))
    write_page(folder / "ladder.html", "The ladder", [ABOUT], sections)
    return ["ladder.csv", "ladder.html"]

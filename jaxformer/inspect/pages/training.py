"""`report.html` in a run's folder: a page with its log, updated during training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.data.dataset import evenly_spaced
from jaxformer.inspect.activations import capture_shapes
from jaxformer.inspect.pages.charts import STEP, Axis, Grid, Line, Lines
from jaxformer.inspect.pages.labels import layer_label
from jaxformer.inspect.pages.page import Section, Table, Texts, write_page
from jaxformer.nn.parameter_norms import ROW_KEYS
from jaxformer.runs.run import abstract_params, read_config
from jaxformer.train.log import MetricWriter, print_line, read_metrics, read_samples

REPORT = "report.html"
MAX_TIME_SHARE = 0.01
"""Maximum fraction of the training time spent on the page."""
Row = Mapping[str, Any]
"""Row of `metrics.jsonl`."""
COUNTED = (
    "A language model first learns how often each token occurs, then which follow each token. The horizontal lines are "
    "the held-out losses of counting either in the training text."
)
N_SAMPLES = 6
"""Number of most recent samples to show."""
MAX_POINTS = 2000
"""Maximum points per line; a longer log is subsampled evenly."""
MAX_CHART_POINTS = 20_000
"""Maximum points in all lines of a chart, at about 6 bytes each."""


def page_writer(folder: Path) -> MetricWriter:
    """Return a writer that updates the page at evaluations, within `MAX_TIME_SHARE`, until a write fails."""
    rows: list[Row] = []
    next_update = 0.0

    def write(row: dict[str, Any]) -> None:
        nonlocal next_update
        rows.extend([row] if rows else read_metrics(folder))  # initially including rows from before a resumption
        start = time.perf_counter()
        if "val_loss" in row and start >= next_update:
            is_written = write_training_page(folder, rows)
            next_update = start + (time.perf_counter() - start) / MAX_TIME_SHARE if is_written else math.inf

    return write


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


def write_comparison(file: Path, logs: Mapping[str, Sequence[Row]]) -> bool:
    """Write a page with the curves of several runs, one over the other; return False, and write nothing, if no log has
    a loss. `logs` has the rows by the run's name."""
    sections = []
    for key, title, axis in (
        ("val_loss", "Held-out loss", "loss, nats"),
        ("loss", "Training loss", "loss, nats"),
        ("val_bpb", "Held-out bits per byte", "bits per byte"),
        ("val_accuracy", "Held-out accuracy", "accuracy"),
        ("lr", "Learning rate", "learning rate"),
    ):
        if lines := [line for name, rows in logs.items() for line in _curve(rows, key, name, 100)]:
            sections.append(Lines(title, lines, STEP, Axis(axis)))
    if sections:
        write_page(file, " and ".join(logs), [f"{len(logs)} runs."], sections)
    return bool(sections)


def training_sections(rows: Sequence[Row], config: ModelConfig, samples: Sequence[str] = ()) -> list[Section]:
    """Return sections for whatever the log, rows in step order, contains of losses, attention entropy, update ratios,
    learning rate, tokens per expert and the initialisation check; and for the samples, given oldest first."""
    return [
        *_losses(rows),
        *_entropy(rows, config),
        *_updates(rows),
        *_learning_rate(rows),
        *_sharpness(rows),
        *_experts(rows),
        *_init_check(rows),
        *_samples(samples),
    ]


@cache
def attention_layers(config: ModelConfig) -> tuple[str, ...]:
    """Return the labels of a model's attention layers, in the order of the log."""
    model = config.build()
    params, example = abstract_params(model), config.example()
    maps = capture_shapes(model, params, *example, names="*attention.pattern", missing_ok=True)
    return tuple(layer_label(name.removesuffix(".pattern")) for name in maps)


def _lines_by_layer(rows: Sequence[Row], layers: Sequence[Mapping[str, Sequence[Any]]], member: str) -> list[Line]:
    """Return one line per layer and member, such as a head; `layers` has, per row, the members' values by layer."""
    steps = [row["step"] for row in rows]
    return [
        Line(steps, [numbers[layer][i] for numbers in layers], layer, f"{member} {i}")
        for layer, first in layers[0].items()
        for i in range(len(first))
    ]


def _with(rows: Sequence[Row], key: str, n_lines: Callable[[Any], int] = lambda _: 1) -> Sequence[Row]:
    """Return the rows with a non-empty value for `key`, of which a chart draws `n_lines(value)` lines. If there are
    more rows than the chart may have points, return evenly spaced ones, including the first and the last."""
    rows = [row for row in rows if key in row and row[key] not in ([], {})]
    n_points = MAX_CHART_POINTS // max((n_lines(row[key]) for row in rows), default=1)
    return [rows[i] for i in evenly_spaced(len(rows), max(2, min(MAX_POINTS, n_points)))]


def _curve(rows: Sequence[Row], key: str, name: str, max_markers: int = 0) -> list[Line]:
    """Return the line of a number in the log, with markers if it has few points; `[]` if the log lacks it."""
    rows = _with(rows, key)
    steps, values = [row["step"] for row in rows], [row[key] for row in rows]
    return [Line(steps, values, name, points=len(rows) <= max_markers, noisy=key == "loss")] if rows else []


def _losses(rows: Sequence[Row]) -> Iterator[Section]:
    if lines := _curve(rows, "loss", "training batch") + _curve(rows, "val_loss", "held-out", 100):
        counted: dict[str, float] = next((row["count_losses"] for row in rows if "count_losses" in row), {})
        ends = [min(line.x[0] for line in lines), max(line.x[-1] for line in lines)]
        lines += [Line(ends, [loss] * 2, f"counting {what}") for what, loss in counted.items()]
        yield Lines("Loss", lines, STEP, Axis("loss, nats"), about=COUNTED if counted else "")


def _entropy(rows: Sequence[Row], config: ModelConfig) -> Iterator[Section]:
    if len(rows := _with(rows, "entropy", lambda layers: sum(map(len, layers)))) > 1:  # one step gives no line
        labels, n_layers = attention_layers(config), len(rows[0]["entropy"])
        if len(labels) != n_layers:  # the log belongs to another model
            labels = tuple(f"layer {i}" for i in range(n_layers))
        layers = [dict(zip(labels, row["entropy"], strict=True)) for row in rows]
        about = "Mean entropy of a row of the attention map, a line per head: 0 if it attends to one position."
        axis = Axis("nats", from_zero=True)
        yield Lines("Attention entropy", _lines_by_layer(rows, layers, "head"), STEP, axis, about=about)


def _updates(rows: Sequence[Row]) -> Iterator[Section]:
    if not (rows := _with(rows, "gradients", len)):
        return
    lowest = 0.01 * max(row.get("lr") or 0 for row in rows)
    ratios: dict[str, tuple[list[int], list[float | None]]] = {}
    for row in rows:
        for parameter in row["gradients"]:
            steps, y = ratios.setdefault(parameter["name"], ([], []))
            steps.append(row["step"])
            y.append(None if "lr" in row and (row["lr"] or 0) <= lowest else parameter["update"])
    kinds: dict[str, list[Line]] = {}
    for name, (steps, y) in ratios.items():
        kind = name.rpartition(".")[2]
        kinds.setdefault(kind, []).append(Line(steps, y, kind, name, points=len(steps) == 1))
    about = (
        "Norm of a step's update over that of the weights, a line per parameter (or head's part of one), with the "
        "median and the middle half where there are five or more. One far above the others is unstable; one far below "
        "hardly learns. Steps at a hundredth of the highest learning rate, or less, are left out."
    )
    shown = [value for _, y in ratios.values() for value in y if value]
    if len(rows) > 1 and shown:  # for a single step, the table suffices
        axis = Axis("update / weight", log=True, limits=(min(shown), max(shown)))
        yield Grid("Update ratios", [Lines(kind, lines, STEP, axis, 200) for kind, lines in kinds.items()], about=about)
    table = [[p["name"], *(_number(p[key]) for key in ROW_KEYS[1:])] for p in rows[-1]["gradients"]]
    columns = ["parameter", "‖gradient‖", "‖weights‖", "lr·g/w", "update/w"]
    yield Table(f"Gradients at step {rows[-1]['step']:,}", columns, table)


def _learning_rate(rows: Sequence[Row]) -> Iterator[Section]:
    if lines := _curve(rows, "lr", "learning rate"):
        yield Lines("Learning rate", lines, STEP, Axis("learning rate", from_zero=True), 220)


def _sharpness(rows: Sequence[Row]) -> Iterator[Section]:
    if lines := _curve(rows, "sharpness", "sharpness", 100):
        limit = _curve(rows, "sharpness_limit", "limit of a quadratic")
        about = (
            "The largest eigenvalue of the Hessian of the loss on some training examples. Were the loss quadratic, "
            "training would diverge above the limit of the current learning rate."
        )
        yield Lines("Sharpness", lines + limit, STEP, Axis("sharpness", log=True), about=about)


def _experts(rows: Sequence[Row]) -> Iterator[Section]:
    if rows := _with(rows, "router"):
        layers = [
            {layer_label(layer.removesuffix(".mlp")): load["share"] for layer, load in row["router"].items()}
            for row in rows
        ]
        axis = Axis("fraction", from_zero=True, percent=True)
        about = "Fraction of the router's assignments per expert, by layer."
        yield Lines("Tokens per expert", _lines_by_layer(rows, layers, "expert"), STEP, axis, about=about)


def _init_check(rows: Sequence[Row]) -> Iterator[Section]:
    check = next((row["init_check"] for row in rows if "init_check" in row), None)
    if check is None:
        return
    names = {
        "stream": "residual stream, mean square",
        "scores": "attention scores, variance",
        "entropy": "attention entropy, nats",
        "growth": "growth",
    }
    columns = ["layer", *(f"{name}{kind}" for name in names.values() for kind in ("", " (expected)"))]
    pairs = zip(check["observed"], check["expected"], strict=True)
    table: list[list[str | float]] = [
        [f"layer {i}", *(_number(side[key]) for key in names for side in pair)] for i, pair in enumerate(pairs)
    ]
    about = "Statistics of the initialised model, and their expected values."
    yield Table("Initialisation check", columns, table, about=about)


def _samples(samples: Sequence[str]) -> Iterator[Section]:
    if samples:
        latest = [text.strip() for text in samples[: -N_SAMPLES - 1 : -1]]
        yield Texts("Samples", latest, about="Generated during training, latest first.")


def _number(value: float | None) -> float:
    """Return a value, NaN for None: the log has null in place of non-finite numbers."""
    return float("nan") if value is None else value

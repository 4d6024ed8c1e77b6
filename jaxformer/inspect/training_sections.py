"""Sections of a page that show the log of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxformer.data.dataset import evenly_spaced
from jaxformer.inspect.page import Figure, Section, Table, Texts, plain

Row = Mapping[str, Any]
"""Row of `metrics.jsonl`."""
N_SAMPLES = 6
"""Latest samples that are shown."""
MAX_POINTS = 2000
"""Points of a curve; of a longer log, evenly spaced ones."""


def training_sections(rows: Sequence[Row], samples: Sequence[str] = ()) -> list[Section]:
    """Return what the log, rows in the order of steps, has of: losses, attention entropy, update ratios, learning rate,
    tokens per expert, the initialisation check; and the samples, given the oldest first."""
    return [*_losses(rows), *_entropy(rows), *_updates(rows), *_learning_rate(rows), *_experts(rows),
            *_init_check(rows), *_samples(samples)]  # fmt: skip


def _line(x: Sequence[float], y: Sequence[Any], name: str, colour: int, **more: Any) -> dict[str, Any]:
    """Return a Plotly trace over steps; null leaves a gap."""
    line = {"colour": colour, "width": 1.5} | more.pop("line", {})
    return {"type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "name": plain(name), "line": line} | more


def _grouped_line(
    rows: Sequence[Row], y: Sequence[Any], name: str, colour: int, member: str, first: bool, **more: Any
) -> dict[str, Any]:
    """Return a trace of a group that shares a colour and one entry in the legend."""
    hover = f"{plain(member)}<br>step %{{x:,}}: %{{y:.4g}}<extra>%{{fullData.name}}</extra>"
    group = {"legendgroup": name, "showlegend": first, "hovertemplate": hover}
    return _line([row["step"] for row in rows], y, name, colour, **group, **more)


def _lines_by_layer(rows: Sequence[Row], layers: Sequence[Mapping[str, Sequence[Any]]], member: str) -> list[Any]:
    """Return a trace per layer and member, such as a head, of which each row has the numbers by layer."""
    return [
        _grouped_line(rows, [numbers[layer][i] for numbers in layers], layer, colour, f"{member} {i}", i == 0)
        for colour, (layer, first) in enumerate(layers[0].items())
        for i in range(len(first))
    ]


def _over_steps(title: str, **axis: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": title}, **axis}}


def _with(rows: Sequence[Row], key: str) -> Sequence[Row]:
    """Return at most `MAX_POINTS` of the rows with a value that is not empty, the first and the last among them."""
    rows = [row for row in rows if key in row and row[key] not in ([], {})]
    return [rows[i] for i in evenly_spaced(len(rows), MAX_POINTS)]


def _losses(rows: Sequence[Row]) -> Iterator[Section]:
    train, val = _with(rows, "loss"), _with(rows, "val_loss")
    points = {"mode": "lines+markers", "marker": {"size": 5}, "line": {"width": 2.5}}
    if train or val:
        yield Figure("Loss", [
            _line([row["step"] for row in train], [row["loss"] for row in train], "training batch", 0),
            _line([row["step"] for row in val], [row["val_loss"] for row in val], "held-out", 1, **points),
        ], _over_steps("loss, nats"))  # fmt: skip


def _entropy(rows: Sequence[Row]) -> Iterator[Section]:
    if rows := _with(rows, "entropy"):
        layers = [{f"layer {i}": heads for i, heads in enumerate(row["entropy"])} for row in rows]
        about = "Mean entropy of a row of the attention map, a line per head: 0 where it attends to one position."
        layout = _over_steps("nats", rangemode="tozero")
        yield Figure("Attention entropy", _lines_by_layer(rows, layers, "head"), layout, about)


def _updates(rows: Sequence[Row]) -> Iterator[Section]:
    if not (rows := _with(rows, "gradients")):
        return
    ratios: dict[str, list[tuple[Row, float]]] = {}
    for row in rows:
        for parameter in row["gradients"]:
            ratios.setdefault(parameter["name"], []).append((row, parameter["update"]))
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in ratios))
    traces, shown = [], set[str]()
    for name, points in ratios.items():
        kind, markers = name.rpartition(".")[2], {"mode": "lines+markers", "marker": {"size": 4}}
        logged, y = zip(*points, strict=True)
        traces.append(_grouped_line(logged, y, kind, kinds.index(kind), name, kind not in shown, **markers))
        shown.add(kind)
    about = (
        "Norm of a step's update over that of the weights, a line per parameter (or head's part of one). One far above "
        "the others is unstable; one far below hardly learns."
    )
    layout = _over_steps("update / weight", type="log", exponentformat="power")
    yield Figure("Update ratios", traces, layout, about)
    table = [[p["name"], *(_number(p[key]) for key in ("g", "w", "u", "update"))] for p in rows[-1]["gradients"]]
    columns = ["parameter", "‖gradient‖", "‖weights‖", "lr·g/w", "update/w"]
    yield Table(f"Gradients at step {rows[-1]['step']:,}", columns, table)


def _learning_rate(rows: Sequence[Row]) -> Iterator[Section]:
    if rows := _with(rows, "lr"):
        trace = _line([row["step"] for row in rows], [row["lr"] for row in rows], "learning rate", 0, showlegend=False)
        yield Figure("Learning rate", [trace], _over_steps("learning rate", rangemode="tozero") | {"height": 240})


def _experts(rows: Sequence[Row]) -> Iterator[Section]:
    if rows := _with(rows, "router"):
        layers = [{layer: load["share"] for layer, load in row["router"].items()} for row in rows]
        layout, about = _over_steps("share", tickformat=".0%", rangemode="tozero"), "Share of the router's choices"
        traces = _lines_by_layer(rows, layers, "expert")
        yield Figure("Tokens per expert", traces, layout, f"{about} per expert of each layer.")


def _init_check(rows: Sequence[Row]) -> Iterator[Section]:
    check = next((row["init_check"] for row in rows if "init_check" in row), None)
    if check is None:
        return
    names = {"stream": "residual stream, mean square", "scores": "attention scores, variance",
             "entropy": "attention entropy, nats", "growth": "growth"}  # fmt: skip
    columns = ["block", *(f"{name}{kind}" for name in names.values() for kind in ("", " (expected)"))]
    pairs = zip(check["observed"], check["expected"], strict=True)
    table: list[list[str | float]] = [
        [f"blocks.{i}", *(_number(side[key]) for key in names for side in pair)] for i, pair in enumerate(pairs)
    ]
    yield Table("Initialisation check", columns, table, "Statistics of the initialised model, beside those expected.")


def _samples(samples: Sequence[str]) -> Iterator[Section]:
    if samples:
        latest = [text.strip() for text in samples[: -N_SAMPLES - 1 : -1]]
        yield Texts("Samples", latest, "Generated during training, the latest first.")


def _number(value: float | None) -> float:
    """Return NaN for null, which JSON has in place of numbers that are not finite."""
    return float("nan") if value is None else value

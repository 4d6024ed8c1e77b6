"""What a run's log says of its training, as sections of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxformer.data.dataset import evenly_spaced
from jaxformer.inspect.page import Figure, Section, Table, Texts, plain

Row = Mapping[str, Any]
"""Of `metrics.jsonl`."""
LATEST = 6
"""Samples that are shown."""
MOST_POINTS = 2000
"""Of a line; of a longer log, as many are taken, evenly."""


def training(rows: Sequence[Row], samples: Sequence[str] = ()) -> list[Section]:
    """All that there is of: losses, entropy of attention, update ratios, learning rate, experts, what the
    initialisation gave, samples.

    Args:
      rows: of the log, in the order of steps.
      samples: what the model wrote on the way, the oldest first.
    """
    return [*_losses(rows), *_entropy(rows), *_updates(rows), *_rate(rows), *_experts(rows), *_first(rows),
            *_samples(samples)]  # fmt: skip


def _line(x: Sequence[float], y: Sequence[Any], name: str, colour: int, **more: Any) -> dict[str, Any]:
    """A trace over steps; a number that is none leaves a gap."""
    line = {"colour": colour, "width": 1.5} | more.pop("line", {})
    return {"type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "name": plain(name), "line": line} | more


def _over_steps(title: str, **axis: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": title}, **axis}}


def _losses(rows: Sequence[Row]) -> Iterator[Section]:
    traces = []
    for number, (key, name) in enumerate((("loss", "training batch"), ("val_loss", "held out"))):
        found = _thinned([row for row in rows if key in row])
        look = {"mode": "lines+markers", "marker": {"size": 5}, "line": {"width": 2.5}} if number else {}
        traces.append(_line([row["step"] for row in found], [row[key] for row in found], name, number, **look))
    if any(trace["x"] for trace in traces):
        yield Figure("Loss", traces, _over_steps("loss, nats"))


def _entropy(rows: Sequence[Row]) -> Iterator[Section]:
    rows = _thinned([row for row in rows if row.get("entropy")])
    if not rows:
        return
    steps, traces = [row["step"] for row in rows], []
    for layer, heads in enumerate(rows[0]["entropy"]):
        for head in range(len(heads)):
            y = [row["entropy"][layer][head] for row in rows]
            group = {"legendgroup": str(layer), "showlegend": head == 0, "hovertemplate": _hover(f"head {head}")}
            traces.append(_line(steps, y, f"layer {layer}", layer, **group))
    about = "Mean entropy of a row of attention, a line a head: 0 where it looks at one place."
    yield Figure("Entropy of attention", traces, _over_steps("nats", rangemode="tozero"), about)


def _updates(rows: Sequence[Row]) -> Iterator[Section]:
    rows = _thinned([row for row in rows if row.get("gradients")])
    if not rows:
        return
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for parameter in row["gradients"]:
            steps, ratios = found.setdefault(parameter["name"], ([], []))
            steps.append(row["step"])
            ratios.append(parameter["update"])
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in found))
    traces, named = [], set[str]()
    for name, (steps, ratios) in found.items():
        kind = name.rpartition(".")[2]
        group = {"legendgroup": kind, "showlegend": kind not in named, "hovertemplate": _hover(name)}
        look = {"mode": "lines+markers", "marker": {"size": 4}}
        traces.append(_line(steps, ratios, kind, kinds.index(kind), **look, **group))
        named.add(kind)
    about = (
        "The norm of what a step adds over that of what is there, a line a parameter (or a head's part of one). "
        "Where it is far above the others, that parameter is torn about; far below, it hardly learns."
    )
    layout = _over_steps("update / weight", type="log", exponentformat="power")
    yield Figure("Update ratios", traces, layout, about)
    last = rows[-1]
    table = [[p["name"], *(_number(p[key]) for key in ("g", "w", "u", "update"))] for p in last["gradients"]]
    yield Table(
        f"Gradients at step {last['step']:,}", ["parameter", "‖gradient‖", "‖weights‖", "lr·g/w", "update/w"], table
    )


def _rate(rows: Sequence[Row]) -> Iterator[Section]:
    rows = _thinned([row for row in rows if "lr" in row])
    if rows:
        trace = _line([row["step"] for row in rows], [row["lr"] for row in rows], "learning rate", 0, showlegend=False)
        yield Figure("Learning rate", [trace], _over_steps("learning rate", rangemode="tozero") | {"height": 240})


def _experts(rows: Sequence[Row]) -> Iterator[Section]:
    rows = _thinned([row for row in rows if row.get("router")])
    if not rows:
        return
    steps, traces = [row["step"] for row in rows], []
    for number, layer in enumerate(rows[0]["router"]):
        for expert in range(len(rows[0]["router"][layer]["share"])):
            y = [row["router"][layer]["share"][expert] for row in rows]
            group = {"legendgroup": layer, "showlegend": expert == 0, "hovertemplate": _hover(f"expert {expert}")}
            traces.append(_line(steps, y, layer, number, **group))
    layout = _over_steps("share", tickformat=".0%", rangemode="tozero")
    yield Figure("Tokens by expert", traces, layout, "The share of choices that falls on each expert of each layer.")


def _first(rows: Sequence[Row]) -> Iterator[Section]:
    found = next((row["init_check"] for row in rows if "init_check" in row), None)
    if found is None:
        return
    names = {
        "stream": "mean square of the stream",
        "scores": "variance of scores",
        "entropy": "entropy",
        "growth": "growth",
    }
    head = ["block", *(f"{name}{what}" for name in names.values() for what in ("", " (expected)"))]
    pairs = zip(found["observed"], found["expected"], strict=True)
    table: list[list[str | float]] = [
        [f"blocks.{i}", *(_number(side[key]) for key in names for side in (seen, wanted))]
        for i, (seen, wanted) in enumerate(pairs)
    ]
    yield Table("Before the first step", head, table, "What the initialisation gave, beside what it should give.")


def _samples(samples: Sequence[str]) -> Iterator[Section]:
    if samples:
        yield Texts(
            "Samples",
            [text.strip() for text in samples[: -LATEST - 1 : -1]],
            "What it wrote on the way, the latest first.",
        )


def _thinned(rows: Sequence[Row]) -> Sequence[Row]:
    """As many as a line may have, the first and the last among them."""
    return [rows[i] for i in evenly_spaced(len(rows), MOST_POINTS)]


def _hover(name: str) -> str:
    return f"{plain(name)}<br>step %{{x:,}}: %{{y:.4g}}<extra>%{{fullData.name}}</extra>"


def _number(value: float | None) -> float:
    """JSON has null for what is not finite."""
    return float("nan") if value is None else value

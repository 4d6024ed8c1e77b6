"""Data of a page's charts, which `docs/lab/src/inspect/charts.ts` draws as SVG."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from jaxformer.inspect.pages.page import Section, embed, rounded


@dataclass(frozen=True)
class Axis:
    """An axis of `Lines`."""

    label: str
    log: bool = False
    """Logarithmic axis; omits values that are not positive."""
    offset: float = 0
    """Added to values before the logarithm: with 1, zero has a place."""
    from_zero: bool = False
    """Begins at zero."""
    reverse: bool = False
    percent: bool = False
    """Labels as percentages of 1."""
    limits: tuple[float, float] | None = None
    """Ends of the axis; lines beyond them run along its edge. None for the range of the lines."""


STEP = Axis("step")
"""Axis of optimizer steps."""


@dataclass(frozen=True)
class Line:
    """A line of `Lines`."""

    x: Sequence[float]
    y: Sequence[float | None]
    """One value per entry of `x`; None leaves a gap."""
    name: str
    """Name in the legend; lines with the same name share a colour and a legend entry."""
    member: str = ""
    """Name among the lines that share `name`, such as the head of a layer."""
    points: bool = False
    """Markers at the points."""
    dotted: bool = False
    noisy: bool = False
    """Values of single batches, of which a button shows the moving average."""


@dataclass(frozen=True)
class Lines(Section):
    """Lines over a common axis, with a legend if they have several names."""

    lines: Sequence[Line]
    x: Axis
    y: Axis
    height: int = 300
    """Height of the chart in pixels."""
    marks: Sequence[tuple[float, str]] = ()
    """Positions on the x axis to mark with a vertical line, and their labels."""

    def body(self) -> str:
        """Return the chart's HTML element. Lines with the same x values share them."""
        positions: list[list[float]] = []
        lines = []
        for line in self.lines:
            x = rounded(list(line.x), 7)
            if x not in positions[-1:]:
                positions.append(x)
            lines.append({**asdict(line), "x": len(positions) - 1, "y": rounded(list(line.y))})
        axes = {"x": asdict(self.x), "y": asdict(self.y)}
        return embed("chart lines", vars(self) | axes | {"positions": positions, "lines": lines})


@dataclass(frozen=True)
class Heatmap(Section):
    """A matrix of cells, which show their values if there is room, and always when pointed at."""

    values: Any
    """`(rows, columns)`; NaN for an empty cell."""
    rows: Sequence[str]
    columns: Sequence[str]
    scale: Literal["sequential", "diverging"] = "sequential"
    """Colour scale from 0, or from -`largest`, to `largest`."""
    largest: float | None = None
    """Value of the strongest colour; None for the largest magnitude."""
    texts: Sequence[Sequence[str]] | None = None
    """Texts in the cells; None for none."""
    notes: Sequence[Sequence[str]] | None = None
    """Tooltips of the cells; None for row, column and value."""
    column_notes: Sequence[str] = ()
    """Text after the value in the tooltips of each column."""
    cell: tuple[int, int] = (46, 28)
    """Width and height of a cell in pixels."""
    images: Sequence[str] = ()
    """Data URI of one image per row."""

    def body(self) -> str:
        """Return the chart's HTML element."""
        values = np.asarray(self.values, np.float64)
        finite = np.abs(values[np.isfinite(values)])
        largest = (float(finite.max()) if finite.size else 0.0) if self.largest is None else self.largest
        colours = {"diverging": self.scale == "diverging", "largest": largest or 1.0}
        return embed("chart heatmap", vars(self) | colours | {"values": rounded(values)})


def heads_heatmap(
    title: str,
    rows: Mapping[str, Sequence[float]],
    text: str,
    note: Callable[[float], str] | None = None,
    **options: Any,
) -> Heatmap:
    """Return a heatmap with a column per head, whose rows may have different numbers of heads.

    Args:
      title: title of the heatmap.
      rows: values of each row's heads; NaN for an empty cell.
      text: format of a value in its cell, such as "{:.3g}".
      note: text about a value for its tooltip, which begins with the row and the head; None for the value alone.
      options: further fields of `Heatmap`.
    """
    n_heads = max(map(len, rows.values()))
    values = np.array([[*row, *[np.nan] * (n_heads - len(row))] for row in rows.values()])
    texts = [["" if np.isnan(x) else text.format(x) for x in row] for row in values]
    heads = [f"head {head}" for head in range(n_heads)]
    notes = note and [
        [f"{name}, {head}: {note(x)}" for head, x in zip(heads, row, strict=True)]
        for name, row in zip(rows, values, strict=True)
    ]
    return Heatmap(title, values, list(rows), heads, texts=texts, notes=notes, **options)


@dataclass(frozen=True)
class Grid(Section):
    """Small multiples: charts side by side, each with its title above."""

    panels: Sequence[Section]

    def body(self) -> str:
        """Return the HTML of all charts."""

        def panel(chart: Section) -> str:
            about = f"<p>{html.escape(chart.about)}</p>" if chart.about else ""
            return f"<figure><figcaption>{html.escape(chart.title)}</figcaption>{about}{chart.body()}</figure>"

        return f'<div class="grid">{"".join(panel(chart) for chart in self.panels)}</div>'

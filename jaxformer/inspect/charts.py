"""Charts of a page: what is drawn; `assets/charts.js` draws it as SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from jaxformer.inspect.page import Section, embed, rounded


@dataclass(frozen=True)
class Axis:
    """An axis of `Lines`."""

    label: str
    log: bool = False
    """Logarithmic; numbers that are not positive are left out."""
    from_zero: bool = False
    """Begins at zero."""
    reverse: bool = False
    percent: bool = False
    """Labels are percentages of 1."""
    limits: tuple[float, float] | None = None
    """Ends of the axis; lines beyond them run along its edge. None for those of the lines."""


STEP = Axis("step")
"""The axis of optimizer steps."""


@dataclass(frozen=True)
class Line:
    """A line of `Lines`."""

    x: Sequence[float]
    y: Sequence[float | None]
    """One number for each of `x`; None leaves a gap."""
    name: str
    """Lines of one name share a colour and an entry of the legend."""
    member: str = ""
    """Part that the line is of, among those of its name, such as the head of a layer."""
    points: bool = False
    """Mark each point."""
    dotted: bool = False


class Chart(Section):
    """A section that `charts.js` draws."""

    assets: ClassVar[Sequence[str]] = ("charts.css", "charts.js")


@dataclass(frozen=True)
class Lines(Chart):
    """Lines over a common axis, with a legend where they have several names."""

    lines: Sequence[Line]
    x: Axis
    y: Axis
    height: int = 300
    """Height of the chart in pixels."""
    marks: Sequence[tuple[float, str]] = ()
    """Positions on the axis `x` that a vertical line and a label mark."""

    def body(self) -> str:
        """Return the chart's element. Lines over the same positions share them."""
        positions: list[list[float]] = []
        lines = []
        for line in self.lines:
            x = rounded(list(line.x), 7)
            if x not in positions[-1:]:
                positions.append(x)
            lines.append({**asdict(line), "x": len(positions) - 1, "y": rounded(list(line.y))})
        axes = {"x": asdict(self.x), "y": asdict(self.y)}
        marks = [list(mark) for mark in self.marks]
        return embed(
            "chart lines",
            {"title": self.title, "positions": positions, "lines": lines, "height": self.height, "marks": marks} | axes,
        )


@dataclass(frozen=True)
class Heatmap(Chart):
    """A matrix of cells, whose values stand in them where there is room, and are told where they are pointed at."""

    values: Any
    """`(rows, columns)`; NaN for a cell that is empty."""
    rows: Sequence[str]
    columns: Sequence[str]
    scale: Literal["sequential", "diverging"] = "sequential"
    """Colours from 0 to `largest`, or from its negative."""
    largest: float | None = None
    """Value of the strongest colour; None for the largest there is."""
    texts: Sequence[Sequence[str]] | None = None
    """Texts in the cells; None for none."""
    notes: Sequence[Sequence[str]] | None = None
    """Sentences that tell the cells; None for row, column and value."""
    column_notes: Sequence[str] = ()
    """Words after the value for each column."""
    cell: tuple[int, int] = (46, 28)
    """Width and height of a cell in pixels."""
    images: Sequence[str] = ()
    """Data URI of an image for each row."""

    def body(self) -> str:
        """Return the chart's element."""
        values = np.asarray(self.values, np.float64)
        finite = np.abs(values[np.isfinite(values)])
        largest = (float(finite.max()) if finite.size else 0.0) if self.largest is None else self.largest
        data = {
            "title": self.title, "values": rounded(values), "rows": list(self.rows), "columns": list(self.columns),
            "diverging": self.scale == "diverging", "largest": largest or 1.0, "texts": self.texts,
            "notes": self.notes, "column_notes": list(self.column_notes), "cell": self.cell,
            "images": list(self.images),
        }  # fmt: skip
        return embed("chart heatmap", data)


@dataclass(frozen=True)
class Grid(Section):
    """Small multiples: charts side by side, each below its title."""

    panels: Sequence[Section]
    assets: ClassVar[Sequence[str]] = Chart.assets

    def body(self) -> str:
        """Return the HTML of all charts."""

        def panel(chart: Section) -> str:
            about = f"<p>{html.escape(chart.about)}</p>" if chart.about else ""
            return f"<figure><figcaption>{html.escape(chart.title)}</figcaption>{about}{chart.body()}</figure>"

        return f'<div class="grid">{"".join(panel(chart) for chart in self.panels)}</div>'

"""Parts of the pictures of docs/story, as SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

INK, BLUE, RED = "#808080", "#4c78c8", "#d2603a"
"""Colours that stand out from a light and from a dark page."""
LABELS = "<style>text { fill: #595959 } @media (prefers-color-scheme: dark) { text { fill: #b8b8b8 } }</style>"
"""Colours of labels: no single one has a contrast of 4.5:1 with a light and with a dark page."""


def svg(width: int, height: int, parts: Sequence[str], title: str) -> str:
    """Return a drawing of a size in pixels, with a title for those who do not see it. To be readable on a phone, it is
    at most 440 pixels wide."""
    assert width <= 440
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
    head += 'role="img" font-family="sans-serif" font-size="13">'
    return "\n".join([head, f"<title>{escape(title)}</title>", LABELS, *parts, "</svg>", ""])


def moving(*rules: str) -> str:
    """Return styles that move parts of a drawing, for readers who have not asked for less motion."""
    return f"<style>@media (prefers-reduced-motion: no-preference) {{ {' '.join(rules)} }}</style>"


def arrow(x: float, y: float, dx: float, dy: float, colour: str = INK) -> str:
    """Return an arrow from a point."""
    length, back = math.hypot(dx, dy), 7
    ux, uy = dx / length, dy / length
    head = [(x + dx - back * ux + side * 4 * uy, y + dy - back * uy - side * 4 * ux) for side in (1, -1)]
    path = f"M{x:.1f} {y:.1f}l{dx:.1f} {dy:.1f}" + "".join(
        f"M{x + dx:.1f} {y + dy:.1f}L{a:.1f} {b:.1f}" for a, b in head
    )
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def box(x: float, y: float, width: float, height: float, label: str, colour: str = BLUE, opacity: float = 0.25) -> str:
    """Return a rectangle with a label in its middle."""
    shape = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4" '
    return f'{shape}fill="{colour}" fill-opacity="{opacity}"/>' + text(
        x + width / 2, y + height / 2 + 5, label, "middle"
    )


def text(x: float, y: float, label: str, anchor: str = "start") -> str:
    """Return a label at a point of its baseline."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(label)}</text>'


def heatmap(x: float, y: float, weights_TS: np.ndarray, title: str, cell: int = 30) -> list[str]:
    """Return the squares of a matrix with entries from 0 to 1, and its title above."""
    T, S = weights_TS.shape
    squares = [
        f'<rect x="{x + s * cell:.0f}" y="{y + t * cell:.0f}" width="{cell - 2}" height="{cell - 2}" '
        f'fill="{BLUE}" fill-opacity="{0.06 + 0.94 * weights_TS[t, s]:.2f}"/>'
        for t in range(T)
        for s in range(S)
    ]
    return [text(x, y - 10, title), *squares]


@dataclass(frozen=True)
class Line:
    """A line of a plot, with its name at its end."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    dashes: str = ""
    dy: float = 4
    """Pixels from the end of the line down to its name."""


def plot(
    lines: Sequence[Line], x_ticks: Mapping[Any, str], y_ticks: Mapping[Any, str], title: str, x_title: str = "", *,
    top: float = 30, height: float = 160, log: str = "",
) -> list[str]:  # fmt: skip
    """Return lines between the first and the last tick of each axis; the axes named in `log` are logarithmic. With the
    names at their ends, they are as wide as a phone."""
    left, width, scales = 46, 220, []
    for axis, ticks in (("x", x_ticks), ("y", y_ticks)):
        as_drawn = np.log if axis in log else np.asarray
        first, *_, last = as_drawn(list(ticks))
        scales.append(lambda v, f=as_drawn, a=first, b=last: (f(np.asarray(v, float)) - a) / (b - a))
    x, y = lambda v: left + width * scales[0](v), lambda v: top + height * (1 - scales[1](v))
    parts = [text(left, top - 16, title), text(left + width / 2, top + height + 40, x_title, "middle")]
    parts += [f'<path d="M{left} {y(v):.0f}h{width}" stroke="{INK}" stroke-opacity="0.3"/>' for v in y_ticks]
    parts += [text(left - 8, y(v) + 4, label, "end") for v, label in y_ticks.items()]
    parts += [text(x(v), top + height + 20, label, "middle") for v, label in x_ticks.items()]
    for line in lines:
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x(line.x), y(line.y), strict=True))
        style = f'fill="none" stroke="{line.colour}" stroke-width="2.5" stroke-dasharray="{line.dashes}"'
        parts.append(f'<polyline points="{points}" {style}/>')
        parts.append(text(x(line.x[-1]) + 8, y(line.y[-1]) + line.dy, line.name))
    return parts


def bars(x: float, y: float, values: Sequence[float], scale: float, title: str, width: int = 26) -> list[str]:
    """Return the features of a row as bars around a line, each of a width in pixels with its gap."""
    parts = [text(x, y - 66, title), f'<path d="M{x} {y}h{width * len(values)}" stroke="{INK}" stroke-opacity="0.5"/>']
    for i, value in enumerate(values):
        top, height = y - max(value, 0) * scale, abs(value) * scale
        at = f'x="{x + width * i}" y="{top:.1f}" width="{0.75 * width:g}" height="{height:.1f}"'
        parts.append(f'<rect {at} fill="{BLUE}"/>')
    return parts

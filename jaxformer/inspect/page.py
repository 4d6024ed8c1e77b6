"""HTML pages about a run: each is one file that opens from disk, needs no network, and suits light and dark schemes."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.extras import import_extra
from jaxformer.fields import nonfinite_to_none
from jaxformer.files import write_atomically

ASSETS = Path(__file__).parent / "assets"
"""Folder of the page's HTML, style and script. The HTML's content security policy allows the page's two scripts alone
and forbids every request, whatever the texts of a page contain."""


@dataclass(frozen=True)
class Figure:
    """A Plotly figure as JSON: dicts of traces and of the layout, which the page's script completes with its colours. A
    colour scale is named `sequential` or `diverging`. Texts of Plotly are HTML: see `plain`."""

    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    width: int = 0
    """Least width in pixels; a narrower screen scrolls."""

    def body(self, key: str) -> str:
        """Return the HTML that the page's script draws into."""
        return f'<div class="wide"><div class="figure" data-of="{key}" style="min-width: {self.width}px"></div></div>'

    def data(self) -> dict[str, Any]:
        """Return the JSON for the page's script."""
        return {"traces": list(self.traces), "layout": dict(self.layout)}


@dataclass(frozen=True)
class Table:
    """Rows of texts and numbers; a click on a column's heading sorts by it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    """Numbers are shown with four digits; a missing one is NaN."""
    about: str = ""

    def body(self, key: str) -> str:
        """Return the table's HTML."""
        numeric = [any(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.head))]

        def cell(value: str | float, i: int) -> str:
            if isinstance(value, str):
                return f"<td{' class=number' if numeric[i] else ''}>{html.escape(value)}</td>"
            text = "-" if np.isnan(value) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            return f'<td class=number data-value="{value!r}">{text}</td>'

        head = "".join(
            f"<th{' class=number' if right else ''}><button>{html.escape(name)}</button></th>"
            for name, right in zip(self.head, numeric, strict=True)
        )
        rows = "\n".join(f"<tr>{''.join(cell(value, i) for i, value in enumerate(row))}</tr>" for row in self.rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'

    def data(self) -> None:
        """Return None: the page's script needs no data."""


@dataclass(frozen=True)
class Texts:
    """Preformatted texts."""

    title: str
    texts: Sequence[str]
    about: str = ""

    def body(self, key: str) -> str:
        """Return the HTML of all texts."""
        return "\n".join(f"<pre>{html.escape(text)}</pre>" for text in self.texts)

    def data(self) -> None:
        """Return None: the page's script needs no data."""


@dataclass(frozen=True)
class AttentionLayer:
    """Attention map of one layer over the texts of an `AttentionSection`."""

    name: str
    rows: str
    """Name of the text of the queries."""
    columns: str
    """Name of the text of the keys."""
    weights_HTS: np.ndarray
    """Rows that sum to 1."""


@dataclass(frozen=True)
class AttentionSection:
    """Texts as tokens to point at, each of which shows the attention of a head from it."""

    title: str
    texts: Mapping[str, Sequence[str]]
    """Tokens by the text's name."""
    layers: Sequence[AttentionLayer]
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """A sentence for each token, by the text's name."""
    about: str = ""

    def body(self, key: str) -> str:
        """Return the HTML that the page's script draws into."""
        return f'<div class="attention" data-of="{key}"></div>'

    def data(self) -> dict[str, Any]:
        """Return the JSON for the page's script, weights as base64 bytes round(255·√w), which keep small ones."""
        layers = [
            {
                "name": layer.name, "rows": layer.rows, "columns": layer.columns, "heads": len(layer.weights_HTS),
                "weights": base64.b64encode(np.rint(255 * np.sqrt(layer.weights_HTS)).astype(np.uint8)).decode(),
            }
            for layer in self.layers
        ]  # fmt: skip
        notes = {name: list(notes) for name, notes in self.notes.items()}
        return {"texts": {name: list(tokens) for name, tokens in self.texts.items()}, "notes": notes, "layers": layers}


Section = Figure | Table | Texts | AttentionSection


def plain(text: str) -> str:
    """Return a text escaped for Plotly, whose titles and labels are HTML."""
    return html.escape(text, quote=False)


def render_page(title: str, facts: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the HTML of a page: its heading, sentences below it, and sections, each with a heading and a link;
    `UserError` if plotly is not installed."""
    keyed = {f"section-{number}": section for number, section in enumerate(sections)}
    data = {key: json_data for key, section in keyed.items() if (json_data := section.data()) is not None}
    plotly = import_extra("plotly.offline", "writing a page").get_plotlyjs()
    data_json = json.dumps(nonfinite_to_none(data), ensure_ascii=False, separators=(",", ":"))
    data_json = data_json.replace("<", "\\u003c")  # no end of a script element
    template, css, js = ((ASSETS / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    return template.format(
        title=html.escape(title), facts="\n".join(f"<p>{html.escape(fact)}</p>" for fact in facts),
        links="\n".join(f'<a href="#{key}">{html.escape(section.title)}</a>' for key, section in keyed.items()),
        sections="\n".join(_section(section, key) for key, section in keyed.items()), data=data_json, plotly=plotly,
        js=js, css=css, hashes=f"{_hash(plotly)} {_hash(js)}",
    )  # fmt: skip


def write_page(file: Path, title: str, facts: Sequence[str], sections: Sequence[Section]) -> None:
    """Write a page atomically: a reload gets the old one or the new one."""
    write_atomically(file, render_page(title, facts, sections))


def _section(section: Section, key: str) -> str:
    about = f"<p>{html.escape(section.about)}</p>\n" if section.about else ""
    return f'<section id="{key}">\n<h2>{html.escape(section.title)}</h2>\n{about}{section.body(key)}\n</section>'


def _hash(script: str) -> str:
    """Return the hash of a script for the content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"

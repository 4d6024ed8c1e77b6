"""Pages that look at a run: each is one file, which opens from disk, needs no network, and suits light and dark."""

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

from jaxformer.fields import nonfinite_to_none
from jaxformer.files import write_atomically

ASSETS = Path(__file__).parent / "assets"
SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {sums};
 style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'; base-uri 'none'">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{title}</h1>
{facts}
<nav>{contents}</nav>
</header>
<main>
{sections}
</main>
<script type="application/json" id="data">{data}</script>
<script>{plotly}</script>
<script>{js}</script>
</body>
</html>
"""
"""The policy knows no script but the page's two, and forbids every request, whatever a page's texts say."""


@dataclass(frozen=True)
class Figure:
    """A plot of Plotly's, as its JSON: dicts of traces and of the layout, which the page adds its colours to.

    A colour scale is called `sequential` or `diverging`. Texts of Plotly are HTML: see `plain`.
    """

    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    width: int = 0
    """Pixels that it needs; where a screen has fewer, it is scrolled."""

    def body(self, key: str) -> str:
        """Its place in the page."""
        return f'<div class="wide"><div class="figure" data-of="{key}" style="min-width: {self.width}px"></div></div>'

    def data(self) -> dict[str, Any]:
        """What the page's script makes of it."""
        return {"traces": list(self.traces), "layout": dict(self.layout)}


@dataclass(frozen=True)
class Table:
    """Rows of texts and numbers; a click on a column's head sorts by it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    """Numbers are shown with four digits, texts as they are; a missing one is NaN."""
    about: str = ""

    def body(self, key: str) -> str:
        """The table."""
        numeric = [any(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.head))]

        def cell(value: str | float, i: int) -> str:
            if isinstance(value, str):
                return f"<td{' class=number' if numeric[i] else ''}>{html.escape(value)}</td>"
            shown = "-" if np.isnan(value) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            return f'<td class=number data-value="{value!r}">{shown}</td>'

        head = "".join(
            f"<th{' class=number' if right else ''}><button>{html.escape(name)}</button></th>"
            for name, right in zip(self.head, numeric, strict=True)
        )
        rows = "\n".join(f"<tr>{''.join(cell(value, i) for i, value in enumerate(row))}</tr>" for row in self.rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'

    def data(self) -> None:
        """Nothing beside the table itself."""


@dataclass(frozen=True)
class Texts:
    """Texts as they are."""

    title: str
    texts: Sequence[str]
    about: str = ""

    def body(self, key: str) -> str:
        """A block a text."""
        return "\n".join(f"<pre>{html.escape(text)}</pre>" for text in self.texts)

    def data(self) -> None:
        """Nothing beside the texts themselves."""


@dataclass(frozen=True)
class Layer:
    """What the heads of one layer of attention look at in the texts of a `Reading`."""

    name: str
    rows: str
    """Which text looks, by name."""
    columns: str
    """Which is looked at."""
    weights_HTS: np.ndarray
    """Rows that sum to 1."""


@dataclass(frozen=True)
class Reading:
    """Texts as tokens, to be pointed at: each shows where a head looks from it."""

    title: str
    texts: Mapping[str, Sequence[str]]
    """Tokens by the text's name."""
    layers: Sequence[Layer]
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What else there is to say of each token, by the text's name."""
    about: str = ""

    def body(self, key: str) -> str:
        """Its place in the page."""
        return f'<div class="reading" data-of="{key}"></div>'

    def data(self) -> dict[str, Any]:
        """What the page's script makes of it; the roots of weights as bytes, of which 255 is all of a
        row: small ones keep their digits."""
        layers = [
            {
                "name": layer.name, "rows": layer.rows, "columns": layer.columns, "heads": len(layer.weights_HTS),
                "weights": base64.b64encode(np.rint(255 * np.sqrt(layer.weights_HTS)).astype(np.uint8)).decode(),
            }
            for layer in self.layers
        ]  # fmt: skip
        notes = {name: list(notes) for name, notes in self.notes.items()}
        return {"texts": {name: list(tokens) for name, tokens in self.texts.items()}, "notes": notes, "layers": layers}


Section = Figure | Table | Texts | Reading


def plain(text: str) -> str:
    """A text as Plotly shows it, which reads HTML in titles and labels."""
    return html.escape(text, quote=False)


def page(title: str, facts: Sequence[str], sections: Sequence[Section]) -> str:
    """The page's HTML.

    Args:
      facts: sentences below the title.
      sections: each becomes a heading with what it shows.
    """
    from plotly.offline import get_plotlyjs  # slow to import, and only needed here

    keys = [f"section-{number}" for number in range(len(sections))]
    made = [_section(section, key) for section, key in zip(sections, keys, strict=True)]
    data = {key: found for section, key in zip(sections, keys, strict=True) if (found := section.data()) is not None}
    links = (f'<a href="#{key}">{html.escape(s.title)}</a>' for s, key in zip(sections, keys, strict=True))
    scripts = get_plotlyjs(), (ASSETS / "page.js").read_text(encoding="utf-8")
    return SHELL.format(
        title=html.escape(title), facts="\n".join(f"<p>{html.escape(fact)}</p>" for fact in facts),
        contents="\n".join(links), sections="\n".join(made), data=_json(data), plotly=scripts[0], js=scripts[1],
        css=(ASSETS / "page.css").read_text(encoding="utf-8"), sums=" ".join(map(_sum, scripts)),
    )  # fmt: skip


def write_page(file: Path, title: str, facts: Sequence[str], sections: Sequence[Section]) -> None:
    """Write a page; whoever reloads it meanwhile gets the old or the new one."""
    write_atomically(file, page(title, facts, sections))


def _section(section: Section, key: str) -> str:
    about = f"<p>{html.escape(section.about)}</p>\n" if section.about else ""
    return f'<section id="{key}">\n<h2>{html.escape(section.title)}</h2>\n{about}{section.body(key)}\n</section>'


def _sum(script: str) -> str:
    """By which a content security policy knows a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _json(value: Any) -> str:
    """JSON that no parser of HTML takes for an end of the script; of numbers that are none, null."""
    return json.dumps(nonfinite_to_none(value), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")

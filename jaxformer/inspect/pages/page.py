"""HTML pages about a run: each is one file that opens from disk without a network, in light and dark colour schemes."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from jaxformer.config.fields import nonfinite_to_none
from jaxformer.files import write_atomically
from jaxformer.terminal import SYMBOLS

ASSETS = Path(__file__).parent / "assets"
"""Folder of the page's HTML, styles and scripts, which docs/lab builds from docs/lab/src/inspect. The HTML's content
security policy allows only the page's own script and forbids every request, but for the weights beside the page of a
large model, whatever a page's texts contain."""
SIGNIFICANT_DIGITS = 4
"""Maximum significant digits of a non-integer."""
MAX_DECIMALS = 5
"""Maximum decimals; a column of smaller numbers is in scientific notation."""
MAX_ROWS = 20
"""Rows of a table that are visible initially; a button shows the others."""
LONG_TEXT = 16
"""Maximum characters of a cell without line breaks."""


@dataclass(frozen=True)
class Section(ABC):
    """A part of a page with a heading and a link."""

    title: str
    about: str = field(default="", kw_only=True)
    """Sentences below the heading."""

    is_live: ClassVar[bool] = False
    """Whether the page needs the style and script that run a model, which compiles WebAssembly."""

    @property
    def fetches(self) -> bool:
        """Whether its script fetches files beside the page."""
        return False

    @abstractmethod
    def body(self) -> str:
        """Return the HTML below the heading; see `embed` for content that a script draws."""


Sections = Sequence[Section] | Mapping[str, Sequence[Section]]
"""Sections of a page; or those of each of its tabs, by name."""


@dataclass(frozen=True)
class Table(Section):
    """Rows of texts and numbers; a click on a column's heading sorts by it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    """Cells of each row. The digits of a number depend on its column; NaN for a missing number."""

    def body(self) -> str:
        """Return the table's HTML."""
        columns = list(zip(*self.rows, strict=True)) or [() for _ in self.head]
        numeric = [any(not isinstance(value, str) for value in column) for column in columns]
        shown = [_column_texts(column) for column in columns]

        def cell(row: int, column: int) -> str:
            value, text = self.rows[row][column], shown[column][row]
            kind = " class=number" if numeric[column] else " class=text" if len(text) > LONG_TEXT else ""
            exact = "" if isinstance(value, str) else f' data-value="{value!r}"'
            return f"<td{kind}{exact}>{html.escape(text)}</td>"

        head = "".join(
            f"<th{' class=number' if right else ''}><button>{html.escape(name)}</button></th>"
            for name, right in zip(self.head, numeric, strict=True)
        )
        cells = ((cell(row, column) for column in range(len(self.head))) for row in range(len(self.rows)))
        rows = "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)
        table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"
        name = html.escape(self.title, quote=True)
        if len(self.rows) <= MAX_ROWS:
            return f'<div class="wide" tabindex="0" role="region" aria-label="{name}">{table}</div>'
        return (
            f'<div class="wide folded" tabindex="0" role="region" aria-label="{name}">{table}</div>'
            f'<button class="plain unfold" aria-expanded="false">Show all {len(self.rows):,} rows</button>'
        )


@dataclass(frozen=True)
class Texts(Section):
    """Preformatted texts."""

    texts: Sequence[str]

    def body(self) -> str:
        """Return the HTML of all texts."""
        return "\n".join(f"<pre>{as_preformatted(text)}</pre>" for text in self.texts)


@dataclass(frozen=True)
class Caution(Section):
    """What keeps the results of a page from being trusted."""

    text: str

    def body(self) -> str:
        """Return the text's HTML."""
        return f'<p class="caution">{html.escape(self.text)}</p>'


def as_preformatted(text: str) -> str:
    """Return a model's text as HTML, with symbols for control characters and for runs of empty lines."""
    text = re.sub(r"\n{3,}", lambda run: "⏎" * len(run[0]) + "\n", text.translate(SYMBOLS))
    return html.escape(text)


def embed(kind: str, data: Any) -> str:
    """Return an HTML element with the class `kind`, which a script completes from the JSON within it."""
    text = json.dumps(nonfinite_to_none(data), ensure_ascii=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # a text must not end the script element
    return f'<div class="{kind}"><script type="application/json">{text}</script></div>'


def rounded(values: Any, digits: int = SIGNIFICANT_DIGITS + 1) -> Any:
    """Return numbers in nested sequences and arrays rounded to `digits` significant digits, as lists for JSON."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, (list, tuple)):
        return [rounded(value, digits) for value in values]
    return float(f"{values:.{digits}g}") if isinstance(values, float) and math.isfinite(values) else values


def render_page(
    title: str, facts: Sequence[str], sections: Sections, links: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the HTML of a page: its title, the facts below it, and sections, each with a heading and a link, in tabs
    if there are several; and links to other pages, by name."""
    tabs = {"": sections} if isinstance(sections, Sequence) else {name: own for name, own in sections.items() if own}
    buttons = [
        f'<button role="tab" id="tab-{i}" aria-controls="panel-{i}">{html.escape(name)}</button>'
        for i, name in enumerate(tabs)
    ]
    numbers = count()
    panels = [_panel({f"section-{next(numbers)}": section for section in own}) for own in tabs.values()]
    if len(tabs) > 1:
        panels = [
            f'<div role="tabpanel" id="panel-{i}" aria-labelledby="tab-{i}">\n{panel}\n</div>'
            for i, panel in enumerate(panels)
        ]
    every = [section for sections in tabs.values() for section in sections]
    is_live = any(section.is_live for section in every)
    asset = ASSETS / ("live" if is_live else "page")
    css, script = (asset.with_suffix(kind).read_text(encoding="utf-8") for kind in (".css", ".js"))
    return (
        (ASSETS / "page.html")
        .read_text(encoding="utf-8")
        .format(
            title=html.escape(title),
            facts="\n".join(f"<p>{html.escape(fact)}</p>" for fact in facts),
            links=_links({target: name for name, target in links.items()}),
            tabs=f'<div role="tablist" aria-label="Parts of the page" hidden>{"".join(buttons)}</div>'
            * (len(tabs) > 1),
            sections="\n".join(panels),
            css=css,
            requests=" connect-src 'self';" * any(section.fetches for section in every),
            script=script,
            sources=_hash(script) + " 'wasm-unsafe-eval'" * is_live,
        )
    )


def write_page(
    file: Path,
    title: str,
    facts: Sequence[str],
    sections: Sections,
    links: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a page atomically: a reload gets either the old or the new page. See `render_page`."""
    write_atomically(file, render_page(title, facts, sections, links))


def _links(names: Mapping[str, str]) -> str:
    """Return links to targets by their names."""
    links = "\n".join(f'<a href="{target}">{html.escape(name)}</a>' for target, name in names.items())
    return f"<nav>{links}</nav>" if names else ""


def _panel(sections: Mapping[str, Section]) -> str:
    """Return sections by their keys, below links to them."""
    links = _links({f"#{key}": section.title for key, section in sections.items()} if len(sections) > 1 else {})
    return "\n".join([links, *(_section(section, key) for key, section in sections.items())])


def _section(section: Section, key: str) -> str:
    about = f"<p>{html.escape(section.about)}</p>\n" if section.about else ""
    return f'<section id="{key}">\n<h2>{html.escape(section.title)}</h2>\n{about}{section.body()}\n</section>'


def _hash(script: str) -> str:
    """Return the hash of a script for the content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _column_texts(values: Sequence[str | float]) -> list[str]:
    """Return a column's cells as texts. Numbers have the same number of decimals, unless most would be left with fewer
    than two digits."""
    sizes = [abs(x) for x in values if isinstance(x, float) and math.isfinite(x) and x]
    largest = math.floor(math.log10(max(sizes))) if sizes else 0
    decimals = SIGNIFICANT_DIGITS - 1 - largest - (largest < 0)
    are_small = decimals > MAX_DECIMALS or sum(x < 10 ** (1 - decimals) for x in sizes) > len(sizes) / 2

    def text(value: str | float) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, int):
            return f"{value:,}"
        if math.isnan(value):
            return "-"
        fixed = f"{value:z,.{max(decimals, 0)}f}"
        hides = value != 0 and not fixed.strip("0.")
        return f"{value:z.3g}" if are_small or decimals < 0 or hides else fixed

    return [text(value) for value in values]

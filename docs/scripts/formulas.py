"""A hook of MkDocs that sets formulas as MathML, so that a page needs no script and loads nothing from elsewhere.

`$...$` and `$$...$$` in Markdown, which GitHub sets as well, are marked by the extension of `EXTENSIONS`.
"""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

EXTENSIONS: dict[str, dict[str, Any]] = {"pymdownx.arithmatex": {"generic": True}}
"""Extension of Markdown, as in mkdocs.yml, with its options."""
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **_: object) -> str:
    """Return a page with its formulas as MathML."""
    return FORMULA.sub(set_formula, html)


def set_formula(formula: re.Match[str]) -> str:
    """Return the MathML of a formula that Markdown has marked."""
    tag, bracket, latex = formula.groups()
    display = "inline" if bracket == "(" else "block"
    return f'<{tag} class="formula">{convert(unescape(latex).strip(), display=display)}</{tag}>'

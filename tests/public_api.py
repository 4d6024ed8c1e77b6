"""The page of the public API, docs/api.md; `python -m tests.public_api` writes it."""

import importlib
import inspect
import re
from collections.abc import Callable
from types import ModuleType

from tests.helpers import ROOT

PACKAGES = ("jaxformer", *(f"jaxformer.{name}" for name in ("ops", "nn", "models", "data", "decode", "inspect")))
PATH = ROOT / "docs/api.md"
HEAD = """# Public API

The public names, grouped by package: `from jaxformer.nn import Block`. `help(name)` shows arguments, shapes and errors.
`python -m tests.public_api` regenerates this page.

## Stability

From version 0.1.0 on, these are stable:

- the names on this page, with the order and the names of their arguments;
- commands, options and exit statuses, and the names of the committed configs;
- parameter names, and what is in a run's folder: a run trained with one version loads, samples and resumes with later
  ones.

A stable name is changed in two steps. In one minor version (0.2), the old name still works, with a
`DeprecationWarning` that names the new one; in the next (0.3), it goes. Both are in the [changelog](../CHANGELOG.md).
A patch version (0.2.1) changes no name and no result.

Not stable are all other names, messages and the pages' looks; results in the last bits, which also depend on the
versions of JAX and XLA; and the committed configs' settings, which follow the measurements. Names that begin with an
underscore are private.
"""


def public_api_page() -> str:
    """Return the text of the page."""
    return HEAD + "".join(_section(importlib.import_module(name)) for name in PACKAGES)


def _section(package: ModuleType) -> str:
    rows = "".join(_row(name, getattr(package, name)) for name in package.__all__)
    return f"\n## {package.__name__}\n\n{_summary(package)}\n\n| name | |\n|---|---|\n{rows}"


def _row(name: str, value: object) -> str:
    if isinstance(value, type | ModuleType):
        return f"| `{name}` | {_summary(value)} |\n"
    if not callable(value):
        return f"| `{name}` | A constant, of {type(value).__name__}. |\n"
    return f"| `{name}({', '.join(_parameters(value))})` | {_summary(value)} |\n"


def _parameters(function: Callable[..., object]) -> list[str]:
    """Return the parameters of a function, those with a default as `name=…`."""
    listed = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not any(x[0] == "*" for x in listed):
            listed.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        listed.append(f"{star}{p.name}" + ("" if p.default is p.empty else "=…"))
    return listed


def _summary(value: object) -> str:
    """Return the first sentence of a docstring, as the cell of a table."""
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    sentence = re.match(r".*?[.](?= [A-Z]|$)", paragraph)
    return (sentence[0] if sentence else paragraph).replace("|", r"\|")


if __name__ == "__main__":
    PATH.write_text(public_api_page())

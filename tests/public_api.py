"""The page of the public API, docs/api.md; `python -m tests.public_api` writes it."""

import importlib
import inspect
import re
from collections.abc import Callable
from types import ModuleType

from tests.helpers import ROOT

PACKAGES = (
    "jaxformer",
    *(f"jaxformer.{name}" for name in ("ops", "nn", "models", "data", "decode", "inspect", "ladder")),
    *(f"jaxformer.{name}" for name in ("config", "contract", "parallel", "runs", "interop")),
)
PATH = ROOT / "docs/api.md"
HEAD = """# Public API

The public names, grouped by package: `from jaxformer.nn import Block`. `help(name)` shows arguments, shapes and errors.
`python -m tests.public_api` regenerates this page.

**Stable from 0.1.0 on:** the names on this page, imported from the package that lists them, with their parameters, and
the attributes and methods of their classes; commands, their options and exit statuses, and the names of configs. A run
that one version has trained loads, samples and resumes with later ones.

**How they change:** the earlier name, parameter or option works for at least one more minor version, with a
`DeprecationWarning` that names its replacement. Both the deprecation and the removal are in the
[changelog](../CHANGELOG.md). New names, and new parameters with a default, may come with any minor version.

**Not stable:** names with a leading underscore; names that are only in a module, such as
`jaxformer.train.loop.train`; the modules in which public names are defined; the files in a run's folder, which
`load_run` reads; the wording of output; numerical results, which may change in the last bits.
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

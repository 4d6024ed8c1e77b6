"""Write into the chapters of docs/story what their Python prints, and the stored figures of the ladder.

    python docs/scripts/story.py [CHAPTER.md ...]

A block of Python is followed by a block of text with its output; a page is read from top to bottom. Between the marks
`<!-- RUNG FIELD -->` and `<!-- -->` stands a figure of `benchmarks/results/ladder.json`, and between
`<!-- rungs NAMES -->` and `<!-- end -->` a table of these rungs, of all without names.
"""

import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STORY = ROOT / "docs/story"
BLOCK = re.compile(r"^(```python\n(.*?)^```\n)(?:\n```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"<!-- (\w+) (\w+) -->.*?<!-- -->")
TABLE = re.compile(r"^<!-- rungs(.*?) -->\n.*?^<!-- end -->\n", re.MULTILINE | re.DOTALL)
COLUMNS = {
    "rung": "rung", "parameters": "parameters", "loss": "nats per token", "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
}  # fmt: skip
DIGITS = {"loss": 3, "perplexity": 2, "bits_per_byte": 3}


def ladder() -> dict[str, dict[str, Any]]:
    """Return the stored figures of each rung, by its name."""
    stored: dict[str, dict[str, Any]] = json.loads((ROOT / "benchmarks/results/ladder.json").read_text())["figures"]
    return stored["rungs"]


def cell(figures: dict[str, Any], field: str) -> str:
    """Return a figure of a rung as text; in place of the loss of one that ended early, the cause."""
    value = figures[field]
    if value is None:
        return str(figures["ended_early"]) if field == "loss" else "-"
    return f"{value:,.{DIGITS.get(field, 0)}f}" if isinstance(value, int | float) else str(value)


def table(names: list[str]) -> str:
    """Return rungs of the ladder as a table in Markdown."""
    rungs = {name: figures | {"rung": f"`{name}`"} for name, figures in ladder().items()}
    rows = [list(COLUMNS.values()), ["---"] + ["---:"] * (len(COLUMNS) - 1)]
    rows += [[cell(rungs[name], field) for field in COLUMNS] for name in names or rungs]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def fill(page: str) -> str:
    """Return a chapter with the output of its Python and the stored figures."""
    namespace: dict[str, Any] = {}

    def with_output(match: re.Match[str]) -> str:
        with redirect_stdout(io.StringIO()) as output:
            exec(match[2], namespace)  # noqa: S102 (the project's own pages)
        shown = "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())
        return match[1] + (f"\n```text\n{shown}```\n" if shown else "")

    page = FIGURE.sub(lambda m: f"<!-- {m[1]} {m[2]} -->{cell(ladder()[m[1]], m[2])}<!-- -->", page)
    page = TABLE.sub(lambda m: f"<!-- rungs{m[1]} -->\n\n{table(m[1].split())}\n<!-- end -->\n", page)
    return BLOCK.sub(with_output, page)


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(STORY.glob("*.md")):
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")

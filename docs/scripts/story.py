"""Write what their Python prints into the chapters of docs/story, and into them and docs/ladder.md the stored figures.

    python docs/scripts/story.py [PAGE.md ...]

A block of Python is followed by a block of text with its output; a page is read from top to bottom. Between the marks
`<!-- RUNG FIELD -->` and `<!-- -->` stands a figure of `benchmarks/results/ladder.json`, and between
`<!-- rungs NAMES -->` and `<!-- end -->` a table of these rungs, of all without names; `<!-- outcomes -->` has all
fields, `<!-- mixing -->` the rungs before attention, and `<!-- seeds -->` the perplexities by seed.
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
PAGES = [*sorted(STORY.glob("*.md")), ROOT / "docs/ladder.md"]
BLOCK = re.compile(r"^(```python\n(.*?)^```\n)(?:\n```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"<!-- (\w+) (\w+) -->.*?<!-- -->")
TABLE = re.compile(r"^<!-- (rungs|outcomes|mixing|seeds)( [\w ]+)? -->\n.*?^<!-- end -->\n", re.MULTILINE | re.DOTALL)
COLUMNS = {
    "rung": "rung", "parameters": "parameters", "loss": "nats per token", "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
}  # fmt: skip
ALL_COLUMNS = COLUMNS | {"entropy": "entropy by heads; blocks", "minutes": "minutes", "sources": "the sources"}
MIXING_COLUMNS = {"rung": "rung", "input": "an MLP on"} | {
    name: COLUMNS[name] for name in ("parameters", "loss", "perplexity")
}
FORMATS = {"loss": ".3f", "perplexity": ".4g", "bits_per_byte": ".3f", "minutes": ".1f"}


def ladder() -> dict[str, Any]:
    """Return the stored figures: those of each rung by its name, and the perplexities by seed."""
    stored: dict[str, Any] = json.loads((ROOT / "benchmarks/results/ladder.json").read_text(encoding="utf-8"))
    return stored["figures"]


def cell(figures: dict[str, Any], field: str) -> str:
    """Return a figure of a rung as text; in place of the loss of one that ended early, the cause."""
    value = figures[field]
    if value is None:
        return str(figures["ended_early"]) if field == "loss" else "-"
    return format(value, FORMATS.get(field, ",")) if isinstance(value, int | float) else str(value)


def table(kind: str, names: list[str]) -> str:
    """Return rungs of the ladder as a table in Markdown."""
    if kind == "seeds":
        seeds = ladder()["perplexity_by_seed"]
        rows = [["perplexity with seed", *map(str, range(len(next(iter(seeds.values())))))]]
        rows += [[f"`{name}`", *(f"{x:.2f}" for x in values)] for name, values in seeds.items()]
    else:
        columns = {"rungs": COLUMNS, "outcomes": ALL_COLUMNS, "mixing": MIXING_COLUMNS}[kind]
        rungs = (ladder()["before_attention"] if kind == "mixing" else ladder())["rungs"]
        rows = [list(columns.values())]
        rows += [[cell(rungs[name] | {"rung": f"`{name}`"}, field) for field in columns] for name in names or rungs]
    rows.insert(1, ["---:" if re.match(r"\d", x) else "---" for x in rows[1]])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def fill_figures(page: str) -> str:
    """Return a page with the stored figures."""
    page = FIGURE.sub(lambda m: f"<!-- {m[1]} {m[2]} -->{cell(ladder()['rungs'][m[1]], m[2])}<!-- -->", page)
    return TABLE.sub(
        lambda m: f"<!-- {m[1]}{m[2] or ''} -->\n\n{table(m[1], (m[2] or '').split())}\n<!-- end -->\n", page
    )


def fill(page: str) -> str:
    """Return a chapter with the output of its Python and the stored figures."""
    namespace: dict[str, Any] = {}

    def with_output(match: re.Match[str]) -> str:
        with redirect_stdout(io.StringIO()) as output:
            exec(match[2], namespace)  # noqa: S102 (the project's own pages)
        shown = "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())
        return match[1] + (f"\n```text\n{shown}```\n" if shown else "")

    return BLOCK.sub(with_output, fill_figures(page))


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or PAGES:
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")

"""The generated report in `benchmarks/README.md`, from the JSON files of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.cases import CASES

README = record.ROOT / "benchmarks/README.md"
ABOUT = {name: case.about for name, case in CASES.items()} | {
    "tests": "Tests of what runs on a GPU, `pytest -m gpu`: operations, forward and backward, beside float64 on the "
    "CPU. The largest difference is relative to what rounding may cause.",
}
BEGIN, END = "<!-- report: python -m benchmarks --report -->\n", "<!-- end of report -->\n"


def write_report(page: Path, results: Path) -> None:
    """Replace the report in a page.

    Raises:
      ValueError: the page lacks the lines that enclose the report.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {BEGIN!r} and {END!r}, between which the report stands.")
    page.write_text(f"{before}{BEGIN}\n{report(results)}\n{END}{after}", encoding="utf-8")


def report(results: Path) -> str:
    """Return the Markdown for all cases with results."""
    files = [(name, results / f"{stem}.json") for name in ABOUT for stem in (name, f"gpu_{name}")]
    return "\n".join(section(name, json.loads(file.read_text("utf-8"))) for name, file in files if file.exists())


def section(name: str, result: dict[str, Any]) -> str:
    """Return the heading, conditions and table of one case."""
    figures, hardware = result["figures"], result["hardware"]
    device = ", ".join(str(hardware[key]) for key in ("gpu", "cpu") if key in hardware)
    versions = ", ".join(f"{key} {version}" for key, version in result["versions"].items())
    rounds = "" if "rounds" not in figures else f"; {figures['rounds']} rounds"
    load = f", load {hardware['load']}" if "load" in hardware else ""
    title = f"{name} (GPU)" if "gpu" in hardware else name
    missing = figures["left_out"].items()
    left_out = "".join(f"\n{side} is left out: no {', '.join(names)}.\n" for side, names in missing)
    problems = [f"\n{point}: {each}\n" for point, of_point in figures.get("problems", {}).items() for each in of_point]
    return (
        f"### {title}\n\n{ABOUT[name]}\n{left_out}\n{table(figures)}{''.join(problems)}\n"
        f"{device}, {hardware['cores']} cores{load}; {versions}; "
        f"commit {result['commit'][:12]}, {result['date']}{rounds}.\n"
    )


def table(figures: dict[str, Any]) -> str:
    """Return the table of the points, and that of their summary."""
    points, roles = figures["points"], figures["roles"]
    timed = {name: point for name, point in points.items() if "ms" in point}
    lines = []
    if timed:
        sides = [name for name in roles if any(name in point["ms"] for point in timed.values())]
        pairs = [(ours, peer) for ours in sides if roles[ours] == "ours" for peer in sides if roles[peer] == "peer"]
        derived = list(dict.fromkeys(key for point in timed.values() for key in point["derived"]))
        head = [f"{figures['unit']}", *sides, *(f"{ours} over {peer}" for ours, peer in pairs), *derived]
        lines = [row(head), row(["---"] * len(head))]
        for name, point in timed.items():
            times = [cell(point["ms"].get(side)) for side in sides]
            ratios = [cell(point["ratio"].get(ours, {}).get(peer), ".2f") for ours, peer in pairs]
            lines.append(row([name, *times, *ratios, *(number(point["derived"].get(key)) for key in derived)]))
    else:
        lines = [row(["point", "figure", "value"]), row(["---"] * 3)]
        for name, point in points.items():
            facts = {key: value for each in point["facts"].values() for key, value in each.items()}
            lines += [row([name, key.replace("_", " "), number(value)]) for key, value in facts.items()]
    if summary := figures.get("summary"):
        columns = list(dict.fromkeys(key for each in summary.values() for key in each))
        lines += ["", row(["", *columns]), row(["---"] * (len(columns) + 1))]
        lines += [row([name, *(number(each.get(key)) for key in columns)]) for name, each in summary.items()]
    return "\n".join(lines) + "\n"


def row(cells: list[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def cell(spread: dict[str, float] | None, spec: str = ".4g") -> str:
    """Format a median and its quartiles as a table cell."""
    if spread is None:
        return "-"
    middle, *quartiles = (format(spread[key], spec) for key in ("median", "q1", "q3"))
    return f"{middle} ({' to '.join(quartiles)})"


def number(value: Any) -> str:
    """Format a value as a table cell."""
    if isinstance(value, bool) or value is None:
        return "-" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        value = "; ".join(map(str, value)) or "-"
    return f"{value:,}" if isinstance(value, int) else " ".join(str(value).replace("|", "\\|").split())

"""Write the tables of docs/sources/index.md from the claims on the other pages there.

    python -m docs.scripts.sources

A claim is a heading with its number, followed by its verdict in bold, by text and Python.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).resolve().parents[1] / "sources"
INDEX = PAGES / "index.md"
VERDICTS = ("Confirmed", "Corrected", "Refuted", "Order only", "Not reproduced", "Open")
CLAIM = re.compile(r"^### (\d+)\. ([^\n]+)\n\n\*\*([^\n]+?)\.\*\*(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Claim:
    """A claim of a source."""

    page: str
    number: int
    text: str
    verdict: str
    body: str
    """Markdown below the verdict."""

    @property
    def tests(self) -> list[str]:
        """Tests that settle the claim."""
        return re.findall(r"`(tests/[\w/]+\.py::\w+)`", self.body)

    @property
    def measurements(self) -> list[str]:
        """Stored measurements that settle the claim."""
        return re.findall(r"`((?:benchmarks|studies)/results/\w+\.json)`", self.body)

    @property
    def python(self) -> str:
        """Python that settles the claim."""
        return "".join(re.findall(r"^```python\n(.*?)^```", self.body, re.MULTILINE | re.DOTALL))

    @property
    def settled_by(self) -> str:
        """What settles the claim, in a word each; empty for nothing."""
        kinds = {
            "Python": self.python,
            "test": self.tests,
            "measurement": self.measurements,
            "command": "```bash" in self.body,
        }
        return ", ".join(kind for kind, found in kinds.items() if found)


def claims() -> list[Claim]:
    """Return all claims, by number."""
    found = [
        Claim(path.name, int(number), text, verdict, body)
        for path in PAGES.glob("*.md")
        for number, text, verdict, body in CLAIM.findall(path.read_text(encoding="utf-8"))
    ]
    return sorted(found, key=lambda claim: claim.number)


def title(page: str) -> str:
    """Return the heading of a page."""
    return (PAGES / page).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def verdict_table() -> str:
    """Return the number of claims by source and verdict."""
    pages = dict.fromkeys(claim.page for claim in claims())
    counts = Counter((claim.page, claim.verdict) for claim in claims())
    lines = [f"| source | {' | '.join(VERDICTS)} |", f"| --- |{' ---: |' * len(VERDICTS)}"]
    lines += [
        f"| [{title(page)}]({page}) | {' | '.join(str(counts[page, verdict]) for verdict in VERDICTS)} |"
        for page in pages
    ]
    totals = Counter(claim.verdict for claim in claims())
    return "\n".join([*lines, f"| all | {' | '.join(str(totals[verdict]) for verdict in VERDICTS)} |"])


def claim_table() -> str:
    """Return all claims with their verdicts and what settles them."""
    rows = [f"| {c.number} | {c.text} | [{c.verdict}]({c.page}) | {c.settled_by or '-'} |" for c in claims()]
    return "\n".join(["| | claim | verdict | settled by |", "| ---: | --- | --- | --- |", *rows])


def fill(page: str) -> str:
    """Return the index with its tables."""
    for name, table in (("verdicts", verdict_table()), ("claims", claim_table())):
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    INDEX.write_text(fill(INDEX.read_text(encoding="utf-8")), encoding="utf-8")

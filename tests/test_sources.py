"""Every claim of the sources has a verdict, and what settles it exists and could fail."""

import re

from docs.scripts.sources import INDEX, VERDICTS, claims, fill
from tests.helpers import ROOT

CHAPTERS = "tests/test_story.py::test_chapter_shows_what_its_code_prints"
FIGURE = re.compile(r"-?\b\d[\d,]*(?:\.\d+(?:e-?\d+)?|e-\d+)\b")


def figures(text: str) -> set[float]:
    """Return the numbers with a decimal point or an exponent."""
    return {float(number.replace(",", "")) for number in FIGURE.findall(text)}


def test_each_claim_is_judged_once():
    """116, a count of pictures, was no claim."""
    assert [claim.number for claim in claims()] == [n for n in range(1, 146) if n != 116]
    assert {claim.verdict for claim in claims()} <= set(VERDICTS)


def test_index_shows_the_claims():
    page = INDEX.read_text()
    assert page == fill(page)


def source(test: str) -> str:
    """Return the source of a test, such as `tests/a.py::test_b`; empty if there is none."""
    file, _, name = test.partition("::")
    found = re.search(rf"^def {name}\(.*?(?=^[@\w]|\Z)", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def test_what_settles_a_claim_exists():
    for claim in claims():
        assert all(map(source, claim.tests)), claim.number
        assert all((ROOT / file).is_file() for file in claim.measurements), claim.number


def test_what_settles_a_claim_could_fail():
    """Prose is no evidence: Python asserts, and compares stored figures and what a chapter prints."""
    for claim in claims():
        assert claim.settled_by or claim.verdict == "Open", claim.number
        assert "assert" in claim.python or not claim.python, claim.number
        assert claim.python or not claim.measurements, claim.number
        assert "printed(" in claim.python or CHAPTERS not in claim.tests, claim.number


def test_each_figure_of_a_verdict_is_checked():
    """By Python or a named test, unless a command makes it anew."""
    for claim in claims():
        prose = re.sub(r"^```.*?^```|`[^`]*`|\]\([^)]*\)", "", claim.body, flags=re.MULTILINE | re.DOTALL)
        unchecked = figures(prose) - figures("\n".join([claim.text, claim.python, *map(source, claim.tests)]))
        assert not unchecked or "```bash" in claim.body, (claim.number, unchecked)

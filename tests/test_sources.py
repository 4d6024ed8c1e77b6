"""Every claim of the sources has a verdict, and what settles it exists and could fail."""

from functools import cache

from docs.scripts.sources import INDEX, VERDICTS, claims, fill
from tests.helpers import ROOT

CHAPTERS = "tests/test_story.py::test_chapter_shows_what_its_code_prints"


def test_each_claim_is_judged_once():
    """116, a count of pictures, was no claim."""
    assert [claim.number for claim in claims()] == [n for n in range(1, 146) if n != 116]
    assert {claim.verdict for claim in claims()} <= set(VERDICTS)


def test_index_shows_the_claims():
    page = INDEX.read_text()
    assert page == fill(page)


def test_what_settles_a_claim_exists():
    text = cache(lambda file: (ROOT / file).read_text())
    for claim in claims():
        for file, _, test in (name.partition("::") for name in claim.tests):
            assert f"def {test}(" in text(file), claim.number
        assert all((ROOT / file).is_file() for file in claim.measurements), claim.number


def test_what_settles_a_claim_could_fail():
    """Prose is no evidence: Python asserts, stored figures are compared with the page's, and a chapter is named."""
    for claim in claims():
        assert claim.settled_by or claim.verdict == "Open", claim.number
        assert "assert" in claim.python or not claim.python, claim.number
        assert claim.python or not claim.measurements, claim.number
        assert "](../story/" in claim.body or CHAPTERS not in claim.tests, claim.number

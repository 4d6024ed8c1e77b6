"""Every claim of the sources has a verdict, and what settles it exists."""

from functools import cache

from docs.scripts.sources import INDEX, VERDICTS, claims, fill
from tests.helpers import ROOT


def test_each_claim_is_judged_once():
    assert [claim.number for claim in claims()] == list(range(1, 135))
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
        assert claim.settled_by or claim.verdict == "Open" or "told in" in claim.body.lower(), claim.number

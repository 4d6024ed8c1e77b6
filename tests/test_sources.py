"""Every claim of the sources has a verdict, and what settles it exists."""

import pytest

from docs.scripts.sources import INDEX, VERDICTS, claims, fill
from tests.helpers import ROOT


def test_each_claim_is_judged_once():
    assert [claim.number for claim in claims()] == list(range(1, 135))
    assert {claim.verdict for claim in claims()} <= set(VERDICTS)


def test_index_shows_the_claims():
    page = INDEX.read_text()
    assert page == fill(page)


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: str(claim.number))
def test_what_settles_a_claim_exists(claim):
    for file, _, test in (name.partition("::") for name in claim.tests):
        assert f"def {test}(" in (ROOT / file).read_text()
    for file in claim.measurements:
        assert (ROOT / file).is_file()
    assert claim.settled_by or claim.verdict == "Open" or "told in" in claim.body.lower()

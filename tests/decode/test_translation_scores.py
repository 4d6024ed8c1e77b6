"""BLEU, chrF and the share of exact matches."""

from collections.abc import Callable
from math import exp

import pytest

from jaxformer.decode.translation_scores import exact_match, scores
from jaxformer.errors import UserError

REFERENCES = ["the cat sat on the mat", "a dog"]


def test_what_is_right_has_all_of_it() -> None:
    assert exact_match(REFERENCES, REFERENCES) == 1
    assert scores(REFERENCES, REFERENCES) == pytest.approx({"bleu": 100, "chrf": 100})


def test_bleu_is_the_papers() -> None:
    """Of 5 words 5 are in the reference, of 4 pairs 3, of 3 triples 2, of 2 quadruples 1; 5 words where 6 should be."""
    results = scores(["the cat sat on mat"], REFERENCES[:1])
    assert results["bleu"] == pytest.approx(100 * exp(1 - 6 / 5) * (1 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4))


def test_chrf_is_the_papers() -> None:
    """Letters alone: of 'ab' in 'ac', half of the 1-grams and none of the 2-grams, in precision and in recall alike."""
    assert scores(["ab"], ["ac"])["chrf"] == pytest.approx(100 * (1 / 2 + 0) / 2)


def test_an_exact_match_is_letter_for_letter() -> None:
    assert exact_match(["a dog", "The cat", "x"], ["a dog", "the cat", "x "]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("function", [exact_match, scores])
@pytest.mark.parametrize(("hypotheses", "references"), [([], []), (["a"], ["a", "b"])])
def test_there_is_one_reference_for_each(function, hypotheses, references) -> None:
    with pytest.raises(UserError, match=f"there are {len(hypotheses)} texts and {len(references)} references"):
        function(hypotheses, references)


def test_without_sacrebleu_it_is_named(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(UserError, match=r"jaxformer\[translation\]"):
        scores(["a"], ["a"])
    assert exact_match(["a"], ["a"]) == 1


@pytest.mark.parametrize("measure", [exact_match, scores])
def test_a_string_is_no_list_of_texts(measure: Callable) -> None:
    with pytest.raises(UserError, match="a single string; give a list of strings"):
        measure("a dog", "a cat")

"""Translation metrics against one reference per translation."""

from __future__ import annotations

from collections.abc import Sequence

from jaxformer.errors import UserError, import_extra


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return the fraction of hypotheses that equal their reference, from 0 to 1.

    Raises:
      UserError: there is no hypothesis, or not one reference for each.
    """
    _check(hypotheses, references)
    return sum(map(str.__eq__, hypotheses, references)) / len(references)


def scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return corpus BLEU (Papineni et al. 2002) and chrF (Popović 2015), from 0 to 100, with sacrebleu's defaults (Post
    2018): case-sensitive BLEU with mteval-v13a tokenization.

    Raises:
      UserError: sacrebleu is not installed, there is no hypothesis, or not one reference for each.
    """
    _check(hypotheses, references)
    sacrebleu = import_extra("sacrebleu", "computing BLEU and chrF")
    return {
        "bleu": sacrebleu.corpus_bleu(list(hypotheses), [list(references)]).score,
        "chrf": sacrebleu.corpus_chrf(list(hypotheses), [list(references)]).score,
    }


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise UserError("the texts or references are a single string; give a list of strings.")
    if not hypotheses or len(hypotheses) != len(references):
        remedy = "give at least 1, and as many of each"
        raise UserError(f"there are {len(hypotheses)} texts and {len(references)} references; {remedy}.")

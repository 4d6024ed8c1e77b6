"""Greedy and beam search of targets, against a plain loop over full passes; BLEU, chrF and exact matches."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import TokenModelConfig
from jaxformer.data.pairs import TargetTokens
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.translation import PLAIN, _beam, constrain, exact_match, scores, translate_tokens
from jaxformer.errors import UserError
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.objective import Params
from jaxformer.models.recurrent import RecurrentConfig
from tests.arrays import random_params
from tests.helpers import compilations

pytestmark = pytest.mark.slow

V, LONGEST = 7, 12
ENDS = {"transformer": 5, "recurrent": 6}
"""A token that each, as its parameters are drawn, comes to say after some of the sources and not after others."""
CONFIGS = {
    "transformer": EncoderDecoderConfig(
        V, LONGEST, d_model=8, n_heads=2, d_ff=(12,), n_encoder_blocks=1, n_decoder_blocks=1, dropout=0.0
    ),
    "recurrent": RecurrentConfig(V, LONGEST, d_embedding=6, d_model=8),
}
# More than a batch, lengths in two buckets (8 and the context's 12), in no order.
SOURCES = [[5, 1, 4], [1] * 12, [2], [6, 5, 4, 3, 2, 1, 0, 1, 2], [4, 4, 0, 1, 2], [0, 6], [1, 2, 3, 4, 5, 6, 0]]


@dataclass(frozen=True)
class Case:
    """A model, and a full pass for one source."""

    config: TokenModelConfig
    params: Params
    end: int

    def log_probabilities(self, source: list[int], target: list[int]) -> np.ndarray:
        """Of every token after each of the target's, `(T, V)`."""
        source_S = np.zeros(LONGEST, np.int32)
        source_S[: len(source)] = source
        target_T = np.zeros(LONGEST, np.int32)
        target_T[: len(target)] = target
        valid_S = np.arange(LONGEST) < len(source)
        return np.asarray(_forward(self.config, self.params, source_S, valid_S, target_T))[: len(target)]

    def greedy(self, source: list[int], most: int) -> list[int]:
        """The likeliest token after each, one full pass a token."""
        generated: list[int] = []
        while len(generated) < most:
            token = int(self.log_probabilities(source, [self.end, *generated])[-1].argmax())
            if token == self.end:
                break
            generated.append(token)
        return generated

    def score(self, source: list[int], generated: list[int], penalty: float, most: int) -> float:
        """As `decode.beam` has it, of a target without its end."""
        target = [*generated, self.end][:most]
        logprobs_TV = self.log_probabilities(source, [self.end, *target[:-1]])
        return logprobs_TV[np.arange(len(target)), target].sum() / len(target) ** penalty

    def translate(self, sources: list[list[int]], **how: object) -> list[list[int]]:
        return translate_tokens(
            self.config.build(), self.params, sources, end_of_text=self.end, context_length=LONGEST, **how
        )


_forward = jax.jit(
    lambda config, params, *inputs: jax.nn.log_softmax(config.build().apply({"params": params}, *inputs)),
    static_argnames="config",
)


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest) -> Case:
    config = CONFIGS[request.param]
    return Case(config, random_params(config.build(), *map(jnp.asarray, config.example())), ENDS[request.param])


def test_greedy_equals_full_passes(case: Case) -> None:
    expected = [case.greedy(source, LONGEST) for source in SOURCES]
    assert case.translate(SOURCES, batch_size=3) == expected
    lengths = set(map(len, expected))
    assert len(lengths) > 1 and min(lengths) < LONGEST  # some end by themselves


@pytest.mark.parametrize("case", ["transformer"], indirect=True)
def test_another_temperature_compiles_nothing(case: Case) -> None:
    first = case.translate(SOURCES[:3], sampling=Sampling(0.1))
    with compilations() as compiled:
        others = [case.translate(SOURCES[:3], sampling=Sampling(temperature)) for temperature in (0.7, 1, 2.0, 9.0)]
    assert not compiled and len(set(map(str, [first, *others]))) > 2


def test_tokens_that_a_model_names_are_forced_and_banned() -> None:
    logits_BV, special = jnp.array([[0.0, 3.0, 2.0, 1.0]]), TargetTokens(first=3, last=0, banned=(1,))
    assert [int(constrain(logits_BV, jnp.int32(i), 3, special).argmax()) for i in range(3)] == [3, 2, 0]
    assert constrain(logits_BV, jnp.int32(0), 3, PLAIN) is logits_BV


def test_one_beam_without_length_penalty_is_greedy(case: Case) -> None:
    """A target that has ended cannot be beaten by a longer one, if lengths count for nothing."""
    source_BS = np.array([[5, 1, 4, 0], [2, 6, 0, 0], [1, 1, 2, 3]], np.int32)
    lengths = [3, 2, 4]
    valid_BS = np.arange(4) < np.array(lengths)[:, None]
    found_BT = _beam(
        case.config.build(), case.params, source_BS, valid_BS, length_penalty=np.float32(0), n_beams=1,
        start=case.end, stop_tokens=(case.end,), special=PLAIN, limit=LONGEST, dtype=jnp.dtype("float32"),
    )  # fmt: skip
    for source_S, n, target_T in zip(source_BS, lengths, np.asarray(found_BT), strict=True):
        generated = case.greedy(source_S[:n].tolist(), LONGEST)
        assert target_T[: len(generated) + 1].tolist() == [*generated, case.end][:LONGEST]


def test_beam_search_approaches_the_best_of_all_targets(case: Case) -> None:
    """Of at most two tokens, the end counted, there are 43: the end alone, or one of six and one of seven."""
    penalty, most = 0.7, 2
    tokens = [token for token in range(V) if token != case.end]
    targets = [[], *([a] for a in tokens), *([a, b] for a in tokens for b in tokens)]
    expected = [max(targets, key=lambda generated: case.score(source, generated, penalty, most)) for source in SOURCES]
    exhaustive = case.translate(SOURCES, n_beams=3, length_penalty=penalty, max_new_tokens=most)
    results = [
        case.score(source, generated, penalty, most) for source, generated in zip(SOURCES, exhaustive, strict=True)
    ]
    best = [case.score(source, generated, penalty, most) for source, generated in zip(SOURCES, expected, strict=True)]
    greedy = [case.score(source, case.greedy(source, most), penalty, most) for source in SOURCES]
    assert sum(np.isclose(results, best, atol=1e-5)) >= 6  # three of six first tokens stay in the beam
    assert (np.array(results) >= np.array(greedy) - 1e-5).all()


def test_invalid_arguments_are_refused(case: Case) -> None:
    for how, message in (
        ({"max_new_tokens": 13}, "max_new_tokens is 13; it must be at least 1 and at most the context's 12"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"n_beams": 4}, "n_beams is 4; for a vocabulary of 7 it must be from 1 to 3"),
    ):
        with pytest.raises(UserError, match=message):
            case.translate([[1]], **how)
    with pytest.raises(ValueError, match="source 2 has 0 tokens; it must have at least 1 and at most the context's 12"):
        case.translate([[1], []])
    assert case.translate([]) == []


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


@pytest.mark.parametrize("measure", [exact_match, scores])
@pytest.mark.parametrize(("hypotheses", "references"), [(["a", "b"], ["a"]), (["a"], ["a", "b"])])
def test_there_is_one_reference_for_each(measure: Callable, hypotheses: list[str], references: list[str]) -> None:
    with pytest.raises(ValueError):
        measure(hypotheses, references)


def test_without_sacrebleu_it_is_named(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(UserError, match=r"jaxformer\[translation\]"):
        scores(["a"], ["a"])
    assert exact_match(["a"], ["a"]) == 1

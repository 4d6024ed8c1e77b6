"""Beam search against Hugging Face's, and against what scores and beams mean.

The values of Hugging Face are stored by `tests/fixtures/make_beams_hf.py`.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxformer.decode.beam import _beam_search, beam_search, search
from jaxformer.decode.generation import generate_tokens
from jaxformer.decode.samplers import Sampling
from jaxformer.errors import UserError
from jaxformer.models.decoder import BlockAttention
from jaxformer.models.objective import Params
from jaxformer.ops import RoPE
from jaxformer.ops.masks import EMPTY
from tests.arrays import apply, assert_close, build, plain_decoder
from tests.helpers import ROOT

pytestmark = pytest.mark.slow

GPT2 = plain_decoder(
    61, 32, d_model=32, n_blocks=2, n_heads=4, attention_bias=True, d_ff=(64,),
    activation="gelu", norm="layernorm", final_norm=True, unembedding="tied",
)  # fmt: skip
ROPE = plain_decoder(
    23, 16, d_model=12, n_blocks=1, n_heads=3, n_kv_heads=1, d_ff=(17,), norm="rmsnorm",
    positions="none", rope=RoPE(), attention=BlockAttention(5),
)  # fmt: skip
PROMPTS = [[3], [5, 1, 4, 1, 5, 9], [2, 7]]


@pytest.fixture(scope="module")
def hugging_face() -> dict[str, np.ndarray]:
    with np.load(ROOT / "tests/fixtures/beams_hf.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def gpt2(hugging_face: dict) -> tuple[nn.Module, Params]:
    """Hugging Face's model."""
    weights = {
        name.removeprefix("weights."): array.astype(np.float32)
        for name, array in hugging_face.items()
        if name.startswith("weights.")
    }
    return GPT2.build(), unflatten_dict(weights, sep=".")


@pytest.fixture(scope="module")
def rope() -> tuple[nn.Module, Params]:
    return build(ROPE)


def unpadded(tokens_PT: np.ndarray) -> list[list[int]]:
    return [row[row != EMPTY].tolist() for row in tokens_PT]


@pytest.mark.parametrize("penalty", [0.6, 1.0, 2.0])
def test_beams_equal_hugging_face(gpt2: tuple, hugging_face: dict, penalty: float) -> None:
    # Hugging Face was given one prompt at a time.
    tokens_PNT, scores_PN = (hugging_face[f"two stops, {penalty}: {what}"] for what in ("tokens", "scores"))
    results = beam_search(
        *gpt2, unpadded(hugging_face["prompts"]), n_beams=4, max_new_tokens=14, context_length=32,
        length_penalty=penalty, stop_tokens=(55, 46),
    )  # fmt: skip
    np.testing.assert_array_equal(results.tokens_PNT, tokens_PNT)
    assert_close(results.scores_PN, scores_PN)


def test_scores_equal_full_passes(rope: tuple) -> None:
    # A cache that went on from another's would show here.
    n, penalty = 9, 0.7
    results = beam_search(
        *rope, PROMPTS, n_beams=3, max_new_tokens=n, context_length=16, length_penalty=penalty, stop_tokens=(4, 20),
    )  # fmt: skip
    for prompt, tokens_NT, scores_N in zip(PROMPTS, results.tokens_PNT, results.scores_PN, strict=True):
        assert len({tuple(tokens) for tokens in tokens_NT.tolist()}) == 3
        assert (np.diff(scores_N) <= 0).all()
        for generated, score in zip(unpadded(np.asarray(tokens_NT)), scores_N, strict=True):
            assert len(generated) == n or generated[-1] in (4, 20)
            assert not {4, 20} & set(generated[:-1])
            logits_TV = apply(*rope, np.array((prompt + generated + [0] * n)[:16]))
            logprobs_TV = np.asarray(jax.nn.log_softmax(logits_TV))
            sum_of_them = sum(logprobs_TV[len(prompt) - 1 + i, token] for i, token in enumerate(generated))
            assert_close(score, sum_of_them / len(generated) ** penalty)
    ends = (results.tokens_PNT == EMPTY).any(axis=2)
    assert ends.any() and not ends.all()


def test_a_prefix_prompt_is_prefilled_as_by_generate() -> None:
    config = plain_decoder(
        23, 16, 12, n_blocks=1, d_ff=(17,), norm="rmsnorm", positions="none", rope=RoPE(), prefix=True
    )
    model, params = build(config)
    options = {"max_new_tokens": 5, "context_length": 16}
    results = beam_search(model, params, PROMPTS, n_beams=1, **options)
    pieces = list(generate_tokens(model, params, PROMPTS, Sampling(0), [0] * len(PROMPTS), **options))
    np.testing.assert_array_equal(results.tokens_PNT[:, 0], np.concatenate([p.tokens for p in pieces], axis=1))
    assert_close(results.scores_PN[:, 0], np.concatenate([p.logprobs for p in pieces], axis=1).mean(axis=1))


def markov(table_VV: jax.Array, starts: list[int], stops: tuple[int, ...] = (), **options: Any) -> tuple[list, list]:
    """Search in a chain of tokens, where the cache is how many tokens were read."""

    def advance(i: jax.Array, tokens_R: jax.Array, read_R: jax.Array) -> tuple[jax.Array, jax.Array]:
        wrong_R = jnp.where(read_R == i, 0, jnp.nan)  # what comes after must have been read
        return table_VV[tokens_R] + wrong_R[:, None], read_R + 1

    start = jnp.array(starts)
    results = jax.jit(partial(search, advance, stop_tokens=stops, **options))(0 * start, table_VV[start], 1.0)
    return results.tokens_PNT.tolist(), results.scores_PN


def test_one_new_token_is_among_the_likeliest(rope: tuple) -> None:
    results = beam_search(*rope, PROMPTS, n_beams=2, max_new_tokens=1, context_length=16)
    for prompt, tokens_N1 in zip(PROMPTS, results.tokens_PNT, strict=True):
        logits_V = apply(*rope, jnp.array(prompt + [0] * 10))[len(prompt) - 1]
        assert tokens_N1.ravel().tolist() == np.argsort(-logits_V)[:2].tolist()


def test_cache_writes_are_no_scatter(rope: tuple) -> None:
    lengths = np.array([3, 4], np.int32)
    compiled = _beam_search.lower(
        *rope, np.zeros((2, 8), np.int32), lengths, np.float32(1), n_beams=3, max_new_tokens=5, stop_tokens=(1,),
        n_tokens=None, dtype=jnp.dtype("float32"),
    ).compile()  # fmt: skip
    assert "dynamic-update-slice" in compiled.as_text()
    assert " scatter(" not in compiled.as_text()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"n_beams": 0}, UserError, "n_beams is 0; for a vocabulary of 61 it must be from 1 to 30"),
        ({"n_beams": 31}, UserError, "n_beams is 31; for a vocabulary of 61 it must be from 1 to 30"),
        ({"n_beams": 16, "stop_tokens": (1, 2, 3)}, UserError, "n_beams is 16; .* to 15"),
        ({"stop_tokens": (61,)}, UserError, "a stop token is 61; it must be from 0 to 60"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens is 0; it must be at least 1"),
        ({"prompts": [[1], []]}, ValueError, "prompt 2 has 0 tokens; it must have at least 1"),
        ({"prompts": [[1], [1] * 30], "max_new_tokens": 4}, ValueError, "30 tokens and 4 new ones are more than"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(gpt2: tuple, changed: dict, error: type, message: str) -> None:
    options = {"prompts": [[1]], "n_beams": 2, "max_new_tokens": 3, "context_length": 32} | changed
    with pytest.raises(error, match=message):
        beam_search(*gpt2, options.pop("prompts"), **options)

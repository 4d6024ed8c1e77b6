"""Speculative decoding: greedily the same text, and in random draws the same distribution."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.contract import Contract, Task
from jaxformer.decode import speculative
from jaxformer.decode.generation import generate_tokens
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.speculative import DraftModel, PromptLookup, speculate
from jaxformer.errors import UserError
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.recurrent_lm import RecurrentLMConfig
from jaxformer.ops import RoPE
from jaxformer.ops.masks import EMPTY
from tests.arrays import plain_decoder, random_params

VOCABULARY, CONTEXT = 13, 64
SHAPE = plain_decoder(
    VOCABULARY, CONTEXT, 16, n_blocks=1, n_heads=2, d_ff=(24,), norm="rmsnorm",
    positions="none", rope=RoPE(),
)  # fmt: skip
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1]


def built(config, seed):
    model = config.build()
    return model, random_params(model, np.zeros(4, np.int32), seed=seed)


MODEL, PARAMS = built(SHAPE, 0)
SMALL = built(plain_decoder(VOCABULARY, CONTEXT, 8, d_ff=(8,), positions="none", rope=RoPE()), 1)
STATE = RecurrentLMConfig(VOCABULARY, CONTEXT, d_model=8).build()
NO_CACHE = MLPConfig(VOCABULARY, CONTEXT, d_model=5, d_ff=(13,), mixing="concatenate").build()
DRAFTS = {
    "look-up": (PromptLookup(VOCABULARY), None),
    "small": (DraftModel(SMALL[0]), SMALL[1]),
    "itself": (DraftModel(MODEL), PARAMS),
}


@pytest.fixture(autouse=True)
def proposals_always_pay(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Except in the test of what happens otherwise."""
    if "pays" not in request.node.name:
        monkeypatch.setitem(speculative.PASS_COST, "cpu", -1.0)


def tokens_of(speculation):
    return np.concatenate([piece.tokens[0] for piece in speculation])


def plainly(sampling, seed=0, n=30, prompt=PROMPT):
    return generate_tokens(MODEL, PARAMS, [prompt], sampling, [seed], max_new_tokens=n, context_length=CONTEXT)


@pytest.mark.slow
def test_greedy_tokens_and_logprobs_equal_generate():
    sampling = Sampling(temperature=0, top_logprobs=2)
    expected = list(plainly(sampling, n=40, prompt=[7]))
    speculation = speculate(
        MODEL, PARAMS, *DRAFTS["small"], [[7]], sampling, [0], max_new_tokens=40, context_length=CONTEXT, n_proposed=3
    )
    got = list(speculation)
    for field in expected[0]._fields:
        a, b = (np.concatenate([getattr(p, field)[0] for p in pieces]) for pieces in (expected, got))
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=field)
    assert speculation.n_tokens == 40


@pytest.mark.slow
def test_greedy_tokens_with_penalties_equal_generate_past_the_context(monkeypatch):
    """Of two samples, for which the prompt is read once. The stop token is the likeliest one, held back to the end."""
    free = tokens_of(plainly(Sampling(temperature=0), n=70))
    stop, banned = np.bincount(free).argmax(), free[:2]
    sampling = Sampling(
        temperature=0, stop_tokens=(int(stop),), min_new_tokens=69, bad_words=(tuple(banned.tolist()),),
        frequency_penalty=0.1,
    )  # fmt: skip
    options = {"max_new_tokens": 70, "context_length": CONTEXT, "n_samples": 2, "cache_dtype": "int8"}
    expected = [piece.tokens for piece in generate_tokens(MODEL, PARAMS, [PROMPT], sampling, [0, 1], **options)]
    calls, init = [], speculative._init

    def count_prefills(*args, **kwargs):
        if isinstance(args[3], np.ndarray):  # and not the tracer of a call for shapes
            calls.append(args)
        return init(*args, **kwargs)

    monkeypatch.setattr(speculative, "_init", count_prefills)
    got = [
        piece.tokens for piece in speculate(MODEL, PARAMS, *DRAFTS["look-up"], [PROMPT], sampling, [0, 1], **options)
    ]
    rows = np.concatenate(got, axis=1)
    assert [row[row != EMPTY].tolist() for row in rows] == np.concatenate(expected, axis=1).tolist()
    assert len(calls) == 1
    assert rows[0, :2].tolist() != banned.tolist()
    assert stop not in rows[0, :69]


@pytest.mark.slow
def test_prompt_lookup_proposes_the_continuation_of_the_longest_match():
    draft = PromptLookup(VOCABULARY, longest=3)
    text = np.zeros(16, np.int32)
    known = [5, 1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3]
    text[: len(known)] = known

    def propose(length):
        state = speculative.SpeculativeState(None, (), None, text, np.int32(length), None)
        return draft.propose(None, state, n=3, sampling=Sampling(), key=None)

    assert propose(12)[0].tolist() == [4, 9, 2]  # after "1 2 3", not after the later "2 3"
    assert propose(8)[0].tolist() == [4, 9, 2]  # "2 3"
    assert propose(11)[0].tolist() == [3, 4, 9]  # "1 2"; "2" alone stands later, too
    tokens, probs_NV, _ = propose(12)
    np.testing.assert_array_equal(probs_NV, np.eye(VOCABULARY)[np.array(tokens)])


class Coin(nn.Module):
    """A model that says 0 or 1, each with probability 1/2, whatever was before."""

    contract = Contract(Task.CAUSAL_LM, vocab_size=2, has_cache=True, attention_window=8, extrapolates=True)

    def init_cache(self, n_slots, dtype):
        return jnp.zeros(n_slots)

    def extend(self, tokens_T, positions_T, cache_S, slot):
        return jnp.zeros((len(tokens_T), 2)), cache_S

    def unembed(self, x_2):
        return x_2


def test_a_token_that_is_proposed_is_no_likelier():
    """The look-up proposes what it has read, 0; were a token drawn anew where that is rejected, 3/4 would be 0."""
    n_draws = 100
    speculation = speculate(
        Coin(), {"none": jnp.zeros(1)}, PromptLookup(2), None, [[1, 0, 0, 0, 0]], Sampling(1.0), range(n_draws),
        n_samples=n_draws, max_new_tokens=2, context_length=CONTEXT, n_proposed=1,
    )  # fmt: skip
    rows = np.concatenate([piece.tokens for piece in speculation], axis=1)
    zeros = sum(row[row != EMPTY][0] == 0 for row in rows)  # what follows one that is accepted is not proposed
    assert abs(zeros - n_draws / 2) < 3.5 * np.sqrt(n_draws / 4)


@pytest.mark.slow
def test_samples_are_distributed_as_those_of_generate():
    """The joint distribution of two tokens, from many seeds, against the draws of `generate_tokens`."""
    from scipy.stats import chi2_contingency  # for which each worker would otherwise wait

    sampling = Sampling(temperature=0.7, top_k=3, frequency_penalty=1.0)
    n_draws, n = 300, 2
    speculation = speculate(
        MODEL, PARAMS, *DRAFTS["small"], [PROMPT], sampling, range(n_draws), n_samples=n_draws, max_new_tokens=n,
        context_length=CONTEXT, n_proposed=2,
    )  # fmt: skip
    rows = np.concatenate([piece.tokens for piece in speculation], axis=1)
    drawn = [tuple(row[row != EMPTY].tolist()) for row in rows]
    plain = [tuple(row) for row in all_draws(sampling, n, n_draws)]
    texts = sorted({*drawn, *plain})
    counts = np.array([[draws.count(text) for text in texts] for draws in (drawn, plain)])
    common = counts.sum(0) >= 20
    table = np.column_stack([counts[:, common], counts[:, ~common].sum(1)])
    assert common.sum() >= 4
    assert chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-3


def all_draws(sampling, n, n_draws):
    pieces = generate_tokens(
        MODEL, PARAMS, [PROMPT], sampling, range(10**6, 10**6 + n_draws), n_samples=n_draws, max_new_tokens=n,
        context_length=CONTEXT,
    )  # fmt: skip
    return np.concatenate([piece.tokens for piece in pieces], axis=1).tolist()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n_proposed": 0}, ValueError, "n_proposed is 0; it must be at least 1"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens is 0; it must be at least 1"),
        ({"prompts": [[]]}, ValueError, "the prompt has 0 tokens"),
        ({"seeds": [-1]}, OverflowError, "-1"),
        ({"draft": PromptLookup(30)}, ValueError, "the draft's vocabulary has 30 tokens, the model's 13"),
        ({"model": replace(SHAPE, prefix=True).build()}, ValueError, "reads its prompt with bidirectional attention"),
        (
            {"model": STATE},
            UserError,
            "the model has no cache from which rejected tokens can be removed; omit the draft",
        ),
        ({"draft": DraftModel(STATE)}, UserError, "the draft has no cache from which rejected tokens can be removed"),
        ({"draft": DraftModel(NO_CACHE)}, UserError, "the draft has no cache from which"),
    ],
)
def test_invalid_arguments_are_refused(changes, error, message):
    arguments = {
        "model": MODEL, "draft": PromptLookup(VOCABULARY), "prompts": [PROMPT], "seeds": [0], "max_new_tokens": 5,
        "context_length": CONTEXT,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        speculate(params=PARAMS, draft_params=None, sampling=Sampling(), **arguments | changes)


def test_a_text_past_the_context_of_the_draft_is_refused():
    small = plain_decoder(VOCABULARY, 16, 8, d_ff=(8,))
    drafts = [DraftModel(replace(small, positions=positions).build(), 16) for positions in ("learned", "none")]
    run = partial(
        speculate, MODEL, PARAMS, draft_params=None, prompts=[PROMPT], sampling=Sampling(), seeds=[0],
        context_length=CONTEXT,
    )  # fmt: skip
    with pytest.raises(ValueError, match="10 tokens and 8 new ones are more than the context of 16"):
        run(drafts[0], max_new_tokens=8)
    run(drafts[0], max_new_tokens=7)
    run(drafts[1], max_new_tokens=100)  # its positions do not end


@pytest.mark.slow
def test_rows_are_generated_one_after_another_and_can_be_ended_also_by_a_stop_token():
    prompts, n = [PROMPT, [7], [2, 2]], 20
    stop = int(tokens_of(plainly(Sampling(temperature=0), n=n))[11])
    sampling = Sampling(temperature=0, stop_tokens=(stop,))
    expected = [tokens_of(plainly(sampling, n=n, prompt=prompt)).tolist() for prompt in prompts]
    assert len(expected[0]) <= 12 and expected[0][-1] == stop
    speculation = speculate(
        MODEL, PARAMS, *DRAFTS["look-up"], prompts, sampling, [0] * 3, max_new_tokens=20, context_length=CONTEXT
    )
    speculation.end(1)
    pieces = [piece.tokens for piece in speculation]
    assert all((tokens_BN != EMPTY).any(axis=1).sum() == 1 for tokens_BN in pieces)
    rows = np.concatenate(pieces, axis=1)
    assert [row[row != EMPTY].tolist() for row in rows] == [expected[0], [], expected[2]]


@pytest.mark.slow
def test_a_draft_proposes_as_long_as_it_pays(monkeypatch: pytest.MonkeyPatch):
    """The model itself proposes four tokens, all of which are accepted: five a pass. The first call has 20 tokens.
    The draft costs as much as the model, so that a pass takes 5 + 4 cost times as long as one over one token."""
    monkeypatch.setitem(speculative.PASS_COST, "cpu", 0.1)
    sampling = Sampling(temperature=0)
    speculation = speculate(
        MODEL, PARAMS, *DRAFTS["itself"], [PROMPT], sampling, [0], max_new_tokens=50, context_length=CONTEXT
    )
    np.testing.assert_array_equal(tokens_of(speculation), tokens_of(plainly(sampling, n=50)))
    assert speculation.n_passes == 4 + 30

"""Speculative decoding: greedily the same text, and in random draws the same distribution."""

from functools import partial

import jax
import numpy as np
import pytest
from scipy import stats

from jaxformer.decode.generate import generate
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.speculative import LookUp, ModelDraft, speculate
from jaxformer.errors import UserError
from jaxformer.models.decoder import DecoderConfig
from jaxformer.ops.masks import EMPTY

VOCABULARY, CONTEXT = 13, 64
SHAPE = DecoderConfig(
    VOCABULARY, CONTEXT, 16, n_blocks=2, n_heads=2, output_projection=True, d_ff=(24,), norm="rmsnorm",
    positions="rope",
)  # fmt: skip
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1]


def made(config, seed):
    model = config.build()
    return model, model.init(jax.random.key(seed), np.zeros(4, np.int32))["params"]


MODEL, PARAMS = made(SHAPE, 0)
SMALL = made(DecoderConfig(VOCABULARY, CONTEXT, 8, d_ff=(8,), positions="rope"), 1)
DRAFTS = {
    "look-up": (LookUp(VOCABULARY), None),
    "small": (ModelDraft(SMALL[0]), SMALL[1]),
    "itself": (ModelDraft(MODEL), PARAMS),
}


def tokens_of(speculation):
    return np.concatenate([piece.tokens_BN[0] for piece in speculation])


def plainly(sampling, seed=0, n=30, prompt=PROMPT):
    return generate(MODEL, PARAMS, [prompt], sampling, [seed], max_new_tokens=n, context_length=CONTEXT)


@pytest.mark.parametrize(
    ("draft", "n_proposed", "prompt"),
    [("look-up", 4, PROMPT), ("look-up", 1, [7]), ("small", 3, [7]), ("itself", 4, PROMPT)],
)
def test_greedily_it_is_the_same_text(draft, n_proposed, prompt):
    sampling = Sampling(temperature=0, top_logprobs=2)
    wanted = list(plainly(sampling, n=40, prompt=prompt))
    speculation = speculate(
        MODEL, PARAMS, *DRAFTS[draft], [prompt], sampling, [0], max_new_tokens=40, context_length=CONTEXT,
        n_proposed=n_proposed,
    )  # fmt: skip
    got = list(speculation)
    for field in wanted[0]._fields:
        a, b = (np.concatenate([getattr(p, field)[0] for p in pieces]) for pieces in (wanted, got))
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=field)
    assert speculation.made == 40
    if draft == "itself":  # everything is taken
        assert speculation.passes == -(-40 // (n_proposed + 1))


def test_text_that_repeats_is_looked_up():
    draft = LookUp(VOCABULARY, longest=3)
    text = np.zeros(16, np.int32)
    known = [5, 1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3]
    text[: len(known)] = known
    propose = partial(draft.propose, None, (), text, n=3, sampling=Sampling(), history=None, key=None)
    assert propose(length=np.int32(12))[0].tolist() == [4, 9, 2]  # after "1 2 3", not after the later "2 3"
    assert propose(length=np.int32(8))[0].tolist() == [4, 9, 2]  # "2 3"
    assert propose(length=np.int32(11))[0].tolist() == [3, 4, 9]  # "1 2"; "2" alone stands later, too
    tokens, probs_NV, _ = propose(length=np.int32(12))
    np.testing.assert_array_equal(probs_NV, np.eye(VOCABULARY)[np.array(tokens)])


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["look-up", "small"])
def test_draws_are_distributed_as_without_a_draft(draft):
    """The joint distribution of three tokens, from many seeds, against the probabilities that the model gives."""
    sampling = Sampling(temperature=0.7, top_k=3, frequency_penalty=1.0)
    n_draws, n = 3000, 3
    run = partial(
        speculate, MODEL, PARAMS, *DRAFTS[draft], [PROMPT], sampling, max_new_tokens=n, context_length=CONTEXT,
        n_proposed=2,
    )  # fmt: skip
    drawn = [tuple(tokens_of(run(seeds=[seed])).tolist()) for seed in range(n_draws)]
    plain = [tuple(row) for row in all_draws(sampling, n, n_draws)]
    seen = sorted({*drawn, *plain})
    counts = np.array([[draws.count(text) for text in seen] for draws in (drawn, plain)])
    common = counts.sum(0) >= 20
    table = np.column_stack([counts[:, common], counts[:, ~common].sum(1)])
    assert common.sum() >= 8
    assert stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-3


def all_draws(sampling, n, n_draws):
    pieces = generate(
        MODEL, PARAMS, [PROMPT], sampling, range(10**6, 10**6 + n_draws), n_samples=n_draws, max_new_tokens=n,
        context_length=CONTEXT,
    )  # fmt: skip
    return np.concatenate([piece.tokens_BN for piece in pieces], axis=1).tolist()


def test_a_stop_token_ends_it_and_is_the_last():
    greedy = tokens_of(plainly(Sampling(temperature=0), n=30))
    stop = int(greedy[11])
    first = greedy.tolist().index(stop)
    for draft in (DRAFTS["look-up"], DRAFTS["itself"]):
        got = speculate(
            MODEL, PARAMS, *draft, [PROMPT], Sampling(temperature=0, stop_tokens=(stop,)), [0], max_new_tokens=30,
            context_length=CONTEXT,
        )  # fmt: skip
        assert tokens_of(got).tolist() == greedy[: first + 1].tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_proposed": 0}, "would propose 0 tokens at a time; it can be 1 to 64"),
        ({"n_proposed": 65}, "would propose 65 tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"prompt": []}, "the prompt has 0 tokens"),
    ],
)
def test_what_cannot_be_is_one_sentence(changes, said):
    arguments = {"prompt": PROMPT, "max_new_tokens": 5} | changes
    prompt = arguments.pop("prompt")
    with pytest.raises(UserError, match=said):
        speculate(MODEL, PARAMS, *DRAFTS["look-up"], [prompt], Sampling(), [0], context_length=CONTEXT, **arguments)


def test_a_context_with_an_end_is_not_outgrown():
    model, params = made(DecoderConfig(VOCABULARY, 16, 8, d_ff=(8,)), 0)
    run = partial(speculate, model, params, LookUp(VOCABULARY), None, [PROMPT], Sampling(temperature=0), [0])
    with pytest.raises(UserError, match=r"context of 16, .* ask for at most 7 new ones"):
        run(max_new_tokens=8, context_length=16)
    got = tokens_of(run(max_new_tokens=7, context_length=16))
    wanted = generate(model, params, [PROMPT], Sampling(temperature=0), [0], max_new_tokens=7, context_length=16)
    assert got.tolist() == tokens_of(wanted).tolist()


def test_rows_come_one_after_another_and_can_be_ended():
    sampling, prompts = Sampling(temperature=0), [PROMPT, [7], [2, 2]]
    wanted = [tokens_of(plainly(sampling, n=20, prompt=prompt)).tolist() for prompt in prompts]
    speculation = speculate(
        MODEL, PARAMS, *DRAFTS["look-up"], prompts, sampling, [0] * 3, max_new_tokens=20, context_length=CONTEXT
    )
    speculation.end(1)
    pieces = [piece.tokens_BN for piece in speculation]
    assert all((tokens_BN != EMPTY).any(axis=1).sum() == 1 for tokens_BN in pieces)
    rows = np.concatenate(pieces, axis=1)
    assert [row[row != EMPTY].tolist() for row in rows] == [wanted[0], [], wanted[2]]

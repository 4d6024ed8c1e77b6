"""Why a text went on as it did, against one full pass."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer.inspect import attention_maps
from jaxformer.inspect.explain import explain
from tests.arrays import apply
from tests.inspect.test_trace import MODELS, T, V, made

pytestmark = pytest.mark.slow

TEXT = [int(x) for x in np.random.default_rng(4).integers(0, V, T)]


@pytest.mark.parametrize("name", ["decoder", "grouped", "rowwise"])
def test_rows_are_what_a_full_pass_gives(name):
    model, params, _ = made(MODELS[name])
    logits_TV = apply(model, params, np.array(TEXT, np.int32))
    p_TV = np.asarray(jax.nn.softmax(logits_TV), np.float64)
    maps = attention_maps(model, params, np.array(TEXT, np.int32))
    mean_TT = np.mean(np.concatenate(maps), axis=0) if maps else None
    rows = explain(model, params, TEXT, 2, n_rivals=4, n_places=2)
    assert len(rows) == T - 2
    for at, row in enumerate(rows, start=2):
        p_V = p_TV[at - 1]
        assert row.token == TEXT[at]
        np.testing.assert_allclose(row.probability, p_V[TEXT[at]], rtol=1e-4)
        np.testing.assert_allclose(row.entropy, -(p_V * np.log(np.maximum(p_V, 1e-30))).sum(), rtol=1e-3, atol=1e-4)
        others = [token for token in np.argsort(-p_V, kind="stable") if token != TEXT[at]][:4]
        np.testing.assert_allclose([p for _, p in row.rivals], p_V[others], rtol=1e-4, atol=1e-7)
        assert TEXT[at] not in [token for token, _ in row.rivals]
        if mean_TT is None:
            assert row.looked_at == ()
        else:
            weights = sorted(mean_TT[at - 1], reverse=True)[:2]
            np.testing.assert_allclose([w for _, w in row.looked_at], weights, rtol=1e-4)
            assert all(place < at for place, _ in row.looked_at)


def test_a_prompt_that_is_a_prefix_is_seen_as_one():
    model, params, _ = made(MODELS["prefix"])
    rows = explain(model, params, TEXT, 4)
    p_TV = jax.nn.softmax(apply(model, params, np.array(TEXT, np.int32), 4))
    np.testing.assert_allclose([r.probability for r in rows], np.asarray(p_TV)[range(3, T - 1), TEXT[4:]], rtol=1e-4)


def test_what_cannot_be_explained_is_an_error():
    model, params, _ = made(MODELS["decoder"])
    with pytest.raises(ValueError, match="8 tokens, but the model has 7 positions"):
        explain(model, params, [*TEXT, 1], 1)
    model, params, _ = made(MODELS["concatenated"])
    with pytest.raises(ValueError, match="full window"):
        explain(model, params, TEXT, 1)


def test_a_text_may_go_on_past_the_context_where_the_model_does():
    config = replace(MODELS["decoder"], positions="rope", head_dim=4)
    model, params, _ = made(config)
    rows = explain(model, params, TEXT * 3, 20)
    logits_TV = apply(model, params, np.array(TEXT * 3, np.int32))
    p_TV = jax.nn.softmax(logits_TV)
    np.testing.assert_allclose(rows[0].probability, p_TV[19, (TEXT * 3)[20]], rtol=1e-3)

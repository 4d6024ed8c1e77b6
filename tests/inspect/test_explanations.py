"""Token explanations agree with one full pass."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer.inspect import attention_maps
from jaxformer.inspect.explanations import explain
from jaxformer.ops import RoPE
from tests.arrays import apply
from tests.helpers import slow
from tests.inspect.test_activations import MODELS, T, V, random_model

TEXT = [int(x) for x in np.random.default_rng(4).integers(0, V, T)]


@pytest.mark.parametrize("name", ["rowwise", slow("grouped")])
def test_explanations_agree_with_a_full_pass(name):
    model, params, _ = random_model(MODELS[name])
    logits_TV = apply(model, params, np.array(TEXT, np.int32))
    p_TV = np.asarray(jax.nn.softmax(logits_TV), np.float64)
    maps = jax.jit(attention_maps, static_argnums=0)(model, params, np.array(TEXT, np.int32))
    mean_TT = np.mean(np.concatenate(maps), axis=0) if maps else None
    rows = explain(model, params, TEXT, 2, n_alternatives=4, n_positions=2)
    assert len(rows) == T - 2
    for at, row in enumerate(rows, start=2):
        p_V = p_TV[at - 1]
        assert row.token == TEXT[at]
        np.testing.assert_allclose(row.probability, p_V[TEXT[at]], rtol=1e-4)
        np.testing.assert_allclose(row.entropy, -(p_V * np.log(np.maximum(p_V, 1e-30))).sum(), rtol=1e-3, atol=1e-4)
        others = [token for token in np.argsort(-p_V, kind="stable") if token != TEXT[at]][:4]
        np.testing.assert_allclose([p for _, p in row.alternatives], p_V[others], rtol=1e-4, atol=1e-7)
        assert TEXT[at] not in [token for token, _ in row.alternatives]
        if mean_TT is None:
            assert row.attended == ()
        else:
            weights = sorted(mean_TT[at - 1], reverse=True)[:2]
            np.testing.assert_allclose([w for _, w in row.attended], weights, rtol=1e-4)
            assert all(position < at for position, _ in row.attended)


@pytest.mark.slow
def test_prompt_of_a_prefix_model_is_its_prefix():
    model, params, _ = random_model(MODELS["prefix"])
    rows = explain(model, params, TEXT, 4)
    p_TV = jax.nn.softmax(apply(model, params, np.array(TEXT, np.int32), 4))
    np.testing.assert_allclose([r.probability for r in rows], np.asarray(p_TV)[range(3, T - 1), TEXT[4:]], rtol=1e-4)


@pytest.mark.slow
def test_text_beyond_the_positions_and_full_window_models_are_errors():
    model, params, _ = random_model(MODELS["decoder"])
    with pytest.raises(ValueError, match="8 tokens, but the model has 7 learned positions"):
        explain(model, params, [*TEXT, 1], 1)
    model, params, _ = random_model(MODELS["concatenated"])
    with pytest.raises(ValueError, match="full window"):
        explain(model, params, TEXT, 1)


@pytest.mark.slow
def test_text_may_exceed_the_context_of_an_extrapolating_model():
    config = replace(MODELS["decoder"], positions="none", rope=RoPE(), head_dim=4)
    model, params, _ = random_model(config)
    rows = explain(model, params, TEXT * 3, 20)
    logits_TV = apply(model, params, np.array(TEXT * 3, np.int32))
    p_TV = jax.nn.softmax(logits_TV)
    np.testing.assert_allclose(rows[0].probability, p_TV[19, (TEXT * 3)[20]], rtol=1e-3)

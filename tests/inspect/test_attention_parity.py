"""Attention maps agree with torch.nn.MultiheadAttention and flax.linen.MultiHeadDotProductAttention."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inspect import capture
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.ops import masks
from jaxformer.ops.attention import attention
from tests.helpers import ROOT

FIXTURE = np.load(ROOT / "tests/fixtures/attention_torch.npz")


@pytest.mark.parametrize("name", ["causal", "padded"])
def test_weights_agree_with_torch(name):
    x_TD = jnp.asarray(FIXTURE["x"], jnp.float32)
    T = len(x_TD)
    params = {key: jnp.asarray(FIXTURE[key], jnp.float32) for key in FIXTURE.files if key[:2] in ("W_", "b_")}
    H, K, _ = params["W_O"].shape
    module = MultiHeadAttention(H, K, H, bias=True)
    mask = masks.Causal() if name == "causal" else masks.tokens(T, jnp.arange(T) < FIXTURE["n_valid"])
    result = capture(module, params, x_TD, jnp.arange(T), mask)
    np.testing.assert_allclose(result["pattern"], FIXTURE[f"{name}.weights"], atol=1e-5)
    np.testing.assert_allclose(result["output"], FIXTURE[f"{name}.out"], atol=1e-5)


def test_values_wider_than_keys_agree_with_torch():
    q_HTK, k_HTK, v_HTK, y_HTK = (jnp.asarray(FIXTURE[f"wide.{name}"], jnp.float32) for name in ("q", "k", "v", "out"))
    assert q_HTK.shape[-1] < v_HTK.shape[-1]
    y = attention(q_HTK, k_HTK, v_HTK, masks.Causal(), q_HTK.shape[-1] ** -0.5)
    np.testing.assert_allclose(y, y_HTK, atol=1e-5)

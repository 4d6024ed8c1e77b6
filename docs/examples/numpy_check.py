"""Multi-head attention against NumPy: every formula of the module in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.nn import MultiHeadAttention
from jaxformer.ops import Causal, RoPE

T, D, H, G, K = 7, 12, 4, 2, 6  # positions, width, query heads, key/value heads, width of a head
module = MultiHeadAttention(H, K, n_kv_heads=G, bias=True, qk_norm=True, rope=RoPE(10_000.0))
x_TD = jax.random.normal(jax.random.key(0), (T, D))
shapes = jax.eval_shape(module.init, jax.random.key(1), x_TD)["params"]
rng = np.random.default_rng(2)
params = {name: rng.normal(size=shape.shape) for name, shape in shapes.items()}


def project(name):
    """Return queries, keys or values, `(heads, T, K)`."""
    return np.einsum("td,dhk->htk", x, params[f"W_{name}"]) + params[f"b_{name}"]


def normalized(y_HTK, name):
    """Return queries or keys with a root mean square of the gain."""
    return y_HTK / np.sqrt(np.mean(y_HTK**2, axis=-1, keepdims=True) + 1e-6) * params[f"gamma_{name}"]


def rotated(y_HTK):
    """Return queries or keys, the pair of features i and i + K/2 rotated by position · 10000^(-2i/K)."""
    angle = np.arange(T)[:, None] * 10_000.0 ** (-np.arange(0, K, 2) / K)
    z = (y_HTK[..., : K // 2] + 1j * y_HTK[..., K // 2 :]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=-1)


x = np.asarray(x_TD, np.float64)
q, k, v = rotated(normalized(project("Q"), "Q")), rotated(normalized(project("K"), "K")), project("V")
k, v = (np.repeat(y_GTK, H // G, axis=0) for y_GTK in (k, v))  # query heads share keys and values
scores = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(1, 2) / np.sqrt(K), -np.inf)
weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
weights /= weights.sum(axis=-1, keepdims=True)
expected = np.einsum("htk,hkd->td", weights @ v, params["W_O"]) + params["b_O"]

y_TD, _ = module.apply({"params": jax.tree.map(jnp.float32, params)}, x_TD, mask=Causal())
print(f"largest deviation {np.abs(y_TD - expected).max():.1e} of {np.abs(expected).max():.1f}")
np.testing.assert_allclose(y_TD, expected, atol=1e-5 * np.abs(expected).max())

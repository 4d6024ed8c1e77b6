"""Functions of `jaxformer.ops` in an Equinox module."""

import jax
import jax.numpy as jnp

from jaxformer.ops import Causal, attention, rms_norm, rope

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    raise SystemExit("This example needs Equinox; install it with: pip install equinox") from error


class Layer(eqx.Module):
    """Pre-norm causal self-attention with rotary positions, `(T, D)` to `(T, D)`."""

    project: eqx.nn.Linear
    out: eqx.nn.Linear
    gamma: jax.Array
    n_heads: int = eqx.field(static=True)

    def __init__(self, d_model: int, n_heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.project = eqx.nn.Linear(d_model, 3 * d_model, use_bias=False, key=keys[0])
        self.out = eqx.nn.Linear(d_model, d_model, use_bias=False, key=keys[1])
        self.gamma, self.n_heads = jnp.ones(d_model), n_heads

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        T, D = x_TD.shape
        qkv_T3HK = jax.vmap(self.project)(rms_norm(x_TD, self.gamma)).reshape(T, 3, self.n_heads, -1)
        q_HTK, k_HTK, v_HTK = jnp.moveaxis(qkv_T3HK, (1, 2), (0, 1))
        position_T = jnp.arange(T)
        q_HTK, k_HTK = rope(q_HTK, position_T), rope(k_HTK, position_T)
        y_HTK = attention(q_HTK, k_HTK, v_HTK, Causal())
        return x_TD + jax.vmap(self.out)(y_HTK.swapaxes(0, 1).reshape(T, D))


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss(layer: Layer, x_BTD: jax.Array) -> jax.Array:
    """Return the mean squared error of predicting each next vector."""
    return jnp.mean((jax.vmap(layer)(x_BTD[:, :-1]) - x_BTD[:, 1:]) ** 2)


layer = Layer(d_model=16, n_heads=4, key=jax.random.key(0))
x_BTD = jax.random.normal(jax.random.key(1), (8, 6, 16))
first, grads = loss(layer, x_BTD)
layer = eqx.apply_updates(layer, jax.tree.map(lambda g: -0.3 * g, grads))
second, _ = loss(layer, x_BTD)
print(f"loss {first:.3f} -> {second:.3f}")
assert second < first

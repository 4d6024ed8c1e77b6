"""Attention in bare JAX: parameters in a dict, `jax.grad`, a batch by `jax.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.ops import Causal, cross_entropy, multi_head_attention, rms_norm

V, T, D, H, K = 8, 12, 32, 2, 16  # vocabulary, positions, width, heads, width of a head


def init(key):
    """Return parameters."""
    shapes = {"W_E": (V, D), "W_pos": (T, D), **dict.fromkeys(("W_Q", "W_K", "W_V"), (D, H, K))}
    shapes |= {"W_O": (H, K, D), "W_out": (D, V)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.2 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def logits(params, tokens_T):
    """Return logits `(T, V)` of one sequence."""
    x_TD = params["W_E"][tokens_T] + params["W_pos"][: len(tokens_T)]
    y_TD = rms_norm(x_TD, jnp.ones(D))
    attended_TD = multi_head_attention(y_TD, y_TD, *(params[f"W_{name}"] for name in "QKVO"), Causal())
    return (x_TD + attended_TD) @ params["W_out"]


@jax.jit
def step(params, tokens_BT):
    """Return parameters after a step of gradient descent, and the loss before it."""

    def loss(params):
        nats = jax.vmap(lambda tokens_T: cross_entropy(logits(params, tokens_T[:-1]), tokens_T[1:]))
        return nats(tokens_BT).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value


params, rng = init(jax.random.key(0)), np.random.default_rng(0)
losses = []
for _ in range(30):
    period_B3 = rng.integers(V, size=(64, 3))
    params, loss = step(params, np.tile(period_B3, T // 3 + 1)[:, : T + 1])  # each token follows the one 3 before
    losses.append(float(loss))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per token")
assert losses[-1] < losses[0]

"""Bare JAX: attention with parameters in a dict, and a whole model as two pure functions, trained by `jax.grad`."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.models import DecoderConfig
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


def train(logits, params):
    """Return the losses of 30 steps of gradient descent."""

    @jax.jit
    def step(params, tokens_BT):
        def loss(params):
            nats = jax.vmap(lambda tokens_T: cross_entropy(logits(params, tokens_T[:-1]), tokens_T[1:]))
            return nats(tokens_BT).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value

    rng, losses = np.random.default_rng(0), []
    for _ in range(30):
        period_B3 = rng.integers(V, size=(64, 3))
        params, loss = step(params, np.tile(period_B3, T // 3 + 1)[:, : T + 1])  # each token follows the one 3 before
        losses.append(float(loss))
    return losses


# `init` and `apply` of a model keep no state: its parameters are a nested dict of arrays.
model = DecoderConfig(V, T, d_model=D, n_blocks=1, n_heads=H, d_ff=(64,), embedding_std=0.2).build()
variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros(T, int))
both = {"own": train(logits, init(jax.random.key(0))), "model": train(model.apply, variables)}
for name, losses in both.items():
    print(f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per token")
assert all(losses[-1] < losses[0] for losses in both.values())

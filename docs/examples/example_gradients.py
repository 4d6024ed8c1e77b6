"""Per-example gradients of a language model: by `jax.vmap(jax.grad)`, and their norms by `per_example_gradients`."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data import next_token_batch
from jaxformer.inspect import per_example_gradients
from jaxformer.models import DecoderConfig
from jaxformer.ops import cross_entropy

config = DecoderConfig(vocab_size=50, context_length=8, d_model=16, n_blocks=1, n_heads=2, d_ff=(32,))
model = config.build()
tokens_BT = np.random.default_rng(0).integers(config.vocab_size, size=(4, config.context_length + 1))
params = jax.jit(model.init)(jax.random.key(0), tokens_BT[0, :-1])["params"]


def loss(params, tokens_T):
    """Return the mean loss of one sequence in nats per token."""
    return cross_entropy(model.apply({"params": params}, tokens_T[:-1]), tokens_T[1:])


# A model maps one example, so that the gradient of each is a `vmap` away.
grads_B = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(params, tokens_BT)
norm_B = jnp.sqrt(sum(jnp.sum(g_B**2, axis=range(1, g_B.ndim)) for g_B in jax.tree.leaves(grads_B)))
clipped = jax.tree.map(lambda g_B: jnp.einsum("b...,b->...", g_B, jnp.minimum(1, 0.5 / norm_B)) / len(norm_B), grads_B)
print("norms:", np.round(norm_B, 3), "parameters:", sum(g.size for g in jax.tree.leaves(clipped)))

# The same norms, a few examples at a time, for models whose gradients of a whole batch do not fit the memory.
measured = per_example_gradients(model, params, next_token_batch(tokens_BT))
print("cosines with their mean:", np.round(measured.cosine_B, 3), "gradient noise scale:", round(measured.noise_scale))
np.testing.assert_allclose(measured.norm_B, norm_B, rtol=1e-4)

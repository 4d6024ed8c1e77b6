"""Alignment of a state with the positions of a source: single-query attention for recurrent networks.

A is the width of queries and keys.
"""

from math import sqrt

import jax
import jax.numpy as jnp

from jaxformer.ops.attention import MASKED
from jaxformer.ops.precision import upcast


def additive_scores(q_A: jax.Array, k_SA: jax.Array, v_A: jax.Array) -> jax.Array:
    """Return vᵀ tanh(q + k), `(S,)`: the alignment model of Bahdanau et al. 2015 (appendix A.1.2), where q = W_a s and
    k = U_a h."""
    return jnp.tanh(q_A[None] + k_SA) @ v_A


def linear_scores(q_A: jax.Array, k_SA: jax.Array, v_A: jax.Array) -> jax.Array:
    """Return vᵀ (q + k), `(S,)`: additive scores without the tanh. vᵀ q is the same for all positions and cancels in
    the softmax, so the weights do not depend on the query."""
    return (q_A[None] + k_SA) @ v_A


def dot_scores(q_A: jax.Array, k_SA: jax.Array) -> jax.Array:
    """Return qᵀ k / √A, `(S,)`: the 'general' score of Luong et al. 2015, section 3.1, where k = W_a h, scaled as in
    Vaswani et al. 2017."""
    return k_SA @ q_A / sqrt(len(q_A))


def alignment_weights(scores_S: jax.Array, valid_S: jax.Array) -> jax.Array:
    """Return the softmax over valid positions, `(S,)` float32 (Bahdanau et al. 2015, equation 6); zeros if none is
    valid."""
    scores_S = jnp.where(valid_S, upcast(scores_S), MASKED)
    return jnp.where(valid_S, jax.nn.softmax(scores_S), 0.0)

"""Boolean masks, True where a query may look at a key, made from what stands at each place.

A rule takes one number a query and one a key (position, segment) and gives `(T, S)`. Because rules read
positions and not slots, the same rule serves training, prefill, decoding with a cache and ragged prompts.
Combine rules with `&` and `|`.
"""

import jax
import jax.numpy as jnp

EMPTY = -1
"""Position of a slot that holds no token: padding, or a cache slot not yet written."""


def causal(query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """A query sees its own position and those before it."""
    return query_T[:, None] >= key_S[None, :]


def sliding_window(query_T: jax.Array, key_S: jax.Array, width: int) -> jax.Array:
    """A query sees keys less than `width` positions away; with `causal`, its last `width` positions
    (Beltagy et al. 2020)."""
    return jnp.abs(query_T[:, None] - key_S[None, :]) < width


def prefix(query_T: jax.Array, key_S: jax.Array, length: int | jax.Array) -> jax.Array:
    """Causal, but all see the first `length` positions (the prefix LM of Raffel et al. 2020, figure 3)."""
    return causal(query_T, key_S) | (key_S < length)[None, :]


def padding(query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """All see every slot that holds a token (position not `EMPTY`); only the keys matter."""
    return jnp.broadcast_to((key_S != EMPTY)[None, :], (query_T.shape[0], key_S.shape[0]))


def segment(query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """Given segment numbers in place of positions: a query sees its own segment (packed documents)."""
    return query_T[:, None] == key_S[None, :]

"""Boolean masks, True where a query may look at a key, made from what stands at each place.

A rule takes one number a query and one a key (position, segment) and gives `(T, S)`. Because rules read
positions and not slots, the same rule serves training, prefill, decoding with a cache and ragged prompts.
Combine rules with `&` and `|`.

`Causal` is the exception: a mask known while tracing, without an array, for the case that most training is.
"""

from dataclasses import dataclass

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


def tokens(n_queries: int, valid_S: jax.Array | None) -> jax.Array | None:
    """All see every key that is a token, `(T, S)` from one boolean a key; None, where all are, hides nothing."""
    return None if valid_S is None else jnp.broadcast_to(valid_S, (n_queries, len(valid_S)))


def zero_padding(x_TD: jax.Array, valid_T: jax.Array | None) -> jax.Array:
    """Return features with zeros at positions that are padding, whose values then reach no gradient, as 0 times NaN
    would; without `valid_T`, as they are."""
    return x_TD if valid_T is None else jnp.where(valid_T[:, None], x_TD, 0)


def segment(query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """Given segment numbers in place of positions: a query sees its own segment (packed documents)."""
    return query_T[:, None] == key_S[None, :]


@dataclass(frozen=True)
class Causal:
    """A query sees its own position and those before it, at most `window` positions in all.

    A rule as the others, and a mask by itself: attention takes it in place of an array, and then queries and keys
    stand at positions 0, 1, 2, ... in order. As it is known while tracing, a kernel can skip what nobody sees,
    and nothing of size T·S is made. Hashable, so a jitted function can take it as a static argument.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; a query sees at least its own position, so 1 or more")

    def __call__(self, query_T: jax.Array, key_S: jax.Array) -> jax.Array:
        """`(T, S)` from positions, as every rule."""
        seen_TS = causal(query_T, key_S)
        return seen_TS if self.window is None else seen_TS & sliding_window(query_T, key_S, self.window)

    def array(self, T: int, S: int) -> jax.Array:
        """`(T, S)` for queries and keys in order."""
        return self(jnp.arange(T), jnp.arange(S))


Mask = Causal | jax.Array | None
"""What attention takes: the symbolic mask, `(T, S)` booleans, or nothing hidden."""

"""Attention heads that attend to a fixed distance at initialisation."""

from math import sqrt

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.ops.positions import query_and_key_at

NARROW, WIDE = (7.0, (0.4, 1.0)), (3.0, (0.05, 0.35))
"""At initialisation, the attention score of the key at a head's distance, where other scores have a magnitude of about
1; and the RoPE frequencies, in radians per position, that distinguish that distance from others."""


def biases_at(
    distance: int, head_dim: int, rope_base: float, scale: float, is_wide: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the initial `b_Q` and `b_K`, each `(K,)` float32, of a head that attends to a distance. The biases by
    themselves yield the score of `NARROW` or `WIDE` there.

    Raises:
      ValueError: see `query_and_key_at`.
    """
    score, frequencies = WIDE if is_wide else NARROW
    query_K, key_K = query_and_key_at(distance, head_dim, rope_base, *frequencies)
    norm = sqrt(score / scale)
    return norm * query_K, norm * key_K


class LocalHeads(MultiHeadAttention):
    """`MultiHeadAttention` whose first heads attend to fixed distances at initialisation, regardless of content. They
    set the initial b_Q and b_K, which need `bias` and RoPE and, unlike the slopes of ALiBi (Press et al. 2022), are
    trained. The biases of the other heads, and of keys that only they attend to, start at zero.

    Attributes:
      distances: positions back, or ahead if negative, of the key of each of the first heads.
      is_wide: attend less sharply, to about ten positions around each distance.
    """

    distances: tuple[int, ...] = ()
    is_wide: bool = False

    def init_bias(self, name: str) -> nn.initializers.Initializer:
        if name == "b_V" or not self.distances:
            return nn.initializers.zeros
        assert self.rope is not None  # scores do not depend on distances otherwise
        pairs = [biases_at(d, self.head_dim, self.rope.base, self.factor, self.is_wide) for d in self.distances]
        queries, keys = zip(*pairs, strict=True)
        biases = queries if name == "b_Q" else keys[:: self.n_heads // (self.n_kv_heads or self.n_heads)]

        def init(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
            return jnp.zeros(shape, dtype).at[: len(biases), 0].set(jnp.stack(biases).astype(dtype))

        return init

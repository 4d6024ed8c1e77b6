"""Attention in memory linear in T and S, in plain JAX.

Softmax is computed over one block of keys at a time, with a running maximum and sum (Milakov and Gimelshein 2018; Rabe
and Staats 2021). The backward pass recomputes the blocks of scores, from the log of the sums (Dao et al. 2022).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.lax import dynamic_index_in_dim, dynamic_update_index_in_dim

from jaxformer.ops.attention import MASKED, zero_hidden
from jaxformer.ops.masks import Causal, Mask, Packed, causal_part, segment
from jaxformer.ops.precision import wide, widened

SAVED = "attention"
"""Name of the saved activations, for `jax.checkpoint_policies.save_only_these_names`: with it, a rematerialised block
does not attend twice."""


def blockwise_attention(
    q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, mask: Mask = None, scale: float = 1.0, *, block: int = 512
) -> jax.Array:
    """Return the output of `ops.attention.attention`, in memory linear in T and S, forward and backward.

    Blocks that a `Causal` mask hides, or that of a `Packed`, take no time. Differentiable once, in reverse. Masked keys
    as in `attention`.

    Args:
      q_HTK, k_GSK, v_GSK, mask, scale: as in `attention`.
      block: most queries, and most keys, of a block.
    """
    H, T, K = q_HTK.shape
    G, S, _ = k_GSK.shape
    tiles = Tiles(T, S, block, causal_part(mask))
    rest: jax.Array | None = None
    if isinstance(mask, Packed):
        rest = jnp.pad(mask.segments_T, (0, tiles.n_q * tiles.b_q - T))
    elif not isinstance(mask, Causal | None):
        rest = jnp.pad(mask, ((0, tiles.n_q * tiles.b_q - T), (0, tiles.n_k * tiles.b_k - S)))
    q_NGRbK = split(q_HTK * scale, tiles.n_q, tiles.b_q).reshape(tiles.n_q, G, H // G, tiles.b_q, K)
    k_MGcK, v_MGcK = (split(zero_hidden(x, mask, T), tiles.n_k, tiles.b_k) for x in (k_GSK, v_GSK))
    y_NGRbK = tiled_attention(tiles, q_NGRbK, k_MGcK, v_MGcK, rest)
    y_HTK = jnp.moveaxis(y_NGRbK.reshape(tiles.n_q, H, tiles.b_q, -1), 0, 1).reshape(H, tiles.n_q * tiles.b_q, -1)
    return y_HTK[:, :T]


def split(x_HTK: jax.Array, n: int, b: int) -> jax.Array:
    """Split `(H, T, K)` into n blocks of b positions, `(n, H, b, K)`, padded with zeros."""
    H, T, K = x_HTK.shape
    return jnp.moveaxis(jnp.pad(x_HTK, ((0, 0), (0, n * b - T), (0, 0))).reshape(H, n, b, K), 1, 0)


@dataclass(frozen=True)
class Tiles:
    """Tiling of the T·S scores: n_q blocks of b_q queries, n_k blocks of b_k keys, as even as possible."""

    T: int
    S: int
    block: int
    causal: Causal | None

    @property
    def n_q(self) -> int:
        """Number of query blocks."""
        return -(-self.T // self.block)

    @property
    def n_k(self) -> int:
        """Number of key blocks."""
        return -(-self.S // self.block)

    @property
    def b_q(self) -> int:
        """Queries per block."""
        return -(-self.T // self.n_q)

    @property
    def b_k(self) -> int:
        """Keys per block."""
        return -(-self.S // self.n_k)

    def visible(self) -> tuple[np.ndarray, ...]:
        """Return query block and key block of every tile with a visible key, row by row."""
        i, j = np.indices((self.n_q, self.n_k))
        if self.causal is None:
            return i.ravel(), j.ravel()
        furthest = (i + 1) * self.b_q - 1 - j * self.b_k  # of the tile's last query from its first key
        nearest = i * self.b_q - ((j + 1) * self.b_k - 1)
        return np.nonzero((furthest >= 0) & (nearest < (self.causal.window or self.T)))

    def mask(self, i: jax.Array, j: jax.Array, rest: jax.Array | None) -> jax.Array:
        """Return the mask of a tile, `(b_q, b_k)` bool; the padding of the last block is hidden.

        Args:
          rest: segments `(T,)` or a mask `(T, S)`, padded to whole blocks; None if `causal` is all.
        """
        query_b, key_c = i * self.b_q + jnp.arange(self.b_q), j * self.b_k + jnp.arange(self.b_k)
        mask_bc = jnp.broadcast_to(key_c < self.S, (self.b_q, self.b_k))
        if self.causal is not None:
            mask_bc &= self.causal(query_b, key_c)
        if rest is None:
            return mask_bc
        if rest.ndim == 1:
            return mask_bc & segment(rest[query_b], rest[key_c])
        return mask_bc & jax.lax.dynamic_slice(rest, (i * self.b_q, j * self.b_k), (self.b_q, self.b_k))


def scores(tiles: Tiles, i: jax.Array, j: jax.Array, q: jax.Array, k: jax.Array, rest: jax.Array | None) -> jax.Array:
    """Return the scores of one tile, `(G, R, b_q, b_k)` float32 or wider, minus infinity where masked."""
    scores_GRbc = jnp.einsum("grbk,gck->grbc", at(q, i), at(k, j), preferred_element_type=wide(q.dtype))
    return jnp.where(tiles.mask(i, j, rest), scores_GRbc, -jnp.inf)


def at(x: jax.Array, i: jax.Array) -> jax.Array:
    """Return `x[i]`."""
    return dynamic_index_in_dim(x, i, keepdims=False)


def put(x: jax.Array, i: jax.Array, value: jax.Array) -> jax.Array:
    """Return x with `x[i]` replaced; in place where x is the carry of a loop."""
    return dynamic_update_index_in_dim(x, value, i, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def tiled_attention(tiles: Tiles, q: jax.Array, k: jax.Array, v: jax.Array, rest: jax.Array | None) -> jax.Array:
    """Return attention over blocks: `(N, G, R, b, K)`, `(M, G, c, K)`, `(M, G, c, K)` to `(N, G, R, b, K)`."""
    return forward(tiles, q, k, v, rest)[0]


def forward(tiles: Tiles, q: jax.Array, k: jax.Array, v: jax.Array, rest: jax.Array | None) -> tuple:
    """Return the output, and the residuals for `backward`."""
    dtype = wide(q.dtype)

    def step(carry: tuple, ij: tuple) -> tuple:
        i, j = ij
        sum_NGRbK, total_NGRb, top_NGRb = carry
        scores_GRbc = scores(tiles, i, j, q, k, rest)
        top = jnp.maximum(at(top_NGRb, i), scores_GRbc.max(-1))
        weights_GRbc = jnp.exp(scores_GRbc - top[..., None])
        shrink = jnp.exp(at(top_NGRb, i) - top)
        part = jnp.einsum("grbc,gck->grbk", weights_GRbc.astype(v.dtype), at(v, j), preferred_element_type=dtype)
        return (
            put(sum_NGRbK, i, at(sum_NGRbK, i) * shrink[..., None] + part),
            put(total_NGRb, i, at(total_NGRb, i) * shrink + weights_GRbc.sum(-1)),
            put(top_NGRb, i, top),
        ), None

    rows = q.shape[:-1]
    # The maximum starts finite, so that a row without a visible key gives zeros and no NaN.
    start = (jnp.zeros((*rows, v.shape[-1]), dtype), jnp.zeros(rows, dtype), jnp.full(rows, MASKED, dtype))
    (sum_NGRbK, total_NGRb, top_NGRb), _ = jax.lax.scan(step, start, tiles.visible())
    total_NGRb = jnp.where(total_NGRb > 0, total_NGRb, 1)
    y = checkpoint_name((sum_NGRbK / total_NGRb[..., None]).astype(v.dtype), SAVED)
    log_total_NGRb = checkpoint_name(top_NGRb + jnp.log(total_NGRb), SAVED)
    return y, (q, k, v, rest, y, log_total_NGRb)


def backward(tiles: Tiles, saved: tuple, dy: jax.Array) -> tuple:
    """Return the gradients with respect to q, k and v (Dao et al. 2022, algorithm 4)."""
    q, k, v, rest, y, log_total_NGRb = saved
    dtype = wide(q.dtype)
    dot_NGRb = jnp.sum(widened(dy) * y, -1)  # Σ over keys of weight · gradient to it

    def step(carry: tuple, ij: tuple) -> tuple:
        i, j = ij
        dq, dk, dv = carry
        weights_GRbc = jnp.exp(scores(tiles, i, j, q, k, rest) - at(log_total_NGRb, i)[..., None])
        to_weights = jnp.einsum("grbk,gck->grbc", at(dy, i), at(v, j), preferred_element_type=dtype)
        to_scores = (weights_GRbc * (to_weights - at(dot_NGRb, i)[..., None])).astype(q.dtype)
        product = partial(jnp.einsum, preferred_element_type=dtype)
        return (
            put(dq, i, at(dq, i) + product("grbc,gck->grbk", to_scores, at(k, j))),
            put(dk, j, at(dk, j) + product("grbc,grbk->gck", to_scores, at(q, i))),
            put(dv, j, at(dv, j) + product("grbc,grbk->gck", weights_GRbc.astype(dy.dtype), at(dy, i))),
        ), None

    start = tuple(jnp.zeros(x.shape, dtype) for x in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(step, start, tiles.visible())
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


tiled_attention.defvjp(forward, backward)

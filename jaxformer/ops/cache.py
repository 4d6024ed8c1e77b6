"""The key/value cache of one sequence.

Slots are where things lie, positions are what they mean. All layers share one array of positions, and a slot
whose position is `masks.EMPTY` holds nothing, so that masks made from positions need not know how prompts
were padded. The slot to write is an argument and not part of the cache: one number for a whole batch, so
that under `vmap` the write stays a dynamic-update-slice and does not become a scatter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.ops.masks import EMPTY


class LayerCache(NamedTuple):
    """Keys and values of one layer, each `(G, S, K)`."""

    k_GSK: jax.Array
    v_GSK: jax.Array


class KVCache(NamedTuple):
    """Keys and values of every layer, and the position of each slot, `(S,)` int32."""

    layers: tuple[LayerCache, ...]
    position_S: jax.Array


def init_cache(n_layers: int, n_kv_heads: int, n_slots: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache."""
    zeros = jnp.zeros((n_kv_heads, n_slots, head_dim), dtype)
    return KVCache((LayerCache(zeros, zeros),) * n_layers, jnp.full((n_slots,), EMPTY, jnp.int32))


def write_layer(layer: LayerCache, k_GTK: jax.Array, v_GTK: jax.Array, slot: jax.Array | int) -> LayerCache:
    """Put T keys and values at slots slot, …, slot + T - 1."""
    return LayerCache(
        jax.lax.dynamic_update_slice_in_dim(layer.k_GSK, k_GTK.astype(layer.k_GSK.dtype), slot, axis=1),
        jax.lax.dynamic_update_slice_in_dim(layer.v_GSK, v_GTK.astype(layer.v_GSK.dtype), slot, axis=1),
    )


def write_positions(position_S: jax.Array, positions_T: jax.Array, slot: jax.Array | int) -> jax.Array:
    """Put T positions at slots slot, …, slot + T - 1."""
    return jax.lax.dynamic_update_slice_in_dim(position_S, positions_T.astype(position_S.dtype), slot, axis=0)

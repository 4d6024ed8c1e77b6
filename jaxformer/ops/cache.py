"""The key/value cache of one sequence.

A slot is an index in the cache; its position is its token's position in the sequence. All layers share one array of
positions, and a slot whose position is `masks.EMPTY` is empty, so masks computed from positions do not depend on how
prompts are padded. The slot to write is an argument and not part of the cache: one integer for the whole batch.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.ops.attention import adjust, softmax
from jaxformer.ops.bias import check_cached_bias
from jaxformer.ops.masks import EMPTY
from jaxformer.ops.positions import check_positions
from jaxformer.ops.precision import accumulation_dtype, upcast
from jaxformer.ops.workarounds import update_slice, zero_after


class Stored(NamedTuple):
    """Vectors in the cache's dtype."""

    values: jax.Array
    scale_GS: jax.Array | None
    """Scale of each int8 vector; None for floating-point vectors."""


class LayerCache(NamedTuple):
    """Keys and values of one layer, laid out for one query: its scores are a sum of rows of the key array, and its
    output is a sum of rows of the value array."""

    k_GKS: Stored
    v_GSK: Stored

    @property
    def n_slots(self) -> int:
        """Number of slots S."""
        return self.v_GSK.values.shape[1]


class KVCache(NamedTuple):
    """Keys and values of every layer, and the position of each slot, `(S,)` int32.

    A layer with an attention window may have fewer slots, n: a ring of the last n tokens, with that of slot s in its
    slot s mod n; see `ring`.
    """

    layers: tuple[LayerCache, ...]
    position_S: jax.Array


def init_cache(
    n_layers: int, n_kv_heads: int, n_slots: int, head_dim: int, dtype: DTypeLike, value_dim: int | None = None
) -> KVCache:
    """Return an empty cache for keys and values in float32, bfloat16 or int8. `value_dim` defaults to `head_dim`.

    With `jax_enable_x64`, it may also be in float64.

    Raises:
      ValueError: the dtype is another one.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in ("float64", "float32", "bfloat16", "int8"):
        raise ValueError(f"the cache's dtype is {dtype}; it must be float32, bfloat16 or int8.")
    scale_GS = jnp.zeros((n_kv_heads, n_slots), jnp.float32) if dtype == jnp.int8 else None
    k_GKS = Stored(jnp.zeros((n_kv_heads, head_dim, n_slots), dtype), scale_GS)
    v_GSK = Stored(jnp.zeros((n_kv_heads, n_slots, value_dim or head_dim), dtype), scale_GS)
    return KVCache((LayerCache(k_GKS, v_GSK),) * n_layers, jnp.full((n_slots,), EMPTY, jnp.int32))


def write_layer(layer: LayerCache, k_GTK: jax.Array, v_GTK: jax.Array, slot: jax.Array | int) -> LayerCache:
    """Return the cache with T keys and values written at slots slot, …, slot + T - 1.

    Raises:
      ValueError: the shapes are not those of the cache, or, unless traced, the slots are not in it.
    """
    for name, x, (G, n_slots, K) in (
        ("keys", k_GTK, layer.k_GKS.values.swapaxes(1, 2).shape),
        ("values", v_GTK, layer.v_GSK.values.shape),
    ):
        if x.ndim != 3 or (x.shape[0], x.shape[2]) != (G, K):
            raise ValueError(f"expected {name} of shape ({G}, T, {K}), as in the cache, got {x.shape}")
        _check_slots(n_slots, x.shape[1], slot)
    k, v = (_store(x_GTK, stored.values.dtype) for x_GTK, stored in ((k_GTK, layer.k_GKS), (v_GTK, layer.v_GSK)))
    k = k._replace(values=k.values.swapaxes(1, 2))
    return LayerCache(_write_stored(layer.k_GKS, k, slot, 2), _write_stored(layer.v_GSK, v, slot, 1))


def read_layer(layer: LayerCache, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return all keys and values, each `(G, S, K)`."""
    k, v = layer
    if k.scale_GS is None or v.scale_GS is None:
        return k.values.swapaxes(1, 2).astype(dtype), v.values.astype(dtype)
    k_GKS = k.values.astype(dtype) * k.scale_GS[:, None, :].astype(dtype)
    return k_GKS.swapaxes(1, 2), v.values.astype(dtype) * v.scale_GS[:, :, None].astype(dtype)


def decode_step(
    q_H1K: jax.Array,
    k_G1K: jax.Array,
    v_G1K: jax.Array,
    layer: LayerCache,
    slot: jax.Array | int,
    mask_1S: jax.Array,
    scale: float,
    *,
    bias: jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    q_of_values_H1K: jax.Array | None = None,
) -> tuple[jax.Array, LayerCache]:
    """Return the attention of one query, `(H, 1, K)`, and the layer with the query's own key and value written at
    `slot`.

    `bias` is an array, `(H, 1, S)` or `(1, S)`, from the positions in the cache, such as
    `ALiBi(slopes)(positions_1, cache.position_S)`; `soft_cap` and `sinks` are those of `attention`. The products of
    `q_of_values_H1K` and the values are added to the scores: in latent attention, values are also a part of the keys.

    The score and weight of `slot` come from the new key and value, rounded as the cache rounds them; the cache is
    written last, for `workarounds.zero_after`.

    Values in the cache must be finite even at masked slots, because 0 times NaN is NaN.
    """
    check_cached_bias(bias)
    (H, _, K), G, dtype = q_H1K.shape, k_G1K.shape[0], q_H1K.dtype
    einsum = partial(jnp.einsum, preferred_element_type=accumulation_dtype(dtype))
    q_GRK = q_H1K.reshape(G, H // G, K) * scale
    own_S = jnp.arange(mask_1S.shape[1]) == slot

    def scores(products: str, q_GRK: jax.Array, stored: Stored, own_G1K: jax.Array) -> jax.Array:
        scores_GRS = einsum(products, q_GRK, stored.values.astype(dtype))
        if stored.scale_GS is not None:
            scores_GRS *= stored.scale_GS[:, None, :]
        own_score_GR1 = einsum("grk,gsk->grs", q_GRK, _rounded(own_G1K, stored.values.dtype))
        return jnp.where(own_S, own_score_GR1, scores_GRS)

    scores_GRS = scores("grk,gks->grs", q_GRK, layer.k_GKS, k_G1K)
    if q_of_values_H1K is not None:
        q_GRK = q_of_values_H1K.reshape(G, H // G, -1) * scale
        scores_GRS += scores("grk,gsk->grs", q_GRK, layer.v_GSK, v_G1K)
    if bias is not None:
        bias = jnp.broadcast_to(bias, (H, *mask_1S.shape)).reshape(scores_GRS.shape)
    scores_GRS = adjust(scores_GRS, bias, soft_cap)
    weights_GRS = softmax(scores_GRS, mask_1S, None if sinks is None else sinks.reshape(G, H // G))
    own_weight_GR1 = jnp.sum(weights_GRS, -1, where=own_S, keepdims=True)
    weights_GRS = jnp.where(own_S, 0, weights_GRS)
    if layer.v_GSK.scale_GS is not None:
        weights_GRS *= layer.v_GSK.scale_GS[:, None, :]
    mixed_GRK = einsum("grs,gsk->grk", weights_GRS.astype(dtype), layer.v_GSK.values.astype(dtype))
    mixed_GRK += own_weight_GR1.astype(dtype) * upcast(_rounded(v_G1K, layer.v_GSK.values.dtype))
    y_H1K = mixed_GRK.reshape(H, 1, -1).astype(dtype)
    after = zero_after(y_H1K[:1, :, :1])
    return y_H1K, write_layer(layer, k_G1K + after, v_G1K + after, slot)


def write_positions(position_S: jax.Array, positions_T: jax.Array, slot: jax.Array | int) -> jax.Array:
    """Return the array of positions with T positions written at slots slot, …, slot + T - 1."""
    positions_T = check_positions(positions_T)
    _check_slots(len(position_S), len(positions_T), slot)
    return update_slice(position_S, positions_T.astype(position_S.dtype), slot, 0)


def ring(
    position_S: jax.Array, slot: jax.Array | int, n_tokens: int, n_slots: int
) -> tuple[jax.Array, jax.Array | int]:
    """Return the position of each slot of a layer with `n_slots` slots, `(n_slots,)`, and the slot in it of the first
    of `n_tokens`, which are written at `slot` of the cache.

    If the cache as a whole is a ring, too, S must be a multiple of `n_slots`.
    """
    if n_slots == len(position_S):
        return position_S, slot
    last = slot + n_tokens - 1
    age_S = (last - jnp.arange(n_slots)) % n_slots
    return position_S[(last - age_S) % len(position_S)], slot % n_slots


def _check_slots(n_slots: int, n_tokens: int, slot: jax.Array | int) -> None:
    """Raise `ValueError` for slots that are not in the cache, where an update would overwrite others; a traced slot is
    not known."""
    if not isinstance(slot, jax.core.Tracer) and not 0 <= (first := int(slot)) <= n_slots - n_tokens:
        last = first + n_tokens - 1
        raise ValueError(f"the cache has slots 0 to {n_slots - 1}, not {first} to {last}; make it larger")


def _store(x_GTK: jax.Array, dtype: DTypeLike) -> Stored:
    """Return vectors in the cache's dtype; each int8 vector has one scale, its largest absolute value over 127."""
    if dtype != jnp.int8:
        return Stored(x_GTK.astype(dtype), None)
    scale_GT = jnp.abs(x_GTK).max(-1).astype(jnp.float32) / 127
    inverse_GT = jnp.where(scale_GT > 0, 1 / scale_GT, 0)
    return Stored(jnp.round(x_GTK * inverse_GT[..., None]).astype(jnp.int8), scale_GT)


def _rounded(x_GTK: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return vectors rounded to the cache's dtype, in their original dtype."""
    if np.can_cast(x_GTK.dtype, dtype):
        return x_GTK
    if dtype != jnp.int8:  # the compiler would remove a round trip of conversions
        return jax.lax.reduce_precision(x_GTK, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
    values, scale_GT = _store(x_GTK, dtype)
    assert scale_GT is not None  # int8 has one
    return values.astype(x_GTK.dtype) * scale_GT[..., None].astype(x_GTK.dtype)


def _write_stored(stored: Stored, part: Stored, slot: jax.Array | int, axis: int) -> Stored:
    values = update_slice(stored.values, part.values, slot, axis)
    if stored.scale_GS is None or part.scale_GS is None:
        return Stored(values, None)
    return Stored(values, update_slice(stored.scale_GS, part.scale_GS, slot, 1))

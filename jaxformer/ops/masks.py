"""Boolean masks, True where a query may attend to a key.

A rule maps one integer per query and one per key (a position or a segment) to `(T, S)`. Because rules read positions
and not cache slots, the same rule serves training, prefill, decoding with a cache and ragged prompts. Combine rules
with `&` and `|`.

`Causal` and `Packed` are masks without an array `(T, S)`, for queries and keys in order.

True means visible, as in `torch.nn.functional.scaled_dot_product_attention` and in Hugging Face's `attention_mask`; in
the masks of `torch.nn.MultiheadAttention`, including `key_padding_mask`, it means hidden.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.errors import batch_hint

EMPTY = -1
"""Position of a slot that holds no token: padding, or a cache slot not yet written."""


def causal(query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """Return the causal mask: a query attends to its own position and those before it."""
    query_T1, key_1S = _pairs(query_T, key_S)
    return query_T1 >= key_1S


def sliding_window(query_T: jax.Array, key_S: jax.Array, width: int) -> jax.Array:
    """Return the mask of keys less than `width` positions away (Beltagy et al. 2020); combined with `causal`, the last
    `width` positions."""
    query_T1, key_1S = _pairs(query_T, key_S)
    return jnp.abs(query_T1 - key_1S) < width


def prefix(query_T: jax.Array, key_S: jax.Array, length: int | jax.Array) -> jax.Array:
    """Return the causal mask with the first `length` positions visible to all queries (prefix LM of Raffel et al. 2020,
    figure 3)."""
    check_prefix(length)
    return causal(query_T, key_S) | (key_S < length)[None, :]


def padding(query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """Return the mask of keys that hold a token (position not `EMPTY`), the same for all queries; see also `tokens`."""
    _pairs(query_T, key_S)
    if key_S.dtype == bool:
        raise TypeError("padding reads positions, not booleans; use masks.tokens")
    return jnp.broadcast_to((key_S != EMPTY)[None, :], (query_T.shape[0], key_S.shape[0]))


def tokens(n_queries: int, valid_S: jax.Array | None) -> jax.Array | None:
    """Return the mask `(T, S)` from one boolean per key, True for a token; None if `valid_S` is None."""
    if valid_S is None:
        return None
    check_valid(valid_S, len(valid_S))
    return jnp.broadcast_to(valid_S, (n_queries, len(valid_S)))


def zero_padding(x_TD: jax.Array, valid_T: jax.Array | None) -> jax.Array:
    """Return features `(T, D)` with zeros at padding, so that NaN there does not reach any gradient; unchanged without
    `valid_T`."""
    if valid_T is None:
        return x_TD
    check_valid(valid_T, len(x_TD))
    return jnp.where(valid_T[:, None], x_TD, 0)


def segment(query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """Return the mask of keys in the query's own segment (packed documents), from segment ids."""
    query_T1, key_1S = _pairs(query_T, key_S)
    return query_T1 == key_1S


def _pairs(query_T: jax.Array, key_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return queries as a column `(T, 1)` and keys as a row `(1, S)`."""
    if np.ndim(query_T) != 1 or np.ndim(key_S) != 1:
        shapes = f"{np.shape(query_T)} and {np.shape(key_S)}"
        raise ValueError(f"expected one integer per query and per key, (T,) and (S,), got {shapes}")
    return query_T[:, None], key_S[None, :]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Causal:
    """Static causal mask: a query attends to its own position and those before it, at most `window` positions in all.

    It is a rule like the others, and also a mask without an array, for queries and keys at positions 0, 1, 2, ... in
    order: fewer queries than keys are the first positions, not the last. Kernels skip masked blocks, and no array of
    size T·S is allocated. Hashable, so it can be a static argument of a jitted function.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int | np.integer | None):
            raise TypeError(f"window is {self.window!r}; give a number of positions, or None for all")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1, the query's own position")

    def __call__(self, query_T: jax.Array, key_S: jax.Array) -> jax.Array:
        """Return the mask `(T, S)` from positions, like every rule."""
        mask_TS = causal(query_T, key_S)
        return mask_TS if self.window is None else mask_TS & sliding_window(query_T, key_S, self.window)

    def array(self, T: int, S: int) -> jax.Array:
        """Return the mask `(T, S)` for queries and keys in order."""
        return self(jnp.arange(T), jnp.arange(S))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Packed:
    """Causal mask of packed documents: a query attends to the keys of its own segment that `causal` lets it attend to.

    Like `Causal`, it is for queries and keys at positions 0, 1, 2, ... in order, and kernels compute it block by block.

    Attributes:
      segments_T: document index of each position, int32.
      causal: mask without the segments.
    """

    segments_T: jax.Array
    causal: Causal = Causal()

    def array(self, T: int, S: int) -> jax.Array:
        """Return the mask `(T, S)`; T and S must equal the length of `segments_T`."""
        return self.causal.array(T, S) & segment(self.segments_T, self.segments_T)


Mask = Causal | Packed | jax.Array | None
"""Attention mask: by order and segments, a bool array, or None for no mask."""


def as_array(mask: Mask, n_queries: int, n_keys: int) -> jax.Array:
    """Return any mask as an array, `(T, S)` bool."""
    if mask is None:
        return jnp.ones((n_queries, n_keys), bool)
    return mask.array(n_queries, n_keys) if isinstance(mask, Causal | Packed) else mask


def causal_part(mask: Mask) -> Causal | None:
    """Return the `Causal` that a mask contains; None for an array or no mask."""
    return mask.causal if isinstance(mask, Packed) else mask if isinstance(mask, Causal) else None


def check_mask(mask: Any, n_heads: int, n_queries: int, n_keys: int) -> None:
    """Raise `TypeError` for anything but a `Mask`, `ValueError` for a mask of another shape."""
    if mask is None or isinstance(mask, Causal):
        return
    if isinstance(mask, Packed):
        if not np.shape(mask.segments_T) == (n_queries,) == (n_keys,):
            shapes = f"{np.shape(mask.segments_T)} for {n_queries} queries and {n_keys} keys"
            raise ValueError(f"expected one segment per position, got segments of shape {shapes}")
        return
    if isinstance(mask, type):
        raise TypeError(f"the mask is the class {mask.__name__}; give an instance, such as Causal()")
    dtype = getattr(mask, "dtype", type(mask).__name__)
    if dtype != jnp.bool_:
        remedy = ": mask == 0 if it is added to scores (0 and -inf), mask == 1 if it is 1 and 0"
        example = remedy if hasattr(mask, "dtype") else ""
        raise TypeError(f"the mask is {dtype}; give a bool array, True where a query may attend{example}")
    shared, per_head = (n_queries, n_keys), (n_heads, n_queries, n_keys)
    if mask.shape not in (shared, per_head):
        remedy = "; see jnp.broadcast_to" if mask.size and mask.ndim == 2 else ""
        raise ValueError(f"expected a mask of shape {shared} or {per_head}, got {mask.shape}{remedy}")


def check_valid(valid_T: jax.Array, n_tokens: int) -> None:
    """Raise `TypeError` unless `valid_T` has booleans, `ValueError` unless it has one per token."""
    dtype = getattr(valid_T, "dtype", type(valid_T).__name__)
    if dtype != jnp.bool_:
        raise TypeError(f"valid is {dtype}; give a bool array, True for tokens, such as attention_mask == 1")
    if valid_T.shape != (n_tokens,):
        got = f"{valid_T.shape}{batch_hint(valid_T.shape, 1)}"
        raise ValueError(f"expected valid of shape {(n_tokens,)}, one per token, got {got}")


def check_prefix(length: int | jax.Array) -> None:
    """Raise `TypeError` unless the length of a prefix is a whole number."""
    if np.shape(length) or not jnp.issubdtype(jnp.result_type(length), jnp.integer):
        got = f"{jnp.result_type(length)} of shape {np.shape(length)}"
        raise TypeError(f"the prefix is {got}; give its length in tokens, one integer")

"""Parameters for decoding alone, in fewer bytes than they were trained in."""

from __future__ import annotations

import re
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxformer.models.objective import Params
from jaxformer.ops.quantized import Quantized, quantize

Format = Literal["float32", "bfloat16", "int8"]

SUMMED: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"W_pos$", ()),  # looked up, never multiplied
    (r"W_(a$|s_)", ()),  # within a loop, or read once a source
    (r"W_router$", ()),  # small, and rounding would send tokens elsewhere
    (r"experts\.W_", (1,)),  # (E, D, F), (E, F, D)
    (r"W_E$", (1,)),  # (V, D): a row is a token's channel, where it is looked up and where logits are made
    (r"W_O$", (0, 1)),  # (H, K, D)
    (r"W_", (0,)),  # (D, H, K), (D, F), (F, D), (D, V)
)
"""Axes that a product with a parameter sums over: the first pattern found in its name decides. What no pattern finds,
or sums over nothing, stays in float32: norms and biases, which are small."""


def store(params: Params, weights: Format) -> Params:
    """The parameters, with matrices in the given format. Each stands where it stood."""

    def one(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        if weights == "bfloat16":
            return leaf.astype(jnp.bfloat16)
        name = ".".join(str(key.key) for key in path)
        summed = next((axes for pattern, axes in SUMMED if re.search(pattern, name)), ())
        return quantize(leaf, summed) if summed else leaf

    if weights == "float32":
        return params
    return jax.jit(lambda params: jax.tree_util.tree_map_with_path(one, params))(params)


def restored(params: Params) -> Params:
    """What `store` gave, in float32 again: what its rounding left."""

    def one(leaf: Any) -> jax.Array:
        return leaf.values * leaf.scale if isinstance(leaf, Quantized) else leaf.astype(jnp.float32)

    return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))

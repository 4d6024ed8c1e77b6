"""Parameters for decoding in fewer bytes than they were trained in."""

from __future__ import annotations

import re
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxformer.models.objective import Params
from jaxformer.ops.quantized import Quantized, quantize

Format = Literal["float32", "bfloat16", "int8"]

SUMMED_AXES: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"W_pos$", ()),  # looked up, never multiplied
    (r"W_(a$|s_)", ()),  # within a loop, or read once per source
    (r"W_router$", ()),  # small, and rounding would route tokens to other experts
    (r"experts\.W_", (1,)),  # (E, D, F), (E, F, D)
    (r"W_E$", (1,)),  # (V, D): a row is a token's channel, for the embedding and for the logits
    (r"W_O$", (0, 1)),  # (H, K, D)
    (r"W_", (0,)),  # (D, H, K), (D, F), (F, D), (D, V)
)
"""Axes that a product with a parameter sums over, by the first pattern that its name matches. Other parameters, and
those without such axes, stay in float32: norms and biases, which are small."""


def store(params: Params, weights: Format) -> Params:
    """Return the parameters with matrices in the given format, on the same devices."""

    def convert(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        if weights == "bfloat16":
            return leaf.astype(jnp.bfloat16)
        name = ".".join(str(key.key) for key in path)
        axes = next((axes for pattern, axes in SUMMED_AXES if re.search(pattern, name)), ())
        return quantize(leaf, axes) if axes else leaf

    if weights == "float32":
        return params
    return jax.jit(lambda params: jax.tree_util.tree_map_with_path(convert, params))(params)


def restored(params: Params) -> Params:
    """Return parameters from `store` in float32, as rounded."""

    def convert(leaf: Any) -> jax.Array:
        return leaf.values * leaf.scale if isinstance(leaf, Quantized) else leaf.astype(jnp.float32)

    return jax.tree.map(convert, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))

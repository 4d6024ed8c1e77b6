"""Parameters for decoding in fewer bytes than they were trained in."""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.contract import ParameterAxes, Role
from jaxformer.models.objective import Params
from jaxformer.nn.parameters import parameter_axes
from jaxformer.ops.quantized import Quantized, quantize

Format = Literal["float32", "bfloat16", "int8"]

EXACT_AXES = {"positions", "gates", "alignment", "choices"}
"""Axes of matrices that stay in float32: looked up and never multiplied (positions), read within a loop or once per
source (gates, alignment), or routing tokens, which rounding would send to other experts (choices)."""


def store(params: Params, weights: Format, model: nn.Module) -> Params:
    """Return a model's parameters with matrices in the given format, on the same devices."""
    if weights == "float32":
        return params
    declared = parameter_axes(model)

    def convert(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        if weights == "bfloat16":
            return leaf.astype(jnp.bfloat16)
        summed = summed_axes(declared[".".join(str(key.key) for key in path)])
        return quantize(leaf, summed) if summed else leaf

    return jax.jit(lambda params: jax.tree_util.tree_map_with_path(convert, params))(params)


def summed_axes(axes: ParameterAxes) -> tuple[int, ...]:
    """Return the axes of a parameter over which an int8 scale reaches: those that products with it sum over, but of an
    embedding a token's features. No axes for a parameter that stays in float32."""
    if axes.role is Role.VECTOR or EXACT_AXES & set(axes.names):
        return ()
    first, last = len(axes.stack), len(axes.names) - len(axes.outputs)
    return tuple(range(last, len(axes.names)) if "vocab" in axes.inputs else range(first, last))


def restored(params: Params) -> Params:
    """Return parameters from `store` in float32, as rounded."""

    def convert(leaf: Any) -> jax.Array:
        return leaf.values * leaf.scale if isinstance(leaf, Quantized) else leaf.astype(jnp.float32)

    return jax.tree.map(convert, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))

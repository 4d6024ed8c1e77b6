"""Matrices of 8 bits a number, for decoding: a step reads every weight once, so the fewer bytes, the faster.

One scale a channel of the output (absmax; Dettmers et al. 2022, section 2.1). What they are multiplied with keeps its
precision: on a CPU, whose fast products are of integers, it is split into two of 8 bits, which together are 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

LARGEST = 127
"""Of an int8, used on both sides of 0 alike."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=[])
@dataclass(frozen=True)
class Quantized:
    """A matrix as `values * scale`, where an array would stand: in `x @ W`, `rows(W, tokens)`, `W.T`, `W.reshape`.

    Attributes:
      values: int8, in the matrix's shape.
      scale: float32, of the same number of dimensions; 1 long where products sum.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def T(self) -> Quantized:
        """Transposed."""
        return Quantized(self.values.T, self.scale.T)

    def reshape(self, *shape: int) -> Quantized:
        """As a matrix of two axes: those that products sum over, and the others.

        Raises:
          ValueError: not two axes, or axes of both kinds would become one.
        """
        values = self.values.reshape(*shape)
        rows = 1
        for size, kept in zip(self.shape, self.scale.shape, strict=True):
            if kept == 1:
                rows *= size
        if values.ndim != 2 or (self.scale.size > 1 and values.shape[0] != rows):
            raise ValueError(f"a quantised matrix of scales {self.scale.shape} cannot be made {values.shape}")
        return Quantized(values, self.scale.reshape(1, -1))

    def __getitem__(self, rows: Any) -> jax.Array:
        """Rows, in float32."""
        return self.values[rows] * (self.scale[rows] if self.scale.shape[0] > 1 else self.scale)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """`(…, D)` times `(D, F)`, in the dtype of x."""
        return jax.lax.platform_dependent(x, self.values, self.scale, cpu=_product_of_integers, default=_product)


def quantize(matrix: jax.Array, summed: tuple[int, ...]) -> Quantized:
    """The nearest such matrix.

    Args:
      summed: axes that products with it sum over; a channel of the output has one scale over all of them.
    """
    scale = jnp.max(jnp.abs(matrix), axis=summed, keepdims=True).astype(jnp.float32) / LARGEST
    scale = jnp.where(scale > 0, scale, 1.0)
    return Quantized(jnp.round(matrix / scale).astype(jnp.int8), scale)


def rows(matrix: jax.Array | Quantized, index: jax.Array) -> jax.Array:
    """`matrix[index]`, also of a NumPy array."""
    return matrix[index] if isinstance(matrix, Quantized) else jnp.asarray(matrix)[index]


def _product(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """The compiler converts a weight where it reads it."""
    return (x @ values.astype(x.dtype)) * scale.reshape(-1).astype(x.dtype)


def _product_of_integers(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """The CPU's compiler would write the converted weights to memory, which takes longer than to read float32.

    x becomes 254 coarse + fine, each of 8 bits, which share the pass over the weights.
    """
    size = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) / LARGEST
    size = jnp.where(size > 0, size, 1.0)
    y = x / size
    coarse = jnp.round(y)
    parts = jnp.stack([coarse, jnp.round((y - coarse) * (2 * LARGEST))]).astype(jnp.int8)
    both = jnp.matmul(parts, values, preferred_element_type=jnp.int32).astype(jnp.float32)
    return ((both[0] + both[1] / (2 * LARGEST)) * size * scale.reshape(-1)).astype(x.dtype)

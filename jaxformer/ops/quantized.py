"""int8 matrices for decoding: a decode step reads every weight once, so fewer bytes are faster.

There is one scale per output channel (absmax; Dettmers et al. 2022, section 2.1). Activations keep their precision: on
a CPU, where integer matmuls of few rows are fast, they are split into two int8 parts, 16 bits together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxformer.ops.broadcasting import expand
from jaxformer.ops.explicit_axes import with_auto_axes
from jaxformer.ops.precision import accumulation_dtype
from jaxformer.ops.workarounds import converted_after

LARGEST = 127
"""Largest int8 value; the range is symmetric about 0."""
MAX_INTEGER_ROWS = 32
"""Maximum rows per example that a CPU multiplies with integers: a decode step or a draft's proposals. For more, as in a
prompt, one conversion of the weights to the dtype of the rows takes less time."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["dtype"])
@dataclass(frozen=True)
class Quantized:
    """Matrix `values * scale` that supports `x @ W`, `rows(W, tokens)`, `W.T` and `W.reshape`.

    Attributes:
      values: int8, in the matrix's shape.
      scale: float32 with the same number of axes, of size 1 along the axes that a matmul sums over.
      dtype: dtype of rows.
    """

    values: jax.Array
    scale: jax.Array
    dtype: DTypeLike = jnp.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.values.shape

    @property
    def T(self) -> Quantized:
        """Transpose."""
        return replace(self, values=self.values.T, scale=self.scale.T)

    def __getitem__(self, rows: jax.Array) -> jax.Array:
        """Return rows."""
        scale = self.scale[rows] if self.scale.shape[0] > 1 else self.scale
        return (self.values[rows].astype(scale.dtype) * scale).astype(self.dtype)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """Return the matmul of `(…, D)` and `(D, F)` or `(D, H, K)`, in the dtype of x."""
        on_cpu = _integer_matmul if x.size <= MAX_INTEGER_ROWS * x.shape[-1] else _late_matmul
        return jax.lax.platform_dependent(x, self.values, self.scale, cpu=on_cpu, default=_matmul)


def quantize(matrix: jax.Array, summed: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Quantized:
    """Return the matrix rounded to int8.

    Args:
      summed: axes that a matmul sums over; an output channel has one scale over all of them.
      dtype: dtype of rows.
    """
    scale = jnp.max(jnp.abs(matrix), axis=summed, keepdims=True).astype(jnp.float32) / LARGEST
    scale = jnp.where(scale == 0, 1.0, scale)
    return Quantized(jnp.round(matrix.astype(scale.dtype) / scale).astype(jnp.int8), scale, dtype)


@with_auto_axes
def rows(matrix: jax.Array | Quantized, index: jax.Array) -> jax.Array:
    """Return `matrix[index]`, also for a NumPy array, and for a list of indices."""
    return (matrix if isinstance(matrix, Quantized) else jnp.asarray(matrix))[jnp.asarray(index)]


def _matmul(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the matmul; the compiler converts a weight where it reads it. Sums are float32 until they are scaled."""
    values = values.reshape(x.shape[-1], *values.shape[_n_summed(x, values) :])
    sums = jnp.tensordot(x, values.astype(x.dtype), 1, preferred_element_type=accumulation_dtype(x.dtype))
    return (sums * expand(scale.reshape(values.shape[1:]), sums.ndim)).astype(x.dtype)


def _late_matmul(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the matmul for a CPU, whose compiler converts whole matrices."""
    return _matmul(x, converted_after(values, x), scale)


def _n_summed(x: jax.Array, values: jax.Array) -> int:
    """Return the number of leading axes of a matrix that the last axis of x merges: several for a matrix by heads."""
    return next((n for n in range(1, values.ndim) if prod(values.shape[:n]) == x.shape[-1]), 1)


def _integer_matmul(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the matmul, computed with integers: XLA's CPU compiler would write converted weights to memory, which
    takes longer than reading float32.

    x becomes 254 · coarse + fine, two int8 arrays that share one pass over the weights. The weights are the first
    factor, which the CPU's kernels read as it is stored, if by output channel; they copy the second factor into another
    order at every call. For (576, 1536) and one row, this takes 46 instead of 65 us, and float32 98 us.
    """
    size = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) / LARGEST
    size = jnp.where(size == 0, 1.0, size)  # NaN stays in the scale, as no integer is NaN
    y = x.astype(size.dtype) / size
    coarse = jnp.round(y)
    n = _n_summed(x, values)
    summed, outputs = values.shape[:n], values.shape[n:]
    parts = jnp.stack([coarse, jnp.round((y - coarse) * (2 * LARGEST))], axis=-1).astype(jnp.int8)
    # The sums' axis stands between two others: of a matrix, the compiler would merge a transpose into the product,
    # which then converts the weights to int32 and takes ten times as long.
    parts_TDN = parts.reshape(-1, *summed, 2)
    contracted = tuple(range(n)), tuple(range(1, n + 1))
    sums_FTN = jax.lax.dot_general(values, parts_TDN, (contracted, ((), ())), preferred_element_type=jnp.int32)
    both = jnp.moveaxis(sums_FTN.astype(jnp.float32).reshape(prod(outputs), -1, 2), 0, 1)
    both = both.reshape(*x.shape[:-1], *outputs, 2)
    size = size.reshape(*size.shape[:-1], *(1 for _ in outputs))
    y = (both[..., 0] + both[..., 1] / (2 * LARGEST)) * size
    return (y * expand(scale.reshape(outputs), y.ndim)).astype(x.dtype)

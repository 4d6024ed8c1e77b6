"""Cross-entropy of a linear layer's logits, one chunk of rows at a time, with its gradient in the same pass.

The logits of a whole batch would be the largest array of a training step. The gradients of rows and matrix are computed
together with each chunk's logits (Hsu et al. 2024, section 3.2), so that no logit is stored for the backward pass or
computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxformer.ops.broadcasting import expand
from jaxformer.ops.explicit_axes import with_auto_axes
from jaxformer.ops.losses import check_targets
from jaxformer.ops.precision import accumulation_dtype, upcast
from jaxformer.ops.quantized import Quantized

ALIGNMENT = 128
"""Rows and classes per matmul tile on GPU and TPU: chunks have a multiple of this many rows, and matrices are padded to
a multiple of this many classes."""


@partial(jax.tree_util.register_dataclass, data_fields=["W_DV", "b_V"], meta_fields=["soft_cap"])
@dataclass(frozen=True, eq=False)
class Unembedding:
    """Linear layer from features to logits. Its arrays are the leaves of a pytree.

    Attributes:
      W_DV: matrix, an array or an `ops.quantized.Quantized`.
      b_V: bias; None for none.
      soft_cap: c of c·tanh(logits / c); None for none.
    """

    W_DV: Any
    b_V: jax.Array | None = None
    soft_cap: float | None = None

    def logits(self, x_TD: jax.Array) -> jax.Array:
        """Return logits `(T, V)` for features `(T, D)`, or `(V,)` for `(D,)`."""
        logits_TV = x_TD @ self.W_DV
        if self.b_V is not None:
            logits_TV = logits_TV + expand(self.b_V, logits_TV.ndim)
        return logits_TV if self.soft_cap is None else self.soft_cap * jnp.tanh(logits_TV / self.soft_cap)


def rows_per_chunk(n_rows: int, n_classes: int, max_logits: int) -> int:
    """Return the number of rows per chunk, for the fewest chunks of equal length with at most `max_logits` logits each.

    The last chunk may need padding. With several chunks, their rows are a multiple of `ALIGNMENT` if that many fit into
    one.
    """
    most = max(1, max_logits // n_classes)
    if n_rows <= most:
        return n_rows
    unit = ALIGNMENT if most >= ALIGNMENT else 1
    n_chunks = -(-n_rows // (most // unit * unit))
    return -(-n_rows // (n_chunks * unit)) * unit


@with_auto_axes
def linear_cross_entropy(
    x_ND: jax.Array,
    unembedding: Unembedding,
    targets_N: jax.Array,
    weights_N: jax.Array,
    max_logits: int,
    smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sums over N rows of the cross-entropy with and without label smoothing, in nats, as float32
    scalars.

    Logits have the dtype of the rows; everything after them is in float32. The first sum is differentiable in x, W, b
    and the weights; with smoothing, the second is treated as a constant.

    Args:
      targets_N: integers from 0 to V - 1; any other yields NaN, unless its weight is 0.
      max_logits: maximum number of logits computed at once.
      smoothing: ε of label smoothing (Szegedy et al. 2016, section 7).
    """
    targets_N = check_targets(x_ND.shape[:1], targets_N, weights_N)
    weights_N = jnp.asarray(weights_N).astype(accumulation_dtype(x_ND.dtype))
    W_DV = unembedding.W_DV
    if isinstance(W_DV, Quantized):
        W_DV = (W_DV.values.astype(W_DV.scale.dtype) * W_DV.scale).astype(x_ND.dtype)
    n_rows, n_classes = len(x_ND), W_DV.shape[-1]
    shape = _Shape(n_classes, rows_per_chunk(n_rows, n_classes, max_logits), unembedding.soft_cap, smoothing)
    return _weighted_sums(shape, x_ND, W_DV, unembedding.b_V, weights_N, targets_N)


class _Shape(NamedTuple):
    """Static arguments."""

    n_classes: int
    n_rows: int
    """Rows per chunk."""
    soft_cap: float | None
    smoothing: float


class _Chunk(NamedTuple):
    """Results of a chunk: losses per row, and gradients, None where not needed."""

    smoothed_C: jax.Array
    nll_C: jax.Array
    to_x_CD: jax.Array | None = None
    to_W_DV: jax.Array | None = None
    to_b_V: jax.Array | None = None


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _weighted_sums(
    shape: _Shape, x_ND: jax.Array, W_DV: jax.Array, b_V: jax.Array | None, weights_N: jax.Array, targets_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return `linear_cross_entropy`."""
    return _sums(_all_chunks(shape, (False, False, False), x_ND, W_DV, b_V, weights_N, targets_N), weights_N)


def _sums(results: _Chunk, weights_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(results.smoothed_C * weights_N), jnp.sum(results.nll_C * weights_N)


@partial(_weighted_sums.defjvp, symbolic_zeros=True)
def _weighted_sums_jvp(shape: _Shape, primals: tuple, tangents: tuple) -> tuple:
    """Return the sums and their tangents, inner products of gradients with the arguments' tangents, whose transpose
    only scales the gradients."""
    is_constant = [t is None or isinstance(t, SymbolicZero) for t in tangents[:4]]
    needed = tuple(not constant for constant in is_constant[:3])
    results = _all_chunks(shape, needed, *primals)
    grads = (results.to_x_CD, results.to_W_DV, results.to_b_V, results.smoothed_C)
    derivatives = [
        jnp.sum(upcast(grad) * upcast(tangent))
        for grad, tangent, constant in zip(grads, tangents, is_constant, strict=False)
        if grad is not None and not constant
    ]
    sums = _sums(results, primals[3])
    tangent = sum(derivatives, jnp.zeros_like(sums[0]))
    return sums, (tangent, jnp.zeros_like(tangent) if shape.smoothing else tangent)


def _all_chunks(
    shape: _Shape,
    needed: tuple[bool, ...],
    x_ND: jax.Array,
    W_DV: jax.Array,
    b_V: jax.Array | None,
    weights_N: jax.Array,
    targets_N: jax.Array,
) -> _Chunk:
    """Return losses and gradients of all rows; gradients with respect to x, W and b where `needed`."""
    N, V, C = len(x_ND), shape.n_classes, shape.n_rows
    padding, n = -V % ALIGNMENT, -(-N // C)
    W_DV = jnp.pad(W_DV, ((0, 0), (0, padding)))
    b_V = None if b_V is None else jnp.pad(b_V, (0, padding))
    one_chunk, class_V = partial(_chunk, shape, needed, W_DV, b_V), jnp.arange(V + padding, dtype=jnp.int32)
    if n == 1:
        results = one_chunk(x_ND, weights_N, targets_N, class_V)
        # XLA's CPU compiler would merge the matmul with a transpose after it into a form that takes its slow path.
        results = results._replace(to_W_DV=jax.lax.optimization_barrier(results.to_W_DV))
    else:

        def in_chunks(rows_NX: jax.Array) -> jax.Array:
            padded = jnp.pad(rows_NX, [(0, n * C - N)] + [(0, 0)] * (rows_NX.ndim - 1))
            return padded.reshape(n, C, *rows_NX.shape[1:])

        def add_chunk(total: tuple, chunk: tuple) -> tuple[tuple, _Chunk]:
            result = one_chunk(*chunk)
            total = jax.tree.map(jnp.add, total, (result.to_W_DV, result.to_b_V))
            return total, result._replace(to_W_DV=None, to_b_V=None)

        zeros = lambda a, is_needed: jnp.zeros(a.shape, accumulation_dtype(a.dtype)) if is_needed else None  # noqa: E731
        # JAX would hoist the loop-invariant one-hot rows, as large as the logits, out of the loop, so each iteration
        # gets its own copy of the class indices.
        classes = jnp.broadcast_to(class_V, (n, *class_V.shape))
        total, results = jax.lax.scan(
            add_chunk,
            (zeros(W_DV, needed[1]), zeros(b_V, needed[2])),
            (in_chunks(x_ND), in_chunks(weights_N), in_chunks(targets_N), classes),
        )
        results = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:N], results)
        results = results._replace(to_W_DV=total[0], to_b_V=total[1])
    return results._replace(
        to_W_DV=None if results.to_W_DV is None else results.to_W_DV[:, :V],
        to_b_V=None if results.to_b_V is None else results.to_b_V[:V],
    )


def _chunk(
    shape: _Shape,
    needed: tuple[bool, ...],
    W_DV: jax.Array,
    b_V: jax.Array | None,
    x_CD: jax.Array,
    weights_C: jax.Array,
    targets_C: jax.Array,
    class_V: jax.Array,
) -> _Chunk:
    """Return losses and gradients of a chunk; gradients with respect to x, W and b where `needed`.

    Args:
      class_V: class indices; those from `shape.n_classes` on are padding.
    """
    V, ε = shape.n_classes, shape.smoothing
    logits_CV = Unembedding(W_DV, b_V, shape.soft_cap).logits(x_CD)
    upcast_CV = upcast(logits_CV)
    among_CV = upcast_CV
    if len(class_V) > V:
        among_CV += jnp.where(class_V < V, 0, -jnp.inf).astype(upcast_CV.dtype)[None]
    largest_C, total_C = _largest_and_total(among_CV)
    # The maximum is subtracted first: added to a large logit, the logarithm would lose its digits.
    of_target_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=1, mode="clip")[:, 0]
    # Padding classes have logits as well, which must not yield a valid loss.
    is_class_C = (targets_C >= 0) & (targets_C < V) | (weights_C == 0)
    of_target_C = jnp.where(is_class_C, upcast(of_target_C), jnp.nan) - largest_C
    nll_C = smoothed_C = jnp.log(total_C) - of_target_C
    share_V = jnp.where(class_V < V, ε / V, 0).astype(upcast_CV.dtype)
    if ε:
        smoothed_C = nll_C + ε * of_target_C - jnp.sum(share_V[None] * (upcast_CV - largest_C[:, None]), axis=1)
    if not any(needed):
        return _Chunk(smoothed_C, nll_C)
    one_hot_CV = (class_V[None] == targets_C[:, None]).astype(upcast_CV.dtype)
    grad_CV = jnp.exp(among_CV - largest_C[:, None]) / total_C[:, None] - (1 - ε) * one_hot_CV
    if ε:
        grad_CV -= share_V[None]
    grad_CV *= weights_C[:, None]
    if shape.soft_cap is not None:
        grad_CV *= 1 - jnp.square(upcast_CV / shape.soft_cap)
    grad_CV = grad_CV.astype(logits_CV.dtype)
    sums = accumulation_dtype(grad_CV.dtype)
    return _Chunk(
        smoothed_C,
        nll_C,
        grad_CV @ W_DV.T if needed[0] else None,
        jnp.einsum("cd,cv->dv", x_CD, grad_CV, preferred_element_type=sums) if needed[1] else None,
        jnp.sum(grad_CV, axis=0, dtype=sums) if needed[2] else None,
    )


@jax.custom_jvp
def _largest_and_total(logits_CV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest logit of each row, and the sum of exponentials of the logits minus the largest, each `(C,)`.

    On a GPU, both come from one pass over the logits (Milakov and Gimelshein 2018, algorithm 3).
    """
    return jax.lax.platform_dependent(logits_CV, cuda=_in_one_pass, default=_in_two_passes)


@_largest_and_total.defjvp
def _largest_and_total_jvp(primals: tuple, tangents: tuple) -> tuple:
    """Return both and their tangents, with the largest logit held constant because no loss depends on it."""
    (logits_CV,), (tangent_CV,) = primals, tangents
    largest_C, total_C = _largest_and_total(logits_CV)
    to_total_C = jnp.sum(jnp.exp(logits_CV - largest_C[:, None]) * tangent_CV, axis=1)
    return (largest_C, total_C), (jnp.zeros_like(largest_C), to_total_C)


def _in_two_passes(logits_CV: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest_C = jnp.max(logits_CV, axis=1)
    return largest_C, jnp.sum(jnp.exp(logits_CV - largest_C[:, None]), axis=1)


def _in_one_pass(logits_CV: jax.Array) -> tuple[jax.Array, jax.Array]:
    lowest = jnp.finfo(logits_CV.dtype).min  # finite: the difference of two infinities is NaN

    def add(a: tuple, b: tuple) -> tuple:
        largest = jnp.maximum(a[0], b[0])
        return largest, a[1] * jnp.exp(a[0] - largest) + b[1] * jnp.exp(b[0] - largest)

    finite_CV = jnp.maximum(logits_CV, lowest)
    # The ones depend on the logits: JAX would hoist constant ones out of the loop over chunks, which would then read
    # them from memory.
    ones_CV, zero = 0 * finite_CV + 1, jnp.zeros((), logits_CV.dtype)
    return jax.lax.reduce((finite_CV, ones_CV), (zero + lowest, zero), add, (1,))

"""Work-arounds for compilers: what each is for, its measured gain, and the version that it was seen with.

All compute what the plain form computes. Each can go once the compiler of a later version needs it no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PLATFORMS_WITHOUT_BFLOAT16_SUMS = ("cpu",)
"""Platforms whose compiler crashes on an all-reduce in bfloat16 over a tensor axis (all-reduce promotion), which is
refused instead; seen with jax 0.10."""


MAX_ROWS = 16
"""Most rows of an example whose product with a `FirstFactor` has the matrix first: those of a decode step or of a
draft's proposals, not of a prompt."""


@jax.custom_vjp
def separate_gradient_transpose(matrix: jax.Array) -> jax.Array:
    """Return a matrix, whose gradient is computed in two steps: a product, and its transposition.

    XLA's CPU compiler merges the two into one product with both factors transposed, which takes its slow path. Gain: a
    step of `quick` takes 111 ms in place of 128 ms. Seen with jax 0.10.
    """
    return matrix


separate_gradient_transpose.defvjp(lambda w: (w, None), lambda _, g: (jax.lax.optimization_barrier(g.T).T,))


def psum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Return `jax.lax.psum` over those axes that have several devices.

    XLA's partitioner crashes on a sum over axes of one device when `tensor` has more. Seen with jax 0.10.
    """
    larger = tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    return jax.lax.psum(x, larger) if larger else x


def all_gather(x: jax.Array, axis_name: str, axis: int, ring_lengths: Sequence[int]) -> jax.Array:
    """Return a tiled `jax.lax.all_gather`, ring by ring; its gradient is a reduce-scatter, ring by ring.

    A mesh axis of 256 TPUs may lie over a square of 16 by 16. XLA sums over a square at once by an all-reduce and a
    slice, but over a line by a reduce-scatter. Gain: half of the traffic. Seen with jax 0.10.

    Args:
      ring_lengths: see `rings`.
    """
    for group in ring_groups(ring_lengths):
        x = jax.lax.all_gather(x, axis_name, axis=axis, tiled=True, axis_index_groups=group)
    return x


def rings(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """Return the lengths of the straight lines in which TPUs wind through the machine, the fastest last.

    Other devices, and lines without a regular length, are one ring.
    """
    coords = [tuple(device.coords) if device.platform == "tpu" else () for device in devices]
    lengths: list[int] = []
    while len(coords) > 1:
        moves = [tuple(x != y for x, y in zip(a, b, strict=True)) for a, b in pairwise(coords)]
        n = next((i for i, move in enumerate(moves, 1) if move != moves[0]), len(coords))
        if sum(moves[0]) != 1 or len(coords) % n:
            return (len(devices),)
        lengths, coords = [n, *lengths], coords[::n]
    return tuple(lengths) or (1,)


def ring_groups(lengths: Sequence[int]) -> list[list[list[int]] | None]:
    """Return for each ring, the fastest first, the groups of device indices that form one; None for all devices."""
    if len(lengths) == 1:
        return [None]
    index = np.arange(prod(lengths)).reshape(lengths)
    return [np.moveaxis(index, i, -1).reshape(-1, n).tolist() for i, n in reversed(list(enumerate(lengths)))]


def update_slice(array: jax.Array, part: jax.Array, start: jax.Array | int, axis: int) -> jax.Array:
    """Return `jax.lax.dynamic_update_slice_in_dim`, which stays one under `vmap` if the start is the same for all.

    JAX's batching rule makes a scatter of it, and XLA copies the array for that, at every decode step the cache. Seen
    with jax 0.10.
    """

    def update(array: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(array, part, start, axis)

    put: Callable[..., jax.Array] = jax.custom_batching.custom_vmap(update)

    @put.def_vmap  # type: ignore[attr-defined]
    def batched(
        size: int, is_batched: list[bool], array: jax.Array, part: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, bool]:
        if is_batched[2]:
            return jax.vmap(update, tuple(0 if b else None for b in is_batched))(array, part, start), True
        if not is_batched[0]:
            array = jnp.broadcast_to(array, (size, *array.shape))
        if not is_batched[1]:
            part = jnp.broadcast_to(part, (size, *part.shape))
        return update_slice(array, part, start, axis + 1), True

    return put(array, part, jnp.asarray(start))


@partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=[])
@dataclass(frozen=True)
class FirstFactor:
    """Matrix W whose transpose is stored, and that supports `x @ W`: of few rows per example as `(Wᵀ xᵀ)ᵀ`.

    XLA's CPU compiler is slow at few rows times a matrix of more rows than columns: of (2048,256) and 1, 8 and 64 rows,
    it takes 218, 316 and 868 us on one core with AVX-512, and this form 147, 182 and 721. Gain: a decode step of 4
    blocks of width 256 takes 0.92 of the time for 1 text, 0.90 for 8, 1.03 for 64. Seen with jax 0.10.

    Attributes:
      matrix: W, `(D, F)`, itself a transpose, which is not computed.
    """

    matrix: jax.Array

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """Return `(…, D)` times `(D, F)`."""
        return (self.matrix.T @ x.T).T if x.ndim == 2 and len(x) <= MAX_ROWS else x @ self.matrix


def zero_after(x: jax.Array) -> jax.Array:
    """Return 0 times a floating-point array: added to a value, it orders the value's use after the array.

    In a loop, XLA copies a cache at every step in which it could be read after it was written. It orders by data
    dependence, and leaves such a sum alone. Seen with jax 0.10.
    """
    return 0 * x


def kth_largest(x: jax.Array, k: int) -> jax.Array:
    """Return the k-th largest number of a vector, as the minimum of the k largest.

    XLA's CPU compiler turns the last of the k largest, a slice, into a sort of all. Seen with jax 0.10.
    """
    return jax.lax.top_k(x, k)[0].min()


def stored(x: jax.Array) -> jax.Array:
    """Return an array that is read from memory where it is used.

    XLA's GPU compiler would compute updates of parameters a second time to sum their squares, and keep a copy of the
    optimizer's old state for that. Gain: with `in_order`, a step of GPT-2 of two blocks copies 1 array in place of 68.
    It would compute mean and norm of rows again where they are differentiated, and store the rows in float32 for the
    gradients of gain and shift. Gain: 4 % of the memory traffic of a step of gpt2_124m. Seen with jax 0.10.
    """
    return jax.lax.optimization_barrier(x)


def in_order(first: Any, then: Any) -> tuple[Any, Any]:
    """Return two trees of arrays, the second to be used once the first is computed.

    XLA's GPU compiler sums the squares of parameters while it updates them, and then cannot write the new ones over the
    old ones, but copies them. Computed first, the sums come with the conversion to bfloat16. Gain: 1 copy in place of
    196 in a step of gpt2_124m. Seen with jax 0.10.
    """
    return jax.lax.optimization_barrier((first, then))

"""Compiler workarounds, each with its purpose, measured gain and the JAX version that needed it.

Each computes the same result as the plain form, and can be removed once the compiler no longer needs it.
"""

from __future__ import annotations

import os
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
"""Platforms whose compiler crashes on a bfloat16 all-reduce over a tensor axis (all-reduce promotion); there it is
refused instead. Seen with jax 0.10."""


MAX_ROWS = 16
"""Maximum rows per example for which a matmul with a `FirstFactor` has the matrix as first factor: enough for a decode
step or a draft's proposals, not for a prompt."""


def run_once_options(platform: str) -> dict[str, Any] | None:
    """Return compiler options for a program that runs once, such as initialisation: on a CPU a lower optimisation
    level, unless XLA_FLAGS sets one.

    By default, XLA's CPU compiler spends far longer on random draws than they take. Gain: the initial state of `quick`
    compiles in 3.2 instead of 5.8 s of CPU time with jax 0.10, and in 3.3 instead of 7.8 s with 0.12, bit-identical.
    """
    level, flags = "xla_backend_optimization_level", os.environ.get("XLA_FLAGS", "").strip()
    is_given = level in flags or (flags and not flags.startswith("-"))  # otherwise XLA_FLAGS names a file
    return None if platform != "cpu" or is_given else {level: 1}


def low_memory_options(platform: str) -> dict[str, Any] | None:
    """Return compiler options for a program that recomputes activations in order to fit into memory: on a CPU, XLA's
    schedule of least memory, with the barriers that separate the recomputation from the first computation.

    By default, XLA's CPU compiler begins all conversions of parameters at once, to keep cores busy, and removes the
    barriers before it merges equal operations, so nothing is computed twice and all activations are kept. Gain: the
    gradient of SmolLM2-135M in float64 takes 0.60 instead of 1.27 GB on each of two devices, next to the float32
    parameters. Seen with jax 0.10; 0.12 merges nothing, and the schedule alone saves a quarter of the temporary memory.
    """
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return options | {"xla_disable_hlo_passes": "cse_barrier_expander"} if platform == "cpu" else None


@jax.custom_vjp
def separate_gradient_transpose(matrix: jax.Array) -> jax.Array:
    """Return the matrix unchanged, but compute its gradient in two steps: a matmul, then a transpose.

    XLA's CPU compiler merges the two into one matmul with both factors transposed, which takes its slow path. Gain: a
    step of `quick` takes 111 ms instead of 128 ms. Seen with jax 0.10.
    """
    return matrix


separate_gradient_transpose.defvjp(lambda w: (w, None), lambda _, g: (jax.lax.optimization_barrier(g.T).T,))


def psum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Return `jax.lax.psum` over the axes that have several devices.

    XLA's partitioner crashes on a sum over axes of one device when `tensor` has more. Seen with jax 0.10
    and 0.12.
    """
    larger = tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    return jax.lax.psum(x, larger) if larger else x


def all_gather(x: jax.Array, axis_name: str, axis: int, ring_lengths: Sequence[int]) -> jax.Array:
    """Return a tiled `jax.lax.all_gather`, ring by ring; its gradient is a reduce-scatter, ring by ring.

    A mesh axis of 256 TPUs may span a square of 16 by 16. XLA sums over a whole square by an all-reduce and a slice,
    but over a line by a reduce-scatter. Gain: half of the traffic. Seen with jax 0.10 and 0.12.

    Args:
      ring_lengths: see `rings`.
    """
    for group in ring_groups(ring_lengths):
        x = jax.lax.all_gather(x, axis_name, axis=axis, tiled=True, axis_index_groups=group)
    return x


def rings(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """Return the lengths of the straight lines that TPUs form in the machine's topology, the fastest-varying last.

    Other devices, and lines of irregular length, count as one ring.
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
    """Return the groups of device indices that form rings, for each length, the fastest-varying first; None for all
    devices."""
    if len(lengths) == 1:
        return [None]
    index = np.arange(prod(lengths)).reshape(lengths)
    return [np.moveaxis(index, i, -1).reshape(-1, n).tolist() for i, n in reversed(list(enumerate(lengths)))]


def update_slice(array: jax.Array, part: jax.Array, start: jax.Array | int, axis: int) -> jax.Array:
    """Return `jax.lax.dynamic_update_slice_in_dim`, preserved under `vmap` if all examples share the start.

    JAX's batching rule turns it into a scatter. Gain: decode steps of 4 blocks of width 256 for 16 rows and 1,024 slots
    take 0.89 of the time with jax 0.10, and 0.91 with 0.12.
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


@jax.custom_vjp
def batched_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays unchanged; under `vmap`, all of them are batched if any is, and so are their cotangents.

    cuDNN's attention in `jax.nn` raises if only some of queries, keys, values and the output's cotangent are batched,
    as in per-example gradients, `vmap(grad)`. XLA removes the selects. Seen with jax 0.10; mended in
    jax 0.11.1, so it goes when that is the oldest supported version.
    """
    return _select_by(arrays, arrays)


def _select_by(given: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Return arrays, each a select between it and itself by a condition that depends on all of `given`."""
    condition = sum(x[(0,) * x.ndim].astype(jnp.float32) for x in given) > 0
    return tuple(jnp.where(condition, x, x) for x in arrays)


batched_together.defvjp(
    lambda *arrays: (_select_by(arrays, arrays), arrays),
    lambda arrays, cotangents: _select_by(arrays, cotangents),
)


@partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=[])
@dataclass(frozen=True)
class FirstFactor:
    """Matrix W that is stored transposed and supports `x @ W`, computed as `(Wᵀ xᵀ)ᵀ` for few rows per example.

    XLA's CPU compiler is slow at multiplying few rows by a matrix with more rows than columns: for (2048,256) and 1, 8
    and 64 rows, it takes 218, 316 and 868 us on one core with AVX-512, and this form 147, 182 and 721. Gain: decode
    steps of 4 blocks of width 256 for 8 rows take 0.94 of the time with jax 0.10, and 0.92 with 0.12.

    Attributes:
      matrix: W, `(D, F)`, a lazy transpose of the stored matrix.
    """

    matrix: jax.Array

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """Return the matmul of `(…, D)` and `(D, F)`."""
        return (self.matrix.T @ x.T).T if x.ndim == 2 and len(x) <= MAX_ROWS else x @ self.matrix


@partial(jax.tree_util.register_dataclass, data_fields=["matrix", "joint"], meta_fields=["first"])
@dataclass(frozen=True)
class Heads:
    """Matrix that is some heads of a larger one, with which `x @ W` multiplies: XLA computes that matmul once for all
    matrices that are parts of it.

    XLA's GPU compiler merges matmuls with a factor in common, but not those of a single row, and repeats the norm
    before them in each. Gain: a decode step of gpt2_124m has 114 kernels instead of 141. Seen with jax 0.10
    and 0.12.

    Attributes:
      matrix: W, `(D, H, K)`, an array or int8.
      joint: the larger one, `(D, N · K)`.
      first: index in it of the first head of W.
    """

    matrix: Any
    joint: Any
    first: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        shape: tuple[int, ...] = self.matrix.shape
        return shape

    def __rmatmul__(self, x_TD: jax.Array) -> jax.Array:
        """Return the matmul of `(T, D)` and `(D, H, K)`."""
        _, H, K = self.shape
        return (x_TD @ self.joint).reshape(len(x_TD), -1, K)[:, self.first : self.first + H]


def zero_after(x: jax.Array) -> jax.Array:
    """Return 0 times a floating-point array; adding it to a value makes the value's uses wait for the array.

    In a loop, XLA copies the cache at every step that might read it after writing it. The sum adds a data dependence,
    which XLA does not simplify away. Gain: decode steps of 4 blocks of width 256 for 16 rows and 1,024 slots take 0.26
    of the time with jax 0.10, and 0.24 with 0.12.
    """
    return 0 * x


def converted_after(matrix: jax.Array, x: jax.Array) -> jax.Array:
    """Return a matrix in the dtype of x, converted once x is computed; under `vmap`, once x of the first example is.

    XLA's CPU compiler schedules the conversions of all matrices first, and then holds all of them at once. The sum adds
    a data dependence, which XLA does not simplify away. Gain: the prefill of 128 tokens by SmolLM2-135M with int8
    weights needs 8 instead of 405 MiB of temporary memory, at equal speed. Seen with jax 0.10
    and 0.12.
    """
    never = _first(jax.lax.stop_gradient(x)) > jnp.inf
    return matrix.astype(x.dtype) + never.astype(x.dtype)


@jax.custom_batching.custom_vmap
def _first(x: jax.Array) -> jax.Array:
    """Return the first element, under `vmap` that of the first example."""
    return x.reshape(-1)[0]


@_first.def_vmap
def _first_of_batch(size: int, is_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return _first(x[0]), False


def kth_largest(x: jax.Array, k: int) -> jax.Array:
    """Return the k-th largest value of a vector, as the minimum of the k largest.

    XLA's CPU compiler turns a slice of the k largest into a sort of all values. Gain: 0.2 instead of 12.6 ms for the 50
    largest of 50,257. Seen with jax 0.10; 0.12 takes 0.2 ms either way.
    """
    return jax.lax.top_k(x, k)[0].min()


def materialized(x: jax.Array) -> jax.Array:
    """Return the array behind an optimisation barrier, so that it is read from memory instead of recomputed.

    XLA's GPU compiler would compute parameter updates a second time to sum their squares, and keep a copy of the
    optimizer's old state for that. Gain: with `in_order`, a step of a two-block GPT-2 copies 1 array instead of 68.
    It would also recompute the mean and norm of rows in the backward pass, and store the rows in float32 for the
    gradients of gain and shift. Gain: 4 % of the memory traffic of a step of gpt2_124m. Seen with jax 0.10; with 0.12,
    as with 0.10, it saves 2 % with two blocks.
    """
    return jax.lax.optimization_barrier(x)


def in_order(first: Any, then: Any) -> tuple[Any, Any]:
    """Return two trees of arrays, the second of which is used only after the first is computed.

    XLA's GPU compiler sums the squares of parameters while it updates them, so it cannot update them in place but
    copies them. Computed first, the sums are fused with the conversion to bfloat16. Gain: 1 copy instead of 196 in a
    step of gpt2_124m. Seen with jax 0.10; with 0.12, 1 copy instead of 14 with two blocks.
    """
    return jax.lax.optimization_barrier((first, then))

"""Batches of rows: which texts share one, the sizes that arrays are padded to, and the devices that they are on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxformer.models.objective import Params
from jaxformer.parallel.mesh import batch_sharding, batch_shards, make_mesh, replicated

MIN_ROWS_PER_DEVICE = 8
"""Minimum rows per device of a CPU; with fewer, one device with all cores is as fast."""
MIN_SLOTS_READ = 128
"""Minimum slots that attention reads; fewer save no noticeable time."""


def batch_by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return batches of indices of prompts with similar lengths, so that few programs are compiled."""
    by_length = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [by_length[start : start + size] for start in range(0, len(by_length), size)]


def left_aligned(rows: list[list[int]], width: int) -> np.ndarray:
    """Return rows of tokens as an array, `(B, width)` int32, padded on the right with zeros."""
    tokens_BP = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens_BP[i, : len(row)] = row
    return tokens_BP


def length_bucket(n: int) -> int:
    """Return n rounded up to a power of two from 8 on, or from 192 on three quarters of one: the padded length of a
    prompt, and the slots that attention reads. Finer steps would save work, but compile more programs."""
    size = doubled(8, n)
    return size * 3 // 4 if size >= 256 and n <= size * 3 // 4 else size


def read_slots(n: int, n_slots: int) -> int:
    """Return the number of slots that attention reads when n are in use."""
    return min(max(MIN_SLOTS_READ, length_bucket(n)), n_slots)


def doubled(size: int, n: int) -> int:
    """Return `size`, doubled until it is at least n."""
    while size < n:
        size *= 2
    return size


def padded_length(n: int, context_length: int) -> int:
    """Return the length that an encoder's text of n tokens is padded to: the context, or a doubled 512 if less."""
    return min(doubled(512, n), context_length)


def placement(params: Params) -> Callable[[np.ndarray], Any]:
    """Return a function that puts an array of rows on the parameters' devices, sharded if the rows divide evenly, else
    replicated."""
    if (mesh := _mesh_of(params)) is None:
        return lambda rows: rows
    even = lambda rows: len(rows) % batch_shards(mesh) == 0  # noqa: E731
    return lambda rows: jax.device_put(rows, batch_sharding(mesh) if even(rows) else replicated(mesh))


def row_mesh(params: Params, n_rows: int) -> Mesh | None:
    """Return the mesh of the parameters if only its `data` axis has several devices and the rows divide evenly among
    them; None otherwise."""
    mesh = _mesh_of(params)
    if mesh is None or not 1 < mesh.size == mesh.shape.get("data"):
        return None
    return mesh if n_rows % mesh.size == 0 else None


def _mesh_of(params: Params) -> Mesh | None:
    """Return the mesh that the parameters are on; None for a single device."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def spread_rows(params: Params, n_rows: int) -> Params:
    """Return parameters replicated from one CPU device to all, each of which then decodes its share of the rows;
    unchanged if the rows do not divide evenly, or into fewer than `MIN_ROWS_PER_DEVICE`.

    XLA runs attention and narrow matmuls of a decode step on one thread: two devices with one core each decode 64 rows
    in 0.65 of the time that one device with both cores takes.
    """
    n, first = jax.local_device_count(), jax.tree.leaves(params)[0]
    if jax.default_backend() != "cpu" or len(first.devices()) > 1:
        return params
    if n == 1 or n_rows % n or n_rows < n * MIN_ROWS_PER_DEVICE:
        return params
    return jax.device_put(params, replicated(make_mesh(devices=jax.local_devices())))

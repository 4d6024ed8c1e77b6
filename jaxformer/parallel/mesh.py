"""Sharding: a device mesh, and a table from the named axes of parameters to mesh axes.

The batch is split over all axes but `tensor`. `fsdp` also splits the parameters and the optimizer's state, which
are all-gathered where they are used (Rajbhandari et al. 2020, stage 3); `tensor` splits heads and hidden layers
(Shoeybi et al. 2019), for which XLA's partitioner inserts the communication; `expert` splits experts, and tokens travel
to them (Lepikhin et al. 2020).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.contract import ParameterAxes, Role
from jaxformer.errors import UserError
from jaxformer.ops import workarounds

AXES = ("data", "fsdp", "expert", "tensor")
"""Mesh axes from the slowest connection to the fastest: neighbours on the last axis are physical neighbours."""
BATCH = ("data", "fsdp", "expert")
"""Mesh axes that split the batch."""
Tree = TypeVar("Tree")
"""Pytree of arrays."""
REPLICATED = PartitionSpec()
"""Spec of an array that every device holds in full."""

TENSOR_AXES = ("vocab", "pixels", "patches", "classes", "joint", "heads", "hidden", "alignment", "maxout")
MESH_AXES: dict[str, str] = {
    "embed": "fsdp",
    "latent": "fsdp",
    "experts": "expert",
    **dict.fromkeys(TENSOR_AXES, "tensor"),
}
"""Mesh axis that splits each named parameter axis if its size divides the axis, but only the first such axis of a
parameter; other axes are not split."""
SPLIT_VECTORS = ("experts", "heads", "hidden")
"""Axes that are also split in vectors. Other vectors are replicated, because they are small."""


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of mesh axes by name, from a string such as 'data=2,fsdp=4'. Raises `UserError` for a malformed
    string, an unknown or repeated axis, or an invalid size."""
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or not re.fullmatch("[1-9][0-9]{0,6}", size):
            form = f"one size of at least 1 for each of some of the axes {', '.join(AXES)}"
            raise UserError(f"the mesh is {text!r}; it must be {form}, such as data=2,fsdp=4.")
        sizes[axis] = int(size)
    return sizes


def make_mesh(mesh: str = "", devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of all devices with the axes `AXES`; by default, `data` has all devices that the other axes leave.
    Raises `UserError` if the product of the sizes is not the number of devices."""
    devices = jax.devices() if devices is None else devices
    sizes = parse_mesh(mesh)
    n, n_others = len(devices), prod(size for axis, size in sizes.items() if axis != "data")
    sizes.setdefault("data", max(1, n // n_others))
    if prod(sizes.values()) != n:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UserError(f"the mesh needs {product} = {prod(sizes.values())} devices, but there are {n}; change `mesh`.")
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    # Devices are neighbours where the machine allows it; its axes are split if none is as long as one of the mesh.
    device_mesh = create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(device_mesh, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_shards(mesh: Mesh) -> int:
    """Return the number of shards of a batch."""
    return prod(mesh.shape[axis] for axis in BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that are replicated on every device."""
    return NamedSharding(mesh, REPLICATED)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays whose leading axis is split over all axes of `BATCH`."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def spec(axes: ParameterAxes, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return the partition spec of one parameter."""
    names = [name if axes.role is not Role.VECTOR or name in SPLIT_VECTORS else "" for name in axes.names]
    on_mesh = [MESH_AXES.get(name) for name in names]
    if not any(on_mesh):
        return REPLICATED
    split: list[str | None] = []
    for axis, n in zip(on_mesh, shape, strict=True):
        fits = axis and axis not in split and mesh.shape[axis] > 1 and n % mesh.shape[axis] == 0
        split.append(axis if fits else None)
    return PartitionSpec(*split)


def shardings(tree: object, axes: Mapping[str, ParameterAxes], mesh: Mesh) -> Any:
    """Return a sharding for every leaf of a tree of parameters with these axes (`nn.parameters.parameter_axes`), or of
    an optimizer state that contains such trees, where other names may precede a parameter's. Other leaves, such as step
    counts, are replicated."""

    def sharding(path: tuple, leaf: jax.Array) -> NamedSharding:
        if not leaf.ndim or not isinstance(path[-1], jax.tree_util.DictKey):
            return replicated(mesh)
        keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        names = (".".join(keys[i:]) for i in range(len(keys)))
        declared = next(axes[name] for name in names if name in axes)
        return NamedSharding(mesh, spec(declared, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def gather(params: Tree, specs: object, mesh: Mesh) -> Tree:
    """Return parameters all-gathered over `fsdp` from this device's shards, inside `jax.shard_map`. They remain split
    over `expert` and `tensor`. The gradient is a reduce-scatter over `fsdp`."""
    ring_lengths = workarounds.rings(mesh.devices[0, :, 0, 0].tolist())

    def gather_leaf(leaf: jax.Array, axes: PartitionSpec) -> jax.Array:
        if "fsdp" not in axes:
            return leaf
        return workarounds.all_gather(leaf, "fsdp", tuple(axes).index("fsdp"), ring_lengths)

    return jax.tree.map(gather_leaf, params, specs)


def sum_over_batch(tree: Tree, specs: object = REPLICATED) -> Tree:
    """Return arrays summed over the shards of a batch, inside `jax.shard_map`. `specs` is one spec for all leaves, or a
    tree of specs; gradients are already summed over the axes in their spec, by `gather`."""

    def sum_part(spec: PartitionSpec, part: Tree) -> Tree:
        axes = [axis for axis in BATCH if axis not in spec]
        return jax.tree.map(lambda leaf: workarounds.psum(leaf, axes), part)

    return jax.tree.map(sum_part, specs, tree)


def global_device_put(tree: object, sharding: NamedSharding) -> Any:
    """Return arrays sharded over all devices, from arrays that every process holds in full."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    put = lambda array: jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])  # noqa: E731
    return jax.tree.map(put, tree)


def local_rows(sharding: NamedSharding, n_rows: int) -> np.ndarray:
    """Return the indices of the rows of a batch that this process's devices hold."""
    indices = sharding.addressable_devices_indices_map((n_rows,)).values()
    return np.unique(np.concatenate([np.arange(n_rows)[index] for index in indices]))


def assemble(rows: object, row_indices: np.ndarray, n_rows: int, sharding: NamedSharding) -> Any:
    """Return a batch sharded over all devices, a tree of arrays, from the rows of each process and their indices in the
    batch; see `local_rows`."""
    if len(row_indices) == n_rows:
        return global_device_put(rows, sharding)

    def assemble_leaf(leaf: np.ndarray) -> jax.Array:
        shard = lambda index: leaf[np.searchsorted(row_indices, np.arange(n_rows)[index[0]])]  # noqa: E731
        return jax.make_array_from_callback((n_rows, *leaf.shape[1:]), sharding, shard)

    return jax.tree.map(assemble_leaf, rows)


@lru_cache(maxsize=4)
def _all_gather(mesh: Mesh) -> Callable:
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))


def local_copy(tree: Tree, mesh: Mesh) -> Tree:
    """Return a copy of arrays on one device of this process, for inspection by functions without a mesh."""
    if any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)):
        tree = _all_gather(mesh)(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def on_each_shard(function: Callable, mesh: Mesh, in_specs: object, out_specs: object) -> Callable:
    """Return `jax.shard_map` of a function over the batch axes; `tensor` is left to XLA's partitioner."""
    axes = set(AXES) if mesh.shape["tensor"] == 1 else set(BATCH)

    def without_tensor(specs: object) -> Any:
        return jax.tree.map(lambda spec: PartitionSpec(*(a if a != "tensor" else None for a in spec)), specs)

    specs = {"in_specs": without_tensor(in_specs), "out_specs": without_tensor(out_specs)}
    return jax.shard_map(function, mesh=mesh, axis_names=axes, check_vma=False, **specs)


def specs_of(tree: object) -> Any:
    """Return the `PartitionSpec` of each array of a tree, or of its `ShapeDtypeStruct`."""
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def abstract(tree: object, shardings: object) -> Any:
    """Return a tree of `ShapeDtypeStruct` for a tree's leaves, with their shardings."""
    struct = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(struct, tree, shardings)

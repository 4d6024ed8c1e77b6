"""Where arrays live: a mesh of devices, and a table from the named axes of parameters to its axes.

The batch is split over all axes but `tensor`. `fsdp` also splits the parameters and the optimizer's state, which
are gathered where they are used (Rajbhandari et al. 2020, stage 3); `tensor` splits heads and hidden layers
(Shoeybi et al. 2019), for which XLA's partitioner puts in the communication; `expert` splits experts, and tokens travel
to them (Lepikhin et al. 2020).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.contract import ParameterAxes, Role
from jaxformer.errors import UserError
from jaxformer.ops import workarounds

AXES = ("data", "fsdp", "expert", "tensor")
"""From the slowest connection to the fastest: neighbours on the last axis are neighbours in the machine."""
BATCH = ("data", "fsdp", "expert")
"""The axes that split the batch."""
REPLICATED = PartitionSpec()
"""Split over nothing."""

MESH_AXES: dict[str, str] = {
    "embed": "fsdp",
    "experts": "expert",
    **dict.fromkeys(("vocab", "pixels", "patches", "classes", "joint", "heads", "hidden", "maxout"), "tensor"),
}
"""Mesh axis that splits each named axis of a parameter, where it divides its length; other axes are not split."""
SPLIT_VECTORS = ("experts", "heads", "hidden")
"""Axes that are split in vectors, too. Other vectors are replicated, as they are small."""


def parse_mesh(text: str) -> dict[str, int]:
    """'data=2,fsdp=4' as a dict.

    Raises:
      UserError: not of that form, an unknown axis, one named twice, or a size that is none.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        axis, _, size = part.partition("=")
        if axis not in AXES:
            raise UserError(f"mesh {text!r} names an axis {axis!r}; the axes are {', '.join(AXES)}.")
        if axis in sizes or not re.fullmatch("[1-9][0-9]{0,6}", size):
            raise UserError(
                f"mesh {text!r} must give {axis} one size of at least 1 and below 10,000,000, such as data=2,fsdp=4."
            )
        sizes[axis] = int(size)
    return sizes


def make_mesh(text: str = "", devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all devices with the axes of `AXES`; `data` takes what the others leave, if it is not given.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = parse_mesh(text)
    n, taken = len(devices), prod(size for axis, size in sizes.items() if axis != "data")
    sizes.setdefault("data", max(1, n // taken))
    if prod(sizes.values()) != n:
        asked = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UserError(f"the mesh needs {asked} = {prod(sizes.values())} devices, but there are {n}; change --mesh.")
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    # Neighbours where the machine allows it; where no axis of the machine is as long as one of the mesh, it is split.
    placed = create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the batch is split."""
    return prod(mesh.shape[axis] for axis in BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, REPLICATED)


def batch_split(mesh: Mesh) -> NamedSharding:
    """The first axis over all axes of `BATCH`."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def spec(axes: ParameterAxes, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return the mesh axes of one parameter."""
    names = [name if axes.role is not Role.VECTOR or name in SPLIT_VECTORS else "" for name in axes.names]
    on_mesh = [MESH_AXES.get(name) for name in names]
    if not any(on_mesh):
        return REPLICATED
    fits = [a and mesh.shape[a] > 1 and n % mesh.shape[a] == 0 for a, n in zip(on_mesh, shape, strict=True)]
    return PartitionSpec(*(a if fit else None for a, fit in zip(on_mesh, fits, strict=True)))


def shardings(tree: Any, axes: Mapping[str, ParameterAxes], mesh: Mesh) -> Any:
    """Return a sharding for every leaf of a tree of parameters, or of an optimizer's state that holds such trees.

    Other leaves, such as a count of steps, are replicated. In the state, names of its own may precede a parameter's.

    Args:
      axes: of each parameter; see `nn.parameters.parameter_axes`.
    """

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        if not leaf.ndim or not isinstance(path[-1], jax.tree_util.DictKey):
            return replicated(mesh)
        keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        names = (".".join(keys[i:]) for i in range(len(keys)))
        declared = next(axes[name] for name in names if name in axes)
        return NamedSharding(mesh, spec(declared, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def gather(params: Any, specs: Any, mesh: Mesh) -> Any:
    """Parameters whole but for `expert` and `tensor`, from this device's shards; to be called inside `jax.shard_map`.

    Differentiated, it sums the gradient over `fsdp` and leaves each device its shard: a reduce-scatter.
    """
    ring_lengths = workarounds.rings(mesh.devices[0, :, 0, 0].tolist())

    def gather_leaf(leaf: jax.Array, axes: PartitionSpec) -> jax.Array:
        if "fsdp" not in axes:
            return leaf
        return workarounds.all_gather(leaf, "fsdp", tuple(axes).index("fsdp"), ring_lengths)

    return jax.tree.map(gather_leaf, params, specs)


def sum_over_batch(tree: Any, specs: Any = REPLICATED) -> Any:
    """What each device has from its part of the batch, summed over all parts; inside `jax.shard_map`.

    Args:
      specs: one for all leaves, or a tree of them. `gather` has summed gradients over the axes they name already.
    """

    def sum_part(spec: PartitionSpec, part: Any) -> Any:
        axes = [axis for axis in BATCH if axis not in spec]
        return jax.tree.map(lambda leaf: workarounds.psum(leaf, axes), part)

    return jax.tree.map(sum_part, specs, tree)


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays that every process has whole, as arrays over all devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    one = lambda array: jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])  # noqa: E731
    return jax.tree.map(one, tree)


def local_rows(sharding: NamedSharding, n_rows: int) -> np.ndarray:
    """Which rows of a batch this process's devices hold."""
    held = sharding.addressable_devices_indices_map((n_rows,)).values()
    return np.unique(np.concatenate([np.arange(n_rows)[index] for index in held]))


def assemble(rows: Any, held: np.ndarray, n_rows: int, sharding: NamedSharding) -> Any:
    """The whole batch over all devices, a tree of arrays of which each process gives the rows `held`; see
    `local_rows`."""
    if len(held) == n_rows:
        return place(rows, sharding)

    def one(leaf: np.ndarray) -> jax.Array:
        at = lambda index: leaf[np.searchsorted(held, np.arange(n_rows)[index[0]])]  # noqa: E731
        return jax.make_array_from_callback((n_rows, *leaf.shape[1:]), sharding, at)

    return jax.tree.map(one, rows)


@lru_cache(maxsize=4)
def _made_whole(mesh: Mesh) -> Callable:
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))


def local_copy(tree: Any, mesh: Mesh) -> Any:
    """Arrays whole on one device of this process: for looking at a model with what knows no mesh."""
    if any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)):
        tree = _made_whole(mesh)(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def on_each_shard(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map` over the axes of the batch; `tensor`, where there is one, is left to the partitioner."""
    axes = set(AXES) if mesh.shape["tensor"] == 1 else set(BATCH)
    seen = lambda tree: jax.tree.map(lambda s: PartitionSpec(*(a if a != "tensor" else None for a in s)), tree)  # noqa: E731
    return jax.shard_map(
        function, mesh=mesh, in_specs=seen(in_specs), out_specs=seen(out_specs), axis_names=axes, check_vma=False
    )


def abstract(tree: Any, places: Any) -> Any:
    """Shapes and dtypes of a tree's leaves, with their shardings."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)

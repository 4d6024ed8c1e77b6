"""Topologies of TPUs that the compiler can compile for without them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from math import prod

import jax

from jaxformer.errors import UserError
from jaxformer.sharding import parse_mesh

FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
SLICES = {"v4": CUBES, "v5e": FLAT, "v5p": (*CUBES, "16x16x24"), "v6e": FLAT}
"""Common slices of each generation, for error messages; the compiler has more."""


def check_topology(topology: str, mesh: str) -> None:
    """Raise `UserError` for a name that is no topology, or a mesh with another number of devices than its chips."""
    generation, _, shape = topology.partition(":")
    known = [f"{name}:{slice_}" for name, slices in SLICES.items() for slice_ in slices]
    if generation not in SLICES or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        near = get_close_matches(topology, known, 3, 0) if generation not in SLICES else _nearest(generation, shape)
        raise UserError(f"there is no topology {topology!r}; near it are {', '.join(near)}.")
    n, axes = prod(map(int, shape.split("x"))), parse_mesh(mesh)
    fixed = prod(size for axis, size in axes.items() if axis != "data")
    if n != fixed * axes.get("data", max(1, n // fixed)):
        raise UserError(
            f"the mesh {mesh} is of {prod(axes.values())} devices, but {topology} has {n} chips; change --mesh."
        )


def topology_devices(topology: str) -> Sequence[jax.Device]:
    """Return the devices of a topology, for compilation only.

    Raises:
      UserError: the TPU compiler does not have it.
    """
    from jax.experimental import topologies

    try:
        devices: Sequence[jax.Device] = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # jax wraps the errors of libtpu in several types
        near = _nearest(*topology.split(":"))
        raise UserError(f"the TPU compiler knows no topology {topology!r}; near it are {', '.join(near)}.") from error
    return devices


def _nearest(generation: str, shape: str) -> list[str]:
    """Return the slices of a generation with the numbers of chips nearest to a shape's."""
    n_chips = prod(max(1, int(size)) for size in re.findall(r"\d+", shape)[:3])
    slices = sorted(SLICES[generation], key=lambda s: abs(prod(map(int, s.split("x"))) - n_chips))
    return [f"{generation}:{slice_}" for slice_ in slices[:3]]

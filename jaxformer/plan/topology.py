"""Device topologies to compile for without the hardware: TPU slices and hosts with NVIDIA GPUs."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

import jax

from jaxformer.errors import UserError
from jaxformer.parallel.memory import gpu_pool_share
from jaxformer.parallel.mesh import parse_mesh

FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
HOSTS = ("1", "2", "4", "8", "2x8", "4x8", "8x8", "16x8", "32x8", "64x8", "128x8")
SPECS = Path(__file__).with_name("gpus")
"""Folder with the specification of each GPU that the compiler needs."""
GPUS = {path.stem: HOSTS for path in sorted(SPECS.glob("*.txtpb"))}
SLICES = {"v4": CUBES, "v5e": FLAT, "v5p": (*CUBES, "16x16x24"), "v6e": FLAT, "tpu7x": CUBES, **GPUS}
"""Common slices of each TPU generation, and GPU hosts, for error messages; the compilers support more."""
TPU_KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
"""JAX's name of the devices of each TPU generation."""
DEVICES_PER_CHIP = {"tpu7x": 2}
"""Devices per chip, where they are not one: the two halves of a TPU7x."""

CUDNN_VERSION = 91200
"""Version of cuDNN assumed for absent GPUs: 9.12.0, as in their specifications."""


@dataclass(frozen=True)
class Compiler:
    """A compiler for devices that need not be present."""

    kind: str
    """Kind of devices that it compiles for."""
    packages: tuple[str, ...]
    """Packages that provide it; one suffices."""
    extra: str
    """Extra that installs it."""

    @property
    def is_installed(self) -> bool:
        """True if one of its packages can be imported."""
        return any(_is_installed(package) for package in self.packages)


TPU = Compiler("TPU", ("libtpu",), "plan")
GPU = Compiler("GPU", ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "plan-gpu")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def compiler_of(topology: str) -> Compiler:
    """Return the compiler for a topology."""
    return GPU if topology.partition(":")[0] in GPUS else TPU


def count_devices(topology: str) -> int:
    """Return the number of devices in a topology: 16 for the chips of `v5e:4x4`, two for each chip of `tpu7x:2x2x1`, 8
    GPUs for `h100:8` and `h100:1x8` (hosts x GPUs per host).

    Raises:
      UserError: there is no such topology.
    """
    generation, _, shape = topology.partition(":")
    pattern = r"([1-9]\d{0,3}x)?[1-9]\d?" if generation in GPUS else r"\d+(x\d+){1,2}"
    if generation not in SLICES or not re.fullmatch(pattern, shape):
        known = [f"{name}:{slice_}" for name, slices in SLICES.items() for slice_ in slices]
        near = get_close_matches(topology, known, 3, 0) if generation not in SLICES else _nearest(generation, shape)
        raise UserError(f"there is no topology {topology!r}; similar names are {', '.join(near)}.")
    return DEVICES_PER_CHIP.get(generation, 1) * prod(map(int, shape.split("x")))


def device_kind(topology: str) -> str:
    """Return JAX's name of a topology's devices."""
    generation = topology.partition(":")[0]
    if generation in TPU_KINDS:
        return TPU_KINDS[generation]
    described = re.search(r'device_description_str: "(.*)"', (SPECS / f"{generation}.txtpb").read_text())
    assert described is not None
    return described[1]


def host_size(topology: str) -> int | None:
    """Return the GPUs per host of a topology; None for TPUs, whose links also connect hosts."""
    return int(re.split("[:x]", topology)[-1]) if compiler_of(topology) is GPU else None


def check_topology(topology: str, mesh: str) -> None:
    """Raise `UserError` if a topology does not exist, or its number of devices does not match the mesh."""
    n, axes = count_devices(topology), parse_mesh(mesh)
    if not _fits(axes, n):
        devices = "GPUs" if compiler_of(topology) is GPU else "devices" if "tpu7x" in topology else "chips"
        problem = f"the mesh {mesh} has {prod(axes.values())} devices, but {topology} has {n} {devices}"
        raise UserError(f"{problem}; change `mesh`.")


def rescale_mesh(mesh: str, n: int) -> str:
    """Return the mesh adapted to n devices by changing the size of `fsdp`; unchanged if it fits or cannot be
    adapted."""
    axes = parse_mesh(mesh)
    others = prod(size for axis, size in axes.items() if axis != "fsdp")
    if _fits(axes, n) or n % others:
        return mesh
    return ",".join(f"{axis}={size}" for axis, size in {**axes, "fsdp": n // others}.items())


def _fits(axes: dict[str, int], n: int) -> bool:
    """Return True if a mesh has n devices; a missing `data` axis gets the devices that the others leave."""
    fixed = prod(size for axis, size in axes.items() if axis != "data")
    return n == fixed * axes.get("data", max(1, n // fixed))


def topology_devices(topology: str) -> Sequence[jax.Device]:
    """Return the devices of a topology, for compilation only. For GPUs, JAX's checks of the local GPU then assume this
    kind in the whole process.

    Raises:
      UserError: the TPU compiler does not know the topology, or the versions of the GPU compiler and jaxlib differ.
    """
    from jax.experimental import topologies

    generation, _, shape = topology.partition(":")
    if generation in GPUS:
        gpu_pool_share()  # check it first: JAX ignores its plugin if it is invalid
        hosts, _, n = shape.rpartition("x")
        spec = (SPECS / f"{generation}.txtpb").read_text()
        try:
            described = topologies.get_topology_desc("", "cuda", topology=f"1x{hosts or 1}x{n}", target_config=spec)
        except NotImplementedError as error:
            problem = f"jaxlib {jax.lib.__version__} cannot use the installed GPU compiler; install the same version"
            raise UserError(f"{problem}: pip install jax-cuda13-plugin=={jax.lib.__version__}.") from error
        gpus: Any = described.devices
        assume_gpu(gpus[0].compute_capability)
        return gpus
    try:
        devices: Sequence[jax.Device] = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # jax wraps the errors of libtpu in several types
        near = _nearest(generation, shape)
        problem = f"the TPU compiler knows no topology {topology!r}"
        raise UserError(f"{problem}; similar names are {', '.join(near)}.") from error
    return devices


def assume_gpu(compute_capability: str) -> None:
    """Make JAX trace cuDNN's attention as on a GPU of the given compute capability, such as "9.0", whatever the local
    device is.

    JAX's own checks query the local GPU and its libraries. Checked with jax 0.10.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def version(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    cudnn.check_cudnn_version = lambda: CUDNN_VERSION
    cudnn.check_compute_capability = lambda least: version(compute_capability) >= version(least)
    cudnn.is_cuda_compute_capability_equal = lambda other: version(compute_capability) == version(other)


def _nearest(generation: str, shape: str) -> list[str]:
    """Return the slices of a generation whose numbers of chips are nearest to a shape's."""
    n_chips = prod(max(1, int(size)) for size in re.findall(r"\d+", shape)[:3])
    slices = sorted(SLICES[generation], key=lambda s: abs(prod(map(int, s.split("x"))) - n_chips))
    return [f"{generation}:{slice_}" for slice_ in slices[:3]]

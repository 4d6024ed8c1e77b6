"""Settings of JAX and of the C library that must stand before the first array is made."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import stat
import sys
from math import prod
from pathlib import Path

import jax

from jaxformer.data.corpus import cache_root
from jaxformer.errors import UserError
from jaxformer.sharding import parse_mesh

MOST_DEVICES = 16
"""Each virtual device holds a copy of the parameters."""
MAX_MESH_DEVICES = 1024
"""Devices that a mesh may ask of one process; a virtual one costs threads and memory before anything is computed."""


def set_up(batch_size: int = 1, mesh: str = "", processes: int = 1) -> None:
    """Keep compiled programs on disk, and make the most of a CPU; accelerators are left as they are.

    Raises:
      UserError: others can write to the cache, or the mesh asks more devices than there can be.
    """
    root = cache_root()
    has_cache = all(is_private(folder) for folder in (root, root / "tokens", root / "compiled"))
    if has_cache and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    keep_freed_memory()
    given = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not given:
        jax.config.update("jax_num_cpu_devices", cpu_devices(batch_size, mesh, processes))


def is_private(folder: Path) -> bool:
    """Make a folder of the cache if it is missing; False where that is not possible, so that there is no cache.

    Raises:
      UserError: others can write to it: they could put programs there, which would be run.
    """
    remedy = "set JAXFORMER_CACHE to a folder of your own"
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    status = existing.stat()
    if existing != folder and status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise UserError(f"the cache {folder} would lie in {existing}, which others can write to; {remedy}.")
    if existing == folder and status.st_uid != os.geteuid():
        raise UserError(f"the cache {folder} belongs to another user, who could put programs there; {remedy}.")
    if existing == folder and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        command = f"chmod go-w {shlex.quote(str(folder))}"
        raise UserError(f"others can write to the cache {folder}, and put programs there; {remedy}, or: {command}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return True


def cpu_devices(batch_size: int, mesh: str = "", processes: int = 1) -> int:
    """Return how many virtual devices a CPU becomes: as many as the mesh asks of this process. Without a mesh, one per
    core, as far as the batch splits evenly: XLA uses several devices of one thread better than one device of several
    threads (0.40 against 0.48 s per step on two cores).

    Raises:
      UserError: more than `MAX_MESH_DEVICES`.
    """
    if sizes := parse_mesh(mesh):
        n = max(1, prod(sizes.values()) // processes)
        if n > MAX_MESH_DEVICES:
            raise UserError(f"the mesh {mesh} asks {n} devices of one process; give it at most {MAX_MESH_DEVICES}.")
        return n
    return max(n for n in range(1, min(cores(), MOST_DEVICES) + 1) if batch_size % (n * processes) == 0 or n == 1)


def cores() -> int:
    """Cores this process may use: by affinity, and by the quota of a container."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or no quota ("max")
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        n = min(n, max(1, int(quota) // int(period)))
    return n


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed and to serve it again.

    A training step frees and asks for hundreds of megabytes of scratch space; handing them back to the system
    each time means that every page is faulted in and zeroed anew, a fifth of the step's time on a CPU.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD
            mallopt(option, value)

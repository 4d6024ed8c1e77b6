"""Settings of JAX and of the C library that must stand before the first array is made."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shlex
import stat
import sys
from math import prod
from pathlib import Path

import jax

from jaxformer.data.token_cache import cache_root, make_private
from jaxformer.errors import UserError
from jaxformer.sharding import parse_mesh

MOST_DEVICES = 16
"""Each virtual device holds a copy of the parameters."""
MAX_VIRTUAL_DEVICES = 1024
"""Virtual devices of a CPU at most: each costs threads and memory before anything is computed."""

warn = logging.getLogger(__name__).warning


def set_up(batch_size: int = 1, mesh: str = "", processes: int = 1) -> None:
    """Keep compiled programs on disk, unless `JAX_COMPILATION_CACHE_DIR` says where, and make the most of a CPU;
    accelerators are left as they are.

    Raises:
      UserError: others can write to the cache.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        root = cache_root()
        if all(is_private(folder) for folder in (root, root / "tokens", root / "compiled")):
            jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    keep_freed_memory()
    given = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not given:
        jax.config.update("jax_num_cpu_devices", cpu_devices(batch_size, mesh, processes))


def is_private(folder: Path) -> bool:
    """Make a folder of the cache if it is missing, and return whether programs in it can be trusted: False where it
    cannot be made, and, with a warning, where it is another user's (root with somebody's cache, say).

    Raises:
      UserError: others can write to it: they could put programs there, which would be run.
    """
    remedy = "set JAXFORMER_CACHE to a folder of your own"
    try:
        above = next(path for path in folder.absolute().parents if path.exists())
        mode = above.stat().st_mode
        if not folder.exists() and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(f"the cache {folder} would lie in {above}, which others can write to; {remedy}.")
        make_private(folder)
        link, status = folder.lstat(), folder.stat()  # judged once it is there: it may have come from someone else
    except OSError:
        return False
    if {link.st_uid, status.st_uid} != {os.geteuid()}:
        warn(f"compiled programs are not kept: the cache {folder} belongs to another user; {remedy}.")
        return False
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        command = f"chmod go-w {shlex.quote(str(folder))}"
        raise UserError(f"others can write to the cache {folder}, and put programs there; {remedy}, or: {command}")
    return True


def cpu_devices(batch_size: int, mesh: str = "", processes: int = 1) -> int:
    """Return how many virtual devices a CPU becomes: as many as the mesh asks of this process. Without a mesh, one per
    core, as far as the batch splits evenly: XLA uses several devices of one thread better than one device of several
    threads (0.40 against 0.48 s per step on two cores).

    A mesh of more than `MAX_VIRTUAL_DEVICES` is not one of a CPU, which is left as it is: `make_mesh` refuses the mesh,
    unless there are as many accelerators.
    """
    if sizes := parse_mesh(mesh):
        n = max(1, prod(sizes.values()) // processes)
        return n if n <= MAX_VIRTUAL_DEVICES else 1
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

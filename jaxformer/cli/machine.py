"""Settings of JAX and the C library, applied before the first array is created."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import shlex
import stat
from math import prod
from pathlib import Path

from jaxformer.errors import UserError
from jaxformer.files import cache_root, make_private

MAX_DEFAULT_DEVICES = 16
"""Maximum number of virtual devices without a mesh; each holds a copy of the parameters."""
MAX_VIRTUAL_DEVICES = 1024
"""Maximum number of virtual CPU devices; each costs threads and memory even before any computation."""

PATIENCE = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 3600,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 7 * 86_400,
}
"""Seconds for which virtual devices wait for each other in a collective before XLA warns and terminates the process.
The defaults, 20 and 40, are exceeded by steps of minutes if other programs keep one device's thread waiting."""

warn = logging.getLogger(__name__).warning


def set_up(batch_size: int = 1, mesh: str = "", processes: int = 1, rows_per_device: int = 1) -> None:
    """Cache compiled programs on disk, unless `JAX_COMPILATION_CACHE_DIR` is set, and use all cores of a CPU. Raises
    `UserError` if others can write to the cache."""
    import jax  # takes most of a second, which --help need not wait for

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        root = cache_root()
        if all(is_private(folder) for folder in (root, root / "tokens", root / "compiled")):
            jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    keep_freed_memory()
    gc.enable()
    gc.freeze()  # imported objects stay alive, so do not scan them again
    gc.set_threshold(50_000, 10, 10)  # tracing makes many live objects; scanning them took 6 % of a short run's time
    given = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not given:
        jax.config.update("jax_num_cpu_devices", cpu_devices(batch_size, mesh, processes, rows_per_device))
    wait_patiently()


def wait_patiently() -> None:
    """Add the flags of `PATIENCE` that are not already set to the environment variable XLA_FLAGS, which XLA reads when
    JAX initialises its devices; skipped if the variable names a file."""
    given = os.environ.get("XLA_FLAGS", "")
    if not given.strip() or given.split()[0].startswith("-"):
        missing = [f"{name}={seconds}" for name, seconds in PATIENCE.items() if name not in given]
        os.environ["XLA_FLAGS"] = " ".join([*given.split(), *missing])


def is_private(folder: Path) -> bool:
    """Create a cache folder if it is missing, and return whether programs in it can be trusted. They cannot if the
    folder cannot be created or, with a warning, belongs to another user (for instance if root uses somebody's cache).
    Raises `UserError` if others can write to it, as they could put programs there that would run."""
    if not hasattr(os, "geteuid"):  # on Windows, modes do not show who can write to a folder
        return False
    remedy = "set JAXFORMER_CACHE to a folder of your own"
    try:
        above = next(path for path in folder.absolute().parents if path.exists())
        mode = above.stat().st_mode
        if not folder.exists() and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(f"the cache {folder} would lie in {above}, which others can write to; {remedy}.")
        make_private(folder)
        link, status = folder.lstat(), folder.stat()  # after creation, possibly by another process
    except OSError:
        return False
    if {link.st_uid, status.st_uid} != {os.geteuid()}:
        warn(f"compiled programs are not cached: the cache {folder} belongs to another user; {remedy}.")
        return False
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        command = f"chmod go-w {shlex.quote(str(folder))}"
        raise UserError(f"others can write to the cache {folder}, and put programs there; {remedy}, or: {command}")
    return True


def cpu_devices(batch_size: int, mesh: str = "", processes: int = 1, rows_per_device: int = 1) -> int:
    """Return the number of virtual CPU devices: those of the mesh, divided among the processes.

    Without a mesh, it is one per core, as far as the batch splits evenly into at least `rows_per_device` rows: XLA
    makes better use of several devices with one thread each than of one device with several threads (0.40 against
    0.48 s per step on two cores). It is 1 for a mesh of more than `MAX_VIRTUAL_DEVICES`, which `make_mesh` refuses
    unless there are as many accelerators.
    """
    from jaxformer.parallel.mesh import parse_mesh

    if sizes := parse_mesh(mesh):
        n = max(1, prod(sizes.values()) // processes)
        return n if n <= MAX_VIRTUAL_DEVICES else 1
    counts = range(1, min(cores(), MAX_DEFAULT_DEVICES) + 1)
    splits = lambda n: batch_size % n == 0 and batch_size >= n * rows_per_device  # noqa: E731
    return max(n for n in counts if n == 1 or splits(n * processes))


def cores() -> int:
    """Return the number of cores allowed by CPU affinity and a container's quota."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or no quota ("max")
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        n = min(n, max(1, int(quota) // int(period)))
    return n


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory instead of returning it to the system. A training step frees and allocates hundreds
    of megabytes of scratch memory; if it were returned each time, every page would be faulted in and zeroed anew, a
    fifth of the step time on a CPU.

    All threads then share one memory arena, for whose lock a tokenizer's threads would wait most of their time. The
    tokenizer therefore uses one thread, unless `TOKENIZERS_PARALLELISM` is set."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD
            mallopt(option, value)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def return_freed_memory() -> None:
    """Make glibc return each freed array of at least a megabyte to the system, after `keep_freed_memory`: programs that
    run once or twice, each with arrays of other sizes, would leave gaps that none of the next ones fits into."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-4, 65_536), (-3, 2**20)):  # M_MMAP_MAX, M_MMAP_THRESHOLD
            mallopt(option, value)


def release_freed_memory() -> None:
    """Make glibc return all freed memory to the system once, after much was freed that is not needed again: reading the
    checkpoint of SmolLM2-135M leaves 0.3 GB."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)

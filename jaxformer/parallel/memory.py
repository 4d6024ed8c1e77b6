"""Comparison of the memory that a compiled program needs with that of a device, before the program runs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import jax

from jaxformer.errors import UserError

REMEDY = (
    "lower `train.batch_size`, raise `compute.grad_accumulation_steps`, set `compute.remat='block'`, or split the "
    "parameters with `mesh='fsdp=N'`"
)
"""Changes that reduce the memory of a step, for error messages."""


def memory_needed(compiled: jax.stages.Compiled) -> int:
    """Return the peak bytes per device of a compiled program, according to the compiler's buffer assignment."""
    m: Any = compiled.memory_analysis()
    buffers = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return int(buffers + m.temp_size_in_bytes + m.generated_code_size_in_bytes)


def memory_capacity(device: jax.Device) -> int | None:
    """Return the bytes of memory of one local device, or None if unknown; virtual CPU devices share the machine's
    memory."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    machine = _machine_memory() if device.platform == "cpu" else None
    return None if machine is None else machine // jax.local_device_count()


def gpu_pool_share() -> float:
    """Return the fraction of a GPU's memory in JAX's pool: 0.75, unless XLA_CLIENT_MEM_FRACTION or
    XLA_PYTHON_CLIENT_MEM_FRACTION sets another, as in `jaxlib.xla_client`.

    Raises:
      UserError: the variable is not a positive number.
    """
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if text := os.environ.get(name):
            try:
                share = float(text)
            except ValueError:
                share = math.nan
            if not 0 < share < math.inf:
                raise UserError(f"{name} is {text!r}, which is not a positive number; set it to one such as 0.9.")
            return share
    return 0.75


def _machine_memory() -> int | None:
    """Return the bytes of physical memory, or the limit of the container; None on Windows."""
    if not hasattr(os, "sysconf"):
        return None
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            limits.append(int(text))
    return min(limits)


def _free_memory() -> int | None:
    """Return the bytes of memory and swap available to this program, including what it already uses; None if Linux does
    not report it."""
    try:
        lines = [line for file in ("meminfo", "self/status") for line in Path("/proc", file).read_text().splitlines()]
        fields = dict(line.split(":", 1) for line in lines)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree", "RssAnon"))
    except (OSError, ValueError, KeyError):
        return None


def check_parameters(params: object, n_devices: int, device: jax.Device) -> None:
    """Raise `UserError` if parameters (or their shapes and dtypes) and gradients exceed the memory of all `n_devices`
    devices, each with the memory of `device`. This is a lower bound on training's memory, checked before anything is
    computed; `check_memory` checks the whole step."""
    leaves = jax.tree.leaves(params)
    n_parameters, capacity = sum(leaf.size for leaf in leaves), memory_capacity(device)
    needed = sum(2 * leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if capacity is not None and needed > n_devices * capacity:
        limit = f"{format_bytes(needed)} of memory, but there are {format_bytes(n_devices * capacity)}"
        problem = f"the model has {n_parameters:,} parameters; with their gradients they need {limit}"
        raise UserError(f"{problem}; make it smaller: fewer blocks, or a smaller d_model, d_ff or vocab_size.")


def check_memory(compiled: jax.stages.Compiled, device: jax.Device) -> str:
    """Return a log line with the memory that a compiled step needs and that the device has; of a CPU, whose devices
    share the process, also of all its devices, and what else the process holds. Raises `UserError` if the step needs
    more than the device has or, on a CPU, more than other programs leave, where Linux would kill it silently."""
    needed, capacity = memory_needed(compiled), memory_capacity(device)
    if capacity is None:
        return f"memory per device: {format_bytes(needed)}"
    problem = f"a step needs {format_bytes(needed)} of memory per device, but"
    if needed > capacity:
        raise UserError(f"{problem} there are {format_bytes(capacity)}; {REMEDY}.")
    line, n = f"memory per device: {format_bytes(needed)} of {format_bytes(capacity)}", jax.local_device_count()
    if device.platform != "cpu":
        return line
    if (free := _free_memory()) is not None and needed > (share := free // n):
        raise UserError(f"{problem} other programs leave {format_bytes(share)}; close some, or {REMEDY}.")
    total = f", {format_bytes(n * needed)} on all {n} devices" if n > 1 else ""
    return f"{line}{total}, besides Python, compiled programs and evaluations"


def format_bytes(n_bytes: float) -> str:
    """Return bytes with three digits and a binary prefix: "23.5 GiB"."""
    power = min(5, max(0, int(math.log2(max(n_bytes, 1)) // 10)))
    return f"{n_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"

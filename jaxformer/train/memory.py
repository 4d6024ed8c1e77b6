"""Whether a compiled step fits into memory, before it runs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import jax

from jaxformer.errors import UserError

REMEDY = (
    "lower train.batch_size, raise compute.grad_accumulation_steps, set compute.remat to block, or split the "
    "parameters with --mesh fsdp=N"
)
"""What makes a step fit."""


def needed(compiled: Any) -> int:
    """Bytes a device that a compiled program holds at most, by the compiler's own plan of its buffers."""
    m = compiled.memory_analysis()
    held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return int(held + m.temp_size_in_bytes + m.generated_code_size_in_bytes)


def capacity(device: jax.Device) -> int | None:
    """Bytes of memory that one device of this process has; virtual CPU devices share the machine's. None: unknown."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return _machine_memory() // jax.local_device_count() if device.platform == "cpu" else None


def _machine_memory() -> int:
    """Physical memory, or the limit of the container."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            limits.append(int(text))
    return min(limits)


def check_parameters(params: Any, n_devices: int, device: jax.Device) -> None:
    """Refuse, before anything is computed, a model that all devices together have no room to train.

    Training holds at least the parameters and a gradient of each. Whether the rest fits, too, `check_memory` knows.

    Args:
      params: a tree of arrays, or of their shapes and dtypes.

    Raises:
      UserError: they do not fit.
    """
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    needs, has = sum(2 * leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)), capacity(device)
    if has is not None and needs > n_devices * has:
        raise UserError(
            f"the model has {count:,} parameters; with their gradients they need {size(needs)} of memory, and there "
            f"are {size(n_devices * has)}; make it smaller: fewer blocks, or a smaller d_model, d_ff or vocab_size."
        )


def check_memory(compiled: Any, device: jax.Device) -> str:
    """A line for the log: what a step needs of what there is.

    Raises:
      UserError: more than there is.
    """
    needs, has = needed(compiled), capacity(device)
    if has is None:
        return f"memory per device: {size(needs)}"
    if needs > has:
        raise UserError(f"a step needs {size(needs)} of memory per device, and there are {size(has)}; {REMEDY}.")
    return f"memory per device: {size(needs)} of {size(has)}"


def size(n_bytes: float) -> str:
    """Bytes for people."""
    power = min(5, max(0, int(math.log2(max(n_bytes, 1)) // 10)))
    return f"{n_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"

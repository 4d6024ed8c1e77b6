"""Programs for GPUs that return the same bits at every run: flags that XLA reads when JAX starts its devices.

https://openxla.org/xla/determinism
"""

from __future__ import annotations

import os

import jax
from jax._src.xla_bridge import backends_are_initialized

from jaxformer.errors import UserError

FLAGS = {"--xla_gpu_exclude_nondeterministic_ops": "true", "--xla_gpu_autotune_level": "0"}
"""Sums in one order, as the gradient of an embedding, a scatter-add, has none; and no autotuning, as two processes may
time kernels differently and choose others. A level of the user's own remains, for autotuning results from a file."""


def set_deterministic() -> None:
    """Add `FLAGS` to the environment variable XLA_FLAGS; to be called before the first array.

    Raises:
      UserError: JAX has already started GPUs without them.
    """
    if backends_are_initialized():
        check_deterministic(jax.default_backend())
    elif missing := missing_flags():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {missing}".strip()


def check_deterministic(platform: str) -> None:
    """Raise `UserError` where GPUs have started without `FLAGS`.

    Args:
      platform: platform of the devices: cpu, gpu or tpu.
    """
    if platform == "gpu" and (missing := missing_flags()):
        raise UserError(
            "compute.deterministic is true, but JAX has started its GPUs without the flags for it; set "
            f"XLA_FLAGS='{missing}' before the first array."
        )


def missing_flags() -> str:
    """Return those of `FLAGS` that XLA_FLAGS lacks, separated by spaces; raise `UserError` where it names a file."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    if flags and not flags[0].startswith("-"):  # XLA would look for a file of the longer name, and go on without
        raise UserError(
            f"XLA_FLAGS names the file {flags[0]}, to which compute.deterministic cannot add; set XLA_FLAGS to the "
            "flags themselves."
        )
    given = dict(flag.partition("=")[::2] for flag in flags)
    exclude, autotune = FLAGS
    lacks = {exclude: given.get(exclude) not in ("", "true", "1"), autotune: autotune not in given}
    return " ".join(f"{name}={value}" for name, value in FLAGS.items() if lacks[name])

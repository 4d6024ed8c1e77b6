"""Bit-reproducible programs on GPUs, through flags that XLA reads when JAX initialises its devices.

https://openxla.org/xla/determinism
"""

from __future__ import annotations

import os

import jax
from jax._src.xla_bridge import backends_are_initialized

from jaxformer.errors import UserError

FLAGS = {"--xla_gpu_exclude_nondeterministic_ops": "true", "--xla_gpu_autotune_level": "0"}
"""Flags that fix the order of sums, which scatter-adds such as an embedding's gradient otherwise lack, and that switch
off autotuning, whose timings may select different kernels in different processes. A user's own autotuning level is
preserved, for results loaded from a file."""


def set_deterministic() -> None:
    """Add `FLAGS` to the environment variable XLA_FLAGS. Call it before the first array is created.

    Raises:
      UserError: JAX has already initialised GPUs without them.
    """
    if backends_are_initialized():
        check_deterministic(jax.default_backend())
    elif missing := missing_flags():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {missing}".strip()


def check_deterministic(platform: str) -> None:
    """Raise `UserError` if GPUs were initialised without `FLAGS`.

    Args:
      platform: platform of the devices: cpu, gpu or tpu.
    """
    if platform == "gpu" and (missing := missing_flags()):
        problem = "`compute.deterministic` is true, but JAX has initialised its GPUs without the flags it needs"
        raise UserError(f"{problem}; set XLA_FLAGS='{missing}' before the first array.")


def missing_flags() -> str:
    """Return the flags of `FLAGS` that XLA_FLAGS lacks, separated by spaces."""
    given = dict(flag.partition("=")[::2] for flag in os.environ.get("XLA_FLAGS", "").split())
    exclude, autotune = FLAGS
    lacks = {exclude: given.get(exclude) not in ("", "true", "1"), autotune: autotune not in given}
    return " ".join(f"{name}={value}" for name, value in FLAGS.items() if lacks[name])

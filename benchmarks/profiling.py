"""Device time of a training step by kernel, from a profile by `jax.profiler`."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from benchmarks.harness import Figures
from benchmarks.training import jaxformer

STEPS = 5


def kernels(folder: Path, **job: Any) -> tuple[None, Figures]:
    """Run some training steps; return the milliseconds per step of the longest kernels."""
    step, _ = jaxformer(folder, **job)
    with jax.profiler.trace(str(folder / "profile")):
        results = [step(number) for number in range(STEPS)]
        jax.block_until_ready(results)
    return None, {f"{name}, ms per step": ms for name, ms in busiest(folder / "profile", STEPS).items()}


def busiest(folder: Path, steps: int, most: int = 25) -> dict[str, float]:
    """Return the milliseconds per step of the longest kernels in the newest profile, and of all kernels as 'total'.

    Kernels whose names differ only in a trailing number, such as those of different blocks, or in template arguments
    are combined. On a CPU, operations on XLA's threads take the place of kernels, and an operation includes those
    nested in it.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    planes = list(ProfileData.from_file(str(newest)).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    thread = "Stream" if gpus else "tf_XLA"
    lines = [line for plane in gpus or planes for line in plane.lines if line.name.startswith(thread)]
    ms: dict[str, float] = defaultdict(float)
    for event in (event for line in lines for event in line.events):
        if gpus or re.fullmatch(r"[\w.-]+", event.name):
            ms[re.sub(r"^void |<.*|\(.*|([._]\d+)+$", "", event.name)] += event.duration_ns / 1e6 / steps
    longest = sorted(ms, key=lambda name: -ms[name])[:most]
    return {"total": round(sum(ms.values()), 3), **{name: round(ms[name], 3) for name in longest}}

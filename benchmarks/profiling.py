"""Device time of a training step or a generated token by kernel, from a profile by `jax.profiler`."""

import gzip
import os
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from benchmarks import decoding
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


def decode(folder: Path, new: int, **job: Any) -> tuple[None, Figures]:
    """Generate tokens; return where the time of one goes."""
    generate, _ = decoding.jaxformer(folder, new=new, **job)
    began = time.perf_counter()
    generate(0)
    seconds = time.perf_counter() - began
    with jax.profiler.trace(str(folder / "profile")):
        generate(1)
    kept = Path(os.environ.get("PROFILES", os.devnull))
    if kept.is_dir():
        name = "_".join([str(job["shape"]) if isinstance(job["shape"], str) else "gpt2", job["weight_format"]])
        content = newest_profile(folder / "profile").read_bytes()
        (kept / f"decode_{re.sub(r'[^a-z0-9_]', '_', name)}.xplane.pb.gz").write_bytes(gzip.compress(content))
    events = device_events(folder / "profile")
    busy = end = 0.0
    for start, stop in sorted((start, start + duration) for _, start, duration in events):
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    span = end - min(start for _, start, _ in events)
    copies = [name for name, _, _ in events if "emcpy" in name]
    per_token = {
        "ms": 1e3 * seconds / new, "ms, profiled": span / new / 1e6, "ms of kernels, profiled": busy / new / 1e6,
        "ms between them, profiled": (span - busy) / new / 1e6, "kernels": (len(events) - len(copies)) / new,
        "copies": len(copies) / new, "copies to the host": sum("D2H" in name for name in copies) / new,
    }  # fmt: skip
    kernels = busiest(folder / "profile", new, most=12, digits=5)
    return None, {
        **{f"{name}, per token": round(value, 5) for name, value in per_token.items()},
        **{f"{name}, ms per token": ms for name, ms in kernels.items()},
    }


def newest_profile(folder: Path) -> Path:
    """Return the file of the newest profile."""
    return max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)


def device_events(folder: Path) -> list[tuple[str, float, float]]:
    """Return name, start and duration in nanoseconds of the kernels and copies in the newest profile, or on a CPU of
    XLA's operations."""
    planes = list(ProfileData.from_file(str(newest_profile(folder))).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    thread = "Stream" if gpus else "tf_XLA"
    lines = [line for plane in gpus or planes for line in plane.lines if line.name.startswith(thread)]
    events = (event for line in lines for event in line.events)
    each = [(event.name, event.start_ns, event.duration_ns) for event in events]
    return [event for event in each if gpus or re.fullmatch(r"[\w.-]+", event[0])]


def busiest(folder: Path, steps: int, most: int = 25, digits: int = 3) -> dict[str, float]:
    """Return the milliseconds per step of the longest kernels in the newest profile, and of all kernels as 'total'.

    Kernels whose names differ only in a trailing number, such as those of different blocks, or in template arguments
    are combined. On a CPU, operations on XLA's threads take the place of kernels, and an operation includes those
    nested in it.
    """
    ms: dict[str, float] = defaultdict(float)
    for name, _, duration in device_events(folder):
        ms[re.sub(r"^void |<.*|\(.*|([._]\d+)+$", "", name)] += duration / 1e6 / steps
    longest = sorted(ms, key=lambda name: -ms[name])[:most]
    return {"total": round(sum(ms.values()), digits), **{name: round(ms[name], digits) for name in longest}}

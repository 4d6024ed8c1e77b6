"""Device time by kernel, from a profile that `jax.profiler` wrote.

python benchmarks/kernel_times.py FOLDER [STEPS]
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

from jax.profiler import ProfileData


def busiest(folder: Path, steps: int, most: int = 25) -> dict[str, float]:
    """Return the milliseconds per step of the longest kernels in the newest profile, and of all of them as 'total'.

    Kernels whose names differ in a last number only, as those of different blocks do, count as one. On a CPU, which has
    no kernels, it is the operations that XLA's threads did, and one counts for those inside it as well.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    planes = list(ProfileData.from_file(str(newest)).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    thread = "Stream" if gpus else "tf_XLA"
    lines = [line for plane in gpus or planes for line in plane.lines if line.name.startswith(thread)]
    ms: dict[str, float] = defaultdict(float)
    for event in (event for line in lines for event in line.events):
        if gpus or re.fullmatch(r"[\w.-]+", event.name):
            ms[re.sub(r"([._]\d+)+$", "", event.name)] += event.duration_ns / 1e6 / steps
    longest = sorted(ms, key=lambda name: -ms[name])[:most]
    return {"total": round(sum(ms.values()), 3), **{name: round(ms[name], 3) for name in longest}}


def table(found: dict[str, float]) -> str:
    """Return a table with one row per kernel."""
    whole = found["total"] or 1.0  # nothing was seen where the profiler may not look at the device
    return "\n".join(f"{ms:10.3f} ms  {ms / whole:6.1%}  {name[:90]}" for name, ms in found.items())


if __name__ == "__main__":
    print(table(busiest(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)))

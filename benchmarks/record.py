"""Metadata of every benchmark and study: hardware, versions, commit and date."""

import contextlib
import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
STUDY_RESULTS = ROOT / "studies" / "results"


def cores() -> int:
    """Return the number of CPU cores allowed by affinity and a container's quota, like `jaxformer.cli.machine.cores`
    but without importing JAX, which not every worker should load."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        n = min(n, max(1, int(quota) // int(period)))
    return n


def cpu() -> str:
    """Return the CPU model as reported by the system."""
    if platform.system() == "Darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the named packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit(root: Path = ROOT) -> str:
    """Return the commit of a checkout, with `-dirty` if files other than results have changed; without git, the value
    of the environment variable COMMIT."""
    try:
        git = ("git", "-C", str(root))
        others = [f":!{folder.relative_to(ROOT)}" for folder in (RESULTS, STUDY_RESULTS)]
        changed = output_of(*git, "status", "--porcelain", "--", ".", *others)
        return output_of(*git, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


def write(name: str, figures: dict[str, Any], software: dict[str, str], folder: Path, **hardware: Any) -> Path:
    """Write `<name>.json`: the figures, and the hardware and software that they were measured on. The recorded load is
    the average number of runnable processes over five minutes, including this measurement.

    Args:
      name: name of the benchmark or study.
      figures: figures in JSON types; keys contain the units.
      software: result of `versions` in the measured processes.
      folder: folder of the file: `RESULTS` or `STUDY_RESULTS`, unless the user named another.
      hardware: hardware besides the CPU, such as `gpu="…"`.
    """
    load = {"load": round(os.getloadavg()[1], 2)} if hasattr(os, "getloadavg") else {}  # Windows has none
    record = {
        "figures": figures,
        "hardware": {"cpu": cpu(), "cores": cores(), **load, **hardware},
        "versions": software,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    path = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return scratch.replace(path)


def output_of(*command: str) -> str:
    """Return the output of a command."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

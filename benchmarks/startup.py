"""Start-up: import time, and the time to the first training step."""

import os
import resource
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from benchmarks import record
from benchmarks.harness import Figures, Milliseconds

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(record.ROOT)}


def imports(folder: Path, part: str, base: str, is_base: bool) -> tuple[Any, Figures]:
    """Import a part of jaxformer with all its modules, or the libraries that it is built on, in a new process. Measures
    CPU time (user and system), which excludes waiting."""
    modules = [base]
    if not is_base:
        path = getattr(import_module(part), "__path__", ())
        modules = [part, *(f"{part}.{module.name}" for module in iter_modules(path))]

    def step(_: int) -> Milliseconds:
        began = processor_seconds()
        subprocess.run([sys.executable, "-c", f"import {', '.join(modules)}"], env=os.environ | ENVIRONMENT, check=True)
        return Milliseconds(1e3 * (processor_seconds() - began))

    return step, {}


def processor_seconds() -> float:
    """Return the CPU time of all finished child processes, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def first_step(folder: Path, options: list[str], is_cold: bool) -> tuple[Any, Figures]:
    """Start `train.py` and wait until the first step is in its log, with cold caches of programs and tokens, or with
    the caches of an earlier run."""
    cache = folder / "cache"

    def step(number: int) -> Milliseconds:
        run = folder / f"run{number}"
        if is_cold:
            shutil.rmtree(cache, ignore_errors=True)
        command = [sys.executable, "train.py", "--run", str(run), "--train.log-every", "1", *options]
        began = time.perf_counter()
        with subprocess.Popen(
            command, cwd=record.ROOT, env=os.environ | ENVIRONMENT | {"JAXFORMER_CACHE": str(cache)},
            stdout=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            log = run / "metrics.jsonl"
            while '"loss"' not in (log.read_text() if log.exists() else ""):
                if process.poll() is not None:
                    raise RuntimeError(f"train.py ended with status {process.returncode} before its first step.")
                time.sleep(0.005)
            ms = Milliseconds(1e3 * (time.perf_counter() - began))
            process.kill()
        shutil.rmtree(run)
        return ms

    if not is_cold:
        step(0)
    return step, {}

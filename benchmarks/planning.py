"""Cost of `jaxformer plan`, which compiles a training step for accelerators that need not be present."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Figures


def compile_step(folder: Path, config: str, topology: str) -> tuple[None, Figures]:
    """Plan a config for a topology; return the process's CPU time and memory, and whether the step fits.

    Raises:
      RuntimeError: planning failed.
    """
    command = [sys.executable, "-m", "jaxformer", "plan", "--config", config, "--topology", topology]
    environment = os.environ | {"JAXFORMER_CACHE": str(folder / "cache")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):  # 1 if the step does not fit
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}.")
    return None, {
        "CPU seconds": usage.ru_utime + usage.ru_stime,
        "GiB": usage.ru_maxrss / 2**20,
        "fits": process.returncode == 0,
    }

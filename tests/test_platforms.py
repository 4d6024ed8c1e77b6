"""Training and sampling need nothing that only POSIX has, and no optional package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.errors import EXTRAS
from tests.helpers import ROOT, tiny, write_books

BARE = f"""
import os, signal, sys
import grain, jax, orbax.checkpoint, rich.console, tokenizers  # they have other ways on Windows

sys.modules |= dict.fromkeys({[*EXTRAS]})
sys.modules |= dict.fromkeys(["fcntl", "grp", "pwd", "readline", "resource", "termios"])
for module, names in {{
    os: ["geteuid", "getuid", "pread", "pwrite", "sched_getaffinity", "statvfs", "sysconf", "uname"],
    signal: ["SIGHUP", "SIGKILL", "SIGPIPE", "SIGSTOP", "SIGUSR1"],
}}.items():
    for name in names:
        delattr(module, name)
from jaxformer.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(here: Path, *arguments: str) -> list[str]:
    """Run a command in a process with no more of the system than Windows offers and no extra; return its lines."""
    env = {name: x for name, x in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BARE, *arguments]
    result = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_without_posix_and_extras_a_run_trains_resumes_is_inspected_and_samples(tmp_path):
    write_books(tmp_path / "books")
    trained = run(tmp_path, "train", *tiny(tmp_path / "books", steps=2))
    assert "plots" not in "".join(trained)  # only the alignment of a translation is drawn with an extra
    assert (tmp_path / "runs/quick/report.html").exists()
    resumed = run(tmp_path, "train", "--resume", "--steps", "4")
    assert resumed[0].endswith("quick (resumed)") and any(line.startswith("final: step 4 ") for line in resumed)
    page = run(tmp_path, "inspect", "runs/quick")[-1]
    assert page.startswith("runs/quick/inspect.html: ") and (tmp_path / "runs/quick/inspect.html").exists()
    assert run(tmp_path, "sample", "--prompt", "The cat", "--max-new-tokens", "5")[0].startswith("The cat")

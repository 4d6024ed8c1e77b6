"""Training and sampling need nothing that only POSIX has, and no optional package."""

import json
import os
import re
import subprocess
import sys

import pytest

from jaxformer.errors import EXTRAS
from tests.helpers import ROOT, tiny, write_books

BARE = f"""
import json, os, signal, sys
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
from jaxformer.cli import inspect  # imported only: to inspect takes longer than to train
for arguments in json.loads(sys.argv[1]):
    print("$", *arguments[:1])
    assert main(arguments) == 0, arguments
"""
"""A process with no more of the system than Windows offers, and no extra, that runs commands."""


@pytest.mark.slow
def test_without_posix_and_extras_a_run_trains_resumes_and_samples(tmp_path):
    write_books(tmp_path / "books")
    commands = [
        ["train", *tiny(tmp_path / "books", steps=1)], ["train", "--resume", "--steps", "2"],
        ["sample", "--prompt", "The cat", "--max-new-tokens", "5"],
    ]  # fmt: skip
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BARE, json.dumps(commands)]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    _, trained, resumed, sampled = re.split(r"^\$ \w+\n", result.stdout, flags=re.MULTILINE)
    assert "plots" not in trained  # only the alignment of a translation is drawn with an extra
    assert (tmp_path / "runs/quick/report.html").exists()
    assert resumed.splitlines()[0].endswith("quick (resumed)") and "\nfinal: step 2 " in resumed
    assert sampled.startswith("The cat")

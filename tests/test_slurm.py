"""`docs/examples/train.sbatch` under a SLURM whose `srun` starts two processes on the loopback interface."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.train.log import read_metrics
from tests.helpers import ROOT, changed, tiny, write_books
from tests.parallel.test_processes import free_port

SCRIPT = ROOT / "docs/examples/train.sbatch"
SRUN = """#!{python}
import os, signal, subprocess, sys, time

command = sys.argv[1:]
while command[0].startswith("-"):  # options of srun
    command.pop(0)
port, stop_at, n = os.environ["JAX_COORDINATOR_PORT"], int(os.environ["STOP_AT"]), os.environ["TASKS"]
step = {{
    "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": n, "SLURM_NTASKS": n,
    "SLURM_STEP_NUM_NODES": "1", "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:" + port,
}}
tasks = [
    subprocess.Popen(command, env=os.environ | step | {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}})
    for i in range(int(n))
]
metrics = os.path.join("runs", os.environ["SLURM_JOB_NAME"], "metrics.jsonl")
while stop_at and all(task.poll() is None for task in tasks):
    if os.path.exists(metrics) and sum(1 for line in open(metrics)) > stop_at:
        for task in tasks:  # as with --signal=TERM@300
            task.send_signal(signal.SIGTERM)
        break
    time.sleep(0.05)
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = '#!/bin/sh\necho "scontrol $*"\n'


def submit(folder: Path, *options: str, tasks: int, stop_at: int = 0) -> subprocess.CompletedProcess:
    """Run the script as SLURM does, in the folder that it was submitted from.

    Args:
      tasks: processes, which have two devices together.
      stop_at: rows of the log after which the tasks receive SIGTERM; 0 for never.
    """
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": "4242", "SLURM_JOB_NAME": "small", "SLURM_CPUS_PER_TASK": "1", "PYTHON": sys.executable,
        "STOP_AT": str(stop_at), "TASKS": str(tasks), "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT), "JAX_COORDINATOR_PORT": str(free_port()), "JAX_NUM_CPU_DEVICES": str(2 // tasks),
        "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    return subprocess.run(
        ["bash", SCRIPT, *options], cwd=folder, env=os.environ | job, capture_output=True, text=True, timeout=400
    )


def test_directives_give_each_task_all_gpus_of_its_node_and_time_to_save():
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SCRIPT.read_text(), re.MULTILINE))
    assert directives["ntasks-per-node"] == directives["gpus-per-node"]  # JAX gives each process one GPU
    assert not {"gpus-per-task", "gpu-bind"} & directives.keys()  # each task would see its own as GPU 0
    assert directives["signal"] == "TERM@300" and "requeue" in directives
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0


@pytest.mark.slow
def test_job_of_two_processes_saves_at_sigterm_is_requeued_and_continues(tmp_path):
    rare = ["--train.checkpoint-every", "0", "--train.eval-every", "0", "--train.report-every", "0"]
    books = write_books(tmp_path / "books")
    options = tiny(books, 100_000, *rare, "--mesh", "fsdp=2", "--train.profile", "2:4")
    first = submit(tmp_path, *options, tasks=2, stop_at=5)
    assert first.returncode == 143, first.stdout + first.stderr
    assert "devices: 2 x cpu, mesh fsdp=2, 2 processes" in first.stdout
    described = re.findall(r"^\| `([\w ]+:)`", (ROOT / "docs/accelerators.md").read_text(), re.MULTILINE)
    assert described and all(f"\n{line} " in first.stdout for line in described)
    assert first.stdout.splitlines()[-1] == "scontrol requeue 4242"
    saved = int(re.search(r"interrupted at step ([\d,]+) and saved", first.stdout)[1].replace(",", ""))
    traces = (tmp_path / "runs/small/profile").rglob("steps-2-3/*.xplane.pb")
    assert sorted(file.name.split("_")[-1] for file in traces) == ["0.xplane.pb", "1.xplane.pb"]

    # On one node, as it happens, with as many devices.
    second = submit(tmp_path, *changed(options, "--steps", str(saved + 5)), tasks=1)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "run runs/small (resumed)" in second.stdout and "scontrol" not in second.stdout
    assert read_metrics(tmp_path / "runs/small")[-1]["step"] == saved + 5


@pytest.mark.slow
def test_error_of_training_ends_the_job_without_requeueing(tmp_path):
    result = submit(tmp_path, "--config", "nothing.py", tasks=1)
    assert result.returncode == 2 and result.stderr.count("error: ") == 1
    assert "scontrol" not in result.stdout and not (tmp_path / "runs").exists()

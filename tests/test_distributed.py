"""Several processes on the loopback interface train as one does, stop together, and miss one another."""

import json
import signal
import socket
import subprocess
import time

import numpy as np
import pytest

from jaxformer.checkpoints import StoredCheckpoints
from jaxformer.distributed import DistributedOptions, processes_around
from jaxformer.errors import UserError
from tests.helpers import run, start, tiny, write_books

STEPS = 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "127.0.0.1:1"}, "go together"),
        ({"processes": 2, "process": 0}, "go together"),
        ({"coordinator": "localhost", "processes": 2, "process": 0}, "must be HOST:PORT"),
        ({"coordinator": "127.0.0.1:1", "processes": 2, "process": 2}, "process is 2; .* below 2"),
        ({"heartbeat_seconds": 0}, "heartbeat_seconds is 0; it must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        DistributedOptions(**options)


@pytest.mark.parametrize(
    ("environment", "n"),
    [
        ({}, 1),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"SLURM_STEP_NUM_TASKS": "1"}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, 2),
    ],
)
def test_who_was_started_together_is_known_from_the_environment(environment, n):
    assert processes_around(environment) == n


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with books."""
    folder = tmp_path_factory.mktemp("together")
    write_books(folder / "books")
    return folder


def options(here, *more: str, steps: int = STEPS) -> list[str]:
    """A row of metrics for each step, and a learning rate that does not depend on how many there are."""
    return [*tiny(here / "books", steps), "--train.log-every", "1", "--optimizer.schedule", "constant", *more]


def start_all(here, n: int, *arguments: str) -> list[subprocess.Popen]:
    """So many processes of one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        start(
            "train.py", *arguments, "--distributed.coordinator", f"127.0.0.1:{port}",
            "--distributed.processes", str(n), "--distributed.process", str(i), cwd=here,
        )
        for i in range(n)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Status, output and errors of each."""
    said = [process.communicate(timeout=200) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def rows(folder) -> list[dict]:
    """The metrics so far."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses(folder) -> list[float]:
    """The loss of each step."""
    return [row["loss"] for row in rows(folder) if "loss" in row]


def wait_for_row(processes: list[subprocess.Popen], folder, step: int) -> None:
    """Until a step is logged, two minutes at most."""
    until = time.monotonic() + 120
    while not any(row["step"] >= step for row in rows(folder)):
        assert time.monotonic() < until and all(process.poll() is None for process in processes)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def alone(here):
    """The losses, and the last row, of one process with one device."""
    result = run("train.py", *options(here, "--run", "alone", "--mesh", "data=1"), cwd=here)
    assert result.returncode == 0, result.stderr
    return losses(here / "alone"), rows(here / "alone")[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "mesh"), [(2, "fsdp=2"), (4, "data=2,fsdp=2")])
def test_processes_together_have_the_losses_of_one(here, alone, n, mesh):
    name = f"together{n}"
    results = ended(start_all(here, n, *options(here, "--run", name, "--mesh", mesh)))
    assert [status for status, *_ in results] == [0] * n, results
    assert len(alone[0]) == STEPS
    np.testing.assert_allclose(losses(here / name), alone[0], rtol=1e-5)
    last = rows(here / name)[-1]
    for key in ("val_loss", "val_bpb", "entropy"):
        np.testing.assert_allclose(last[key], alone[1][key], rtol=1e-5)
    assert "final: step=20" in results[0][1]
    assert not any("final" in out or "step" in out for _, out, _ in results[1:])  # one speaks for all


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_in_one(here, alone):
    results = ended(start_all(here, 2, *options(here, "--run", "fewer", "--mesh", "fsdp=2", steps=10)))
    assert [status for status, *_ in results] == [0, 0], results
    result = run("train.py", "--resume", "--run", "fewer", "--steps", str(STEPS), "--mesh", "data=1", cwd=here)
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(losses(here / "fewer"), alone[0], rtol=1e-5)


@pytest.mark.slow
def test_a_signal_to_one_stops_all_after_the_same_step(here):
    processes = start_all(here, 2, *options(here, "--run", "signalled", "--mesh", "data=2", steps=100_000))
    wait_for_row(processes, here / "signalled", 3)
    processes[1].send_signal(signal.SIGTERM)
    results = ended(processes)
    assert [status for status, *_ in results] == [128 + signal.SIGTERM] * 2, results
    step = int(results[0][1].split("interrupted at step ")[1].split()[0].replace(",", ""))
    assert (here / "signalled" / "checkpoints" / str(step)).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_killed_the_others_say_so_and_end(here, victim):
    name = f"bereft{victim}"
    processes = start_all(here, 2, *options(here, "--run", name, "--mesh", "data=2", steps=100_000))
    wait_for_row(processes, here / name, 7)  # past the checkpoint of step 5
    processes[victim].kill()
    began = time.monotonic()
    results = ended(processes)
    assert time.monotonic() - began < 60
    status, _, err = results[1 - victim]
    assert status == 1 and "another process of this run has ended" in err, results
    assert f"--resume --run {name}" in err and "Traceback" not in err
    assert StoredCheckpoints(here / name).step("last") >= 5

"""Several processes that train one model, on the loopback interface."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import jax
import numpy as np
import pytest

from jaxformer.data.windows import next_token_batch
from jaxformer.errors import UserError
from jaxformer.parallel import processes as distributed
from jaxformer.parallel.mesh import batch_sharding, global_device_put, make_mesh
from jaxformer.parallel.processes import (
    AsyncMax,
    DistributedOptions,
    bind_address,
    broadcast,
    connect,
    count_processes,
    shutdown,
)
from jaxformer.runs.checkpoints import CheckpointManager, CheckpointReader
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step
from tests.across import BATCHES, CONFIG, SAVED
from tests.helpers import ROOT, tiny, write_books


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coordinator": "host:1234"}, "must be given together"),
        ({"coordinator": "host:port", "processes": 2, "process": 0}, "'host:port'; it must be HOST:PORT"),
        ({"coordinator": "host:99999", "processes": 2, "process": 0}, "'host:99999'; it must be HOST:PORT"),
        ({"coordinator": ":1234", "processes": 2, "process": 0}, "':1234'; it must be HOST:PORT"),
        ({"coordinator": "host:1234", "processes": 2, "process": 2}, "process` is 2; of 2 processes"),
        ({"heartbeat_seconds": 10**9}, "heartbeat_seconds` is 1000000000; it must be at most 86400"),
    ],
)
def test_invalid_options_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        DistributedOptions(**fields)


@pytest.mark.parametrize(
    ("environment", "n"),
    [
        ({}, 1),
        ({"SLURM_STEP_NUM_TASKS": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "16"}, 16),
        ({"OMPI_COMM_WORLD_SIZE": ""}, 1),
        ({"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
        ({"TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476", "TPU_WORKER_HOSTNAMES": "localhost"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c", "MEGASCALE_NUM_SLICES": "4"}, 12),
    ],
)
def test_processes_are_counted_from_the_environment(environment, n):
    assert count_processes(environment) == n


def test_single_process_needs_no_communication():
    connect(DistributedOptions())
    assert not jax.distributed.is_initialized()
    assert broadcast("runs/quick") == "runs/quick"
    assert AsyncMax(make_mesh()).reduce(15) == 15
    assert shutdown(3) == 3


@pytest.mark.parametrize(
    ("coordinator", "bound"),
    [
        ("localhost:9", "localhost:9"),
        ("127.0.0.1:9", "127.0.0.1:9"),
        ("127.0.1.1:9", "127.0.1.1:9"),
        ("[::1]:9", "[::1]:9"),
        ("192.0.2.1:9", None),
        ("node0:9", None),  # as a machine may know itself, while others reach it by another address
    ],
)
def test_loopback_coordinator_binds_to_loopback_only(monkeypatch, coordinator, bound):
    loopback = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 9))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [loopback])
    assert bind_address(coordinator) == bound


def free_port() -> int:
    """Return a free port below those that the system assigns to connections."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            pass
    raise AssertionError("100 ports are taken")


class Metadata(BaseHTTPRequestHandler):
    """Google's metadata server for a TPU pod of two hosts, each of which requests a path with its index."""

    def do_GET(self):
        number, key = self.path.split("/")[1], self.path.split("/")[-1]
        metadata = {"agent-worker-number": number, "worker-network-endpoints": "127.0.0.1,127.0.0.1", "tpu-env": ""}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(metadata[key].encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


ON_A_TPU = """if True:
    import os, sys, urllib.request
    from types import SimpleNamespace
    import jax

    def get(url, **_):
        with urllib.request.urlopen(url) as answer:
            return SimpleNamespace(status_code=answer.status, text=answer.read().decode())

    sys.modules["requests"] = SimpleNamespace(get=get)  # JAX asks through it; only jax[tpu] brings it
    del os.environ["TPU_SKIP_MDS_QUERY"]  # JAX has not seen a TPU
    from jaxformer.parallel.processes import DistributedOptions, all_gather, connect, shutdown
    connect(DistributedOptions())
    told = all_gather(f"process {jax.process_index()}")
    print(f"\\n{jax.distributed.is_initialized()} {told}", flush=True)  # Gloo prints, too
    shutdown(0)
"""


def start_on_a_tpu(**environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", ON_A_TPU], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
    )  # fmt: skip


@pytest.mark.slow
def test_tpu_pod_hosts_connect_by_the_metadata_server(metadata_server):
    port = str(free_port())
    processes = [
        start_on_a_tpu(JAX_FORCE_TPU_INIT="1", GCE_METADATA_IP=f"{metadata_server}/{number}", JAX_COORDINATOR_PORT=port)
        for number in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert "\nTrue ['process 0', 'process 1']" in out, out + err


def test_unreachable_metadata_server_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "requests", SimpleNamespace(get=lambda url, **_: urlopen(url)))
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    monkeypatch.setenv("JAX_FORCE_TPU_INIT", "1")
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match=r"this run could not connect .* to train on this machine only, set TPU_SKIP"):
        connect(DistributedOptions())


def test_unreachable_coordinator_is_named(monkeypatch):
    monkeypatch.setattr(distributed, "CONNECT_SECONDS", 0)
    port = free_port()
    with pytest.raises(UserError, match=f"process 0 does not respond at 127.0.0.1:{port} after 0 s"):
        connect(DistributedOptions(f"127.0.0.1:{port}", 2, 1))


def test_port_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"process 0 cannot listen on port {port} .* choose another one"):
            connect(DistributedOptions(f"127.0.0.1:{port}", 2, 0))


@pytest.mark.slow
def test_exit_on_abort_applies_inside_only():
    program = """if True:
        import ctypes, os, threading
        from jaxformer.parallel.processes import exit_on_abort
        abort = threading.Thread(target=ctypes.CDLL(None).abort)  # lets go of the lock of Python, as the runtime does
        child = os.fork()  # which aborts inside, and its parent outside
        with exit_on_abort("a sentence", 7):
            if not child:
                abort.start(), abort.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        abort.start(), abort.join()
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGABRT, "7\n", "a sentence\n")


def start_all(n: int, devices: int, command: Callable[[list[str]], list[str]], cwd: Path) -> list[subprocess.Popen]:
    """Start n processes with several devices each; `command` receives the options of their addresses."""
    where = ["--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.processes", str(n)]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, *command([*where, "--distributed.process", str(i)])],
            cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for i in range(n)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def one_process() -> tuple[list[float], Callable[[str, Path], list[float]]]:
    """Return the losses on one device, and those resumed from a checkpoint."""
    mesh = make_mesh("", jax.devices()[:1])
    setup = TrainSetup(CONFIG, mesh)
    step = make_train_step(setup)

    def losses_from(state, start: int) -> list[float]:
        losses = []
        for k in range(start, CONFIG.steps):
            state, metrics = step(
                state, global_device_put(next_token_batch(BATCHES[k]), batch_sharding(mesh)), np.int32(k)
            )
            losses.append(float(metrics.loss))
        return losses

    def resumed(folder: Path) -> list[float]:
        like = setup.abstract_state
        with CheckpointManager(folder) as checkpoints:
            params, opt_state, position = checkpoints.restore(SAVED, like.params, like.opt_state)
        assert position == {"step": SAVED}
        return losses_from(like._replace(params=params, opt_state=opt_state, failures=np.int32(0)), SAVED)

    return losses_from(setup.init_state(), 0), resumed


def test_two_processes_train_as_one(tmp_path, one_process):
    n, devices, mesh = 2, 1, "fsdp=2"
    expected, resumed = one_process
    processes = start_all(n, devices, lambda where: ["-m", "tests.across", str(tmp_path), mesh, *where[1::2]], ROOT)
    reports = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
        reports.append(json.loads(next(line for line in out.splitlines() if line.startswith("{"))))
    rows = CONFIG.train.batch_size
    for i, report in enumerate(reports):
        np.testing.assert_allclose(report["losses"], expected, rtol=1e-5)
        assert report["text"] == "from 0"
        assert report["largest"] == n - 1  # every process said its own number
        assert report["rows"] == list(range(i * rows // n, (i + 1) * rows // n))  # it reads no others
    np.testing.assert_allclose(resumed(tmp_path), expected[SAVED:], rtol=1e-5)


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> Path:
    return write_books(tmp_path_factory.mktemp("text") / "books")


def train_together(cwd: Path, *data: Path) -> list[subprocess.Popen]:
    """Start two processes that train for long and save every 10 steps."""
    options = ["--model.n-blocks", "1", "--mesh", "fsdp=2", "--run", "run", "--distributed.heartbeat-seconds", "10"]
    options += ["--train.eval-every", "100000", "--train.report-every", "0", "--train.checkpoint-every", "10"]

    def command(where: list[str]) -> list[str]:
        return [str(ROOT / "train.py"), *tiny(data[int(where[-1])], 100_000, *options), *where]

    return start_all(2, 1, command, cwd)


@pytest.mark.slow
def test_loss_of_one_process_ends_all_with_a_message(books, tmp_path):
    """Of the one that the others are connected to; tests/test_slurm.py has two that are told to end."""
    first, second = train_together(tmp_path, books, books)
    until = time.monotonic() + 240
    while not (tmp_path / "run/checkpoints/10/sha256.json").exists():
        assert time.monotonic() < until and first.poll() is None and second.poll() is None, first.communicate()
        time.sleep(0.05)
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=240)
    assert second.returncode == 1, out + err
    assert (
        "error: another process of this run has ended or does not respond; its own output says why; "
        f"resume from the last checkpoint with: python {ROOT}/train.py --resume --run run"
    ) in err.splitlines()  # among what the runtime says
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.step() >= 10


@pytest.mark.slow
def test_shutdown_does_not_wait_for_devices(tmp_path):
    program = """if True:
        import sys
        from jaxformer.parallel.processes import (
            AsyncMax, DistributedOptions, bind_address, connect, is_main_process, shutdown
        )
        from jaxformer.parallel.mesh import make_mesh
        _, coordinator, _, processes, _, process = sys.argv[1:]
        connect(DistributedOptions(coordinator, int(processes), int(process)))
        agreement = AsyncMax(make_mesh())
        assert int(agreement.reduce(0)) == 0  # the devices are connected
        if is_main_process():
            unanswered = agreement.reduce(1)  # with one device, JAX would wait for it here
        shutdown(0)
    """
    for process in start_all(2, 2, lambda where: ["-c", program, *where], tmp_path):
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err


@pytest.mark.slow
def test_failed_process_does_not_wait_for_a_save(tmp_path):
    program = """if True:
        import sys, time
        from pathlib import Path
        import numpy as np
        from jaxformer.runs.checkpoints import CheckpointManager, CheckpointReader
        from jaxformer.cli import train
        from jaxformer.parallel.processes import (
            DistributedOptions, barrier, connect, exit_on_lost_process, is_main_process
        )
        from jaxformer.parallel.mesh import global_device_put, make_mesh, replicated
        folder, _, coordinator, _, processes, _, process = sys.argv[1:]
        complete = CheckpointManager._complete

        def slow(checkpoints):
            time.sleep(600 if checkpoints._saving == 10 else 0)  # far longer than anyone should wait
            complete(checkpoints)

        def job(*_):
            connect(DistributedOptions(coordinator, int(processes), int(process), 10))
            with exit_on_lost_process("advice"), CheckpointManager(Path(folder)) as checkpoints:
                tree = {"W": global_device_put(np.ones(3), replicated(make_mesh()))}
                save = lambda step: checkpoints.save(step, tree, tree, {}, None)
                save(5)
                checkpoints._wait()
                barrier()
                save(10)
                if not is_main_process():
                    1 / 0
                barrier()

        CheckpointManager._complete, train._main = slow, job
        sys.exit(train.main([]))
    """
    first, second = start_all(2, 1, lambda where: ["-c", program, str(tmp_path), *where], ROOT)
    out, err = second.communicate(timeout=240)
    assert second.returncode == 1, out + err
    assert "ZeroDivisionError: division by zero" in err
    out, err = first.communicate(timeout=240)
    assert first.returncode == 1, out + err
    assert any(line.endswith("its own output says why; advice") for line in err.splitlines())
    stored = CheckpointReader(tmp_path)
    assert stored.steps() == [5] and stored.step() == 5


@pytest.mark.slow
def test_process_without_data_ends_all_processes(books, tmp_path):
    first, second = train_together(tmp_path, books, tmp_path / "nothing")
    out, err = second.communicate(timeout=240)
    assert second.returncode == 2, out + err
    assert f"error: no data at {tmp_path / 'nothing'}" in err and "Traceback" not in err
    out, err = first.communicate(timeout=240)
    assert first.returncode == 1, out + err
    assert (
        "error: another process of this run has ended or does not respond; its own output says why; "
        "training has not started."
    ) in err.splitlines()
    assert not (tmp_path / "run").exists()

"""Runs on object storage: staged, uploaded, leased and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxformer.checkpoints import CheckpointReader
from jaxformer.object_store import ObjectStore
from jaxformer.staging import LEASE, METRICS, local_folder
from jaxformer.train.log import read_metrics, without_timings
from tests.helpers import ROOT, tiny, write_books

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the endpoint of an S3 server with a bucket."""
    s3 = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3.start()
    host, port = s3.get_host_and_port()
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")).close()
    yield f"http://{host}:{port}"
    s3.stop()


@pytest.fixture
def environment(server, tmp_path, monkeypatch) -> None:
    """Set the credentials of the server and a cache of this test."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))


SHORT = (
    "--train.report-every", "0", "--train.eval-every", "0", "--train.gradients-every", "0", "--train.log-every", "1",
    "--train.checkpoint-every", "4",
)  # fmt: skip


def start_together(cwd: Path, port: int, *options: str) -> list[subprocess.Popen]:
    """Start two processes of `train.py` with one device each."""
    where = ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.processes", "2"]
    command = [sys.executable, str(ROOT / "train.py"), *options, "--mesh", "fsdp=2", *where]
    environment = {
        "JAX_NUM_CPU_DEVICES": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }  # fmt: skip
    return [
        subprocess.Popen(
            [*command, "--distributed.heartbeat-seconds", "10", "--distributed.process", str(i)],
            cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | environment,
        )
        for i in range(2)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen]) -> list[str]:
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [out for out, _ in outputs]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("victims", "is_other_machine"), [([0, 1], True), ([1], False)])
def test_killed_run_of_two_processes_on_s3_resumes_bit_identically(
    environment, tmp_path, victims, is_other_machine, monkeypatch
):
    from tests.test_distributed import free_port

    books = write_books(tmp_path / "books")
    url, store = f"s3://bucket/killed-{len(victims)}", ObjectStore(f"s3://bucket/killed-{len(victims)}")
    options = [*tiny(books, 16, *SHORT), "--run"]
    killed = start_together(tmp_path, free_port(), *options, url)
    until = time.monotonic() + 240
    while store.read("checkpoints/8/sha256.json") is None:
        assert time.monotonic() < until and killed[0].poll() is None, [p.communicate() for p in killed]
        time.sleep(0.05)
    for victim in victims:
        killed[victim].send_signal(signal.SIGKILL)
    for process in killed:
        assert process.communicate(timeout=120) and process.returncode != 0
    if is_other_machine:
        monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other machine"))
        lease = json.loads(store.read(LEASE)[0])
        assert lease["expires"] > time.time()
        store.write(LEASE, json.dumps(lease | {"expires": 0.0}).encode())  # as after a minute
    out = finish(start_together(tmp_path, free_port(), "--resume", "--run", url))[0]
    assert f"run {url} (resumed)" in out

    finish(start_together(tmp_path, free_port(), *options, "plain"))
    expected, folder = CheckpointReader(tmp_path / "plain"), local_folder(url)
    resumed = CheckpointReader(folder)
    assert resumed.step() == expected.step() == 16
    arrays, expected_arrays = resumed.arrays(16), expected.arrays(16)
    assert arrays.keys() == expected_arrays.keys()
    for name, array in expected_arrays.items():
        assert np.array_equal(arrays[name], array), name
    rows, expected_rows = read_metrics(folder), read_metrics(tmp_path / "plain")
    assert [without_timings(row) for row in rows] == [without_timings(row) for row in expected_rows]
    assert (folder / METRICS).read_bytes()

"""Runs on object storage: staged, uploaded, leased and resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from jaxformer import staging
from jaxformer.checkpoints import CheckpointManager, CheckpointReader
from jaxformer.cli import sample, train
from jaxformer.errors import UserError, resume_command, run_name
from jaxformer.lease import LEASE, Lease
from jaxformer.object_store import ObjectStore, StoreError
from jaxformer.runs import load_run
from jaxformer.staging import (
    METRICS,
    Mirror,
    is_split,
    local_folder,
    mirror_of,
    mirrored,
    open_staged,
    process_index,
    staged_run,
)
from jaxformer.train.log import read_metrics, without_timings
from tests.helpers import ROOT, flip_a_bit, in_memory, run, small_run, start, tiny, write_books

pytest.importorskip("obstore")


@contextmanager
def serve(port: int = 0) -> Iterator[str]:
    """Start an S3 server on loopback, with what servers of this process have stored; yield its endpoint."""
    s3 = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    s3.start()
    try:
        host, port = s3.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        s3.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the endpoint of an S3 server with a bucket."""
    with serve() as endpoint:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
        yield endpoint


@pytest.fixture
def environment(server, tmp_path, monkeypatch) -> None:
    """Set the credentials of the server and a cache of this test, but for compiled programs."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", f"{os.environ['JAXFORMER_CACHE']}/compiled")
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))


SHORT = (
    "--train.report-every", "0", "--train.eval-every", "0", "--train.gradients-every", "0", "--train.log-every", "1",
    "--train.checkpoint-every", "4",
)  # fmt: skip


def start_together(cwd: Path, port: int, *options: str) -> list[subprocess.Popen]:
    """Start two processes of `train.py` with one device each."""
    where = ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.processes", "2"]
    command = [sys.executable, str(ROOT / "train.py"), *options, "--mesh", "fsdp=2", *where]
    environment = {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
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


URL = "s3://bucket/run"
TREE = {"W": np.arange(6, dtype=np.float32)}


@pytest.fixture
def store(monkeypatch, tmp_path) -> ObjectStore:
    """Replace all stores by one in memory, and the cache by one of this test."""
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(staging, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(staging, "PUSH_SECONDS", 0.05)
    return in_memory(monkeypatch)


def save(checkpoints: CheckpointManager, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, TREE, TREE, {"step": step}, None)


def train_in_store(*steps: int, resume: bool = False) -> None:
    """Save checkpoints, and a row of the log before each, to the store."""
    with open_staged(URL, 0, resume) as staged, mirrored(staged):
        staged.folder.mkdir(exist_ok=True)
        (staged.folder / "config.json").write_text("{}")
        with CheckpointManager(staged.folder) as checkpoints:
            for step in steps:
                with (staged.folder / METRICS).open("a") as log:
                    log.write(json.dumps({"step": step}) + "\n")
                save(checkpoints, step)


def test_checkpoints_and_log_are_uploaded_and_old_ones_removed(store, tmp_path):
    train_in_store(5, 10, 15)
    assert staged_run(local_folder(URL)).committed() == {"checkpoints/10", "checkpoints/15"}
    assert not [name for name in store.list() if "checkpoints/5/" in name or "/." in name]
    reader = CheckpointReader(local_folder(URL))
    assert reader.steps() == [10, 15]
    np.testing.assert_array_equal(reader.arrays(reader.step())["params/W"], TREE["W"])
    assert [row["step"] for row in read_metrics(local_folder(URL))] == [5, 10, 15]
    assert Lease.read(store).expires <= time.time()
    assert mirror_of(local_folder(URL)) is None and not is_split()


def test_arrays_are_downloaded_only_of_the_checkpoint_that_is_read(store):
    train_in_store(5, 10)
    folder = local_folder(URL)
    assert not list(folder.glob("checkpoints/*/params/d"))
    assert CheckpointReader(folder).step(5) == 5
    assert {path.parts[-3] for path in folder.glob("checkpoints/*/params/d")} == {"5"}


def test_half_uploaded_checkpoint_is_ignored_and_removed_on_resuming(store):
    train_in_store(5, 10)
    store.delete(["checkpoints/10/sha256.json"])  # as if its process had been killed before the commit
    assert CheckpointReader(local_folder(URL)).steps() == [5]
    shutil.rmtree(staging.cache_folder("runs", URL))
    train_in_store(resume=True)
    assert not store.list("checkpoints/10") and CheckpointReader(local_folder(URL)).step() == 5


def test_run_that_another_machine_continued_before_the_lease_was_taken_is_followed(store, monkeypatch, tmp_path):
    train_in_store(5)
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other machine"))
    with open_staged(URL, 0, True) as staged:
        monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
        train_in_store(10, resume=True)
        with mirrored(staged), CheckpointManager(staged.folder) as checkpoints:
            assert checkpoints.step() == 10
            assert [row["step"] for row in read_metrics(staged.folder)] == [5, 10]
    train_in_store(12, resume=True)
    with open_staged(URL, 0, True) as staged:  # the folder of the last session, which is kept
        monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other machine"))
        train_in_store(15, resume=True)
        with mirrored(staged), CheckpointManager(staged.folder) as checkpoints:
            assert checkpoints.step() == 15


def test_new_run_that_another_process_created_first_is_left_alone(store, monkeypatch, tmp_path):
    with open_staged(URL, 0, False) as staged:
        monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other machine"))
        train_in_store(5)
        with pytest.raises(UserError, match=f"another process has changed {URL} just now; resume it"), mirrored(staged):
            pass
    assert staged.committed() == {"checkpoints/5"}


def test_removal_that_was_killed_before_it_reached_the_store_is_undone(store):
    train_in_store(5, 10)
    folder = staging.cache_folder("runs", URL) / "process-0"
    shutil.rmtree(folder / "checkpoints/10")
    with open_staged(URL, 0, True) as staged, mirrored(staged), CheckpointManager(staged.folder) as checkpoints:
        assert checkpoints.step() == 10  # else a new 10 would stay behind the old one
        assert checkpoints.remove_after(5) == [10]
        save(checkpoints, 10)
    assert CheckpointReader(local_folder(URL)).step() == 10


def test_staged_shards_of_another_number_of_processes_are_not_committed(store, monkeypatch):
    fail = False
    upload = ObjectStore.upload

    def failing(self, files):
        if fail:
            raise StoreError(f"{URL}: it does not answer.")
        upload(self, files)

    monkeypatch.setattr(ObjectStore, "upload", failing)
    train_in_store(5)
    fail = True
    with pytest.raises(UserError, match="all is staged"):
        train_in_store(10, resume=True)
    fail = False
    session = staging.cache_folder("runs", URL) / "process-0" / staging.SESSION
    lease = json.loads(store.read(LEASE)[0])
    assert lease["session"] == session.read_text() and lease["session"].endswith("-1")
    of_two = lease["session"][:-1] + "2"
    session.write_text(of_two)
    store.write(LEASE, json.dumps(lease | {"session": of_two}).encode())
    train_in_store(resume=True)
    assert staged_run(local_folder(URL)).committed() == {"checkpoints/5"}


def test_corrupt_copies_are_downloaded_again(store):
    train_in_store(5)
    folder = local_folder(URL)
    assert CheckpointReader(folder).step() == 5
    flip_a_bit(next(folder.glob("checkpoints/5/params/d/*")))
    assert CheckpointReader(folder).step(5) == 5


def test_corrupt_checkpoint_in_the_store_is_an_error_when_read_and_replaced_when_trained(store):
    train_in_store(5, 10)
    name = next(name for name in store.list("checkpoints/10") if "/params/d/" in name)
    content = bytearray(store.read(name)[0])
    content[len(content) // 2] ^= 1
    store.write(name, bytes(content))
    with pytest.raises(UserError, match=rf"checkpoint 10 of {URL} is corrupt: .*; the nearest intact one is 5"):
        CheckpointReader(local_folder(URL)).step(10)
    shutil.rmtree(staging.cache_folder("runs", URL))
    train_in_store(10, resume=True)
    assert CheckpointReader(local_folder(URL)).step(10) == 10


def test_log_is_stored_in_parts_that_follow_its_truncation(store, monkeypatch, tmp_path):
    monkeypatch.setattr(staging, "PART_BYTES", 10)
    with open_staged(URL, 0, False) as staged, mirrored(staged) as mirror:
        staged.folder.mkdir()
        (staged.folder / "config.json").write_text("{}")
        log = staged.folder / METRICS
        for content in (b"", b"0123456", b"0123456789abcdefghij", b"0123456789abcdefghijk", b"0123456789a"):
            log.write_bytes(content)
            mirror.push()
            parts = [store.read(name)[0] for name in sorted(store.list("metrics"))]
            assert b"".join(parts) == content
            assert all(len(part) == 10 for part in parts[:-1])
        log.unlink()
        log.write_bytes(b"other")  # another file
        mirror.push()
        assert store.list("metrics").keys() == {"metrics/000000"} and store.read("metrics/000000")[0] == b"other"


def test_store_that_fails_does_not_stop_training_and_gets_all_later(store, monkeypatch, caplog):
    fails = True
    upload = ObjectStore.upload

    def failing(self, files):
        if fails:
            raise StoreError(f"{URL}: it does not answer.")
        upload(self, files)

    monkeypatch.setattr(ObjectStore, "upload", failing)
    with pytest.raises(UserError, match=f"all is staged in .*process-0, .* --resume --run {URL}"):
        train_in_store(5, 10)
    assert staged_run(local_folder(URL)).committed() == set()
    assert caplog.text.count("it does not answer; training continues and will upload from") == 1
    fails = False
    train_in_store(resume=True)  # from what is staged
    assert CheckpointReader(local_folder(URL)).steps() == [5, 10]


def test_lease_of_a_living_run_is_refused_and_an_expired_one_is_taken_over(store, monkeypatch):
    monkeypatch.setattr("jaxformer.lease.LEASE_SECONDS", 0.6)
    monkeypatch.setattr("jaxformer.lease.RENEW_SECONDS", 0.2)
    first = Lease.acquire(store)
    with (
        Mirror(staging.StagedRun(store, Path("absent")), first, "", 0, 1),  # it renews
        pytest.raises(UserError, match=f"process {os.getpid()} is training in {URL}; stop it, or choose another"),
    ):
        Lease.acquire(store)
    second = Lease.acquire(store)  # once it expired
    assert second.session != first.session and not first.renew()
    assert Lease.acquire(store, own_session=second.session).session != second.session  # at once


def test_run_that_lost_its_lease_uploads_no_more(store):
    with open_staged(URL, 0, False) as staged:
        with pytest.raises(UserError, match=f"another process has taken over {URL}"), mirrored(staged) as mirror:
            staged.folder.mkdir()
            (staged.folder / "config.json").write_text("{}")
            lease = json.loads(store.read(LEASE)[0])
            store.write(LEASE, json.dumps(lease | {"session": "other"}).encode())
            mirror._lease.expires = 0.0
            with CheckpointManager(staged.folder) as checkpoints:
                save(checkpoints, 5, 10)
        assert not staged.committed()


def test_only_one_process_of_a_machine_stages_a_run(store):
    with (
        open_staged(URL, 0, False),
        open_staged(URL, 1, False),
        pytest.raises(UserError, match=f"another process on this machine is training in {URL}"),
        open_staged(URL, 0, False),
    ):
        pass


def test_existing_and_missing_runs_are_named_by_their_url(store, capsys):
    train_in_store(5)
    assert train.main(["--run", URL]) == 2
    assert (
        f"error: {URL} exists, with {len(store.list()) - 1} objects; add --resume to continue it"
        in capsys.readouterr().err
    )
    assert train.main(["--run", "s3://bucket", "--resume"]) == 2
    assert "'s3://bucket' is not a URL of objects in a bucket" in capsys.readouterr().err
    assert resume_command(staging.cache_folder("runs", URL) / "process-0").endswith(f" --resume --run {URL}")


def test_absent_run_is_one_sentence(store, capsys):
    assert sample.main(["--run", URL]) == 2
    assert f"error: {URL} does not exist; train one" in capsys.readouterr().err


def test_stored_run_is_loaded_and_follows_the_store(store, tmp_path):
    original = small_run(tmp_path / "run", ["the cat sees the dog " * 40], steps=2)
    files = {f.relative_to(original).as_posix(): f for f in original.rglob("*") if f.is_file() and f.name != ".lock"}
    store.upload(files)
    run = load_run(URL)
    expected = load_run(original)
    assert run_name(run.path) == URL
    assert run.step == expected.step and run.tokenizer.vocab_size == expected.tokenizer.vocab_size
    np.testing.assert_array_equal(run.params["embedding"]["W_E"], expected.params["embedding"]["W_E"])
    store.delete(sorted(store.list("checkpoints")))
    with pytest.raises(UserError, match="no complete checkpoint"):
        load_run(URL)


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [("3", {}, 3), ("", {}, 0), (None, {"SLURM_PROCID": "5"}, 5), ("", {"OMPI_COMM_WORLD_RANK": "2"}, 2), ("x", {}, 0)],
)
def test_process_index_is_known_before_processes_connect(given, environment, expected):
    assert process_index(given, environment) == expected


@pytest.mark.exhaustive
def test_server_that_vanishes_during_a_run_gets_all_when_it_is_back(environment, tmp_path, monkeypatch):
    from tests.test_distributed import free_port

    port, url = free_port(), "s3://bucket/vanished"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    store, options = ObjectStore(url), [*tiny(write_books(tmp_path / "books"), 120, *SHORT), "--run", url]
    with serve(port):
        process = start("train.py", *options, cwd=tmp_path)
        until = time.monotonic() + 120
        while not staged_run(staging.cache_folder("runs", url) / "process-0") or not store.list("checkpoints"):
            assert time.monotonic() < until and process.poll() is None, process.communicate()
            time.sleep(0.05)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 2 and "final: step 120" in out, err
    warning, error = (line for line in err.splitlines() if line.startswith(("WARNING", "error")))
    assert "training continues and will upload from" in warning
    assert error.startswith(f"error: {url}: it does not answer") and error.endswith(f"train.py --resume --run {url}")
    with serve(port):
        result = run("train.py", "--resume", "--run", url, cwd=tmp_path)
        assert result.returncode == 0 and f"{url} finished at step 120" in result.stdout, result.stderr
        assert CheckpointReader(local_folder(url)).step() == 120
        assert read_metrics(local_folder(url))[-1]["step"] == 120


@pytest.mark.exhaustive
def test_absent_bucket_is_one_sentence(environment, tmp_path):
    result = run("train.py", *tiny(write_books(tmp_path / "books")), "--run", "s3://absent/run", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: s3://absent/run: there is no such bucket; create it, or correct the URL.\n"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """Return a run of two processes that nothing killed; its books lie beside it."""
    from tests.test_distributed import free_port

    folder = tmp_path_factory.mktemp("undisturbed")
    options = [*tiny(write_books(folder / "books"), 16, *SHORT), "--run", "plain"]
    finish(start_together(folder, free_port(), *options))
    return folder / "plain"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("victims", "is_other_machine"), [([0, 1], True), ([1], False)])
def test_killed_run_of_two_processes_on_s3_resumes_bit_identically(
    environment, tmp_path, undisturbed, victims, is_other_machine, monkeypatch
):
    from tests.test_distributed import free_port

    books = undisturbed.parent / "books"
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

    expected, folder = CheckpointReader(undisturbed), local_folder(url)
    resumed = CheckpointReader(folder)
    assert resumed.step() == expected.step() == 16
    arrays, expected_arrays = resumed.arrays(16), expected.arrays(16)
    assert arrays.keys() == expected_arrays.keys()
    for name, array in expected_arrays.items():
        assert np.array_equal(arrays[name], array), name
    rows, expected_rows = read_metrics(folder), read_metrics(undisturbed)
    assert [without_timings(row) for row in rows] == [without_timings(row) for row in expected_rows]
    if is_other_machine:
        more = run("train.py", "--resume", "--run", url, "--steps", "18", cwd=tmp_path)  # on one process
        assert more.returncode == 0 and "final: step 18" in more.stdout, more.stderr
        assert CheckpointReader(local_folder(url)).step() == 18

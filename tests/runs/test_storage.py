"""Runs and data at URLs: copied, uploaded while they change, and resumed."""

import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorstore

from jaxformer.cli import sample, train
from jaxformer.cli.command import resume_command
from jaxformer.data import storage as objects
from jaxformer.data.storage import Storage, StorageError, download_data, is_url
from jaxformer.data.text import find_files
from jaxformer.errors import UserError, run_name
from jaxformer.runs import storage
from jaxformer.runs.checkpoints import CheckpointReader
from jaxformer.runs.integrity import CHECKSUMS
from jaxformer.runs.run import load_run
from jaxformer.runs.storage import Upload, local_folder, uploading
from jaxformer.train.log import read_metrics
from tests.helpers import changed, tiny, write_books

URL = "s3://bucket/run"


@pytest.fixture
def memory(monkeypatch, tmp_path) -> Storage:
    """Replace the buckets by one in memory, and the cache by one of this test."""
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    context, connect = tensorstore.Context(), tensorstore.KvStore.open

    def in_memory(spec, **options):
        if not isinstance(spec, dict):  # one of Orbax's, of a checkpoint on a disk
            return connect(spec, **options)
        return connect({"driver": "memory", "path": spec["path"]}, context=context)

    monkeypatch.setattr(tensorstore.KvStore, "open", in_memory)
    return Storage(URL)


def write(storage: Storage, name: str, content: bytes, folder: Path) -> None:
    (folder / "content").write_bytes(content)
    storage.upload({name: folder / "content"})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("s3://bucket/run", True), ("gs://b/r", True), ("s3://", True), ("runs/s3", False), ("s3:/bucket/run", False),
     ("http://host/x", False), ("C:\\runs", False)],
)  # fmt: skip
def test_urls_are_recognised(name, expected):
    assert is_url(name) == expected


@pytest.mark.parametrize(
    "url", ["s3://", "s3://bucket", "s3://bucket/", "s3://b//x", "s3://b/../x", "s3://b/a b", "s3:///x"]
)
def test_malformed_urls_are_refused(url):
    with pytest.raises(UserError, match="is not a URL of objects in a bucket; write it like s3://bucket/name"):
        Storage(url)


def test_data_is_downloaded_once_per_content(memory, monkeypatch, tmp_path):
    write(memory, "a.txt", b"one", tmp_path)
    write(memory, "sub/b.txt", b"two", tmp_path)
    write(memory, "sub", b"", tmp_path)  # as consoles mark folders
    write(Storage("s3://bucket/run-2"), "c.txt", b"another's", tmp_path)
    assert [file.read_bytes() for file in find_files(URL).files] == [b"one", b"two"]
    written, replace = [], objects.write_atomically
    record = lambda file, content: written.append(file.name) or replace(file, content)  # noqa: E731
    monkeypatch.setattr(objects, "write_atomically", record)
    write(memory, "a.txt", b"three", tmp_path)
    memory.remove(["sub/b.txt", "sub", "absent"])
    for url in (f"{URL}/", URL):
        assert [file.read_bytes() for file in find_files(url).files] == [b"three"]
    assert [name for name in written if name.endswith(".txt")] == ["a.txt"]
    assert download_data(f"{URL}/a.txt").read_bytes() == b"three"
    memory.remove(["a.txt"])
    with pytest.raises(UserError, match="no data at s3://bucket/run; give the URL of an object"):
        download_data(URL)


def write_checkpoint(folder: Path, step: int, content: str = "") -> None:
    path = folder / f"checkpoints/{step}"
    (path / "params").mkdir(parents=True, exist_ok=True)
    (path / "params/d").write_text(content)
    (path / CHECKSUMS).write_text(content)


def test_checksums_are_uploaded_last_and_removed_first(memory, monkeypatch, tmp_path):
    folder, order = tmp_path / "run", []
    write_checkpoint(folder, 5)
    upload = Upload(memory, folder)
    upload()
    assert not memory.names()  # it has no log yet
    for name in (
        "metrics.jsonl",
        CHECKSUMS,
        ".lock",
        "metrics.jsonl.1.new",
        "checkpoints/6.corrupt/x",
        "checkpoints/7/params/d",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    transfer = Storage._transfer
    monkeypatch.setattr(Storage, "_transfer", lambda self, f, names: order.extend(names) or transfer(self, f, names))
    upload()
    checkpoint = ["checkpoints/5/params/d", f"checkpoints/5/{CHECKSUMS}"]
    assert memory.names() == {"metrics.jsonl", CHECKSUMS, *checkpoint}
    assert order[-1] == checkpoint[1]  # after the run's own checksums, too: a checkpoint cannot be read without them
    order.clear()
    upload()
    assert not order
    write_checkpoint(folder, 5, "saved again")
    upload()
    assert order == [checkpoint[1], *checkpoint]
    order.clear()
    for name in checkpoint:
        (folder / name).unlink()
    upload()
    assert order == checkpoint[::-1] and memory.names() == {"metrics.jsonl", CHECKSUMS}


def test_interrupted_upload_is_no_checkpoint_and_is_cleaned_up(memory, tmp_path):
    write_checkpoint(tmp_path / "run", 5)
    (tmp_path / "run/metrics.jsonl").write_text("")
    Upload(memory, tmp_path / "run")()
    write(memory, "checkpoints/10/params/d", b"", tmp_path)
    copy = local_folder(URL)
    assert CheckpointReader(copy).steps() == [5] and run_name(copy) == URL
    with storage.training_folder(URL, resume=True) as folder:
        with uploading(URL, folder):
            assert resume_command(folder).endswith(f" --resume --run {URL}")
        with (
            pytest.raises(UserError, match=r"process \d+ is training in"),
            storage.training_folder(URL, resume=True),
        ):
            pass
    assert not [name for name in memory.names() if name.startswith("checkpoints/10/")]


def test_failing_storage_does_not_stop_training_and_gets_all_later(memory, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(storage, "UPLOAD_SECONDS", 0.01)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("")
    upload = Storage.upload

    tried = threading.Semaphore(0)

    def fail(self, files):
        tried.release()
        raise StorageError(f"{URL}: it does not answer.")

    monkeypatch.setattr(Storage, "upload", fail)
    expected = r"it does not answer; not all of .* is uploaded: copy it before you resume"
    with pytest.raises(UserError, match=expected), uploading(URL, tmp_path / "run"):
        assert tried.acquire(timeout=300) and tried.acquire(timeout=300)
    assert caplog.text.count("it does not answer; training continues and will try again") == 1
    with uploading(URL, tmp_path / "run"):
        monkeypatch.setattr(Storage, "upload", upload)
    assert memory.names() == {"metrics.jsonl"}


def test_absent_existing_and_split_runs_are_one_sentence(memory, tmp_path, capsys):
    assert sample.main(["--run", URL]) == 2
    assert f"error: {URL} does not exist; train one" in capsys.readouterr().err
    write(memory, "x", b"", tmp_path)
    assert train.main(["--run", URL]) == 2
    assert f"error: {URL} exists, with 1 objects; add --resume" in capsys.readouterr().err
    assert train.main(["--run", URL, "--distributed.processes", "2"]) == 2
    assert f"error: {URL} can be trained by one process only; mount the bucket" in capsys.readouterr().err


@pytest.fixture
def s3(monkeypatch) -> Iterator[None]:
    """Start an S3 server with a bucket on loopback, and set its environment variables."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    try:
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")).close()
        yield
    finally:
        server.stop()


@pytest.mark.slow
def test_a_run_at_a_url_resumes_on_another_machine_from_the_last_complete_checkpoint(memory, tmp_path, capsys):
    """Of a checkpoint whose upload was killed, only the parameters are there."""
    Storage("s3://bucket/books").upload({file.name: file for file in write_books(tmp_path / "books").iterdir()})
    options = tiny(Path("-"), 2, "--train.report-every", "0", "--train.eval-every", "0", "--train.log-every", "1")
    options = changed(options, "--data.path", "s3://bucket/books", "--train.batch-size", "8")
    assert train.main([*options, "--run", URL]) == 0
    write(memory, "checkpoints/3/params/d", b"", tmp_path)
    shutil.rmtree(tmp_path / "cache")
    capsys.readouterr()
    assert train.main(["--resume", "--run", URL, "--steps", "4"]) == 0
    printed = capsys.readouterr().out
    assert f"run {URL} (resumed)" in printed and "resumed from step 2" in printed
    assert "checkpoints/3/params/d" not in memory.names()
    assert f"checkpoints/4/{CHECKSUMS}" in memory.names()
    loaded = load_run(URL)
    assert loaded.step == 4 and run_name(loaded.path) == URL
    assert [row["step"] for row in read_metrics(loaded.path)] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_wrong_bucket_credentials_and_server_are_one_sentence(s3, monkeypatch, capsys):
    monkeypatch.setattr(objects, "RETRIES", {"max_retries": 1})
    assert train.main(["--run", "s3://absent/run"]) == 2
    error = "error: s3://absent/run: there is no such bucket; create it, or correct the URL.\n"
    assert error in capsys.readouterr().err
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match=r"^s3://bucket/x: access is denied; set AWS_ACCESS_KEY_ID .* write\.$"):
        Storage("s3://bucket/x").names()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(
        StorageError, match=r"^s3://bucket/x: .*connect.*; check the URL, the network and the endpoint\.$"
    ):
        Storage("s3://bucket/x").names()

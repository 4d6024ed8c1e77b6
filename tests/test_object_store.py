"""Objects at URLs: names, conditional writes, errors, and downloads by entity tag."""

import pytest

from jaxformer import object_store
from jaxformer.data.text import find_files
from jaxformer.errors import UserError
from jaxformer.object_store import ObjectStore, StoreError, download_data, is_url
from tests.helpers import in_memory

pytest.importorskip("obstore")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("s3://bucket/run", True), ("gs://b/r", True), ("s3://", True), ("runs/s3", False), ("s3:/bucket/run", False),
     ("http://host/x", False), ("C:\\runs", False)],
)  # fmt: skip
def test_urls_of_stores_are_recognised(name, expected):
    assert is_url(name) == expected


@pytest.mark.parametrize(
    "url", ["s3://", "s3://bucket", "s3://bucket/", "s3://b//x", "s3://b/../x", "s3://b/a b", "s3:///x"]
)
def test_malformed_urls_are_refused(url):
    with pytest.raises(UserError, match="is not a URL of objects in a bucket; write it like s3://bucket/name"):
        ObjectStore(url)


def test_conditional_write_loses_against_another(monkeypatch):
    store = in_memory(monkeypatch)
    tag = store.write_if("lease", b"1", None)
    assert tag and store.write_if("lease", b"2", None) is None
    assert (newer := store.write_if("lease", b"3", tag))
    assert store.write_if("lease", b"4", tag) is None
    assert store.read("lease") == (b"3", newer)
    assert store.read("absent") is None


def test_transfers_keep_content_and_listing_has_names(monkeypatch, tmp_path):
    store = in_memory(monkeypatch)
    (tmp_path / "a").write_bytes(bytes(range(256)) * 100)
    store.upload({"x/a": tmp_path / "a", "y": tmp_path / "a"})
    assert store.list().keys() == {"x/a", "y"} and store.list("x").keys() == {"x/a"}
    store.download({"x/a": tmp_path / "deep/er/a"})
    assert (tmp_path / "deep/er/a").read_bytes() == (tmp_path / "a").read_bytes()
    assert [file.name for file in (tmp_path / "deep/er").iterdir()] == ["a"]
    store.delete(["y", "absent"])
    assert store.list().keys() == {"x/a"}


def test_vanished_file_is_no_error_of_the_store(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError):
        in_memory(monkeypatch).upload({"x": tmp_path / "absent"})


def test_data_is_downloaded_once_per_content(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    store = in_memory(monkeypatch)
    store.write("a.txt", b"one")
    store.write("sub/b.txt", b"two")
    store.write("sub", b"")  # as consoles mark folders
    files = find_files("s3://bucket/run").files
    assert [file.read_bytes() for file in files] == [b"one", b"two"]
    calls, download = [], ObjectStore.download

    def counted(store, files):
        calls.append(sorted(files))
        download(store, files)

    monkeypatch.setattr(ObjectStore, "download", counted)
    store.write("a.txt", b"three")
    store.delete(["sub/b.txt", "sub"])
    assert [file.read_bytes() for file in find_files("s3://bucket/run/").files] == [b"three"]
    assert [file.read_bytes() for file in find_files("s3://bucket/run").files] == [b"three"]
    assert calls == [["a.txt"]]
    store.delete(["a.txt"])
    with pytest.raises(UserError, match="no data at s3://bucket/run; give the URL of an object"):
        download_data("s3://bucket/run")


def test_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr(object_store, "import_extra", missing)
    with pytest.raises(UserError, match="needs obstore"):
        ObjectStore("s3://bucket/run")


def missing(module: str, purpose: str) -> None:
    raise UserError(f"{purpose} needs obstore")


def test_missing_credentials_and_silent_server_are_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(object_store, "MAX_RETRIES", 0)
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 1)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(StoreError, match=r"^s3://b/x: access is denied; set AWS_ACCESS_KEY_ID .* write\.$"):
        ObjectStore("s3://b/x").list()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(StoreError, match=r"^s3://b/x: it does not answer as expected \(.*\); check.*\.$") as error:
        ObjectStore("s3://b/x").read("checkpoints/401/tokenizer.json")  # a name that resembles a reason
    assert "\n" not in str(error.value)
    assert not object_store.DENIED.search("Error performing GET http://127.0.0.1:1/b/x in 401.92µs - HTTP error")
    assert object_store.DENIED.search("Server returned non-2xx status code: 403 Forbidden: ")

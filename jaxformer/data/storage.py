"""Objects at URLs such as s3://bucket/name, read and written by TensorStore's drivers, and data at URLs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from jaxformer.errors import UserError, parse_json
from jaxformer.files import cache_root, try_lock, write_atomically

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or a service account of the machine",
}
"""Description of the credentials for each URL scheme."""
DENIED = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|[Cc]redentials|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch"
)
RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "8s"}
"""TensorStore's options for the repetition of failed requests."""
TRANSFERS = 8
"""Maximum number of concurrent transfers, each of which holds a file in memory."""
LOCK_SECONDS = 24 * 3600
"""Maximum time to wait for another process that is downloading the same data."""


class StorageError(UserError):
    """A failure to read or write objects."""


def is_url(name: str) -> bool:
    """Return True for a URL of objects, even a malformed one."""
    return name.partition("://")[0] in CREDENTIALS and "://" in name


class Storage:
    """Objects below a URL, by their names relative to it; the name of the object at the URL itself is empty.

    Each method raises `StorageError` on failure.
    """

    def __init__(self, url: str) -> None:
        """Open the URL, without a request.

        Raises:
          UserError: the URL has no bucket or no object name.
        """
        import tensorstore  # slow to import

        scheme, _, rest = url.partition("://")
        bucket, _, path = rest.rstrip("/").partition("/")
        if not bucket or not path or {"", ".", ".."} & {*path.split("/")} or re.search(r"[\s?#]", rest):
            raise UserError(f"{url!r} is not a URL of objects in a bucket; write it like {scheme}://bucket/name.")
        self.url, self._scheme = f"{scheme}://{bucket}/{path}", scheme
        driver = {"s3": "s3", "gs": "gcs"}[scheme]
        spec: dict[str, Any] = {"driver": driver, "bucket": bucket, "path": path}
        if scheme == "s3":  # the driver reads the credentials from the environment, but not these
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            spec |= {"endpoint": os.environ["AWS_ENDPOINT_URL"]} if "AWS_ENDPOINT_URL" in os.environ else {}
            spec |= {"aws_region": region} if region else {}
            if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise the driver logs that there is no ~/.aws
                spec["aws_credentials"] = {"type": "environment"}
        with self._explain():
            context = tensorstore.Context({f"{driver}_request_retries": RETRIES})
            self._store = tensorstore.KvStore.open(spec, context=context).result()
            self._below = tensorstore.KvStore.KeyRange("/", "0")  # the character after /

    def names(self) -> set[str]:
        """Return the names of the objects below the URL, except those that are not valid file paths."""
        with self._explain():
            keys = self._store.list(self._below).result()
        names = {key.decode(errors="replace").removeprefix("/") for key in keys}
        names = {name for name in names if not {"", ".", ".."} & {*name.split("/")}}
        return names - {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}  # of consoles

    def upload(self, files: Mapping[str, Path]) -> None:
        """Write objects from files. Raises `FileNotFoundError` if a file has vanished."""
        self._transfer(lambda name: self._store.write(_key(name), files[name].read_bytes()).result(), files)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that do not exist are ignored."""
        self._transfer(lambda name: self._store.write(_key(name), None).result(), names)

    def download(self, target: Path, names: Iterable[str]) -> set[str]:
        """Download objects that have changed since the last call, and remove the files of others; return the names of
        the objects that exist.

        Args:
          target: folder for the objects, or the file for the object at the URL itself.
        """
        record = target.with_name(f".{target.name}.generations")
        before, after = dict[str, str](), dict[str, str]()
        with suppress(OSError, ValueError, TypeError):
            before = dict(parse_json(record.read_bytes()))

        def download(name: str) -> None:
            file = target / name
            known = bytes.fromhex(before[name]) if name in before and file.is_file() else None
            result = self._store.read(_key(name), if_not_equal=known).result()
            if result.state == "missing":  # a run in training has removed it
                return
            if result.state == "value":
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, result.value)
            after[name] = result.stamp.generation.hex()

        self._transfer(download, names)
        for name in before.keys() - after.keys():
            (target / name).unlink(missing_ok=True)
        if after:
            write_atomically(record, json.dumps(after))
        return {*after}

    def _transfer(self, function: Callable[[str], object], names: Iterable[str]) -> None:
        with self._explain(), ThreadPoolExecutor(TRANSFERS) as pool:
            for _ in pool.map(function, names):
                pass

    @contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, NotImplementedError) as error:  # TensorStore's
            reason = str(error).partition(" [")[0]
            if "NoSuchBucket" in reason or "bucket does not exist" in reason:
                problem = "there is no such bucket; create it, or correct the URL"
            elif DENIED.search(reason):
                problem = f"access is denied; set {CREDENTIALS[self._scheme]}, with permission to list, read and write"
            else:
                problem = f"{reason.splitlines()[0][:200]}; check the URL, the network and the endpoint"
            raise StorageError(f"{self.url}: {problem}.") from error


def _key(name: str) -> str:
    return f"/{name}" if name else ""


def download_data(url: str) -> Path:
    """Return the file of an object, or the folder of all objects below a URL, downloaded to the cache. Only objects
    that have changed are downloaded again.

    Raises:
      UserError: there is no object at or below the URL, or it cannot be read.
    """
    storage = Storage(url)
    target = cache_folder("data", storage) / storage.url.rpartition("/")[2]
    with (target.parent / ".lock").open("w") as lock:
        with suppress(OSError):  # the file system has no locks
            try_lock(lock.fileno(), LOCK_SECONDS)
        if not storage.download(target, storage.names() or {""}):
            raise UserError(f"no data at {url}; give the URL of an object, or of a folder of objects.")
    return target


def cache_folder(kind: str, storage: Storage) -> Path:
    """Return the cache folder for a URL and a kind of content, which is named by the quoted URL; see `run_name`."""
    folder = cache_root().absolute() / kind / quote(storage.url, safe="")
    folder.mkdir(parents=True, exist_ok=True)
    return folder

"""Runs and data at URLs such as s3://bucket/run, read and written by TensorStore's drivers.

A run at a URL is trained in a local copy, whose changes are uploaded in the background. A checkpoint at the URL is
complete if it has checksums; they are uploaded last and removed first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from jaxformer.errors import STAGED_URL, UserError, parse_json
from jaxformer.files import cache_root, try_lock, write_atomically
from jaxformer.integrity import CHECKSUMS
from jaxformer.run_lock import run_lock

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or a service account of the machine",
}
"""Description of the credentials for each URL scheme."""
DENIED = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|[Cc]redentials|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch"
)
CHECKPOINT_FILE = re.compile(r"((?:base/)?checkpoints/(?:0|[1-9]\d*))/[^.].*")
OTHER_FILE = re.compile(r"(?!(?:base/)?checkpoints/|.*\.new$)[^.].*")
"""Patterns of the files that are stored. Hidden files and those that are being written are not."""
LOG = "metrics.jsonl"
RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "8s"}
"""TensorStore's options for the repetition of failed requests."""
TRANSFERS = 8
"""Maximum number of concurrent transfers, each of which holds a file in memory."""
UPLOAD_SECONDS = 5.0
"""Interval at which to look for changed files."""
LOCK_SECONDS = 24 * 3600
"""Maximum time to wait for another process that is downloading the same data."""

warn = logging.getLogger(__name__).warning


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
    target = _cache_folder("data", storage) / storage.url.rpartition("/")[2]
    with (target.parent / ".lock").open("w") as lock:
        with suppress(OSError):  # the file system has no locks
            try_lock(lock.fileno(), LOCK_SECONDS)
        if not storage.download(target, storage.names() or {""}):
            raise UserError(f"no data at {url}; give the URL of an object, or of a folder of objects.")
    return target


def local_folder(name: str) -> Path:
    """Return the folder from which to read a run: the path itself, or the cached copy of a URL, made up to date.

    Raises:
      UserError: the URL is malformed or cannot be read.
    """
    if not is_url(name):
        return Path(name)
    storage = Storage(name)
    folder = _cache_folder("runs", storage) / "read"
    _download_run(storage, folder)
    return folder


@contextmanager
def training_folder(url: str, resume: bool) -> Iterator[Path]:
    """Yield the folder of this machine in which to train the run at a URL, locked; with `resume`, it is a copy.

    Raises:
      UserError: the run exists and is not resumed, another process of this machine trains it, or it cannot be read.
    """
    storage = Storage(url)
    parent = _cache_folder("runs", storage)
    folder = parent / "train"
    with run_lock(parent):
        if not resume and (names := storage.names()):
            problem = f"{url} exists, with {len(names):,} objects"
            raise UserError(f"{problem}; add --resume to continue it, or choose another --run.")
        shutil.rmtree(folder, ignore_errors=True)
        if resume:
            _download_run(storage, folder)
        yield folder


def _download_run(storage: Storage, folder: Path) -> None:
    """Make a folder a copy of the run at a URL, without incomplete checkpoints."""
    names = storage.names()
    storage.download(folder, (name for name in names if _is_stored(name, names)))


def _is_stored(name: str, names: Iterable[str]) -> bool:
    """Return True for a file of a run that is neither temporary nor in an incomplete checkpoint."""
    match = CHECKPOINT_FILE.fullmatch(name)
    return bool(OTHER_FILE.fullmatch(name)) if match is None else f"{match[1]}/{CHECKSUMS}" in names


def _cache_folder(kind: str, storage: Storage) -> Path:
    """Return the cache folder for a URL and a kind of content, in which a file names the URL."""
    readable, digest = re.sub(r"[^\w.-]+", "-", storage.url)[-40:], hashlib.sha256(storage.url.encode()).hexdigest()
    folder = cache_root().absolute() / kind / f"{readable}-{digest[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / STAGED_URL, storage.url)
    return folder


@contextmanager
def uploading(url: str, folder: Path) -> Iterator[None]:
    """Upload the changes of a run's folder to its URL in the background, and the last ones at the end.

    Raises at the end:
      UserError: the last changes could not be uploaded.
    """
    upload, stop = Upload(Storage(url), folder), threading.Event()

    def watch() -> None:
        has_failed = False
        while not stop.wait(UPLOAD_SECONDS):
            try:
                upload()
            except FileNotFoundError:  # removed meanwhile
                continue
            except StorageError as error:
                if not has_failed:
                    warn(f"{str(error).rstrip('.')}; training continues and will try again")
                has_failed = True

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        try:
            upload()
        except StorageError as error:
            reason = str(error).rstrip(".")
            raise UserError(f"{reason}; not all of {folder} is uploaded: copy it before you resume.") from error


class Upload:
    """The changes of a run's folder since the last upload."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        """Note what is at the URL, which was downloaded to the folder."""
        self._storage, self._folder = storage, folder
        stored = (name for name in storage.names() if CHECKPOINT_FILE.fullmatch(name) or OTHER_FILE.fullmatch(name))
        self._sent = {name: _state(folder / name) for name in stored}

    def __call__(self) -> None:
        """Upload changed files and remove the objects of removed ones, unless the run has not begun.

        Raises:
          StorageError: the storage fails.
          FileNotFoundError: a file was removed meanwhile, such as one of an old checkpoint.
        """
        if not (self._folder / LOG).exists():  # it may be discarded, or its folder was removed
            return
        files = {file.relative_to(self._folder).as_posix(): file for file in self._folder.rglob("*") if file.is_file()}
        present = {name: _state(file) for name, file in files.items() if _is_stored(name, files)}
        changed = {name for name, state in present.items() if self._sent.get(name) != state}
        last = {name for name in {*present, *self._sent} if PurePosixPath(name).name == CHECKSUMS}
        removed = self._sent.keys() - present.keys()
        self._remove(changed & last & self._sent.keys())  # a checkpoint that was saved again
        for batch in (changed - last, changed & last):
            self._sent |= dict.fromkeys(batch)  # also if the upload fails halfway
            self._storage.upload({name: files[name] for name in batch})
            self._sent |= {name: present[name] for name in batch}
        self._remove(removed & last)
        self._remove(removed - last)

    def _remove(self, names: set[str]) -> None:
        self._storage.remove(names)
        self._sent = {name: state for name, state in self._sent.items() if name not in names}


def _state(file: Path) -> tuple[int, int] | None:
    """Return what changes with a file's content; None if there is no such file."""
    try:
        return file.stat().st_mtime_ns, file.stat().st_size
    except FileNotFoundError:
        return None

"""Objects at URLs such as s3://bucket/name, and cached downloads of data."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from jaxformer.errors import UserError, parse_json
from jaxformer.extras import import_extra
from jaxformer.files import cache_root, try_lock, write_atomically

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or a service account of the machine",
}
"""Description of the credentials for each URL scheme."""
DENIED = re.compile(
    r"\b40[13] (?:Unauthorized|Forbidden)|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|169\.254\."
    r"|metadata\.google|[Cc]redential|api/token"
)
"""Pattern of errors due to missing or wrong credentials; without any, the machine's metadata server is tried."""
NO_BUCKET = re.compile("NoSuchBucket|bucket does not exist")
TRANSFERS = 8
"""Maximum number of concurrent transfers."""
MAX_RETRIES, RETRY_SECONDS, CONNECT_SECONDS, REQUEST_SECONDS = 8, 20, 5, 300
LOCK_SECONDS = 24 * 3600
"""Maximum time to wait for another process that is downloading the same data."""

Tag = Mapping[str, Any]
"""Entity tag and version of an object's content."""


class StoreError(UserError):
    """A failure of an object store."""


def is_url(name: str) -> bool:
    """Return True for a URL of an object store, even a malformed one."""
    return name.partition("://")[0] in CREDENTIALS and "://" in name


class ObjectStore:
    """Objects below a URL, by their names relative to it; each method raises `StoreError` on failure."""

    def __init__(self, url: str) -> None:
        """Configure the store without connecting.

        Raises:
          UserError: the URL has no bucket or no object name, or an extra is missing.
        """
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.rstrip("/").partition("/")
        if not bucket or not prefix or {"", ".", ".."} & {*prefix.split("/")} or re.search(r"[\s?#]", rest):
            raise UserError(f"{url!r} is not a URL of objects in a bucket; write it like {scheme}://bucket/name.")
        self.url, self._scheme = f"{scheme}://{bucket}/{prefix}", scheme
        obstore = import_extra("obstore.store", f"{self.url}")
        options: dict[str, Any] = {
            "client_options": {
                "connect_timeout": f"{CONNECT_SECONDS}s", "timeout": f"{REQUEST_SECONDS}s",
                "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"),
            },
            "retry_config": {"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        }  # fmt: skip
        with self._explain():
            self._store = obstore.from_url(self.url, **options)

    def list(self, prefix: str = "") -> dict[str, str]:
        """Return the entity tags of the objects below a prefix, by name; only names that are valid file paths."""
        with self._explain():
            metas = self._store.list(prefix or None).collect()
        tags = {meta["path"]: meta["e_tag"] or "" for meta in metas if _is_inside(meta["path"])}
        folders = {parent.as_posix() for name in tags for parent in PurePosixPath(name).parents}
        return {name: tag for name, tag in tags.items() if name not in folders}  # consoles create objects for folders

    def tag(self) -> str | None:
        """Return the entity tag of the object at the URL itself; None if there is none."""
        with self._explain():
            try:
                return self._store.head("")["e_tag"] or ""
            except FileNotFoundError:
                return None

    def read(self, name: str) -> tuple[bytes, Tag] | None:
        """Return the content of an object and its tag; None if there is no such object."""
        with self._explain():
            try:
                result = self._store.get(name)
                return bytes(result.bytes()), _tag(result.meta)
            except FileNotFoundError as error:
                if NO_BUCKET.search(str(error)):
                    raise
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object."""
        with self._explain():
            self._store.put(name, content)

    def write_if(self, name: str, content: bytes, tag: Tag | None) -> Tag | None:
        """Write an object if its tag is still `tag` or, with None, if it does not exist; return the new tag, or None if
        another writer has changed it.

        A store without conditional writes always writes.
        """
        exceptions = import_extra("obstore.exceptions", self.url)
        with self._explain():
            try:
                return _tag(self._store.put(name, content, mode="create" if tag is None else tag))
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return None
            except (exceptions.NotSupportedError, NotImplementedError):
                return _tag(self._store.put(name, content))

    def upload(self, files: Mapping[str, Path]) -> None:
        """Write objects from files, in multiple parts if large. Raises `FileNotFoundError` if a file has vanished."""

        def upload(name: str) -> None:
            with files[name].open("rb") as file:
                self._store.put(name, file)

        self._transfer(upload, files)

    def download(self, files: Mapping[str, Path]) -> None:
        """Write files from objects, each atomically."""

        def download(name: str) -> None:
            files[name].parent.mkdir(parents=True, exist_ok=True)
            scratch = files[name].with_name(f".{files[name].name}.{os.getpid()}.new")  # others may read the run too
            try:
                with scratch.open("wb") as file:
                    for chunk in self._store.get(name):
                        file.write(chunk)
                scratch.replace(files[name])
            finally:
                scratch.unlink(missing_ok=True)

        self._transfer(download, files)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects in order; those that do not exist are ignored."""
        with self._explain():
            for name in names:
                self._store.delete(name)

    def _transfer(self, function: Any, files: Mapping[str, Path]) -> None:
        with self._explain(), ThreadPoolExecutor(TRANSFERS) as pool:
            for _ in pool.map(function, files):
                pass

    @contextmanager
    def _explain(self) -> Iterator[None]:
        """Convert errors of the store into `StoreError`; errors of local files are re-raised unchanged."""
        base = import_extra("obstore.exceptions", self.url).BaseError
        try:
            yield
        except (base, FileNotFoundError, PermissionError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # an error of the file system
                raise
            prefix = self.url.split("/", 3)[3]
            text = re.sub(rf"[^\s<>]*/{re.escape(prefix)}/[^\s<>]*", "", str(error))  # object names may contain 401
            if NO_BUCKET.search(text):
                reason = "there is no such bucket; create it, or correct the URL"
            elif isinstance(error, PermissionError) or DENIED.search(text):
                reason = f"access is denied; set {CREDENTIALS[self._scheme]}, with permission to list, read and write"
            else:
                first = str(error).split("\n")[0].strip()[:200]
                reason = f"it does not answer as expected ({first}); check the URL, the network and the endpoint"
            raise StoreError(f"{self.url}: {reason}.") from error


def _tag(meta: Mapping[str, Any]) -> Tag:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def refresh(store: ObjectStore, target: Path, objects: Mapping[str, str]) -> None:
    """Download the objects whose entity tag has changed since the last call, and remove the files of deleted objects.

    Args:
      target: folder for the objects, or the file for the object at the URL itself, whose name is empty.
      objects: entity tags by name, as in `ObjectStore.list`.
    """
    record = target.with_name(f".{target.name}.etags")
    try:
        before = dict(parse_json(record.read_bytes()))
    except (OSError, ValueError, TypeError):
        before = {}
    changed = {name: tag for name, tag in objects.items() if before.get(name) != tag or not (target / name).is_file()}
    for name in before.keys() - objects.keys():
        (target / name).unlink(missing_ok=True)
    if changed or before.keys() - objects.keys():
        record.unlink(missing_ok=True)  # an interrupted download starts over
        store.download({name: target / name for name in changed})
        write_atomically(record, json.dumps(dict(objects)))


def download_data(url: str) -> Path:
    """Return the file of an object, or the folder of all objects below a URL, downloaded to the cache. Only objects
    whose entity tag has changed are downloaded again.

    Raises:
      UserError: there is no object at or below the URL, or the store fails.
    """
    store = ObjectStore(url)
    target = cache_folder("data", store.url) / store.url.rpartition("/")[2]
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        with suppress(OSError):  # the file system has no locks
            try_lock(lock.fileno(), LOCK_SECONDS)
        objects = store.list()
        if not objects and (tag := store.tag()) is not None:
            objects = {"": tag}
        if not objects:
            raise UserError(f"no data at {url}; give the URL of an object, or of a folder of objects.")
        refresh(store, target, objects)
    return target


def cache_folder(kind: str, url: str) -> Path:
    """Return the cache folder for a URL and a kind of content."""
    readable = re.sub(r"[^\w.-]+", "-", url)[-40:]
    return cache_root().absolute() / kind / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def _is_inside(name: str) -> bool:
    """Return True if an object's name is a path inside a folder."""
    return not name.startswith("/") and not {"", ".", ".."} & {*name.split("/")}

"""Runs at URLs such as s3://bucket/run.

A run at a URL is trained in a local copy, whose changes are uploaded in the background. A checkpoint at the URL is
complete if it has checksums; they are uploaded last and removed first.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxformer.data.storage import Storage, StorageError, cache_folder, is_url
from jaxformer.errors import UserError
from jaxformer.runs.convert import EARLIER_SNAPSHOTS
from jaxformer.runs.integrity import CHECKSUMS
from jaxformer.runs.lock import run_lock

FOLDERS = rf"(?:(?:base/)?checkpoints|snapshots|{EARLIER_SNAPSHOTS})"
CHECKPOINT_FILE = re.compile(rf"({FOLDERS}/(?:0|[1-9]\d*))/[^.].*")
OTHER_FILE = re.compile(rf"(?!{FOLDERS}/|.*\.new$)[^.].*")
"""Patterns of the files that are stored. Hidden files and those that are being written are not."""
LOG = "metrics.jsonl"
UPLOAD_SECONDS = 5.0
"""Interval at which to look for changed files."""

warn = logging.getLogger(__name__).warning


def local_folder(name: str) -> Path:
    """Return the folder from which to read a run: the path itself, or the cached copy of a URL, made up to date.

    Raises:
      UserError: the URL is malformed or cannot be read.
    """
    if not is_url(name):
        return Path(name)
    storage = Storage(name)
    folder = cache_folder("runs", storage) / "read"
    _download_run(storage, folder)
    return folder


@contextmanager
def training_folder(url: str, resume: bool) -> Iterator[Path]:
    """Yield the folder of this machine in which to train the run at a URL, locked; with `resume`, it is a copy.

    Raises:
      UserError: the run exists and is not resumed, another process of this machine trains it, or it cannot be read.
    """
    storage = Storage(url)
    parent = cache_folder("runs", storage)
    folder = parent / "train"
    with run_lock(parent):
        if not resume and (names := storage.names()):
            problem = f"{url} exists, with {len(names):,} objects"
            raise UserError(f"{problem}; add `resume` to continue it, or choose another `run`.")
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
        # Checksums complete a checkpoint; the run's own stand beside the files that every checkpoint needs.
        last = {name for name in {*present, *self._sent} if name.endswith(f"/{CHECKSUMS}")}
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

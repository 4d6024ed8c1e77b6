"""Runs on object storage: a local staging folder, and a mirror that uploads it while training writes to it.

A checkpoint in the store is complete once its checksums exist, which are written last. Stores have no append and no
locks: metrics are stored in numbered parts, and a lease object, renewed by conditional writes, replaces a lock. Each
process stages and uploads its own shards.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxformer.distributed import all_gather, barrier, broadcast
from jaxformer.errors import STAGED_URL, UserError, parse_json, resume_command, run_name
from jaxformer.files import try_lock, write_atomically
from jaxformer.integrity import ARRAYS, CHECKSUMS
from jaxformer.lease import LEASE, Lease
from jaxformer.object_store import ObjectStore, StoreError, cache_folder, is_url, refresh

CONFIG, METRICS = "config.json", "metrics.jsonl"
SESSION = ".session"
"""File with the id of the session that last wrote to a staging folder."""
PART = re.compile(r"metrics/(\d{6})")
PART_BYTES = 2**20
"""Bytes of `metrics.jsonl` per object, except the last."""
CHECKPOINT_FILE = re.compile(r"((?:base/)?checkpoints/(?:0|[1-9]\d*))/(.+)")
POLL_SECONDS, PUSH_SECONDS = 0.5, 15.0
"""Interval at which to look for checkpoints, and interval between uploads of other files."""
UPLOAD_WAIT_SECONDS = 1800.0
"""Maximum wait for an upload, before training saves again and before processes end."""

warn = logging.getLogger(__name__).warning
_mirrors: dict[Path, Mirror] = {}


@dataclass(frozen=True)
class StagedRun:
    """A run on object storage and its local staging folder."""

    store: ObjectStore
    folder: Path
    """Staging folder, inside the cache."""

    @property
    def url(self) -> str:
        """URL of the run."""
        return self.store.url

    def committed(self, objects: Mapping[str, str] | None = None) -> set[str]:
        """Return the complete checkpoints in the store, such as `checkpoints/100`."""
        matches = (CHECKPOINT_FILE.fullmatch(name) for name in (self.store.list() if objects is None else objects))
        return {match[1] for match in matches if match and match[2] == CHECKSUMS}

    def pull(self) -> None:
        """Synchronise the folder with the store, except for arrays, which `fetch` downloads, and incomplete
        checkpoints.

        Raises:
          StoreError: the store fails.
        """
        objects = self.store.list()
        complete = self.committed(objects)
        for path in self.folder.glob("checkpoints/*"):
            checkpoint = path.relative_to(self.folder).as_posix()
            stored = self.store.read(f"{checkpoint}/{CHECKSUMS}") if checkpoint in complete else None
            if stored is None or not _has_content(path / CHECKSUMS, stored[0]):  # removed, or saved again
                shutil.rmtree(path, ignore_errors=True)
        parts = sorted(name for name in objects if PART.fullmatch(name))
        refresh(self.store, self.folder, {name: objects[name] for name in objects if _is_pulled(name, complete)})
        if parts:
            content = b"".join((self.folder / name).read_bytes() for name in parts)
            write_atomically(self.folder / METRICS, content)
        else:
            (self.folder / METRICS).unlink(missing_ok=True)

    def pull_missing(self) -> None:
        """Download the complete checkpoints that are missing in the folder, except for arrays. Checkpoints are removed
        from the folder first, so a killed program may not have removed them from the store.

        Raises:
          StoreError: the store fails.
        """
        objects = self.store.list()
        missing = {c for c in self.committed(objects) if not (self.folder / c / CHECKSUMS).is_file()}
        matches = {name: CHECKPOINT_FILE.fullmatch(name) for name in objects if _is_pulled(name, missing)}
        self.store.download({name: self.folder / name for name, match in matches.items() if match})

    def remove_incomplete(self) -> None:
        """Remove incomplete checkpoints from the store."""
        objects = self.store.list()
        complete = self.committed(objects)
        matches = {name: CHECKPOINT_FILE.fullmatch(name) for name in objects}
        self.store.delete([name for name, match in matches.items() if match and match[1] not in complete])

    def fetch(self, checkpoint: str, anew: bool = False) -> bool:
        """Download the files of a checkpoint that are not in the folder; return False if it is not in the store yet.

        Args:
          checkpoint: name of the checkpoint, such as `checkpoints/100`.
          anew: download all of its files again.

        Raises:
          StoreError: the store fails.
        """
        marker = f"{checkpoint}/{CHECKSUMS}"
        if (stored := self.store.read(marker)) is None:
            return False
        hidden = (f"{checkpoint}/.", marker)
        names = [name for name in self.store.list(checkpoint) if not name.startswith(hidden)]
        self.store.download({n: self.folder / n for n in names if anew or not (self.folder / n).exists()})
        write_atomically(self.folder / marker, stored[0])
        return True


def _has_content(file: Path, content: bytes) -> bool:
    return file.is_file() and file.read_bytes() == content


def _is_pulled(name: str, complete: set[str]) -> bool:
    """Return True for an object that `pull` downloads."""
    if match := CHECKPOINT_FILE.fullmatch(name):
        return match[1] in complete and not match[2].startswith((".", *ARRAYS))
    return name != LEASE and not name.startswith(".")


def staged_run(folder: Path) -> StagedRun | None:
    """Return the run that is staged in a folder or in its parent; None for any other folder."""
    for root in (folder, folder.parent):
        if (root.parent / STAGED_URL).is_file():
            return StagedRun(ObjectStore(run_name(root)), root)
    return None


def local_folder(name: str) -> Path:
    """Return the folder from which to read a run: the path itself, or a cache folder synchronised with a URL.

    Raises:
      UserError: the URL is malformed, or the store fails.
    """
    if not is_url(name):
        return Path(name)
    staged = _stage(name, "read")
    staged.pull()
    return staged.folder


def _stage(url: str, use: str) -> StagedRun:
    store = ObjectStore(url)
    parent = cache_folder("runs", store.url)
    parent.mkdir(parents=True, exist_ok=True)
    write_atomically(parent / STAGED_URL, store.url)
    return StagedRun(store, parent / use)


def process_index(given: str | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Return the index of this process before it is connected: `given`, or from SLURM or Open MPI, else 0, because each
    machine of a TPU pod runs one process."""
    candidates = (given, environment.get("SLURM_PROCID"), environment.get("OMPI_COMM_WORLD_RANK"))
    return next((int(text) for text in candidates if text and text.isdecimal()), 0)


@contextlib.contextmanager
def open_staged(url: str, process: int, resume: bool) -> Iterator[StagedRun]:
    """Open the folder in which a process stages a run for training, locked against other processes on this machine.

    A folder that was written by the run's last session is preserved, because it may contain files that could not be
    uploaded; any other is synchronised with the store.

    Raises:
      UserError: another process uses the folder, the store fails, or the run exists and is not resumed.
    """
    staged = _stage(url, f"process-{process}")
    lock = os.open(staged.folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            is_free = try_lock(lock, 0.3)
        except OSError as error:
            remedy = "set JAXFORMER_CACHE to a folder on a local disk of Linux or macOS"
            raise UserError(f"{staged.folder.parent}, where {url} is staged, has no file locks; {remedy}.") from error
        if not is_free:
            raise UserError(f"another process on this machine is training in {url}; stop it, or choose another --run.")
        if not resume and (others := staged.store.list().keys() - {LEASE}):  # which may not form a run
            remedy = "add --resume to continue it, or choose another --run"
            raise UserError(f"{url} exists, with {len(others):,} objects; {remedy}.")
        lease, last = Lease.read(staged.store), _session(staged.folder)
        if not resume or lease is None or not last or last != lease.session:
            shutil.rmtree(staged.folder, ignore_errors=True)
            if resume:
                staged.pull()
        yield staged
    finally:
        os.close(lock)


def _session(folder: Path) -> str:
    try:
        return (folder / SESSION).read_text()
    except OSError:
        return ""


@contextlib.contextmanager
def mirrored(staged: StagedRun) -> Iterator[Mirror]:
    """Hold the lease of a run and upload what is written to its folder until the end; all processes enter together.

    The folder is synchronised with the store again if others have written there since it was opened. Checkpoints that
    are not in every process's folder are removed locally, and incomplete ones are removed from the store. Checkpoints
    staged by several processes are uploaded first, because each process has only its shards.

    Raises:
      UserError: another process holds the lease, has taken it over or has changed the run, or some files could not be
        uploaded.
    """
    process, last = jax.process_index(), _session(staged.folder)
    lease = None if process else Lease.acquire(staged.store, last)
    with contextlib.ExitStack() as stack:
        if lease is not None:
            stack.callback(_release, lease)
            staged.remove_incomplete()
        session, before = json.loads(broadcast(json.dumps(lease and (lease.session, lease.before))))
        _follow(staged, is_last=last != "" and last == before)
        local = _checkpoints(staged.folder)
        has_all_shards = last.endswith(
            f"-{jax.process_count()}"
        )  # otherwise uncommitted checkpoints lack other processes' shards
        usable = local if has_all_shards else sorted(staged.committed() & {*local})
        common = set.intersection(*(set(json.loads(text)) for text in all_gather(json.dumps(usable))))
        folders = (*staged.folder.glob("checkpoints/*"), *staged.folder.glob("base/checkpoints/*"))
        for folder in folders:
            if folder.name.isdecimal() and folder.relative_to(staged.folder).as_posix() not in common:
                shutil.rmtree(folder)
        if staged.folder.is_dir():
            (staged.folder / SESSION).write_text(session)
        barrier()  # uploads of others must not be removed above
        mirror = stack.enter_context(Mirror(staged, lease, session, process, jax.process_count()))
        if jax.process_count() > 1:
            mirror.wait()
            barrier()
        yield mirror


def _follow(staged: StagedRun, is_last: bool) -> None:
    """Synchronise the folder with the store, whose lease this job holds. Raises `UserError` if another process has
    created or changed the run since it was opened. The folder of the last session is newer than the store."""
    config = staged.folder / CONFIG
    if not staged.folder.is_dir():
        is_changed = staged.store.read(CONFIG) is not None
    elif is_last:
        staged.pull_missing()
        is_changed = False
    else:
        read = config.read_bytes() if config.is_file() else b""
        if _session(staged.folder):
            shutil.rmtree(staged.folder)
        staged.pull()
        is_changed = not _has_content(config, read)
    if is_changed:
        raise UserError(f"another process has changed {staged.url} just now; resume it, or choose another --run.")


def _release(lease: Lease) -> None:
    """End a lease; if no run has begun, delete it."""
    with contextlib.suppress(StoreError):  # the lease will expire
        if lease.renew(0.0) and lease.store.read(CONFIG) is None:
            lease.store.delete([LEASE])


def _checkpoints(folder: Path) -> list[str]:
    """Return the complete checkpoints in a folder, oldest first."""
    files = (*folder.glob(f"base/checkpoints/*/{CHECKSUMS}"), *folder.glob(f"checkpoints/*/{CHECKSUMS}"))
    names = (file.relative_to(folder).as_posix() for file in files)
    complete = [match[1] for name in names if (match := CHECKPOINT_FILE.fullmatch(name))]
    return sorted(complete, key=lambda checkpoint: int(Path(checkpoint).name))


def mirror_of(folder: Path) -> Mirror | None:
    """Return the mirror of a folder or of its parent while this process trains there; otherwise None."""
    return _mirrors.get(folder) or _mirrors.get(folder.parent)


def is_split() -> bool:
    """Return True while several processes train a run on object storage, each with its own folder of shards."""
    return bool(_mirrors) and jax.process_count() > 1  # in this order: a reader does not start JAX's devices


def share_run(folder: Path) -> Path:
    """Return the folder of a new run that process 0 has created, on all processes; if it stages a run on object
    storage, each process has its own copy."""
    if (mirror := mirror_of(folder)) is None:
        return Path(broadcast(str(folder)))
    mirror.push()
    barrier()
    if jax.process_index():
        mirror.staged.pull()
    return folder


class Mirror:
    """Background upload of a staging folder during training.

    If the store fails, training continues, and missing files are uploaded once the store works again.
    """

    def __init__(self, staged: StagedRun, lease: Lease | None, session: str, process: int, n_processes: int) -> None:
        """Create the mirror; its threads start on entering.

        Args:
          lease: lease that process 0 holds; None on other processes.
          session: session id, the same on all processes.
        """
        self.staged, self._store, self._folder = staged, staged.store, staged.folder
        self._lease, self._session, self._process, self._n_processes = lease, session, process, n_processes
        self._done, self._sent = staged.committed(), set[str]()
        self._pushed: dict[str, tuple[int, int, int]] = {}
        self._parts = {name for name in self._store.list("metrics") if PART.fullmatch(name)}
        self._busy, self._stop = threading.RLock(), threading.Event()
        self._failure: StoreError | None = None
        self._lost: Exception | None = None
        self._abandoned = False

    def __enter__(self) -> Mirror:
        _mirrors[self._folder] = self
        self._threads = [threading.Thread(target=self._upload_loop, daemon=True)]
        if self._lease:
            self._threads.append(threading.Thread(target=self._lease_loop, args=[self._lease], daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Upload missing files; after an error, do not wait for other processes."""
        try:
            self._finish(is_patient=kind is None or self._n_processes == 1)
            failure: Exception | None = self._lost or self._failure
            if failure is not None and self._lost is None:
                failure = UserError(
                    f"{str(failure).rstrip('.')}; all is staged in {self._folder}, from where this uploads it on this "
                    f"machine: {resume_command(self._folder)}"
                )
            if failure is not None:
                if kind is None:
                    raise failure
                warn(str(failure))
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()
            del _mirrors[self._folder]

    def wait(self) -> None:
        """Wait until all complete checkpoints are uploaded, unless the store fails.

        Raises:
          UserError: another process has taken the lease.
          OSError: a staged file cannot be read.
        """
        deadline = time.monotonic() + UPLOAD_WAIT_SECONDS
        while self._pending() and not (self._failure or self._lost) and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._lost:
            raise self._lost

    def push(self) -> None:
        """Immediately upload the files that are not part of a checkpoint.

        Raises:
          StoreError: the store fails.
        """
        with self._busy:
            self._push_files()

    def remove(self, checkpoint: str) -> None:
        """Remove a checkpoint, such as `checkpoints/100`, from the store, so that its step can be saved again.

        Raises:
          StoreError: the store fails.
        """
        with self._busy:
            if self._process == 0:
                marker = f"{checkpoint}/{CHECKSUMS}"
                self._store.delete([marker, *(name for name in self._store.list(checkpoint) if name != marker)])
            self._done.discard(checkpoint)
            self._sent.discard(checkpoint)

    def abandon(self) -> None:
        """Remove a new run that has not begun training from the store."""
        with self._busy, contextlib.suppress(StoreError):
            self._abandoned = True
            if self._process == 0:
                self._store.delete([CONFIG, *(name for name in self._store.list() if name not in (CONFIG, LEASE))])

    def _pending(self) -> list[str]:
        return [checkpoint for checkpoint in _checkpoints(self._folder) if checkpoint not in self._done]

    def _lease_loop(self, lease: Lease) -> None:
        while not self._stop.wait(lease.poll_seconds) and self._lost is None:
            try:
                self._renew()
            except StoreError:  # reported by the upload thread
                continue
            except Exception as error:  # raised by the training thread
                self._lost = error

    def _renew(self) -> None:
        """Renew the lease of process 0 if it is due; record an error if another process has taken it."""
        if self._lease and not self._lease.is_fresh() and not self._lease.renew():
            self._lost = UserError(
                f"another process has taken over {self.staged.url}, as this one did not renew its lease in time; stop "
                "one of them, and resume the other."
            )

    def _upload_loop(self) -> None:
        pushed = 0.0
        while not self._stop.wait(PUSH_SECONDS if self._failure else POLL_SECONDS) and self._lost is None:
            is_due = time.monotonic() - pushed > PUSH_SECONDS
            self._attempt(is_due)
            pushed = time.monotonic() if is_due else pushed

    def _attempt(self, with_files: bool) -> None:
        """Upload complete files; a failure of the store is reported once."""
        try:
            with self._busy:
                if self._abandoned or self._lost or not self._folder.is_dir():
                    return
                self._renew()  # another process may have taken over while this one was suspended
                if self._lost:
                    return
                if _session(self._folder) != self._session:
                    (self._folder / SESSION).write_text(self._session)
                for checkpoint in self._pending():
                    self._upload(checkpoint)
                if self._process == 0:
                    self._prune()
                if with_files:
                    self._push_files()
        except StoreError as error:
            if self._failure is None:
                warn(
                    f"{str(error).rstrip('.')}; training continues and will upload from {self._folder} once the store "
                    "works again"
                )
            self._failure = error
        except FileNotFoundError as error:  # the folder has vanished, which training reports, or is changing
            logging.getLogger(__name__).debug("upload of %s: %s", self._folder, error)
        except Exception as error:  # raised by the training thread
            self._lost = error
        else:
            if self._failure is not None:
                warn(f"{self.staged.url} works again; uploads continue")
            self._failure = None

    def _upload(self, checkpoint: str) -> None:
        """Upload this process's files of a checkpoint; process 0 commits it once all processes have uploaded theirs."""
        path, parts = self._folder / checkpoint, f"{checkpoint}/.parts"
        if checkpoint not in self._sent:
            try:
                checksums = dict(parse_json((path / CHECKSUMS).read_bytes()))
                names = (f.relative_to(path).as_posix() for f in path.rglob("*") if f.is_file() and f.name != CHECKSUMS)
                own = [name for name in names if self._is_own(name)]
                self._store.upload({f"{checkpoint}/{name}": path / name for name in own})
            except FileNotFoundError:  # a newer checkpoint has replaced it
                return
            own_checksums = {name: checksums[name] for name in own if name in checksums}
            self._store.write(f"{parts}/{self._session}-{self._process}", json.dumps(own_checksums).encode())
            self._sent.add(checkpoint)
        if self._process == 0:
            complete = {f"{parts}/{self._session}-{process}" for process in range(self._n_processes)}
            if not complete <= self._store.list(parts).keys():
                return
            self._push_files()  # rows of the log up to the checkpoint
            self._renew()
            if self._lost:
                return
            stored = [self._store.read(name) for name in sorted(complete)]
            merged = {name: digest for part in stored if part for name, digest in parse_json(part[0]).items()}
            self._store.write(f"{checkpoint}/{CHECKSUMS}", json.dumps(merged, indent=0).encode())
            self._store.delete(sorted(complete))
        self._done.add(checkpoint)

    def _is_own(self, name: str) -> bool:
        """Return True for a checkpoint file that this process uploads; processes other than 0 upload only shards."""
        base = name.rpartition("/")[2]
        return self._process == 0 or (name.startswith(ARRAYS) and not base.startswith((".", "_", "commit_success")))

    def _prune(self) -> None:
        """Remove older checkpoints that are no longer in the folder."""
        local = _checkpoints(self._folder)
        uploaded = [int(Path(c).name) for c in local if c in self._done and c.startswith("checkpoints/")]
        for checkpoint in sorted(self._done - set(local)):
            if checkpoint.startswith("checkpoints/") and int(Path(checkpoint).name) < max(uploaded, default=0):
                self.remove(checkpoint)

    def _push_files(self) -> None:
        """Upload new and changed files that are not part of a checkpoint; only process 0 does."""
        if self._process or not (self._folder / CONFIG).is_file():
            return
        for file in sorted(self._folder.rglob("*")):
            name = file.relative_to(self._folder).as_posix()
            is_excluded = "checkpoints" in file.parts or "/." in f"/{name}" or name.endswith(".new")
            if is_excluded or name == METRICS or PART.fullmatch(name) or not file.is_file():
                continue
            state = _state(file)
            if self._pushed.get(name) != state:
                self._store.write(name, file.read_bytes())
                self._pushed[name] = state
        if (self._folder / METRICS).is_file():
            self._push_metrics(self._folder / METRICS)

    def _push_metrics(self, file: Path) -> None:
        """Upload the log in parts; parts before the last change only if the file is replaced or truncated."""
        before, state = self._pushed.get(METRICS, (0, 0, 0)), _state(file)
        if before == state:
            return
        first = before[2] // PART_BYTES if before[0] == state[0] and before[2] <= state[2] else 0
        with file.open("rb") as content:
            content.seek(first * PART_BYTES)
            rest = content.read()
        parts = {
            f"metrics/{first + i:06}": rest[i * PART_BYTES : (i + 1) * PART_BYTES]
            for i in range(-(-len(rest) // PART_BYTES))
        }
        last = max(parts, default=f"metrics/{first:06}")
        surplus = sorted((name for name in self._parts if name > last or not rest), reverse=True)
        self._store.delete(surplus)  # first, so that the remaining parts always form the beginning of a log
        self._parts.difference_update(surplus)
        for name, part in parts.items():
            self._store.write(name, part)
            self._parts.add(name)
        self._pushed[METRICS] = state

    def _finish(self, is_patient: bool) -> None:
        """Upload missing files; if `is_patient`, wait until all processes have done so."""
        deadline = time.monotonic() + UPLOAD_WAIT_SECONDS
        while True:
            self._attempt(with_files=True)
            is_done = not self._pending() and (self._process == 0 or self._are_sent_committed())
            if is_done or self._lost or self._failure or not is_patient or time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def _are_sent_committed(self) -> bool:
        """Return True once process 0 has committed what this process has uploaded, unless it was removed since."""
        sent = self._sent & set(_checkpoints(self._folder))
        try:
            return sent <= self.staged.committed()
        except StoreError:
            return True


def _state(file: Path) -> tuple[int, int, int]:
    """Return inode, modification time in nanoseconds and size in bytes of a file."""
    stat = file.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size

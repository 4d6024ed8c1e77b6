"""Lock of a run's folder, so that only one process, or one multi-process job, trains in it at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jaxformer.errors import UserError, user_error_on_write
from jaxformer.files import try_lock

LOCK = ".lock"
TIMEOUT_SECONDS = 0.3
"""Timeout for the lock, longer than `is_run_locked` holds it."""

_LOCKED_EARLY = set[Path]()
"""Folders that `hold_run_lock` has locked for the next `run_lock` of this process."""


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other processes. The kernel releases the lock when this process ends.

    Raises:
      UserError: another process holds the lock, or the folder cannot be written.
    """
    if (resolved := folder.resolve()) in _LOCKED_EARLY:
        _LOCKED_EARLY.remove(resolved)
        yield
        return
    with user_error_on_write(folder, LOCK):
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        is_locked_elsewhere = False
        with contextlib.suppress(OSError):  # the file system has no locks
            is_locked_elsewhere = not try_lock(lock, TIMEOUT_SECONDS)
        if is_locked_elsewhere:
            process = f"process {os.pread(lock, 20, 0).decode() or '(just started)'}"
            raise UserError(f"{process} is training in {folder}; wait for it or stop it, or choose another --run.")
        with contextlib.suppress(OSError):  # the process id is only for messages
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(lock, 0)
    finally:
        os.close(lock)


@contextlib.contextmanager
def hold_run_lock(folder: Path) -> Iterator[None]:
    """Acquire the lock of a run's folder early, on behalf of the `CheckpointManager` that is entered inside."""
    with run_lock(folder):
        _LOCKED_EARLY.add(folder.resolve())
        try:
            yield
        finally:
            _LOCKED_EARLY.discard(folder.resolve())


def is_run_locked(folder: Path) -> bool:
    """Return True if a process is training in a run's folder."""
    try:
        with (folder / LOCK).open("rb") as lock:
            return not try_lock(lock.fileno(), shared=True)
    except OSError:  # no lock file, or it cannot be read
        return False

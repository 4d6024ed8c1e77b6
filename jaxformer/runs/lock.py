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


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other processes. The kernel releases the lock when this process ends.

    Raises:
      UserError: another process holds the lock, or the folder cannot be written.
    """
    with user_error_on_write(folder, LOCK):
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        is_locked_elsewhere = False
        with contextlib.suppress(OSError):  # the file system has no locks
            is_locked_elsewhere = not try_lock(lock, TIMEOUT_SECONDS)
        if is_locked_elsewhere:
            raise _locked_error(folder)
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


def check_not_locked(folder: Path) -> None:
    """Raise `UserError` if a process is training in a run's folder, before the time that it takes to lock it."""
    if is_run_locked(folder):
        raise _locked_error(folder)


def _locked_error(folder: Path) -> UserError:
    process = (folder / LOCK).read_text() or "(just started)"
    return UserError(f"process {process} is training in {folder}; wait for it or stop it, or choose another `run`.")


def is_run_locked(folder: Path) -> bool:
    """Return True if a process is training in a run's folder."""
    try:
        with (folder / LOCK).open("rb") as lock:
            return not try_lock(lock.fileno(), shared=True)
    except OSError:  # no lock file, or it cannot be read
        return False

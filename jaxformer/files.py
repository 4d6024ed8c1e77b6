"""Files: atomic writes, checksums, locks and the cache folder."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxformer.errors import UserError, abbreviate, os_error_reason

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_atomically(file: Path, content: str | bytes) -> None:
    """Replace a file's content atomically: readers see either the old or the new content, even after a crash or a
    concurrent replacement by another process."""
    scratch = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        scratch.replace(file)
    except OSError as error:
        error.filename = str(file)  # not that of the new file, or none
        raise
    finally:
        with suppress(OSError):
            scratch.unlink()


@contextmanager
def no_empty_parents(path: Path) -> Iterator[None]:
    """Remove, at the end, the parents of a path that were missing at the start and are empty, as after an error."""
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    try:
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2**22))  # in smaller parts, it would wait for other threads
    with file.open("rb", buffering=0) as content:
        while n := content.readinto(buffer):
            digest.update(buffer[:n])
    return digest.hexdigest()


def try_lock(descriptor: int, timeout_seconds: float = 0.0, shared: bool = False) -> bool:
    """Lock an open file, exclusively or `shared`; return False if another process holds a conflicting lock until the
    timeout. The kernel releases the lock when the file is closed or the process ends."""
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this system has no advisory locks")
    kind, deadline = fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.03)


def expand_home(path: str) -> Path:
    """Return the `Path` for a string, with `~` expanded. Raises `UserError` if it is invalid, such as too long."""
    try:
        location = Path(path).expanduser()
        location.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = (os_error_reason(error) or str(error)).rstrip(".")
        raise UserError(f"{abbreviate(path)} is not a readable path ({reason}); give another one.") from error
    return location


def cache_root() -> Path:
    """Return the folder for all caches: `$JAXFORMER_CACHE`, else jaxformer/ in `$XDG_CACHE_HOME` or ~/.cache. Raises
    `UserError` if the user has no home folder, as in a container with an unknown user id."""
    if root := os.environ.get("JAXFORMER_CACHE"):
        return Path(root)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxformer"
    except RuntimeError as error:
        raise UserError("the cache has no home folder; set JAXFORMER_CACHE to a folder of your own.") from error


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with permissions for this user only, whatever the umask."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)

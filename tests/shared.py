"""What a session makes once, whichever worker needs it first. A test that alters it makes a copy."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import run, tiny, write_books


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that all workers of a session share; the first that asks for it fills it with `make`, and the
    others wait."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, complete = base / "shared" / name, base / "shared" / f"{name}.complete"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            complete.touch()
    return folder


def options_of_trained(books: Path) -> list[str]:
    """Return the options of the run of `trained`; its batches split over the eight devices of this process, too."""
    return tiny(books, 20, "--train.batch-size", "8")


def trained(factory: pytest.TempPathFactory) -> Path:
    """Return a folder as `train.py` leaves it: with `books`, the run `runs/quick` of 20 steps, and what was printed, in
    `stdout` and `stderr`."""

    def make(folder: Path) -> None:
        result = run("train.py", *options_of_trained(write_books(folder / "books")), cwd=folder)
        assert result.returncode == 0, result.stderr
        (folder / "stdout").write_text(result.stdout)
        (folder / "stderr").write_text(result.stderr)

    return once(factory, "trained", make)

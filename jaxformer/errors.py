"""`UserError`, and its creation from file-system failures."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxformer.invocation import command

SURROGATE = re.compile("[\ud800-\udfff]")


class UserError(Exception):
    """An error that the user can resolve; its message is one sentence with the value, the limit and the remedy.

    The command line prints the message and exits with status 2.
    """


def abbreviate(value: object, length: int = 80) -> str:
    """Return the `repr` of a value, with the middle elided if it is longer than `length` characters."""
    text = hex(value) if isinstance(value, int) and value.bit_length() > 1024 else repr(value)  # Python's limit
    return text if len(text) <= length else f"{text[: length // 2]} … {text[-length // 4 :]}"


def lone_surrogate(text: str) -> int | None:
    """Return the index of the first lone surrogate, half a character that UTF-8 cannot encode; None without one."""
    match = SURROGATE.search(text)
    return None if match is None else match.start()


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text. Raises `ValueError` if it is invalid or nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


def os_error_reason(error: Exception) -> str | None:
    """Return the system's message for a file-system error; None for any other error."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # C++ libraries raise a ValueError whose message contains the system's.
    messages = sorted({os.strerror(number) for number in errno.errorcode}, key=len, reverse=True)
    return next((message for message in messages if message in str(error)), None)


STAGED_URL = ".url"
"""File with the URL of the run on object storage that is staged in the folders next to it."""


def run_name(folder: Path) -> str:
    """Return the name of a run: its folder, or the URL that the folder stages."""
    try:
        return (folder.parent / STAGED_URL).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return str(folder)


def resume_command(folder: Path) -> str:
    """Return the command that resumes a run."""
    return f"{command('train')} --resume --run {shlex.quote(run_name(folder))}"


def write_error(folder: Path, name: str, reason: str) -> UserError:
    """Return the error for a file in a run's folder that cannot be written, with the command to resume."""
    remedy = "free some space" if reason in map(os.strerror, DISK_FULL_ERRORS) else "make the folder writable"
    resume = f"then resume with: {resume_command(folder)}"
    return UserError(f"{name} cannot be written to {folder}: {reason}; {remedy}, {resume}")


def folder_vanished_error(folder: Path, name: str) -> UserError:
    """Return the error for a file that cannot be written because the run's folder was removed or renamed."""
    return UserError(
        f"{name} cannot be written: {folder} no longer exists; restore it and add --resume, or train again."
    )


@contextmanager
def user_error_on_write(folder: Path, name: str) -> Iterator[None]:
    """Convert a failure to write a file in a run's folder into a `UserError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise folder_vanished_error(folder, name) from error
    except OSError as error:
        raise write_error(folder, name, error.strerror or str(error)) from error

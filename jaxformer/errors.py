"""The one error that users are meant to see, and how a failure of the disk becomes one."""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class UserError(Exception):
    """Something the user can mend, said in one sentence: the value, the limit and the remedy.

    The command line prints the sentence and exits with status 2; from Python it is an ordinary exception.
    """


def abbreviate(value: object, length: int = 80) -> str:
    """The `repr` of a value of any size, its middle left out where it is longer than `length` characters."""
    text = hex(value) if isinstance(value, int) and value.bit_length() > 1024 else repr(value)  # Python prints no more
    return text if len(text) <= length else f"{text[: length // 2]} … {text[-length // 4 :]}"


def parse_json(text: str | bytes) -> Any:
    """What JSON text holds; raises `ValueError` where it is none, or nested deeper than Python follows."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that has no room."""


def os_error_reason(error: Exception) -> str | None:
    """Why the system could not read or write something, in its own words; None for an error of another kind."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # Libraries in C++ raise a ValueError whose long text holds the system's words.
    known = sorted({os.strerror(number) for number in errno.errorcode}, key=len, reverse=True)
    return next((words for words in known if words in str(error)), None)


def write_error(folder: Path, what: str, why: str) -> UserError:
    """The error for something of a run's folder that cannot be written, with the way to go on."""
    remedy = "free some space" if why in map(os.strerror, FULL) else "see to it that the folder can be written"
    command = f"python train.py --resume --run {shlex.quote(str(folder))}"
    return UserError(f"{what} cannot be written to {folder}: {why}; {remedy}, then go on with: {command}")


def folder_vanished_error(folder: Path, what: str) -> UserError:
    """The error for a run's folder that was removed or renamed while something of it was to be written."""
    return UserError(f"{what} cannot be written: {folder} has vanished; put it back and add --resume, or train anew.")


@contextmanager
def user_error_on_write(folder: Path, name: str) -> Iterator[None]:
    """Turn a failure to write a file of a run's folder into a `UserError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise folder_vanished_error(folder, name) from error
    except OSError as error:
        raise write_error(folder, name, error.strerror or str(error)) from error

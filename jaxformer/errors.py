"""`UserError`, and what its sentences name: extras to install, file-system failures."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

EXTRAS = {
    "PIL": "images", "babel": "dates", "flatbuffers": "stablehlo", "gguf": "gguf", "jinja2": "hf",
    "matplotlib": "plots", "pyarrow": "data", "sacrebleu": "translation",
    "safetensors": "hf", "tensorboardX": "tensorboard", "wandb": "wandb",
}  # fmt: skip
"""Extra that installs each package."""
SURROGATE = re.compile("[\ud800-\udfff]")


class UserError(Exception):
    """An error that the user can resolve; its message is one sentence with the value, the limit and the remedy.

    Fields of configs and parameters of functions stand in backticks, with their path and maybe a value:
    `train.batch_size`, `mesh='fsdp=4'`. The command line shows them as its options, and exits with status 2.
    """


def foreign(error: BaseException) -> str:
    """Return the text of an error that another library or the user's code raised, with its backticks as apostrophes,
    as in ours they name fields."""
    return str(error).replace("`", "'")


def batch_hint(shape: Sequence[int], n_axes: int) -> str:
    """Return the end of an error for an array with one axis more than its `n_axes`, which may be a batch; empty for
    another number of axes."""
    return "; use jax.vmap for a batch" if len(shape) == n_axes + 1 else ""


def abbreviate(value: object) -> str:
    """Return the `repr` of a value, with the middle elided if it is longer than 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:40]} … {text[-20:]}"


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


def run_name(folder: Path) -> str:
    """Return the name of a run: its folder, or the URL of which the folder is a copy, in a folder named by the quoted
    URL."""
    url = unquote(folder.parent.name)
    return url if "://" in url else str(folder)


def resume_fields(folder: Path) -> str:
    """Return what resumes a run, for the end of a message."""
    return f"`resume=True` `run={run_name(folder)!r}`"


def write_error(folder: Path, name: str, reason: str) -> UserError:
    """Return the error for a file in a run's folder that cannot be written."""
    remedy = "free some space" if reason in map(os.strerror, DISK_FULL_ERRORS) else "make the folder writable"
    return UserError(
        f"{name} cannot be written to {folder}: {reason}; {remedy}, then resume with {resume_fields(folder)}"
    )


def folder_vanished_error(folder: Path, name: str) -> UserError:
    """Return the error for a file that cannot be written because the run's folder was removed or renamed."""
    return UserError(
        f"{name} cannot be written: {folder} no longer exists; restore it and add `resume`, or train again."
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


def missing_extras(*packages: str) -> str:
    """Return the extras of the packages that are not installed, such as "images,plots"; empty if all are installed."""
    specs = {package: importlib.util.find_spec(package) for package in packages}
    # A namespace package, which is any folder of that name, has no location.
    return ",".join(sorted({EXTRAS[package] for package, spec in specs.items() if not (spec and spec.has_location)}))


def import_extra(module: str, purpose: str) -> ModuleType:
    """Return a module of an optional package, such as `PIL.Image`. Raises `UserError`, with the purpose, such as
    "train.log_to wandb", as its subject, if the package is not installed or its import fails for any reason."""
    package = module.partition(".")[0]
    problem = "is not installed"
    try:
        # Any folder with the package's name can be imported as a namespace package.
        if getattr(importlib.import_module(package), "__file__", None):
            return importlib.import_module(module)
    except BaseException as error:  # a package's own code can raise anything, as a panic of Rust or a call of exit
        if isinstance(error, KeyboardInterrupt):
            raise
        if not isinstance(error, ModuleNotFoundError) or error.name != package:
            kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            problem = f"cannot be imported ({kind}{' '.join(str(error).split())})"
    remedy = f"install it with pip install 'jaxformer[{EXTRAS[package]}]'"
    raise UserError(f"{purpose} needs {package}, which {problem}; {remedy}.")

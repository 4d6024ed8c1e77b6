"""Commands: functions of the options on a command line that return an exit status, one-sentence errors, and commands to
type."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jaxformer.cli.options import CommandLine, with_flags
from jaxformer.errors import DISK_FULL_ERRORS, UserError, run_name
from jaxformer.terminal import echo_error, escape_control, escape_line, prepare_streams

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the checkout, or of the installed packages outside a checkout."""
SIGPIPE = 13
"""Number of the signal for a pipe without a reader; Windows does not define its name."""


def as_command(output_optional: bool = False) -> Callable[[Callable[[CommandLine], int]], Callable[..., int]]:
    """Return a decorator that turns a function of the options into a command, a function of the words, by default the
    program's, that returns the exit status. An error that the user can fix becomes one sentence and exit status 2; with
    `--debug` anywhere, the traceback is shown instead. `output_optional` is as in `prepare_streams`."""

    def decorate(function: Callable[[CommandLine], int]) -> Callable[..., int]:
        @functools.wraps(function)
        def run(arguments: Sequence[str] | None = None) -> int:
            prepare_streams(output_optional)
            warnings = logging.StreamHandler()
            warnings.setFormatter(_OneLine("%(levelname)s: %(message)s"))
            logging.basicConfig(handlers=[warnings])  # before a library configures it
            words = list(sys.argv[1:] if arguments is None else arguments)
            if "--debug" in words:
                return function(CommandLine([word for word in words if word != "--debug"]))
            try:
                return function(CommandLine(words))
            except UserError as error:
                problem = with_flags(str(error))
            except (RuntimeError, AssertionError):
                if (platforms := os.environ.get("JAX_PLATFORMS")) is None or _finds_devices():
                    raise
                remedy = "unset it, or set it to cpu"
                problem = f"JAX_PLATFORMS is {platforms!r}, but jax finds no such device; {remedy}."
            except KeyboardInterrupt as interruption:
                message, number = interruption.args or ("interrupted", signal.SIGINT)
                echo_error(message)
                return 128 + number
            except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
                return 128 + SIGPIPE
            except OSError as error:
                path = f"{error.filename}: " if error.filename else ""
                remedy = "; free some space" if error.errno in DISK_FULL_ERRORS else ""
                problem = f"{path}{error.strerror or error}{remedy}."
            echo_error(f"error: {problem}")
            return 2

        return run

    return decorate


def interruptible(function: Callable[..., T], *arguments: Any) -> T:
    """Return a function's result, computed in another thread: Ctrl-C ends the command at once, where the main thread
    would first hear of it when the compiler returns, after up to half a minute."""
    result: Future[T] = Future()

    def compute() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=compute, daemon=True).start()  # for which no exit waits, as for those of a pool
    return result.result()


def command(name: str) -> str:
    """Return a command that works in the user's folder, such as `jaxformer train`, or a call of train.py or sample.py
    if one of them was run."""
    program = Path(sys.argv[0] if sys.argv else "")
    script = program.with_name(f"{name}.py") if program.name else program
    if program.name in ("train.py", "sample.py") and program.resolve().parent == ROOT and script.is_file():
        return f"python {shlex.quote(str(script))}"
    return f"jaxformer {name}" if program.stem == "jaxformer" else f"python -m jaxformer {name}"


def resume_command(folder: Path) -> str:
    """Return the command that resumes a run."""
    return f"{command('train')} --resume --run {shlex.quote(run_name(folder))}"


def exit_program(status: int) -> NoReturn:
    """Exit with the status of a command. After an interruption, exit without the interpreter's clean-up, which would
    wait for the threads of an unfinished save: without end if the interruption came within it."""
    if status > 128:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream
                stream.flush()
        os._exit(status)
    sys.exit(status)


def _finds_devices() -> bool:
    import jax

    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):  # AssertionError if its plugin is not installed
        return False


class _OneLine(logging.Formatter):
    """A formatter that escapes control characters, including newlines except in a traceback.

    For a JAX plugin that cannot be used, such as CUDA's without a GPU, the reason replaces the traceback.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info and str(record.msg).startswith("Jax plugin configuration error"):
            reason = f"{record.getMessage()}: {record.exc_info[1]} JAX_PLATFORMS=cpu uses no plugin."
            fields = {"levelname": "WARNING", "msg": reason, "args": None, "exc_info": None, "exc_text": None}
            record = logging.makeLogRecord(record.__dict__ | fields)
        return escape_control(super().format(record))

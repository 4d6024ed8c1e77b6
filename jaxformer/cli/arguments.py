"""Arguments from dataclasses, and errors in one sentence."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import tyro

from jaxformer.cli.help import help_text
from jaxformer.config import Config, check_fields
from jaxformer.data.infer_config import infer_patch_size
from jaxformer.errors import FULL, UserError
from jaxformer.terminal import echo, echo_error, escape_control, escape_line, prepare_streams

T = TypeVar("T")
OPTION = r"--[\w.-]*\w"


def run_command(
    command: Callable[[list[str]], int], arguments: Sequence[str] | None = None, ignore_closed: bool = False
) -> int:
    """Call a command; the exit status. What the user can mend becomes one sentence and status 2.

    `--debug` anywhere lets the traceback through.

    Args:
      outlive: go on quietly once nobody reads what is written.
    """
    prepare_streams(ignore_closed)
    warnings = logging.StreamHandler()
    warnings.setFormatter(_OneLine("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[warnings])  # before a library does, its own way
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in arguments:
        return command([a for a in arguments if a != "--debug"])
    try:
        options_given(arguments)
        return command(arguments)
    except UserError as error:
        echo_error(f"error: {error}")
        return 2
    except (RuntimeError, AssertionError):
        if (platforms := os.environ.get("JAX_PLATFORMS")) is None or _finds_devices():
            raise
        remedy = "unset it, or set it to cpu"
        echo_error(f"error: JAX_PLATFORMS is {platforms!r}, but jax finds no such device; {remedy}.")
        return 2
    except KeyboardInterrupt as interruption:
        message, number = interruption.args or ("interrupted", signal.SIGINT)
        echo_error(message)
        return 128 + number
    except BrokenPipeError:  # whoever read what we print has gone, as `| head` does
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        return 128 + signal.SIGPIPE
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        remedy = "; free some space" if error.errno in FULL else ""
        echo_error(f"error: {path}{error.strerror or error}{remedy}.")
        return 2


def _finds_devices() -> bool:
    import jax

    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):  # the latter where its plugin is not installed
        return False


class _OneLine(logging.Formatter):
    """Shows control characters, as of a path; newlines, too, but those of a traceback below."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return escape_control(super().format(record))


def parse(cls: type[T], arguments: Sequence[str], default: T, program: str, description: str) -> T:
    """Parse flags for every field of a dataclass, nested ones dotted.

    Raises:
      UserError: an unknown option (with the nearest known one), a value missing, of the wrong type or out of range.
    """

    if {"-h", "--help"} & {*arguments}:
        echo(help_text(default, program, description))
        sys.exit(0)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = tyro.cli(
                cls, args=list(arguments), default=default, prog=program, description=description,
                config=(tyro.conf.AvoidSubcommands,),
            )  # fmt: skip
        check_fields(parsed)  # configs inside have checked themselves
        return parsed
    except SystemExit as error:
        if error.code in (0, None):
            raise
    raise UserError(_sentence(said.getvalue(), arguments))


def peek(arguments: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> tuple[argparse.Namespace, list[str]]:
    """Some options, before it is known what the others can be; and all other arguments.

    Args:
      options: what `argparse` is to know of each, by its flag.

    Raises:
      UserError: a value is missing or of the wrong type.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, known in options.items():
        parser.add_argument(flag, **known)
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}.") from error


def options_given(arguments: Sequence[str]) -> set[str]:
    """The options among arguments, such as `--batch-size`; `--no-resume` is one with `--resume`.

    Raises:
      UserError: one is given twice; only the last would count.
    """
    flags = [re.sub(r"(^--|\.)no-", r"\1", a.partition("=")[0].replace("_", "-")) for a in arguments]
    given = [flag for flag in flags if re.fullmatch(OPTION, flag)]
    if twice := [flag for flag in given if given.count(flag) > 1]:
        raise UserError(f"{twice[0]} is given twice; give it once, where it takes several values with all of them.")
    return set(given)


def model_fields(arguments: Sequence[str]) -> set[str]:
    """Return the names of the model's fields among arguments, such as `image_size`."""
    prefix = "--model."
    given = (flag for flag in options_given(arguments) if flag.startswith(prefix))
    return {flag.removeprefix(prefix).replace("-", "_") for flag in given}


def with_image_size(model: Any, arguments: Sequence[str]) -> Any:
    """Return the model's config for the image size among arguments that are yet to be parsed: with patches that divide
    it, where none are given."""
    given = model_fields(arguments)
    for prefix in ("", "vision."):
        if f"{prefix}image_size" in given and f"{prefix}patch_size" not in given:
            flag = f"--model.{prefix}image-size"
            spelled = [re.sub(OPTION, lambda match: match[0].replace("_", "-"), a, count=1) for a in arguments]
            known, _ = peek(spelled, {flag: {"nargs": "+", "type": int}})
            size = tuple(vars(known)[flag.removeprefix("--").replace("-", "_")])
            if prefix and hasattr(model, "vision"):
                model = replace(model, vision=infer_patch_size(model.vision, size))
            elif not prefix:
                model = infer_patch_size(model, size)
    return model


def _sentence(printed: str, arguments: Sequence[str]) -> str:
    """The message in what tyro prints, or the nearest option where one is unknown.

    Tyro prints a title, the message, and hints, apart by rules; in a box where the terminal can draw one.
    """
    boxed = "│" in printed
    rows = [row.strip("│ ") for row in printed.splitlines() if row.strip() and row[0] not in "╭╰"]
    sections: list[str] = [""]
    for row in rows:
        if set(row) <= set("─-"):
            sections.append("")
        else:
            sections[-1] = f"{sections[-1]} {row}".strip()
    message, *hints = sections if boxed else [*sections[1:], ""]
    named = re.findall(OPTION, message)
    unknown = [flag for a in arguments if (flag := a.partition("=")[0]) in named]
    if message.startswith("Unrecognized") and unknown:
        known = re.findall(OPTION, " ".join(hints).partition("Perhaps you meant:")[2])
        near = get_close_matches(unknown[0], known, 1, 0)
        return f"unknown option {unknown[0]}; " + (f"did you mean {near[0]}?" if near else "--help lists all options.")
    if no_choice := re.match(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", message):
        value, flag, listed = no_choice.groups()
        choices = re.findall(r"'([^']*)'", listed)
        near = get_close_matches(value, choices, 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        return f"{flag} is {value!r}; it must be one of {', '.join(choices)}{hint}"
    if no_number := re.match(r"Error parsing (\S+): (invalid literal|could not convert).*: '(.*)'", message):
        flag, what, value = no_number.groups()
        kind = "a whole number, such as 1000" if what == "invalid literal" else "a number, such as 0.5"
        return f"{flag} is {value!r}; it must be {kind}."
    return f"{message.rstrip('.')}; --help lists all options."


def folder_named(flag: str, value: str) -> Path:
    """Return the folder that an option names, which need not exist.

    Raises:
      UserError: the name is empty, or of a file.
    """
    folder = Path(value)
    if not value:
        raise UserError(f"{flag} is empty; name a folder, such as runs/mine.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{flag} {value} is a file; name a folder.")
    return folder


def load_config(spec: str) -> Config:
    """The config that `FILE` or `FILE:NAME` names; without a name, the one called like the file."""
    path, named, name = spec.partition(":")
    configs = {key: value for key, value in vars(load_module(path)).items() if isinstance(value, Config)}
    wanted = name if named else Path(path).stem
    if wanted not in configs:
        near = get_close_matches(wanted, configs, 1)
        hint = f"did you mean {path}:{near[0]}?" if near else f"it has {', '.join(configs) or 'none'}."
        raise UserError(f"{path} has no config {wanted!r}; {hint}")
    return configs[wanted]


def load_module(path: str) -> ModuleType:
    """A file of configs: Python that the user wrote, which is run.

    Raises:
      UserError: there is none, or it fails.
    """
    file = Path(path)
    if not file.is_file():
        near = sorted(str(p) for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        remedy = (
            f"there are {', '.join(near)}" if near else "give one that exists, or go where the project's configs/ is"
        )
        raise UserError(f"there is no config file {path}; {remedy}.")
    found_spec = importlib.util.spec_from_file_location(f"configs.{file.stem}", file)
    if found_spec is None or found_spec.loader is None:
        raise UserError(f"{path} is no Python file; a config is FILE.py or FILE.py:NAME.")
    module = importlib.util.module_from_spec(found_spec)
    try:
        found_spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{path} is not Python that can be read: {error}.") from error
    except UserError:
        raise
    except Exception as error:  # whatever the user's file does wrong
        line = next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(file)), "?"
        )
        raise UserError(f"{path}, line {line}, failed: {type(error).__name__}: {error}.") from error
    return module

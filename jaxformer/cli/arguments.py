"""Command-line arguments from dataclasses, and errors in one sentence."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import re
import signal
import sys
import traceback
import types
import typing
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from jaxformer.cli.options import help_text, option_groups
from jaxformer.config import Config
from jaxformer.data.infer_config import infer_patch_size
from jaxformer.errors import DISK_FULL_ERRORS, UserError
from jaxformer.fields import check_fields
from jaxformer.terminal import echo, echo_error, escape_control, escape_line, prepare_streams

T = TypeVar("T")
OPTION = re.compile(r"--[\w.-]*\w")
"""Pattern of a flag."""
VALUE_KINDS = {int: "a whole number, such as 1000", float: "a number, such as 0.5", str: "text"}
"""Types of values, and their description in an error."""


@dataclass
class CommandCall:
    """A command that runs, and its exit status."""

    arguments: list[str]
    status: int = 0


@contextlib.contextmanager
def command_call(arguments: Sequence[str] | None, ignore_closed: bool = False) -> Iterator[CommandCall]:
    """Run the body as a command: an error that the user can fix becomes one sentence and exit status 2.

    `--debug` anywhere lets the traceback through.

    Args:
      arguments: those of the command; None for those of the program.
      ignore_closed: continue quietly once nobody reads the output.
    """
    prepare_streams(ignore_closed)
    warnings = logging.StreamHandler()
    warnings.setFormatter(_OneLine("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[warnings])  # before a library does, its own way
    given = list(sys.argv[1:] if arguments is None else arguments)
    call = CommandCall([argument for argument in given if argument != "--debug"])
    if "--debug" in given:
        yield call
        return
    try:
        yield call
    except UserError as error:
        echo_error(f"error: {error}")
        call.status = 2
    except (RuntimeError, AssertionError):
        if (platforms := os.environ.get("JAX_PLATFORMS")) is None or _finds_devices():
            raise
        remedy = "unset it, or set it to cpu"
        echo_error(f"error: JAX_PLATFORMS is {platforms!r}, but jax finds no such device; {remedy}.")
        call.status = 2
    except KeyboardInterrupt as interruption:
        message, number = interruption.args or ("interrupted", signal.SIGINT)
        echo_error(message)
        call.status = 128 + number
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        call.status = 128 + signal.SIGPIPE
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        remedy = "; free some space" if error.errno in DISK_FULL_ERRORS else ""
        echo_error(f"error: {path}{error.strerror or error}{remedy}.")
        call.status = 2


def run_command(
    command: Callable[[list[str]], int], arguments: Sequence[str] | None = None, ignore_closed: bool = False
) -> int:
    """Call a command as the body of `command_call`; return the exit status."""
    with command_call(arguments, ignore_closed) as call:
        options_given(call.arguments)
        call.status = command(call.arguments)
    return call.status


def _finds_devices() -> bool:
    import jax

    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):  # the latter where its plugin is not installed
        return False


class _OneLine(logging.Formatter):
    """A formatter that escapes control characters; newlines, too, but those of a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return escape_control(super().format(record))


def parse(arguments: Sequence[str], default: T, program: str, description: str) -> T:
    """Return a dataclass with the fields that arguments give, nested ones dotted; the others keep their default.

    Raises:
      UserError: an unknown option (with the nearest known one), a value missing, of the wrong type or out of range.
    """
    if {"-h", "--help"} & {*arguments}:
        echo(help_text(default, program, description))
        sys.exit(0)
    options = [option for group in option_groups(default) for option in group.options]
    parser, names = _Parser(), dict(enumerate(options))
    for number, option in names.items():
        if option.positional:
            parser.add_argument(str(number), type=_reader(option.flag, option.hint), nargs="?", default=SUPPRESS)
        elif option.hint is bool:
            for flag, value in zip(option.flags, (True, False), strict=True):
                parser.add_argument(flag, dest=str(number), action="store_const", const=value, default=SUPPRESS)
        else:
            hint, nargs = option.hint, None
            if typing.get_origin(hint) is tuple:
                hint, nargs = typing.get_args(hint)[0], "*"
            reader = _reader(option.flag, hint)
            parser.add_argument(option.flag, dest=str(number), type=reader, nargs=nargs, default=SUPPRESS)
    known, unknown = parser.read(arguments)
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if flags:
        near = get_close_matches(flags[0], [flag for option in options for flag in option.flags], 1)
        hint = f"did you mean {near[0]}?" if near else "--help lists all options."
        raise UserError(f"unknown option {flags[0]}; {hint}")
    if unknown:
        raise UserError(f"{unknown[0]!r} belongs to no option; leave it out, or name its option: --help lists all.")
    values = {names[int(number)].path: value for number, value in vars(known).items()}
    parsed = _replaced(default, {path: tuple(v) if isinstance(v, list) else v for path, v in values.items()})
    check_fields(parsed)  # configs inside have checked themselves
    return parsed


def _hyphenated(word: str) -> str:
    """Return a word of the command line with hyphens for the underscores of its flag, if it begins with one."""
    flag = OPTION.match(word)
    return word if flag is None else flag[0].replace("_", "-") + word[flag.end() :]


class _Parser(argparse.ArgumentParser):
    """A parser without options of its own that raises `UserError`."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False, exit_on_error=False)

    def read(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the known options, and all other arguments."""
        try:
            return self.parse_known_args([_hyphenated(word) for word in arguments])
        except argparse.ArgumentError as error:
            raise UserError(f"{error.argument_name}: {error.message}; --help lists all options.") from error


def _reader(flag: str, hint: Any) -> Callable[[str], Any]:
    """Return the function from a word of the command line to a value of a type; it raises `UserError`."""
    choices: tuple[Any, ...] = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (choice for choice in choices if choice is not type(None))
        inner = _reader(flag, hint)
        return lambda word: None if word.lower() == "none" else inner(word)

    def read(word: str) -> Any:
        if hint is bool or typing.get_origin(hint) is typing.Literal:
            values = {"true": True, "false": False} if hint is bool else {str(choice): choice for choice in choices}
            if (value := word.lower() if hint is bool else word) in values:
                return values[value]
            near = get_close_matches(word, values, 1)
            remedy = f"; did you mean {near[0]}?" if near else "."
            raise UserError(f"{flag} is {word!r}; it must be one of {', '.join(values)}{remedy}")
        if hint not in VALUE_KINDS:
            raise UserError(f"{flag} cannot be given as an option; set it in the config file.")
        try:
            return hint(word)
        except ValueError as error:
            raise UserError(f"{flag} is {word!r}; it must be {VALUE_KINDS[hint]}.") from error

    return read


def _replaced(config: T, values: Mapping[tuple[str, ...], Any]) -> T:
    """Return a dataclass with the values at these paths of field names."""
    changes: dict[str, Any] = {}
    for name in {path[0] for path in values}:
        below = {path[1:]: value for path, value in values.items() if path[0] == name}
        changes[name] = below[()] if () in below else _replaced(getattr(config, name), below)
    return replace(config, **changes)  # type: ignore[type-var]


def peek(arguments: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> tuple[argparse.Namespace, list[str]]:
    """Return some options, before the others are known, and all other arguments.

    Args:
      options: keyword arguments of `argparse`, by flag.

    Raises:
      UserError: a value is missing or of the wrong type.
    """
    parser = _Parser()
    for flag, known in options.items():
        parser.add_argument(flag, **known)
    return parser.read(arguments)


def options_given(arguments: Sequence[str]) -> set[str]:
    """Return the options among arguments, such as `--batch-size`; `--no-resume` counts as `--resume`.

    Raises:
      UserError: one is given twice; only the last would count.
    """
    flags = [re.sub(r"(^--|\.)no-", r"\1", a.partition("=")[0].replace("_", "-")) for a in arguments]
    given = [flag for flag in flags if OPTION.fullmatch(flag)]
    if repeated := [flag for flag in given if given.count(flag) > 1]:
        raise UserError(f"{repeated[0]} is given twice; give it once, where it takes several values with all of them.")
    return set(given)


def model_fields(arguments: Sequence[str]) -> set[str]:
    """Return the names of the model's fields among arguments, such as `image_size`."""
    prefix = "--model."
    given = (flag for flag in options_given(arguments) if flag.startswith(prefix))
    return {flag.removeprefix(prefix).replace("-", "_") for flag in given}


def with_image_size(model: Any, arguments: Sequence[str]) -> Any:
    """Return the model's config with the image size of unparsed arguments, and patches that divide it unless given."""
    given = model_fields(arguments)
    for prefix in ("", "vision."):
        if f"{prefix}image_size" in given and f"{prefix}patch_size" not in given:
            flag = f"--model.{prefix}image-size"
            known, _ = peek(arguments, {flag: {"nargs": "+", "type": int}})
            size = tuple(vars(known)[flag.removeprefix("--").replace("-", "_")])
            if prefix and hasattr(model, "vision"):
                model = replace(model, vision=infer_patch_size(model.vision, size))
            elif not prefix:
                model = infer_patch_size(model, size)
    return model


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
    """Return the config of `FILE:NAME`, or of `FILE` the one with the name of the file.

    Raises:
      UserError: there is no such config, or see `load_module`.
    """
    path, colon, name = spec.partition(":")
    configs = {key: value for key, value in vars(load_module(path)).items() if isinstance(value, Config)}
    name = name if colon else Path(path).stem
    if name not in configs:
        near = get_close_matches(name, configs, 1)
        hint = f"did you mean {path}:{near[0]}?" if near else f"it has {', '.join(configs) or 'none'}."
        raise UserError(f"{path} has no config {name!r}; {hint}")
    return configs[name]


def load_module(path: str) -> ModuleType:
    """Return a file of configs as a module; its code is executed.

    Raises:
      UserError: there is no such file, or it fails.
    """
    file = Path(path)
    if not file.is_file():
        near = sorted(str(p) for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        remedy = (
            f"there are {', '.join(near)}" if near else "give one that exists, or go where the project's configs/ is"
        )
        raise UserError(f"there is no config file {path}; {remedy}.")
    spec = importlib.util.spec_from_file_location(f"config_files.{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file; a config is FILE.py or FILE.py:NAME.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{path} is not Python that can be read: {error}.") from error
    except UserError:
        raise
    except Exception as error:  # of the user's code
        line = next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(file)), "?"
        )
        raise UserError(f"{path}, line {line}, failed: {type(error).__name__}: {error}.") from error
    return module

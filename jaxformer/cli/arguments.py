"""Command-line arguments from dataclasses, and one-sentence errors."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxformer.cli.options import Option, help_text, option_groups
from jaxformer.config import Config, ModelConfig
from jaxformer.config.fields import check_fields, not_a_choice
from jaxformer.config.files import load_module
from jaxformer.data.infer_config import fit_patches
from jaxformer.data.storage import is_url
from jaxformer.errors import DISK_FULL_ERRORS, UserError
from jaxformer.runs.storage import local_folder
from jaxformer.terminal import echo, echo_error, escape_control, escape_line, prepare_streams

T = TypeVar("T")
FLAG = re.compile(r"--[\w.-]*\w")
"""Pattern of a flag."""
OTHER_NAMES = {
    "lr": "learning-rate", "max-steps": "steps", "max-iters": "steps", "grad-clip": "clip-norm",
    "n-layer": "n-blocks", "n-layers": "n-blocks", "n-embd": "d-model", "hidden-size": "d-model",
    "block-size": "context-length", "seq-len": "context-length", "max-tokens": "max-new-tokens", "dtype": "precision",
    "data": "path", "dataset": "path", "out-dir": "run", "output-dir": "run",
}  # fmt: skip
"""Names of options in other programs, and the names here."""
SIGPIPE = 13
"""Number of the signal for a pipe without a reader; Windows does not define its name."""
VALUE_KINDS = {int: "a whole number, such as 1000", float: "a number, such as 0.5", str: "text"}
"""Description of each value type in error messages."""


@dataclass
class CommandCall:
    """A running command, and its exit status."""

    arguments: list[str]
    status: int = 0


@contextlib.contextmanager
def command_call(arguments: Sequence[str] | None, output_optional: bool = False) -> Iterator[CommandCall]:
    """Run the body as a command with these arguments, or the program's for None. An error that the user can fix becomes
    one sentence and exit status 2; with `--debug` anywhere, the traceback is shown instead. `output_optional` is as in
    `prepare_streams`."""
    prepare_streams(output_optional)
    warnings = logging.StreamHandler()
    warnings.setFormatter(_OneLine("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[warnings])  # before a library configures it
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
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        call.status = 128 + SIGPIPE
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        remedy = "; free some space" if error.errno in DISK_FULL_ERRORS else ""
        echo_error(f"error: {path}{error.strerror or error}{remedy}.")
        call.status = 2


def as_command(output_optional: bool = False) -> Callable[[Callable[[list[str]], int]], Callable[..., int]]:
    """Return a decorator that turns a function of arguments into a command, run within `command_call`, that returns the
    exit status and by default takes the program's arguments."""

    def decorate(function: Callable[[list[str]], int]) -> Callable[..., int]:
        @functools.wraps(function)
        def run(arguments: Sequence[str] | None = None) -> int:
            with command_call(arguments, output_optional) as call:
                options_given(call.arguments)
                call.status = function(call.arguments)
            return call.status

        return run

    return decorate


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


class Group(NamedTuple):
    """A flag with the words that follow it."""

    flag: str
    """Flag with hyphens for underscores; empty for the words before the first flag."""
    words: list[str]
    has_equals: bool = False
    """True for `--flag=word`."""

    def values(self, maximum: int | None) -> tuple[list[str], list[str]]:
        """Return the words that are values of the flag, at most `maximum` or any number for None, and the other words.
        Raises `UserError` if a value is missing, or given for a flag without one."""
        if maximum == 0 and self.has_equals:
            raise UserError(f"{self.flag} is {self.words[0]!r}, but it has no value; omit it.")
        if maximum == 1 and not self.words:
            raise UserError(f"{self.flag} has no value; give one.")
        return self.words[:maximum], [] if maximum is None else self.words[maximum:]


def split_flags(arguments: Sequence[str]) -> list[Group]:
    """Return the arguments grouped by flag. Words such as `-1` or `--` are not flags."""
    groups = [Group("", [])]
    for word in arguments:
        flag, equals, value = word.partition("=")
        if FLAG.fullmatch(flag):
            groups.append(Group(flag.replace("_", "-"), [value] if equals else [], bool(equals)))
        else:
            groups[-1].words.append(word)
    return groups


def parse(arguments: Sequence[str], default: T, program: str, description: str) -> T:
    """Return a dataclass with the fields that arguments set, nested ones dotted; other fields keep their defaults.
    Raises `UserError` for an unknown option, naming the nearest known one, and for a value that is missing, of the
    wrong type or out of range."""
    if {"-h", "--help"} & {*arguments}:
        echo(help_text(default, program, description))
        sys.exit(0)
    options = [option for group in option_groups(default) for option in group.options]
    by_flag = {flag: option for option in options for flag in option.flags if flag.startswith("--")}
    positional = [option for option in options if option.positional]
    values: dict[tuple[str, ...], Any] = {}
    for group in split_flags(arguments):
        words = group.words
        if group.flag:
            if group.flag not in by_flag:
                near = nearest_flag(group.flag, [*by_flag])
                hint = f"did you mean {near}?" if near else "--help lists all options."
                raise UserError(f"unknown option {group.flag}; {hint}")
            option = by_flag[group.flag]
            check_single(option, values)
            is_value = bool(words) and words[0].lower() in ("true", "false", "none")
            if option.is_bool and words and (group.has_equals or not positional or is_value):
                raise UserError(f"{group.flag} is {words[0]!r}, but it has no value; give {' or '.join(option.flags)}.")
            given, words = group.values(option.max_values)
            hint = typing.get_args(option.hint)[0] if option.max_values is None else option.hint
            items = tuple(read_value(group.flag, hint, word) for word in given)
            values[option.path] = items if option.max_values is None else next(iter(items), group.flag == option.flag)
        for word in words:
            if not positional:
                raise UserError(f"{word!r} belongs to no option; omit it, or name its option; see --help.")
            option = positional.pop(0)
            check_single(option, values)
            values[option.path] = read_value(option.flag, option.hint, word)
    parsed = _replaced(default, values)
    check_fields(parsed)  # nested configs have checked themselves
    return parsed


def nearest_flag(flag: str, known: Sequence[str]) -> str | None:
    """Return the known flag that is probably meant: one with the same name in another group, or a similar one."""
    by_name = {_name(other): other for other in reversed(known)}
    name = OTHER_NAMES.get(_name(flag), _name(flag))
    if name == "run" and "out" in by_name:  # the command reads a run and writes elsewhere
        name = "out"
    near = [by_name[other] for other in (name, *sorted(by_name)) if other in by_name and other.startswith(name)]
    near += get_close_matches(flag, known, 1) + [by_name[other] for other in get_close_matches(name, by_name, 1)]
    return near[0] if near else None


def _name(flag: str) -> str:
    """Return a flag without its group, such as `batch-size` for `--train.batch-size`."""
    return flag.removeprefix("--").rpartition(".")[2]


def check_single(option: Option, values: Mapping[tuple[str, ...], Any]) -> None:
    """Raise `UserError` if an option that can be given without its flag already has a value."""
    if option.path in values:
        raise UserError(f"{option.flag} is given twice, with and without its flag; give it once.")


def read_value(flag: str, hint: Any, word: str) -> Any:
    """Convert a word of the command line to a type. Raises `UserError` if it has another type, or is not one of the
    choices."""
    choices: tuple[Any, ...] = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (choice for choice in choices if choice is not type(None))
        return None if word.lower() == "none" else read_value(flag, hint, word)
    if typing.get_origin(hint) is typing.Literal:
        values = {str(choice): choice for choice in choices}
        if word in values:
            return values[word]
        raise not_a_choice(flag, word, values)
    if hint not in VALUE_KINDS:
        raise UserError(f"{flag} cannot be given as an option; set it in the config file.")
    try:
        return hint(word)
    except ValueError as error:
        raise UserError(f"{flag} is {word!r}; it must be {VALUE_KINDS[hint]}.") from error


def _replaced(config: T, values: Mapping[tuple[str, ...], Any]) -> T:
    """Return a dataclass with the values at these paths of field names."""
    changes: dict[str, Any] = {}
    for name in {path[0] for path in values}:
        below = {path[1:]: value for path, value in values.items() if path[0] == name}
        changes[name] = below[()] if () in below else _replaced(getattr(config, name), below)
    return replace(config, **changes)  # type: ignore[type-var]


def peek(arguments: Sequence[str], maxima: Mapping[str, int | None]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the values of some flags, before all options are known, and all other arguments. `maxima` has the maximum
    number of values by flag, None for any number. Raises `UserError` if a value is missing."""
    known: dict[str, list[str]] = {}
    others: list[str] = []
    for group in split_flags(arguments):
        words = group.words
        if group.flag in maxima:
            known[group.flag], words = group.values(maxima[group.flag])
        elif group.has_equals:
            words = [f"{group.flag}={words[0]}", *words[1:]]
        elif group.flag:
            words = [group.flag, *words]
        others += words
    return known, others


def options_given(arguments: Sequence[str]) -> set[str]:
    """Return the options among arguments, such as `--batch-size`; `--no-resume` counts as `--resume`. Raises
    `UserError` if one is given twice, as only the last would count."""
    given = [re.sub(r"(^--|\.)no-", r"\1", group.flag) for group in split_flags(arguments) if group.flag]
    if repeated := [flag for flag in given if given.count(flag) > 1]:
        raise UserError(f"{repeated[0]} is given twice; give it once, with all values if it takes several.")
    return set(given)


def model_fields(arguments: Sequence[str]) -> set[str]:
    """Return the names of the model fields among arguments, such as `image_size`."""
    prefix = "--model."
    given = (flag for flag in options_given(arguments) if flag.startswith(prefix))
    return {flag.removeprefix(prefix).replace("-", "_") for flag in given}


def with_fitting_patches(model: ModelConfig, arguments: Sequence[str]) -> ModelConfig:
    """Return the model's config; if unparsed arguments set either the image size or the patch size, set it and adjust
    the other so that patches divide images. The data may still change the image size."""
    holder, prefix = model.contract.patches, "--model."
    if holder is None:
        return model
    prefix += f"{holder}." if holder else ""
    flags = {f"{prefix}{name.replace('_', '-')}": name for name in ("image_size", "patch_size")}
    given = flags.keys() & options_given(arguments)
    if len(given) != 1:
        return model
    (flag,) = given
    size = tuple(read_value(flag, int, word) for word in peek(arguments, {flag: None})[0][flag])
    if not holder:
        return fit_patches(model, flags[flag], size)
    return replace(model, **{holder: fit_patches(getattr(model, holder), flags[flag], size)})


def folder_named(flag: str, value: str) -> Path:
    """Return the folder that an option names, which need not exist. Raises `UserError` if the name is empty, a file or
    a URL."""
    folder = Path(value)
    if not value:
        raise UserError(f"{flag} is empty; name a folder, such as runs/mine.")
    if is_url(value):
        raise UserError(f"{flag} is the URL {value}; name a local folder.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{flag} {value} is a file; name a folder.")
    return folder


def run_named(flag: str, value: str) -> Path:
    """Return the folder of a run that an option names by path or by URL on object storage. Raises `UserError` as
    `folder_named` and `local_folder` do."""
    if not is_url(value):
        return folder_named(flag, value)
    return local_folder(value)


def load_config(spec: str) -> Config:
    """Return the config that `FILE:NAME` names; `FILE` alone means the config with the file's name. FILE is the name of
    one of this project's files, such as `quick`, or a path. Raises `UserError` if there is no such config, and as
    `config_files.load_module` does."""
    path, colon, name = spec.rpartition(":")
    if not colon or {"/", "\\"} & {*name}:  # the colon follows a Windows drive
        path, name = spec, Path(spec).stem
    configs = {key: value for key, value in vars(load_module(path)).items() if isinstance(value, Config)}
    if name not in configs:
        near = get_close_matches(name, configs, 1)
        hint = f"did you mean {path}:{near[0]}?" if near else f"it has {', '.join(configs) or 'none'}."
        raise UserError(f"{path} has no config {name!r}; {hint}")
    return configs[name]

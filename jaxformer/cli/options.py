"""Command-line options from the fields of a dataclass, nested ones dotted: their values, and the text of --help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Container, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from jaxformer.config.fields import (
    check_fields,
    field_docstrings,
    item_class,
    nested_classes,
    not_a_choice,
    required_fields,
    type_hints,
)
from jaxformer.errors import UserError
from jaxformer.terminal import echo

T = TypeVar("T")
Path = tuple[str | int, ...]
"""Names of the fields that lead to a value, with an index for each item of a tuple."""
MERGED = "merged"
"""Marker for a nested dataclass whose fields become options without its name as a prefix."""
POSITIONAL = "positional"
"""Marker for a field that is given without a flag."""
POSITIONAL_TOO = "positional too"
"""Marker for a field that is given with or without its flag."""
HIDDEN = "hidden"
"""Marker for a field that is not an option."""
FLAG = re.compile(r"--[\w.-]*\w")
"""Pattern of a flag; words such as `-1` or `--` are none."""
FIELD = re.compile(r"(?<![^\s(])`([a-z]\w*(?:\.[a-z]\w*)*)(?:=([^`]+))?`(?!\w)")
"""Pattern of a field in a text of the library, with or without a value; see `UserError`. Backticks within a word are
those of a user's path."""
OTHER_NAMES = {
    "lr": "learning-rate", "max-steps": "steps", "max-iters": "steps", "grad-clip": "clip-norm",
    "n-layer": "n-blocks", "n-layers": "n-blocks", "n-embd": "d-model", "hidden-size": "d-model",
    "block-size": "context-length", "seq-len": "context-length", "max-tokens": "max-new-tokens", "dtype": "precision",
    "data": "path", "dataset": "path", "out-dir": "run", "output-dir": "run",
}  # fmt: skip
"""Names of options in other programs, and the names here."""
VALUE_KINDS = {int: "a whole number, such as 1000", float: "a number, such as 0.5", str: "text"}
"""Description of each value type in error messages."""
ALL = "*"
"""Component of an option's path for all items of a tuple of dataclasses."""
INDEX = re.compile(r"\.(\d+)(?=\.)")
"""Pattern of an item's index in a flag, such as that of `--model.attention.0.window`."""
MAX_ITEMS = 2**10
"""Maximum number of items of a tuple that options set."""
METAVARS: dict[object, str] = {int: "INT", float: "FLOAT", str: "STR"}
MAX_LINE_COLUMNS = 100
"""Maximum columns of a line of --help, however wide the terminal is."""


@dataclass(frozen=True)
class CommandOptions:
    """Base of the options of a command that must know which of them were given."""

    given: Annotated[frozenset[str], HIDDEN] = field(default=frozenset(), kw_only=True)
    """Flags of the options that were given; see `CommandLine.given`."""


class Given(NamedTuple):
    """A flag on the command line, with the words that follow it."""

    flag: str
    """Flag with hyphens for underscores; empty for the words before the first flag."""
    values: list[str]
    words: list[str]
    """Flag and values as they were given, such as `--flag=value`."""

    @property
    def name(self) -> str:
        """Flag of the option: `--resume` for `--no-resume`."""
        return re.sub(r"(^--|\.)no-", r"\1", self.flag)


@dataclass(frozen=True)
class Option:
    """One field as an option."""

    path: Path
    """Names of the fields that lead to it, and `ALL` or an index for items of a tuple."""
    flag: str
    """Flag, such as `--model.n-heads`; for an option without one, the field's name."""
    hint: object
    """The field's type."""
    default: object = None
    owner: type = object
    """The dataclass of the field."""
    positional: bool = False
    """True if it can be given without a flag."""

    def at(self, indices: Sequence[str]) -> Path | None:
        """Return the path with indices in place of `ALL`, as many as there are; None if there are others."""
        if not indices:
            return self.path
        rest = iter(indices)
        is_complete = len(indices) == self.path.count(ALL)
        return tuple(int(next(rest)) if name == ALL else name for name in self.path) if is_complete else None

    @property
    def is_bool(self) -> bool:
        """True for a bool, also one that is None if it is not given."""
        return self.hint in (bool, bool | None)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag; for a bool, also the one that sets it to False, such as `--data.no-unwrap`."""
        group, dot, name = self.flag.removeprefix("--").rpartition(".")
        return (self.flag, f"--{group}{dot}no-{name}") if self.is_bool else (self.flag,)

    def read(self, given: Given, has_positional: bool = False) -> tuple[Any, list[str]]:
        """Return the value that was given, and the words that are left.

        Args:
          has_positional: True if words after a bool may be values of positional options.

        Raises:
          UserError: the value is missing, of another type or superfluous.
        """
        flag, words = given.flag, given.values
        if self.hint == (bool | None) and flag == self.flag and words[:1] == ["none"]:
            return None, words[1:]
        if self.is_bool:
            is_value = not has_positional or "=" in given.words[0]
            if words and (is_value or words[0].lower() in ("true", "false", "none")):
                raise UserError(f"{flag} is {words[0]!r}, but it has no value; give {' or '.join(self.flags)}.")
            return INDEX.sub("", flag) == self.flag, words
        if typing.get_origin(self.hint) is tuple:
            return tuple(read_value(flag, typing.get_args(self.hint)[0], word) for word in words), []
        if not words:
            raise UserError(f"{flag} has no value; give one.")
        return read_value(flag, self.hint, words[0]), words[1:]

    def usage(self) -> str:
        """Return the option and the form of its value, as --help shows them."""
        if not self.flag.startswith("--"):
            return self.placeholder
        with_flag = ", ".join(self.flags) if self.is_bool else f"{self.flag} {_metavar(self.hint)}"
        return f"{self.placeholder}, {with_flag}" if self.positional else with_flag

    @property
    def placeholder(self) -> str:
        """Name of a positional option in --help, such as `[RUN]`."""
        return f"[{str(self.path[-1]).upper()}]"

    def help(self) -> str:
        """Return the field's docstring and its default."""
        doc = with_flags(field_docstrings(self.owner).get(str(self.path[-1]), ""))
        if self.default is None or self.default in ((), "") or dataclasses.is_dataclass(self.default):
            return doc
        words = map(str, self.default if isinstance(self.default, tuple) else (self.default,))
        shown = " ".join(word if re.fullmatch(r"\S+", word) else repr(word) for word in words)
        return f"{doc} (default: {shown})".strip()


class CommandLine:
    """The options on a command line, split once into flags and the words that follow them."""

    def __init__(self, words: Sequence[str]) -> None:
        """Split words at flags. Raises `UserError` if one is given twice, as only the last would count."""
        self.asks_help = bool({"-h", "--help"} & {*words})
        self.flags = [Given("", [], [])]
        for word in words:
            flag, equals, value = word.partition("=")
            if FLAG.fullmatch(flag):
                self.flags.append(Given(flag.replace("_", "-"), [value] if equals else [], [word]))
            else:
                self.flags[-1].values.append(word)
                self.flags[-1].words.append(word)
        names = [given.name for given in self.flags]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{repeated[0]} is given twice; give it once, with all values if it takes several.")

    @property
    def given(self) -> frozenset[str]:
        """Flags of the options, such as `--batch-size`; `--no-resume` counts as `--resume`."""
        return frozenset(given.name for given in self.flags if given.flag)

    def words(self, without: Container[str] = ()) -> list[str]:
        """Return the words of all options but some."""
        return [word for given in self.flags if given.name not in without for word in given.words]

    def value(self, flag: str, hint: object, default: object = None) -> Any:
        """Return the value of an option on which the defaults of others depend, or the default if it is not given.
        Raises `UserError` as `Option.read` does."""
        option = Option((), flag, hint)
        given = [given for given in self.flags if given.flag in option.flags]
        return option.read(given[0])[0] if given else default

    def parse(self, default: T, program: str, description: str) -> T:
        """Return a dataclass with the fields that the options set; other fields keep their defaults. Raises `UserError`
        for an unknown option, naming the nearest known one, and for a value that is missing, of the wrong type or out
        of range."""
        if self.asks_help:
            echo(help_text(default, program, description))
            sys.exit(0)
        options = [option for group in option_groups(default) for option in group.options]
        by_flag = {flag: option for option in options for flag in option.flags if flag.startswith("--")}
        positional = [option for option in options if option.positional]
        values: dict[Path, object] = {("given",): self.given} if isinstance(default, CommandOptions) else {}

        def store(option: Option, value: object) -> None:
            if option.path in values:
                raise UserError(f"{option.flag} is given twice, with and without its flag; give it once.")
            values[option.path] = value

        for given in self.flags:
            words = given.values
            if given.flag:
                known = by_flag.get(INDEX.sub("", given.flag))
                path = None if known is None else known.at(INDEX.findall(given.flag))
                if known is None or path is None:
                    near = nearest_flag(given.flag, [*by_flag])
                    hint = f"did you mean {near}?" if near else "--help lists all options."
                    raise UserError(f"unknown option {given.flag}; {hint}")
                value, words = known.read(given, bool(positional))
                store(replace(known, path=path), value)
            for word in words:
                if not positional:
                    raise UserError(f"{word!r} belongs to no option; omit it, or name its option; see --help.")
                option = positional[0]
                if typing.get_origin(option.hint) is tuple:  # all words that follow
                    item = read_value(option.flag, typing.get_args(option.hint)[0], word)
                    values[option.path] = (*typing.cast("tuple[Any, ...]", values.get(option.path, ())), item)
                else:
                    store(positional.pop(0), read_value(option.flag, option.hint, word))
        try:
            parsed = _replaced(default, values)
        except UserError as error:  # may begin with a field of a model, which does not know the path to it
            field, _, rest = str(error).partition(" ")
            flag_of = {field_name(option.path): option.flag for option in options}
            names = {field_name(path) for path in values}
            flags = [flag_of[name] for name in names if f".{name}".endswith(f".{field}") and name in flag_of]
            raise UserError(f"{flags[0]} {rest}" if len(flags) == 1 else str(error)) from error
        check_fields(parsed, "")  # nested configs have checked themselves
        return parsed


def field_name(path: Path) -> str:
    """Return the dotted name of an option's field, without the indices of items."""
    return ".".join(name for name in path if isinstance(name, str) and name != ALL)


def as_flag(path: str) -> str:
    """Return the flag of a field, such as `--train.batch-size`."""
    return f"--{path}".replace("_", "-")


def as_words(path: str, value: object) -> str:
    """Return the options that set a field to a value, such as `--model.no-bias`, quoted for a shell."""
    if dataclasses.is_dataclass(value):
        return " ".join(as_words(f"{path}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        paths = [f"{path}.{i}" for i in range(len(value))] if value[1:] else [path]
        return " ".join(as_words(item_path, item) for item_path, item in zip(paths, value, strict=True))
    flag, values = as_flag(path), value if isinstance(value, tuple) else (value,)
    if isinstance(value, bool):
        return Option((), flag, bool).flags[not value]
    return " ".join([flag, *("none" if x is None else shlex.quote(str(x)) for x in values)])


def with_flags(text: str) -> str:
    """Return a text of the library with options in place of the fields that it names in backticks: `--train.batch-size`
    for `train.batch_size`, `--mesh fsdp=4` for `mesh='fsdp=4'`."""

    def option(match: re.Match[str]) -> str:
        path, value = match.groups()
        try:
            return as_flag(path) if value is None else as_words(path, ast.literal_eval(value))
        except (ValueError, SyntaxError):  # no value of Python: quoted from the user's text
            return match[0]

    return FIELD.sub(option, text)


def nearest_flag(flag: str, known: Sequence[str]) -> str | None:
    """Return the known flag that is probably meant: one with the same name in another group, or a similar one."""
    if below := [other for other in known if other.startswith(f"{flag}.")]:
        return below[0]
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


def read_value(flag: str, hint: Any, word: str) -> Any:
    """Convert a word of the command line to a type. Raises `UserError` if it has another type, or is not one of the
    choices."""
    choices: tuple[Any, ...] = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        plain = [choice for choice in choices if choice is not type(None) and not nested_classes(choice)]
        if word.lower() == "none" and type(None) in choices:
            return None
        if not plain:
            example = as_flag(f"{flag.removeprefix('--')}.{dataclasses.fields(nested_classes(hint)[0])[0].name}")
            raise UserError(f"{flag} is {word!r}; it must be none, or have fields of its own, such as {example}.")
        return read_value(flag, plain[0], word)
    if typing.get_origin(hint) is Literal:
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


def _replaced(config: Any, values: Mapping[Path, object], where: str = "") -> Any:
    """Return a dataclass, or a new one of a class, with the values at these paths below the path `where`."""
    cls: Any = config if isinstance(config, type) else type(config)
    hints, marked, changes = typing.get_type_hints(cls), type_hints(cls), {}
    for name in dict.fromkeys(str(path[0]) for path in values):
        below = {path[1:]: value for path, value in values.items() if path[0] == name}
        inner = where if MERGED in getattr(marked[name], "__metadata__", ()) else f"{where}.{name}".lstrip(".")
        changes[name] = _changed(_default(config, name), hints[name], below, inner)
    try:
        return cls(**changes) if isinstance(config, type) else dataclasses.replace(config, **changes)
    except TypeError as error:
        flags = " and ".join(as_flag(f"{where}.{name}") for name in required_fields(config) if name not in changes)
        raise UserError(f"{as_flag(where)} is incomplete; add {flags}.") from error
    except ValueError as error:  # of a class that is not only a config
        raise UserError(f"{as_flag(where)}: {error}.") from error


def _changed(value: object, hint: Any, below: Mapping[Path, object], where: str) -> object:
    """Return the value of a field, of this type, with the values at paths below it: those of a dataclass, which begins
    with its defaults if the value is none, of items of a tuple, or the value itself."""
    if () in below:
        if len(below) > 1:
            problem = f"{as_flag(where)} is {below[()]}, but its fields are set as well"
            raise UserError(f"{problem}; omit one of them.")
        return below[()]
    if (cls := item_class(hint)) is None:
        names = {path[0] for path in below}
        known: list[Any] = [*([value] if dataclasses.is_dataclass(value) else []), *nested_classes(hint)]
        parts = [part for part in known if names <= {f.name for f in dataclasses.fields(part)}]
        if not parts:
            flags = ", ".join(as_flag(f"{where}.{name}") for name in sorted(map(str, names)))
            raise UserError(f"{flags} belong to different kinds of {as_flag(where)}; give those of one, see --help.")
        is_complete = lambda part: {*required_fields(part)} <= names  # noqa: E731
        return _replaced(next(filter(is_complete, parts), parts[0]), below, where)
    items, indices = list(typing.cast("tuple[Any, ...]", value)) or [cls()], [path[0] for path in below]
    n = max([len(items), *(index + 1 for index in indices if isinstance(index, int))])
    if n > MAX_ITEMS:
        raise UserError(f"{as_flag(where)}.{n - 1} is beyond the {MAX_ITEMS} items that are possible; number from 0.")
    n = -(-n // len(items)) * len(items)  # whole repetitions, so that no other item changes
    items = [items[i % len(items)] for i in range(n)]
    for i, item in enumerate(items):
        for index in (ALL, i):
            if index in indices:
                own = {path[1:]: value for path, value in below.items() if path[0] == index}
                items[i] = item = _replaced(item, own, f"{where}.{i}")
    return tuple(items)


def _default(config: object, name: str) -> Any:
    """Return the value of a dataclass's field or, of a class, its default; `MISSING` if there is none."""
    if not isinstance(config, type):
        return getattr(config, name)
    (f,) = (f for f in dataclasses.fields(config) if f.name == name)
    return f.default if f.default_factory is MISSING else f.default_factory()


@dataclass(frozen=True)
class Group:
    """Options of one dataclass."""

    title: str
    about: str
    """First paragraph of the class's docstring; empty for the outermost."""
    options: list[Option]


def option_groups(default: Any, prefix: str = "", path: Path = ()) -> list[Group]:
    """Return the options of a dataclass, followed by those of the dataclasses nested in it or in tuples of it. Values
    in `default`, a dataclass or a class, are the defaults; flags get the prefix, such as `model.`; `path` has the names
    of the fields that lead to the dataclass."""
    cls: Any = default if isinstance(default, type) else type(default)
    about = (inspect.getdoc(cls) or "").split("\n\n")[0] if prefix else ""
    group = Group(f"{prefix.rstrip('.')} options".strip(), about, [])
    inner: list[Group] = []
    hints, marked = typing.get_type_hints(cls), type_hints(cls)
    for f in dataclasses.fields(cls):
        value, hint, field_path = _default(default, f.name), hints[f.name], (*path, f.name)
        marks = getattr(marked[f.name], "__metadata__", ())
        if MERGED in marks:
            merged, *below = option_groups(value, prefix, field_path)
            group.options.extend(merged.options)
            inner += below
        elif (item := item_class(hint)) is not None:
            only = value[0] if isinstance(value, tuple) and len(value) == 1 else item
            inner += option_groups(only, f"{prefix}{f.name}.", (*field_path, ALL))
        elif HIDDEN not in marks:
            parts = nested_classes(hint)
            for part in parts:
                groups = option_groups(value if isinstance(value, part) else part, f"{prefix}{f.name}.", field_path)
                if parts[1:]:
                    groups[0] = replace(groups[0], title=f"{groups[0].title} ({part.__name__})")
                inner += groups
            if parts == [hint]:
                continue
            flag = f.name if POSITIONAL in marks else as_flag(f"{prefix}{f.name}")
            positional = bool({POSITIONAL, POSITIONAL_TOO} & {*marks})
            shown = None if value is MISSING else value
            group.options.append(Option(field_path, flag, hint, shown, cls, positional))
    return [group, *inner]


def help_text(default: Any, program: str, description: str) -> str:
    """Return the text of --help for a dataclass, with the values in `default` as defaults. Lines are wrapped, but flags
    are never broken."""
    groups = option_groups(default)
    arguments = [option.placeholder for group in groups for option in group.options if option.positional]
    parts = [paragraphs(" ".join(["usage:", program, "[OPTIONS]", *arguments])), paragraphs(description)]
    for number, group in enumerate(groups):
        lines = [paragraphs(f"{group.title}:"), *([paragraphs(group.about, 2)] if group.about else [])]
        rows = [(option.usage(), option.help()) for option in group.options]
        for usage, text in [*([] if number else [("-h, --help", "Show this text.")]), *rows]:
            lines += [paragraphs(usage, 2), paragraphs(text, 6)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def paragraphs(text: str, indent: int = 0) -> str:
    """Return text wrapped to the terminal's width; empty lines separate paragraphs, other line breaks become spaces."""
    width, space = min(shutil.get_terminal_size().columns, MAX_LINE_COLUMNS), " " * indent
    wrapper = textwrap.TextWrapper(width, space, space, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(wrapper.fill(" ".join(part.split())) for part in re.split(r"\n\s*\n", text.strip()))


def _metavar(hint: object) -> str:
    """Return the placeholder in --help for a value of a type."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"{{{','.join(map(str, args))}}}"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        plain = [arg for arg in args if not nested_classes(arg)]
        return "|".join("none" if arg is type(None) else _metavar(arg) for arg in plain)
    if typing.get_origin(hint) is tuple:
        return f"{_metavar(args[0])} …"
    return METAVARS.get(hint, "VALUE")

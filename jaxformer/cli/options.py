"""Command-line options from the fields of a dataclass, nested ones dotted, and the text of --help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
import types
import typing
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from jaxformer.config.fields import type_hints

MERGED = "merged"
"""Marker for a nested dataclass whose fields become options without its name as a prefix."""
POSITIONAL = "positional"
"""Marker for a field that is given without a flag."""
POSITIONAL_TOO = "positional too"
"""Marker for a field that is given with or without its flag."""
HIDDEN = "hidden"
"""Marker for a field that is not an option."""
MAX_LINE_COLUMNS = 100
"""Maximum columns of a line of --help, however wide the terminal is."""
METAVARS = {int: "INT", float: "FLOAT", str: "STR"}


@dataclass(frozen=True)
class Option:
    """One field as an option."""

    path: tuple[str, ...]
    """Names of the fields that lead to it."""
    flag: str
    """Flag, such as `--model.n-heads`; for an option without one, the field's name."""
    hint: Any
    """The field's type."""
    default: Any
    owner: type
    """The dataclass of the field."""
    positional: bool
    """True if it can be given without a flag."""

    @property
    def is_bool(self) -> bool:
        """True for a bool, also one that is None if it is not given."""
        return self.hint in (bool, bool | None)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag; for a bool, also the one that sets it to False, such as `--data.no-unwrap`."""
        group, dot, name = self.flag.removeprefix("--").rpartition(".")
        return (self.flag, f"--{group}{dot}no-{name}") if self.is_bool else (self.flag,)

    @property
    def max_values(self) -> int | None:
        """Maximum number of words in its value: 0 for a bool, None (any number) for a tuple, else 1."""
        return 0 if self.is_bool else None if typing.get_origin(self.hint) is tuple else 1

    def usage(self) -> str:
        """Return the option and the form of its value, as --help shows them."""
        if not self.flag.startswith("--"):
            return self.placeholder
        with_flag = ", ".join(self.flags) if self.is_bool else f"{self.flag} {_metavar(self.hint)}"
        return f"{self.placeholder}, {with_flag}" if self.positional else with_flag

    @property
    def placeholder(self) -> str:
        """Name of a positional option in --help, such as `[RUN]`."""
        return f"[{self.path[-1].upper()}]"

    def help(self) -> str:
        """Return the field's docstring and its default."""
        doc = field_docstrings(self.owner).get(self.path[-1], "")
        if self.default is None or self.default in ((), ""):
            return doc
        words = map(str, self.default if isinstance(self.default, tuple) else (self.default,))
        shown = " ".join(word if re.fullmatch(r"\S+", word) else repr(word) for word in words)
        return f"{doc} (default: {shown})".strip()


@dataclass(frozen=True)
class Group:
    """Options of one dataclass."""

    title: str
    about: str
    """First paragraph of the class's docstring; empty for the outermost."""
    options: list[Option]


def option_groups(default: Any, prefix: str = "", path: tuple[str, ...] = ()) -> list[Group]:
    """Return the options of a dataclass, followed by those of the dataclasses nested in it. Values in `default` are the
    defaults; flags get the prefix, such as `model.`; `path` has the names of the fields that lead to the dataclass."""
    about = (inspect.getdoc(type(default)) or "").split("\n\n")[0] if prefix else ""
    group = Group(f"{prefix.rstrip('.')} options".strip(), about, [])
    inner: list[Group] = []
    hints, marked = typing.get_type_hints(type(default)), type_hints(type(default))
    for f in dataclasses.fields(default):
        value, hint, field_path = getattr(default, f.name), hints[f.name], (*path, f.name)
        marks = getattr(marked[f.name], "__metadata__", ())
        if MERGED in marks:
            merged, *below = option_groups(value, prefix, field_path)
            group.options.extend(merged.options)
            inner += below
        elif dataclasses.is_dataclass(value):
            inner += option_groups(value, f"{prefix}{f.name}.", field_path)
        elif HIDDEN not in marks:
            flag = f.name if POSITIONAL in marks else f"--{prefix}{f.name}".replace("_", "-")
            positional = bool({POSITIONAL, POSITIONAL_TOO} & {*marks})
            group.options.append(Option(field_path, flag, hint, value, type(default), positional))
    return [group, *inner]


def help_text(default: Any, program: str, description: str) -> str:
    """Return the text of --help for a dataclass, with the values in `default` as defaults. Lines are wrapped, but flags
    are never broken."""
    groups = option_groups(default)
    arguments = [option.placeholder for group in groups for option in group.options if option.positional]
    parts = [paragraphs(" ".join(["usage:", program, "[OPTIONS]", *arguments])), paragraphs(description)]
    for number, group in enumerate(groups):
        lines = [f"{group.title}:", *([paragraphs(group.about, 2)] if group.about else [])]
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


def _metavar(hint: Any) -> str:
    """Return the placeholder in --help for a value of a type."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"{{{','.join(map(str, args))}}}"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return "|".join("none" if arg is type(None) else _metavar(arg) for arg in args)
    if typing.get_origin(hint) is tuple:
        return f"{_metavar(args[0])} …"
    return METAVARS.get(hint, "VALUE")


@cache
def field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, including inherited fields."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError):  # not defined in a file, or not parsable after a dedent
            continue
        assert isinstance(node, ast.ClassDef)
        for statement, following in pairwise(node.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                docs.pop(statement.target.id, None)
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    docs[statement.target.id] = str(following.value.value)
    return docs

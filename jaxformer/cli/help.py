"""The text of --help: an option after another, each wrapped once, and no option's name broken."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import tyro

LONGEST_LINE = 100
"""Columns, however wide the terminal is."""
METAVARS = {int: "INT", float: "FLOAT", str: "STR"}


def help_text(default: Any, program: str, description: str) -> str:
    """Return what --help shows of a dataclass whose fields, nested ones dotted, are options.

    Args:
      default: an instance; what its fields have are the defaults.
    """
    groups = list(_groups(default))
    arguments = [name for _, _, options in groups for name, _ in options if not name.startswith("-")]
    usage = " ".join(["usage:", program, "[OPTIONS]", *arguments])
    parts = [paragraphs(usage), paragraphs(description)]
    for title, about, options in groups:
        lines = [f"{title}:", *([paragraphs(about, 2)] if about else [])]
        for name, text in options:
            lines += [paragraphs(name, 2), paragraphs(text, 6)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def paragraphs(text: str, indent: int = 0) -> str:
    """Wrap text to the terminal's width; empty lines part paragraphs, other line breaks are spaces."""
    width, space = min(shutil.get_terminal_size().columns, LONGEST_LINE), " " * indent
    wrapper = textwrap.TextWrapper(
        width, initial_indent=space, subsequent_indent=space, break_long_words=False, break_on_hyphens=False
    )
    return "\n\n".join(wrapper.fill(" ".join(part.split())) for part in re.split(r"\n\s*\n", text.strip()))


def _groups(config: Any, prefix: str = "") -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Title, description and options, each with its text, of a dataclass and then of those inside it."""
    options = [] if prefix else [("-h, --help", "Show this text.")]
    inner: list[tuple[str, str, list[tuple[str, str]]]] = []
    hints, texts = typing.get_type_hints(type(config), include_extras=True), _field_docstrings(type(config))
    for f in dataclasses.fields(config):
        value, hint = getattr(config, f.name), hints[f.name]
        hint, *marks = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        if tyro.conf.Suppress in marks:
            continue
        if dataclasses.is_dataclass(value):
            merged = any(getattr(mark, "name", None) == "" for mark in marks)
            found = list(_groups(value, prefix if merged else f"{prefix}{f.name}."))
            if merged:
                options += [option for option in found[0][2] if option not in options]
            inner += found[merged:]
            continue
        flag = f"--{prefix}{f.name}".replace("_", "-")
        if tyro.conf.Positional in marks:
            name = f"[{f.name.upper()}]"
        elif hint is bool:
            name = f"{flag}, --{prefix}no-{f.name}".replace("_", "-")
        else:
            name = f"{flag} {_metavar(hint)}"
        shown = "" if value is None or value in ((), "") else f" (default: {_shown(value)})"
        options.append((name, f"{texts.get(f.name, '')}{shown}".strip()))
    about = inspect.getdoc(type(config)) if prefix else ""
    yield f"{prefix.rstrip('.')} options".strip(), (about or "").split("\n\n")[0], options
    yield from inner


def _metavar(hint: Any) -> str:
    """What stands for a value of a type."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"{{{','.join(map(str, args))}}}"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return "|".join("none" if arg is type(None) else _metavar(arg) for arg in args)
    if typing.get_origin(hint) is tuple:
        return f"{_metavar(args[0])} …" if args[-1] is Ellipsis else " ".join(map(_metavar, args))
    return "{true,false}" if hint is bool else METAVARS.get(hint, "VALUE")


def _shown(value: Any) -> str:
    """A default as one would give it."""
    words = map(str, value if isinstance(value, tuple) else (value,))
    return " ".join(word if re.fullmatch(r"\S+", word) else repr(word) for word in words)


def _field_docstrings(cls: type) -> dict[str, str]:
    """The text below each field of a dataclass, and of those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):  # of no file that is known
            continue
        assert isinstance(node, ast.ClassDef)
        for field, below in pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found.pop(field.target.id, None)
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    found[field.target.id] = str(below.value.value)
    return found

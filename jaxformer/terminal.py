"""Reprs and tables that fit a screen, and standard streams: control characters are escaped, and training survives the
closing of its terminal."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TextIO

SYMBOLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Symbols of ASCII control characters, such as ␛ for ESC, except newline and tab."""
ESCAPED = (
    *range(0x80, 0xA0),  # control characters that some terminals interpret like ESC sequences
    0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A),  # line separators, text direction
    *range(0xD800, 0xE000),  # surrogates: bytes of an argument that were not UTF-8
)  # fmt: skip
"""Characters without a symbol, shown as their code point."""
REPLACEMENTS = SYMBOLS | {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in ESCAPED}
WIDTH = 100
"""Columns per line."""
MAX_SHOWN_VALUES, MAX_SHOWN_ARRAYS = 16, 4
"""Maximum values of an array, and arrays of a tree, that `short_repr` shows."""


def wrap_columns(parts: Sequence[str], indent: int) -> list[str]:
    """Return parts joined into lines of at most `WIDTH` columns, if each part fits; all lines but the first are
    indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"{'':{indent}}{part}")
    return lines


def align(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return rows of cells as lines of a table with two spaces between columns, each aligned to its side, "<" or
    ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=False)]
    return ["  ".join(f"{x:{side}{n}}" for x, side, n in zip(row, sides, widths, strict=False)) for row in rows]


def first_rows(heading: Sequence[str], rows: Sequence[Sequence[str]], sides: str, n: int = 20) -> str:
    """Return a table of the first n rows, which fits on a screen, with a last line that counts the others."""
    left = len(rows) - n
    return "\n".join(align([heading, *rows[:n]], sides) + ([f"… {left:,} more"] if left > 0 else []))


def short_repr(value: Any) -> str:
    """Return the repr of a NamedTuple or a dataclass, with the dtype and shape of each long array, `float32[8, 256]`,
    and the number of arrays of each large tree."""
    names = getattr(value, "_fields", None) or [f.name for f in fields(value)]
    return f"{type(value).__name__}({', '.join(f'{name}={_shortened(getattr(value, name))!r}' for name in names)})"


class _Unquoted(str):
    __repr__ = str.__str__


def _shortened(value: Any) -> Any:
    """Return a tree with texts in place of long arrays, or one text in place of a large tree."""
    import jax  # not at the top, as the help of commands needs none

    def shorten(x: Any) -> Any:
        is_long = getattr(x, "size", 0) > MAX_SHOWN_VALUES and hasattr(x, "dtype")
        return _Unquoted(f"{x.dtype}{list(x.shape)}") if is_long else x

    sizes = [x.size for x in jax.tree.leaves(value) if hasattr(x, "dtype")]
    if len(sizes) > MAX_SHOWN_ARRAYS:
        return _Unquoted(f"<{len(sizes)} arrays, {sum(sizes):,} values>")
    return jax.tree.map(shorten, value)


def escape_control(text: str) -> str:
    """Return text with control characters replaced by symbols or escapes."""
    return text.translate(REPLACEMENTS)


def echo(text: str = "", file: TextIO | None = None, end: str = "\n") -> None:
    """Write text to a stream, stdout by default, and flush; control characters are escaped if it is a terminal."""
    file = sys.stdout if file is None else file
    file.write((escape_control(text) if file.isatty() else text) + end)
    file.flush()


def echo_status(text: str) -> None:
    """Write a status message to stderr if it is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        echo(text, sys.stderr)


def escape_line(text: str) -> str:
    """Return text with control characters and newlines replaced."""
    return escape_control(text).replace("\n", "\N{SYMBOL FOR NEWLINE}")


def echo_error(message: str) -> None:
    """Write an error or a note to stderr, on one line."""
    echo(escape_line(message), sys.stderr)


def prepare_streams(output_optional: bool = False) -> None:
    """Make stdin, stdout and stderr usable: closed streams become /dev/null, as does one that can no longer be written,
    and characters that the encoding lacks are escaped.

    Args:
      output_optional: continue if stdout can no longer be written, silently if its reader is gone (a closed terminal,
        `| head`) and otherwise with a note, instead of raising `OSError`.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # otherwise the next opened file would become a standard stream
            _redirect_to_null(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for name, descriptor, is_required in (("stdout", 1, not output_optional), ("stderr", 2, False)):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        elif stream is not getattr(sys, f"__{name}__"):  # replaced by the caller
            continue
        if os.name != "nt" or not stream.isatty():  # a console of Windows has an encoding of its own
            stream.flush()
            raw = io.BufferedWriter(_Output(descriptor, is_required))
            stream = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
        if stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


class _Output(io.FileIO):
    """Output that is redirected to /dev/null once it cannot be written, so that the flush at exit does not fail again;
    the failure is raised if the output is required, and otherwise noted unless the reader is gone."""

    def __init__(self, descriptor: int, is_required: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        hung_up = (errno.EIO,) if os.isatty(descriptor) else ()  # for a file, EIO is a disk failure
        self._closed_errors = (errno.EPIPE, *hung_up)
        self._is_required = is_required

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            _redirect_to_null(self.fileno())
            error.filename = "standard output"
            if self._is_required:
                raise
            if self.fileno() != 2 and error.errno not in self._closed_errors:
                echo_error(f"note: {error.filename}: {error.strerror}; continuing without it")
            return len(memoryview(data).cast("B"))  # type: ignore[arg-type]


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)

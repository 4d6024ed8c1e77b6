"""`python -m jaxformer eval`: evaluate a run on held-out data or on a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from jaxformer.cli import machine
from jaxformer.cli.command import as_command, command
from jaxformer.cli.load import RunOptions, TextOptions, open_run, with_run
from jaxformer.cli.options import MERGED, CommandLine, with_flags
from jaxformer.config.fields import Positive, Size
from jaxformer.contract import Task
from jaxformer.errors import UserError
from jaxformer.terminal import echo, echo_error

if TYPE_CHECKING:
    import numpy as np

    from jaxformer.data.pairs import PairDataset
    from jaxformer.models.objective import Params
    from jaxformer.runs.run import Run

DESCRIPTION = """Evaluate a run on the held-out split of its own data; or, with --data.path, a language model on a
text: loss (cross-entropy, nats per token), perplexity, bits per byte, and top-1 accuracy. For pairs of texts, also BLEU
and chrF (both by sacrebleu) and the exact-match rate of greedy translations of the sources.

The text is an end-of-text token and then the documents, each followed by one, tokenized by the run's own tokenizer.
Every token but the first is predicted once, including end-of-text tokens; all preceding tokens of the window are
context, even if they belong to another document. Windows are consecutive, as in training's final validation, so that
the first token of a window is predicted from one token, and the last from context_length. With --stride N, windows
start N tokens apart and each predicts only its last N tokens (the first one all): except for the first
context_length - N tokens of the text, each is predicted from at least context_length - N tokens before it. Bits per
byte are the total bits over the UTF-8 bytes of the text, as the run reads it; perplexity is exp(loss). A model that
only predicts the token after a full window does not predict the first context_length tokens, and always has a stride of
1; a prefix language model gets no prefix. With --weights, the loss is that of rounded weights; matmuls are computed as
--precision says, whereas sample also rounds activations."""


@dataclass(frozen=True)
class Arguments:
    """Options of eval."""

    opening: Annotated[RunOptions, MERGED] = field(default_factory=RunOptions)
    data: TextOptions = field(default_factory=TextOptions)
    stride: Positive | None = None
    """Tokens between the starts of consecutive windows; at most, and by default, the number that a window predicts."""
    by_position: bool = False
    """Also report the loss at each position of the windows, which shows how a language model benefits from context."""
    batch_size: Size = 16
    """Examples per batch, over all devices; affects the speed, not the result."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of matmuls; auto is bfloat16 on GPU and TPU, float32 on CPU."""


@as_command()
def main(line: CommandLine) -> int:
    """Evaluate; return the exit status."""
    options = line.parse(Arguments(), command("eval"), DESCRIPTION)
    path, weights = options.data.path, options.opening.weights
    if path is None and {options.stride, options.data.unwrap, options.data.column} != {None}:
        raise UserError("--stride, --data.unwrap and --data.column are for a text; name one with --data.path.")
    machine.set_up(options.batch_size, options.opening.mesh)

    from jaxformer.data.pairs import PairDataset
    from jaxformer.data.text import find_files
    from jaxformer.decode.weights import restored
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.runs.checkpoints import CheckpointReader
    from jaxformer.runs.run import load_data
    from jaxformer.train.evaluate import ValidationData
    from jaxformer.train.run_evaluation import check_causal_lm, evaluate_run, load_validation_text, loss_by_position

    mesh = make_mesh(options.opening.mesh)
    if path is not None:
        find_files(path)  # report a wrong path before loading the run
    run = open_run(with_run(options.opening), mesh)
    if options.by_position:
        check_causal_lm(run, "--by-position")
    if run.config.model.contract.task is Task.TEXT_EMBEDDING:
        remedy = f"compare texts with {command('sample')}, or fine-tune it as a classifier with --init-from"
        raise UserError(f"{run.path} holds a sentence encoder, which has no loss to evaluate; {remedy}.")
    if run.config.model.contract.task is Task.IMAGE_EMBEDDING:
        remedy = f"compare images with {command('sample')}, or fine-tune it as a classifier with --init-from"
        raise UserError(f"{run.path} holds a model without a head, which has no loss to evaluate; {remedy}.")
    params = restored(run.params)  # rounded values, in the dtype that evaluation computes in
    data: ValidationData
    if path is None:
        data = load_data(run.path, run.config)  # its training split, with another batch size, is not used
        description = data.describe()
        if CheckpointReader(run.path).fingerprint(run.step) not in (None, data.fingerprint):
            problem = "the data, or its split in this version, differs from what this run was trained on"
            echo_error(f"note: {problem}; it may have been trained on some of what is held out now")
    else:
        text = options.data
        data, description, notes = load_validation_text(run, path, options.stride, text.unwrap, text.column)
        for note in notes:
            echo_error(f"note: {with_flags(note)}")
    evaluation = evaluate_run(run, params, data, mesh, options.batch_size, options.precision)
    rounded = "" if weights == "float32" else f"; weights rounded to {weights}"
    echo(f"run {run.path}, step {run.step:,}; {description}{rounded}")
    echo(f"{'held-out' if path is None else 'loss'} {evaluation}")
    if options.by_position:
        sums = loss_by_position(run, params, data, mesh, options.batch_size, options.precision)
        echo(f"loss by position: {_by_position(*sums)}")
    if isinstance(data, PairDataset):
        scores = _translation_scores(run, params, data, options.batch_size)
        echo(" ".join(f"{name}={value:.4f}" for name, value in scores.items()))
    return 0


def _by_position(nats_T: np.ndarray, weights_T: np.ndarray) -> str:
    """Return the mean losses of the targets at positions 1, 2, 3-4, 5-8 and so on, counted from 1, omitting positions
    without targets."""
    parts, first = [], 0
    while first < len(nats_T):
        last = min(2 * first or 1, len(nats_T))
        if n_targets := weights_T[first:last].sum():
            positions = f"{first + 1}" if last - first == 1 else f"{first + 1}-{last}"
            parts.append(f"{positions}={nats_T[first:last].sum() / n_targets:.4f}")
        first = last
    return " ".join(parts)


def _translation_scores(run: Run, params: Params, data: PairDataset, batch_size: int) -> dict[str, float]:
    """Return BLEU, chrF and the exact-match fraction of greedy translations; without sacrebleu, only the last."""
    from jaxformer.decode.translation import exact_match, scores, translate_validation

    translations, references = translate_validation(run, params, data, batch_size)
    exact = {"exact": exact_match(translations, references)}
    try:
        return scores(translations, references) | exact
    except UserError as missing:
        echo_error(f"note: {with_flags(str(missing))}")
        return exact

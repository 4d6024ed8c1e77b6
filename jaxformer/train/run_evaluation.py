"""Evaluation of a finished run, on its own held-out split or on a text."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from jax.sharding import Mesh

from jaxformer.config import ComputeConfig
from jaxformer.data.corpus import text_lengths, tokenize
from jaxformer.data.documents import read_documents
from jaxformer.data.windows import HeldOutText, TextConfig, pack_documents
from jaxformer.errors import UserError
from jaxformer.models.objective import Params, is_causal_lm
from jaxformer.runs import Run
from jaxformer.sharding import batch_shards
from jaxformer.train.evaluate import Evaluation, Evaluator, HeldOut
from jaxformer.train.setup import TrainSetup


def evaluate_run(
    run: Run, params: Params, data: HeldOut, mesh: Mesh, batch_size: int,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
) -> Evaluation:  # fmt: skip
    """Return the evaluation of a run's model, with a batch size rounded up to what the devices divide."""
    shards = batch_shards(mesh)
    train = replace(run.config.train, batch_size=-(-batch_size // shards) * shards)
    config = replace(run.config, train=train, compute=ComputeConfig(precision=precision))
    return Evaluator(TrainSetup(config, mesh), data)(params)


def load_held_out_text(
    run: Run, path: str, stride: int | None = None, unwrap: bool | None = None, column: str | None = None
) -> tuple[HeldOut, str]:
    """Return a text to evaluate a run's language model on, and its description.

    Args:
      stride: tokens between the starts of two windows; None for as many as a window predicts.
      unwrap, column: see `TextConfig`; None for those of the run's training text.

    Raises:
      UserError: the run's model predicts no next token, the stride is too large or has no windows, or the text cannot
        be read.
    """
    model, tokenizer = run.text_model()
    if not is_causal_lm(run.model):
        kind = type(run.model).__name__
        raise UserError(f"{run.path} holds a {kind}, which predicts no next token; leave --data.path out.")
    length, limit = model.context_length, model.n_predicted
    if stride is not None and stride > limit:
        raise UserError(
            f"stride is {stride}; it must be at most {limit}, as many tokens as a window of this run predicts."
        )
    data = run.config.data if isinstance(run.config.data, TextConfig) else TextConfig()
    documents = read_documents(path, data.unwrap if unwrap is None else unwrap, column or data.column)
    tokens = tokenize(documents, tokenizer)
    lengths = text_lengths(tokens, documents.n_bytes, tokenizer)
    size = f"{path}: {len(documents):,} documents, {len(tokens):,} tokens; "
    if run.config.data.has_segments:
        if stride is not None:
            raise UserError(f"stride is {stride}, but this run has packed documents, not windows; leave it out.")
        packed = replace(pack_documents(tokens, tokenizer, length), token_lengths=lengths)
        return packed, f"{size}packed into {len(packed.rows):,} rows of {length}"
    text = HeldOutText(tokens, lengths, length, limit, stride)
    return text, f"{size}windows of {length} tokens, {stride or limit} apart"

"""Evaluation of a finished run, on its own held-out split or on a text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import ComputeConfig
from jaxformer.data.corpus import text_lengths, tokenize
from jaxformer.data.dataset import Batch
from jaxformer.data.documents import read_documents
from jaxformer.data.windows import HeldOutText, TextConfig, pack_documents
from jaxformer.errors import UserError
from jaxformer.models.objective import Params, batched_apply, is_causal_lm, per_target
from jaxformer.ops.losses import negative_log_likelihood
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


def loss_by_position(run: Run, params: Params, data: HeldOut, batch_size: int) -> np.ndarray:
    """Return the mean loss of a run's language model at each position of the windows, `(T,)` float64 in nats per token,
    NaN at positions that nothing is predicted from: how much a model gains from more context.

    Raises:
      UserError: the run's model predicts no next token.
    """
    check_causal_lm(run, "--by-position")
    sums, counts = np.zeros(()), np.zeros(())
    for batch in data.held_out(batch_size):
        nats_T, weights_T = _position_sums(run.model, params, batch)
        sums, counts = sums + np.asarray(nats_T, np.float64), counts + np.asarray(weights_T, np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.divide(sums, counts))


@partial(jax.jit, static_argnames="model")
def _position_sums(model: nn.Module, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of nats and the sum of weights at each position, `(T,)`, over a batch."""
    outputs_B, _ = batched_apply(model, params)(*batch.inputs)
    nll_BT = per_target(negative_log_likelihood, model, params, outputs_B, batch.targets)
    weights_BT = jnp.ones(nll_BT.shape) if batch.weights is None else batch.weights
    return jnp.sum(nll_BT * weights_BT, axis=0), jnp.sum(weights_BT, axis=0)


def check_causal_lm(run: Run, option: str) -> None:
    """Raise `UserError` where a run's model predicts no next token, which an option needs."""
    if not is_causal_lm(run.model):
        kind = type(run.model).__name__
        raise UserError(f"{run.path} holds a {kind}, which predicts no next token; leave {option} out.")


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
    check_causal_lm(run, "--data.path")
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

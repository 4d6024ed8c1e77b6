"""Evaluation of a finished run on its own held-out split or on another text."""

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
from jaxformer.data.dataset import Batch
from jaxformer.data.packing import fitting_length
from jaxformer.data.text import read_documents
from jaxformer.data.tokens import split_documents, text_lengths, tokenize
from jaxformer.data.windows import TextConfig, ValidationText, pack_documents
from jaxformer.errors import UserError
from jaxformer.models.objective import Params, batched_apply, is_causal_lm, per_target
from jaxformer.nn.parameters import cast
from jaxformer.ops.losses import negative_log_likelihood
from jaxformer.parallel.mesh import batch_sharding, batch_shards, global_device_put
from jaxformer.runs.run import Run
from jaxformer.train.evaluate import Evaluation, Evaluator, ValidationData, full_batches
from jaxformer.train.setup import TrainSetup

Precision = Literal["auto", "float32", "bfloat16"]


def evaluate_run(
    run: Run, params: Params, data: ValidationData, mesh: Mesh, batch_size: int, precision: Precision = "auto"
) -> Evaluation:
    """Return the evaluation of a run's model, with the batch size rounded up to a multiple of the number of shards."""
    return Evaluator(_evaluation_setup(run, mesh, batch_size, precision), data)(params)


def _evaluation_setup(run: Run, mesh: Mesh, batch_size: int, precision: Precision) -> TrainSetup:
    shards = batch_shards(mesh)
    train = replace(run.config.train, batch_size=-(-batch_size // shards) * shards)
    return TrainSetup(replace(run.config, train=train, compute=ComputeConfig(precision=precision)), mesh)


def loss_by_position(
    run: Run, params: Params, data: ValidationData, mesh: Mesh, batch_size: int, precision: Precision = "auto"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of nats and the number of targets at each position of a language model's windows, both `(T,)`
    float64, which shows how much the model gains from more context.

    Raises:
      UserError: the run's model is not a causal language model.
    """
    check_causal_lm(run, "`by_position`")
    setup, c = _evaluation_setup(run, mesh, batch_size, precision), run.text_model()[0]
    nats_T, weights_T = np.zeros((2, c.context_length))
    first, split = c.context_length - c.n_predicted, batch_sharding(mesh)  # a model may predict only a window's end
    params = cast(params, setup.compute_dtype)
    for batch in full_batches(data.val_batches(setup.config.train.batch_size), batch_shards(mesh)):
        nats, weights = _position_sums(run.model, params, global_device_put(batch, split))
        nats_T[first : first + len(nats)] += nats
        weights_T[first : first + len(nats)] += weights
    return nats_T, weights_T


@partial(jax.jit, static_argnames="model")
def _position_sums(model: nn.Module, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of nats and the sum of weights at each predicted position over a batch."""
    outputs_B, _ = batched_apply(model, params)(*batch.inputs)
    nll_BT = per_target(negative_log_likelihood, outputs_B, batch.targets)
    weights_BT = jnp.ones(nll_BT.shape) if batch.weights is None else batch.weights
    return jnp.sum(nll_BT * weights_BT, axis=0), jnp.sum(weights_BT, axis=0)


def check_causal_lm(run: Run, option: str) -> None:
    """Raise `UserError` if a run's model is not a causal language model, which `option` requires."""
    if not is_causal_lm(run.model):
        kind = type(run.model).__name__
        raise UserError(f"{run.path} holds a {kind}, which predicts no next token; omit {option}.")


def load_validation_text(
    run: Run, path: str | None, stride: int | None = None, unwrap: bool | None = None, column: str | None = None
) -> tuple[ValidationData, str, tuple[str, ...]]:
    """Return a text to evaluate a run's language model on, its description, and the notes of `Documents`.

    Args:
      path: the text, as in `TextConfig`; None for the validation text of the run's config, or of the default one.
      stride: tokens between the starts of two windows; None for the number of tokens that a window predicts.
      unwrap, column: see `TextConfig`; None for the values of the run's training text.

    Raises:
      UserError: the run's model is not a causal language model, the stride is too large or does not apply to packed
        documents, or the text cannot be read.
    """
    model, tokenizer = run.text_model()
    check_causal_lm(run, "`data.path`")
    length, limit = model.context_length, model.n_predicted
    if stride is not None and stride > limit:
        raise UserError(
            f"`stride` is {stride}; it must be at most {limit}, as many tokens as a window of this run predicts."
        )
    data = run.config.data if isinstance(run.config.data, TextConfig) else TextConfig()
    data = replace(data, unwrap=data.unwrap if unwrap is None else unwrap, column=column or data.column)
    if path is None:
        path = f"held-out text of {data.path}"
        _, documents, _ = split_documents(data)
    else:
        documents = read_documents(path, data.unwrap, data.column)
    tokens = tokenize(documents, tokenizer)
    lengths = text_lengths(tokens, documents.n_bytes, tokenizer)
    size = f"{path}: {len(documents):,} documents, {len(tokens):,} tokens; "
    if run.config.data.has_segments:
        if stride is not None:
            raise UserError(f"`stride` is {stride}, but this run has packed documents, not windows; omit it.")
        packed = replace(pack_documents(tokens, tokenizer, fitting_length(len(tokens), length)), token_lengths=lengths)
        return packed, f"{size}packed into {len(packed.rows):,} rows of {packed.length}", documents.notes
    text = ValidationText(tokens, lengths, length, limit, stride)
    windows = "one window" if len(tokens) <= length + 1 else f"windows of {length} tokens, {stride or limit} apart"
    return text, f"{size}{windows}", documents.notes

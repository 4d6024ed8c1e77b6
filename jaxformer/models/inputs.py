"""Checks of what people call a model with themselves: number of axes and dtype always, token ids where their values are
known.

While JAX traces there are no values, and a compiled function has none of this in it.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig, TokenModelConfig
from jaxformer.errors import UserError


def check_example(model: nn.Module, *inputs: Any) -> None:
    """Raise `UserError` where inputs are not those of one example: another number of axes, as a batch has, token ids
    that are none, a sequence longer than the model's positions.

    The lengths of other axes are not compared, and a model without a config of this library takes anything.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return
    text: Any = getattr(config, "text", config)  # a tower's
    for x, like in zip(inputs, config.example(), strict=False):
        if x is None:
            continue
        check_shape(x, like)
        if like.ndim == 1 and like.dtype == np.int32:
            check_length(text, len(x))
            check_tokens(x, text.vocab_size)


def check_next_tokens(config: TokenModelConfig, tokens_T: jax.Array) -> None:
    """Raise `UserError` for what is no sequence of 2 or more tokens, `(T,)`, to predict each from those before it."""
    check_shape(tokens_T, config.example()[0])
    if len(tokens_T) < 2:
        raise UserError(f"expected 2 tokens or more, got {len(tokens_T)}; the first is predicted from nothing.")
    check_length(config, len(tokens_T) - 1)
    check_tokens(tokens_T, config.vocab_size)


def check_shape(x: Any, like: np.ndarray) -> None:
    """Raise `UserError` for an input of another number of axes than one example's."""
    if jnp.ndim(x) != like.ndim:
        shape = "(T,)" if like.ndim == 1 else like.shape
        remedy = "; use jax.vmap for a batch" if jnp.ndim(x) == like.ndim + 1 else ""
        raise UserError(f"expected an input of shape {shape}, got {jnp.shape(x)}{remedy}.")


def check_length(config: Any, n_tokens: int) -> None:
    """Raise `UserError` for more tokens than a model has positions; sinusoidal and rotary positions have no end."""
    limit = config.context_length
    if getattr(config, "n_predicted", limit) == 1 and n_tokens != limit:
        raise UserError(f"{n_tokens} tokens, but this model reads a window of exactly {limit}; give it as many.")
    if n_tokens > limit and getattr(config, "positions", None) == "learned":
        raise UserError(f"{n_tokens} tokens, but the model has {limit} learned positions; give it the last {limit}.")


def check_tokens(tokens_T: Any, vocab_size: int) -> None:
    """Raise `UserError` for ids that are no integers, or, where values are known, out of the vocabulary."""
    dtype = tokens_T.dtype if hasattr(tokens_T, "dtype") else np.asarray(tokens_T).dtype
    if len(tokens_T) and not jnp.issubdtype(dtype, jnp.integer):
        raise UserError(f"token ids are {dtype}; give integers, such as int32.")
    if isinstance(tokens_T, jax.core.Tracer):
        return
    ids_T = np.asarray(tokens_T)
    wrong_T = (ids_T < 0) | (ids_T >= vocab_size)
    if wrong_T.any():
        at = int(wrong_T.argmax())
        raise UserError(
            f"token {ids_T[at]} at position {at} is not in the vocabulary of {vocab_size}; give ids from 0 to "
            f"{vocab_size - 1}."
        )

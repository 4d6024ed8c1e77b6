"""Explanation of a text token by token: probabilities, alternatives, and the positions attended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import contract_of
from jaxformer.inspect.activations import apply_and_capture
from jaxformer.inspect.names import check_index
from jaxformer.inspect.of_run import of_run
from jaxformer.models.objective import Params, is_causal_lm
from jaxformer.nn.embedding import check_tokens
from jaxformer.ops.attention import row_entropy

LENGTH_MULTIPLE = 64
"""Texts are right-padded to a multiple of this length, so that few programs are compiled; attention is causal."""


@dataclass(frozen=True)
class TokenExplanation:
    """One token of a text. Probabilities are the model's own, before any logits processor."""

    token: int
    probability: float
    entropy: float
    """Entropy of the model's prediction here, in nats."""
    alternatives: tuple[tuple[int, float], ...]
    """The most likely other tokens and their probabilities."""
    attended: tuple[tuple[int, float], ...]
    """Positions that the position predicting this token attends to most, and their weights: means over all heads of all
    blocks. Empty for a model without attention."""


@of_run
def explain(
    model: nn.Module,
    params: Params,
    tokens: Sequence[int],
    start: int = 1,
    n_alternatives: int = 3,
    n_positions: int = 3,
) -> list[TokenExplanation]:
    """Explain the tokens of a text from position `start` on.

    Args:
      model: a causal language model, such as `Decoder`.
      tokens: the text.
      start: first position to explain, 1 or more; from the end if negative.
      n_alternatives: alternatives per token, at most as many as there are other tokens.
      n_positions: attended positions per token, at most as many as there are.

    Raises:
      TypeError: the model is not a causal language model.
      ValueError: a token is not in the vocabulary; a number of alternatives or positions is negative.
      IndexError: the text has no such position, or it is the first, which has no prediction.
      ValueError: the text has more tokens than the model has positions, or the model has logits only after a full
        window.
    """
    if not is_causal_lm(model):
        raise TypeError(f"a {type(model).__name__} predicts no next token; give a causal language model")
    check_tokens(tokens, V := model.config.vocab_size)
    T = len(tokens)
    if start != T and not (start := check_index(start, T, "position", "the text")):
        raise IndexError("the token at position 0 has no prediction; start at 1 or later.")
    if min(n_alternatives, n_positions) < 0:
        raise ValueError(f"n_alternatives is {n_alternatives} and n_positions {n_positions}; give 0 or more.")
    padded = -(-T // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    if not contract_of(model).extrapolates:  # no positions beyond the context
        padded = min(padded, model.config.n_positions)
    if padded < T:
        raise ValueError(f"{T} tokens, but the model has {padded} positions")
    if contract_of(model).fixed_length:
        raise ValueError("the model has logits after a full window only")
    text_T = jnp.asarray(np.pad(np.asarray(tokens, np.int32), (0, padded - T)))
    prefix = (jnp.int32(start),) if contract_of(model).has_prefix else ()
    outputs = _explain(model, params, text_T, prefix, min(n_alternatives + 1, V), min(n_positions, padded))
    outputs_T = (np.asarray(x)[start - 1 : T - 1].tolist() for x in outputs)
    rows, explanations = zip(map(int, tokens[start:]), *outputs_T, strict=True), []
    for token, p, entropy, top_N, top_p_N, position_N, weight_N in rows:
        others = [(other, p) for other, p in zip(top_N, top_p_N, strict=True) if other != token]
        attended = tuple(pair for pair in zip(position_N, weight_N, strict=True) if pair[1] > 0)
        explanations.append(TokenExplanation(token, p, entropy, tuple(others[:n_alternatives]), attended))
    return explanations


@partial(jax.jit, static_argnames=("model", "n_top", "n_positions"))
def _explain(
    model: nn.Module, params: Params, tokens_T: jax.Array, prefix: tuple, n_top: int, n_positions: int
) -> tuple[jax.Array, ...]:
    """Return, per position, the probability of the next token, the entropy, the top tokens `(T, n_top)` and their
    probabilities, and the attended positions `(T, n_positions)` and their weights."""
    names = "*.attention.pattern"
    logits_TV, maps = apply_and_capture(model, params, tokens_T, *prefix, names=names, missing_ok=True)
    p_TV = jax.nn.softmax(logits_TV.astype(jnp.float32))
    next_p_T = jnp.take_along_axis(p_TV, jnp.roll(tokens_T, -1)[:, None], axis=1)[:, 0]
    top_p_TN, top_TN = jax.lax.top_k(p_TV, n_top)
    if maps:
        mean_TT = sum(weights_HTT.sum(axis=0) for weights_HTT in maps.values()) / sum(map(len, maps.values()))
        weight_TN, position_TN = jax.lax.top_k(mean_TT, n_positions)
    else:
        position_TN, weight_TN = (jnp.zeros((len(tokens_T), 0), dtype) for dtype in (jnp.int32, jnp.float32))
    return next_p_T, row_entropy(p_TV), top_TN, top_p_TN, position_TN, weight_TN

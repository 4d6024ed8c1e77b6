"""Why a text went on as it did: for each of its tokens the chance that it had, what else there was, and where the model
looked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import contract_of
from jaxformer.inspect.trace import LOGITS, trace
from jaxformer.models.inputs import check_tokens
from jaxformer.models.objective import Params
from jaxformer.ops.attention import row_entropy

BUCKET = 64
"""Texts are padded at their end to a multiple of it, so that few programs are compiled; no token sees what follows."""


@dataclass(frozen=True)
class Explained:
    """One token of a text. Probabilities are the model's own, before any sampler."""

    token: int
    probability: float
    entropy: float
    """Of all that could have stood here, in nats."""
    rivals: tuple[tuple[int, float], ...]
    """The likeliest others with their probabilities."""
    looked_at: tuple[tuple[int, float], ...]
    """The places in the text with the most weight for whoever wrote this token, the mean over all heads of all blocks;
    empty for a model without attention."""


def explain(
    model: nn.Module, params: Params, tokens: Sequence[int], start: int, n_rivals: int = 3, n_places: int = 3
) -> list[Explained]:
    """Explain the tokens of a text from place `start` on, which must be 1 or more.

    Args:
      model: one that gives the logits of each next token, such as `Decoder`.
      tokens: all of the text.

    Raises:
      UserError: a token is not in the vocabulary.
      ValueError: the text is longer than the model's positions, or gives logits only after a full window.
    """
    check_tokens(tokens, model.config.vocab_size)
    T = len(tokens)
    padded = -(-T // BUCKET) * BUCKET
    if not contract_of(model).extrapolates:  # it has no positions past its context
        padded = min(padded, model.config.context_length)
    if padded < T:
        raise ValueError(f"{T} tokens, but the model has {padded} positions")
    if contract_of(model).fixed_length:
        raise ValueError("the model gives logits after a full window alone")
    text_T = jnp.asarray(np.pad(np.asarray(tokens, np.int32), (0, padded - T)))
    prefix = (jnp.int32(start),) if contract_of(model).has_prefix else ()
    found = _explain(model, params, text_T, prefix, n_rivals + 1, min(n_places, padded))
    chance_T, entropy_T, best_TN, best_p_TN, place_TN, weight_TN = (np.asarray(x) for x in found)
    rows = []
    for at in range(start, T):
        by = at - 1  # the place that this token was written from
        token = int(tokens[at])
        likeliest = zip(best_TN[by].tolist(), best_p_TN[by].tolist(), strict=True)
        rivals = [(other, p) for other, p in likeliest if other != token][:n_rivals]
        places = zip(place_TN[by].tolist(), weight_TN[by].tolist(), strict=True)
        rows.append(
            Explained(
                token, float(chance_T[by]), float(entropy_T[by]), tuple(rivals),
                tuple((place, weight) for place, weight in places if weight > 0),
            )
        )  # fmt: skip
    return rows


@partial(jax.jit, static_argnames=("model", "n_best", "n_places"))
def _explain(
    model: nn.Module, params: Params, tokens_T: jax.Array, prefix: tuple, n_best: int, n_places: int
) -> tuple[jax.Array, ...]:
    """Of the token after each place: its probability, the entropy, the likeliest and their probabilities; and where was
    looked most, with the weights."""
    found = trace(model, params, tokens_T, *prefix, names=(LOGITS, "*.attention.weights"))
    logits_TV = found.pop(LOGITS).astype(jnp.float32)
    p_TV = jax.nn.softmax(logits_TV)
    next_T = jnp.roll(tokens_T, -1)
    chance_T = jnp.take_along_axis(p_TV, next_T[:, None], axis=1)[:, 0]
    best_p_TN, best_TN = jax.lax.top_k(p_TV, n_best)
    if found:
        mean_TT = sum(weights_HTT.sum(axis=0) for weights_HTT in found.values()) / sum(map(len, found.values()))
        weight_TN, place_TN = jax.lax.top_k(mean_TT, n_places)
    else:
        place_TN, weight_TN = (jnp.zeros((len(tokens_T), 0), t) for t in (jnp.int32, jnp.float32))
    return chance_T, row_entropy(p_TV), best_TN, best_p_TN, place_TN, weight_TN

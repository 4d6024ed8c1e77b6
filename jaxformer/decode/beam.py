"""Beam search: high-probability completions from several beams, which are extended at each step.

It follows Hugging Face's `generate` (with `early_stopping=False`): a score is the sum of log-probabilities divided by
length ** length_penalty, the stop token counted in both; a completion is a result only if it is among the n best
candidates when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxformer.contract import contract_of
from jaxformer.decode.batches import length_bucket
from jaxformer.decode.checks import check_prompts
from jaxformer.decode.programs import Cache, call, decode_step, extend_empty
from jaxformer.decode.samplers import Sampling
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY
from jaxformer.terminal import short_repr

Extend = Callable[[jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]
"""Function from i, the i-th new token of each of R rows, and the cache of the tokens before it, to the logits `(R, V)`
of the next tokens and the extended cache."""


class Beams(NamedTuple):
    """The N best completions of each of P prompts, best first.

    Attributes:
      tokens_PNT: tokens up to and including the stop token, then `masks.EMPTY`; int32.
      scores_PN: sum of log-probabilities divided by length ** length_penalty; float32.
    """

    tokens_PNT: jax.Array
    scores_PN: jax.Array

    def __repr__(self) -> str:
        return short_repr(self)


def beam_search(
    model: nn.Module, params: Params, prompts: Sequence[Sequence[int]], *, n_beams: int, max_new_tokens: int,
    context_length: int, length_penalty: float = 1.0, stop_tokens: Sequence[int] = (), n_tokens: int | None = None,
    cache_dtype: DTypeLike = jnp.float32,
) -> Beams:  # fmt: skip
    """Complete prompts of any length by beam search, with a model that has a cache (see `decode.generation`).

    Args:
      n_beams: beams per prompt, all of which are returned.
      max_new_tokens: maximum length of a completion, in tokens.
      length_penalty: above 0 favours long completions, below 0 short ones.
      n_tokens: restricts the search to tokens below this id; None for no restriction.

    Raises:
      ValueError: as for `generate_tokens`; or a text would outgrow the context.
      UserError: the vocabulary is too small for `n_beams`, or lacks a stop token.
    """
    check_prompts(model, prompts, context_length, max_new_tokens=max_new_tokens)
    lengths_P = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths_P.max())
    # The last token is never fed back.
    if longest + max_new_tokens - 1 > context_length and not contract_of(model).extrapolates:
        problem = f"{longest} tokens and {max_new_tokens} new ones are more than the context of {context_length}"
        raise ValueError(f"{problem}, which beam search cannot exceed")
    T = length_bucket(longest)
    tokens_PT = np.array([[0] * (T - len(prompt)) + list(prompt) for prompt in prompts], np.int32)
    return _beam_search(
        model, params, tokens_PT, lengths_P, np.float32(length_penalty), n_beams=n_beams,
        max_new_tokens=max_new_tokens, stop_tokens=tuple(stop_tokens), n_tokens=n_tokens,
        dtype=jnp.dtype(cache_dtype),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("model", "n_beams", "max_new_tokens", "stop_tokens", "n_tokens", "dtype"))
def _beam_search(
    model: nn.Module, params: Params, tokens_PT: jax.Array, lengths_P: jax.Array, length_penalty: jax.Array, *,
    n_beams: int, max_new_tokens: int, stop_tokens: tuple[int, ...], n_tokens: int | None, dtype: DTypeLike,
) -> Beams:  # fmt: skip
    """Prefill the right-aligned prompts, then search."""
    T = tokens_PT.shape[1]
    lengths_R = jnp.repeat(lengths_P, n_beams)

    def prefill(tokens_T: jax.Array, length: jax.Array) -> tuple[jax.Array, Cache]:
        position_T = jnp.arange(T) - (T - length)
        cache = model.init_cache(T + max_new_tokens - 1, dtype)
        x_TD, cache = extend_empty(model, params, tokens_T, jnp.where(position_T >= 0, position_T, EMPTY), cache)
        return call(model, params, "unembed", x_TD[-1])[:n_tokens], cache

    def extend(i: jax.Array, tokens_R: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        logits_RV, cache = jax.vmap(partial(decode_step, model, params, slot=T + i))(tokens_R, lengths_R + i, cache)
        return logits_RV[:, :n_tokens], cache

    logits_PV, cache = jax.vmap(prefill)(tokens_PT, lengths_P)
    return search(
        extend, cache, logits_PV, length_penalty, n_beams=n_beams, max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
    )  # fmt: skip


class _BeamState(NamedTuple):
    """The beams of one prompt."""

    tokens_NT: jax.Array
    """Unfinished completions, the most likely first; int32."""
    logprobs_N: jax.Array
    """Sums of their log-probabilities; float32."""
    parents_N: jax.Array
    """Index of each beam's parent in the previous step, whose cache it continues; int32."""
    ended_NT: jax.Array
    """The best finished completions; int32."""
    scores_N: jax.Array
    """Scores of the finished completions; -inf for unused entries."""
    unfinished: jax.Array
    """True while an unfinished completion may still beat the worst finished one, `()` bool."""


def search(
    extend: Extend, cache: Cache, logits_PV: jax.Array, length_penalty: ArrayLike, *,
    n_beams: int, max_new_tokens: int, stop_tokens: tuple[int, ...],
) -> Beams:  # fmt: skip
    """Run a beam search with any model; the caller jits it.

    Args:
      extend: called with i from 0, and R = P · N rows.
      cache: cache of the prompts, a pytree of arrays with leading axis P. `extend` gets it with leading axis R, the
        rows of a prompt adjacent.
      logits_PV: logits of the first new token.

    Raises:
      UserError: the vocabulary is too small for `n_beams`, or lacks a stop token.
    """
    P, V = logits_PV.shape
    Sampling(stop_tokens=stop_tokens).check_vocabulary(V)
    limit = V // _candidates_per_beam(stop_tokens)
    if not 1 <= n_beams <= limit:
        raise UserError(f"n_beams is {n_beams}; for a vocabulary of {V} it must be from 1 to {limit}.")
    choose = jax.vmap(partial(_choose, length_penalty=length_penalty, stop_tokens=stop_tokens), in_axes=(0, 0, None))
    empty_NT = jnp.full((n_beams, max_new_tokens), EMPTY, jnp.int32)
    none_N = jnp.full(n_beams, -jnp.inf)
    first_N = none_N.at[0].set(0.0)  # all beams start equal, so only the first is extended
    beams = _BeamState(empty_NT, first_N, jnp.zeros(n_beams, jnp.int32), empty_NT, none_N, jnp.array(True))
    beams_P = jax.tree.map(lambda x: jnp.broadcast_to(x, (P, *x.shape)), beams)
    cache, logits_RV = jax.tree.map(lambda x: jnp.repeat(x, n_beams, axis=0), (cache, logits_PV))

    def unfinished(carry: tuple[jax.Array, _BeamState, Cache]) -> jax.Array:
        i, beams_P, _ = carry
        return (i < max_new_tokens) & beams_P.unfinished.any()

    def step(carry: tuple[jax.Array, _BeamState, Cache]) -> tuple[jax.Array, _BeamState, Cache]:
        i, beams_P, cache = carry
        parents_R = (jnp.arange(P)[:, None] * n_beams + beams_P.parents_N).reshape(-1)
        cache = jax.tree.map(lambda x: x[parents_R], cache)
        last_PN = jax.lax.dynamic_index_in_dim(beams_P.tokens_NT, i - 1, axis=2, keepdims=False)
        logits_RV, cache = extend(i - 1, last_PN.reshape(-1), cache)
        return i + 1, choose(beams_P, logits_RV.reshape(P, n_beams, V), i), cache

    beams_P = choose(beams_P, logits_RV.reshape(P, n_beams, V), jnp.int32(0))
    _, beams_P, _ = jax.lax.while_loop(unfinished, step, (jnp.int32(1), beams_P, cache))
    return Beams(beams_P.ended_NT, beams_P.scores_N)


def _choose(
    beams: _BeamState, logits_NV: jax.Array, i: jax.Array, length_penalty: ArrayLike, stop_tokens: tuple[int, ...]
) -> _BeamState:
    """Extend each beam by the i-th new token, and return the N best."""
    N, V = logits_NV.shape
    logprobs_NV = beams.logprobs_N[:, None] + jax.nn.log_softmax(logits_NV.astype(jnp.float32))
    # K candidates, so that N remain to extend even if every stop token is among them.
    logprobs_K, index_K = jax.lax.top_k(logprobs_NV.reshape(-1), N * _candidates_per_beam(stop_tokens))
    parent_K, token_K = index_K // V, index_K % V
    index_T = jnp.arange(beams.tokens_NT.shape[1])
    tokens_KT = jnp.where(index_T == i, token_K[:, None], beams.tokens_NT[parent_K])
    ends_K = jnp.isin(token_K, jnp.array(stop_tokens, jnp.int32)) | (i == index_T[-1])
    logprobs_N, best_N = jax.lax.top_k(jnp.where(ends_K, -jnp.inf, logprobs_K), N)
    length = (i + 1).astype(jnp.float32) ** length_penalty
    counts_K = ends_K & (jnp.arange(len(ends_K)) < N) & beams.unfinished
    scores = jnp.append(beams.scores_N, jnp.where(counts_K, logprobs_K / length, -jnp.inf))
    scores_N, best_ended_N = jax.lax.top_k(scores, N)
    ended_NT = jnp.concatenate([beams.ended_NT, tokens_KT])[best_ended_N]
    # As in Hugging Face's code, the best attainable score is estimated as that of the best beam if it ended now.
    unfinished = beams.unfinished & (logprobs_N[0] / length > scores_N[-1])
    return _BeamState(tokens_KT[best_N], logprobs_N, parent_K[best_N], ended_NT, scores_N, unfinished)


def _candidates_per_beam(stop_tokens: tuple[int, ...]) -> int:
    """Return the number of candidates per beam."""
    return max(2, 1 + len(stop_tokens))

"""Beam search: the continuations of highest probability that keeping a few at each step can find.

As `generate` of Hugging Face does it (with `early_stopping` False), and so with its choices: a continuation is scored
by its summed log-probabilities over its length to the power of `length_penalty`, its stop token counted in both; and
only what stands among the n best when it ends is a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import contract_of
from jaxformer.decode.generate import check_prompts, prompt_bucket
from jaxformer.decode.programs import begin_text, call
from jaxformer.decode.samplers import Sampling
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY


class Beams(NamedTuple):
    """The N best continuations of each of P prompts, the best first."""

    tokens_PNT: jax.Array
    """int32, the stop token included, `masks.EMPTY` after it."""
    scores_PN: jax.Array
    """Summed log-probabilities over length ** length_penalty; float32."""


def beam_search(
    model: nn.Module,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    n_beams: int,
    max_new_tokens: int,
    context_length: int,
    length_penalty: float = 1.0,
    stop_tokens: Sequence[int] = (),
    cache_dtype: Any = jnp.float32,
) -> Beams:
    """Continue prompts of any lengths with a model that has the cache protocol (`decode.generate`).

    Args:
      n_beams: continuations kept at each step, and given.
      max_new_tokens: where a continuation ends that draws no stop token.
      length_penalty: above 0 favours long continuations, below 0 short ones.

    Raises:
      UserError: a prompt is empty or leaves no room in the context, or a number is out of range.
    """
    check_prompts(model, prompts, context_length, n_beams=n_beams, max_new_tokens=max_new_tokens)
    check_length_penalty(length_penalty)
    for number, prompt in enumerate(prompts, start=1):
        room = context_length - len(prompt) + 1  # nothing reads the last token
        if max_new_tokens > room and not contract_of(model).extrapolates:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, which leaves {room} of the {max_new_tokens} new ones room "
                f"in the context of {context_length}; ask for at most {room}."
            )
    lengths_P = np.array([len(prompt) for prompt in prompts], np.int32)
    T = prompt_bucket(int(lengths_P.max()))
    tokens_PT = np.zeros((len(prompts), T), np.int32)
    for row, prompt in zip(tokens_PT, prompts, strict=True):
        row[T - len(prompt) :] = prompt
    return _beam_search(
        model, params, tokens_PT, lengths_P, np.float32(length_penalty), n_beams=n_beams,
        max_new_tokens=max_new_tokens, stop_tokens=tuple(stop_tokens), dtype=jnp.dtype(cache_dtype),
    )  # fmt: skip


def check_length_penalty(length_penalty: float) -> None:
    """Raise `UserError` if a length penalty is not finite."""
    if not np.isfinite(length_penalty):
        raise UserError(f"length_penalty is {length_penalty}; it must be finite: 1 takes the mean a token.")


@partial(jax.jit, static_argnames=("model", "n_beams", "max_new_tokens", "stop_tokens", "dtype"))
def _beam_search(
    model: Any, params: Params, tokens_PT: jax.Array, lengths_P: jax.Array, length_penalty: jax.Array, *,
    n_beams: int, max_new_tokens: int, stop_tokens: tuple[int, ...], dtype: Any,
) -> Beams:  # fmt: skip
    """Read the prompts, all of which end at the last place, and search."""
    run = partial(call, model, params)
    T = tokens_PT.shape[1]
    lengths_R = jnp.repeat(lengths_P, n_beams)

    def read(tokens_T: jax.Array, length: jax.Array) -> tuple[jax.Array, Any]:
        place_T = jnp.arange(T) - (T - length)
        cache = model.init_cache(T + max_new_tokens - 1, dtype)
        x_TD, cache = begin_text(model, params, tokens_T, jnp.where(place_T >= 0, place_T, EMPTY), cache)
        return run("unembed", x_TD[-1]), cache

    def advance(i: jax.Array, tokens_R: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        def one(token: jax.Array, length: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            x_1D, cache = run("extend", token[None], length[None] + i, cache, T + i)
            return run("unembed", x_1D[0]), cache

        return jax.vmap(one)(tokens_R, lengths_R, cache)

    logits_PV, cache = jax.vmap(read)(tokens_PT, lengths_P)
    return search(
        advance, cache, logits_PV, length_penalty, n_beams=n_beams, max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
    )  # fmt: skip


class _Beam(NamedTuple):
    """What is known of the continuations of one prompt."""

    tokens_NT: jax.Array
    """Those that go on, the likeliest first."""
    logprobs_N: jax.Array
    """Their summed log-probabilities."""
    parents_N: jax.Array
    """Where each stood a step before: whose cache it goes on from."""
    ended_NT: jax.Array
    """The best of those that have ended."""
    scores_N: jax.Array
    """Their scores; -inf where none has."""
    hopeful: jax.Array
    """Whether those that go on may still beat the worst of these."""


def search(
    advance: Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]],
    cache: Any,
    logits_PV: jax.Array,
    length_penalty: jax.Array | float,
    *,
    n_beams: int,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
) -> Beams:
    """The search itself, which knows no model; to be jitted by its caller.

    Args:
      advance: given i, the i-th new token of each of R = P · N rows and the cache of what stands before them, gives
        the logits `(R, V)` of the tokens after and the longer cache. i counts from 0.
      cache: of the prompts, any arrays whose first axis is P; in `advance` it is R, a prompt's rows adjacent.
      logits_PV: of the first new token.

    Raises:
      UserError: the vocabulary is too small for so many beams, or has no such stop token.
    """
    P, V = logits_PV.shape
    Sampling(stop_tokens=stop_tokens).check_vocabulary(V)
    most = V // _candidates(stop_tokens)
    if n_beams > most:
        raise UserError(f"n_beams is {n_beams}; for a vocabulary of {V} it must be at most {most}.")
    choose = jax.vmap(partial(_choose, length_penalty=length_penalty, stop_tokens=stop_tokens), in_axes=(0, 0, None))
    none_NT = jnp.full((n_beams, max_new_tokens), EMPTY, jnp.int32)
    never_N = jnp.full(n_beams, -jnp.inf)
    alone_N = never_N.at[0].set(0.0)  # all begin alike, so only one may be gone on from
    begun = _Beam(none_NT, alone_N, jnp.zeros(n_beams, jnp.int32), none_NT, never_N, jnp.array(True))
    begun_P = jax.tree.map(lambda x: jnp.broadcast_to(x, (P, *x.shape)), begun)
    cache, logits_RV = jax.tree.map(lambda x: jnp.repeat(x, n_beams, axis=0), (cache, logits_PV))

    def more(carry: tuple[jax.Array, _Beam, Any]) -> jax.Array:
        i, beams_P, _ = carry
        return (i < max_new_tokens) & beams_P.hopeful.any()

    def step(carry: tuple[jax.Array, _Beam, Any]) -> tuple[jax.Array, _Beam, Any]:
        i, beams_P, cache = carry
        parents_R = (jnp.arange(P)[:, None] * n_beams + beams_P.parents_N).reshape(-1)
        cache = jax.tree.map(lambda x: x[parents_R], cache)
        last_PN = jax.lax.dynamic_index_in_dim(beams_P.tokens_NT, i - 1, axis=2, keepdims=False)
        logits_RV, cache = advance(i - 1, last_PN.reshape(-1), cache)
        return i + 1, choose(beams_P, logits_RV.reshape(P, n_beams, V), i), cache

    chosen_P = choose(begun_P, logits_RV.reshape(P, n_beams, V), jnp.int32(0))
    _, beams_P, _ = jax.lax.while_loop(more, step, (jnp.int32(1), chosen_P, cache))
    return Beams(beams_P.ended_NT, beams_P.scores_N)


def _choose(
    beam: _Beam, logits_NV: jax.Array, i: jax.Array, *, length_penalty: jax.Array | float, stop_tokens: tuple[int, ...]
) -> _Beam:
    """Go on from each continuation with the i-th new token, and keep the best."""
    N, V = logits_NV.shape
    logprobs_NV = beam.logprobs_N[:, None] + jax.nn.log_softmax(logits_NV.astype(jnp.float32))
    # So many that, should all the likeliest end here, N are left to go on with.
    logprobs_K, places_K = jax.lax.top_k(logprobs_NV.reshape(-1), N * _candidates(stop_tokens))
    from_K, token_K = places_K // V, places_K % V
    place_T = jnp.arange(beam.tokens_NT.shape[1])
    tokens_KT = jnp.where(place_T == i, token_K[:, None], beam.tokens_NT[from_K])
    ends_K = jnp.isin(token_K, jnp.array(stop_tokens, jnp.int32)) | (i == place_T[-1])
    on_N, kept_N = jax.lax.top_k(jnp.where(ends_K, -jnp.inf, logprobs_K), N)
    length = (i + 1).astype(jnp.float32) ** length_penalty
    counts_K = ends_K & (jnp.arange(len(ends_K)) < N) & beam.hopeful
    scores = jnp.append(beam.scores_N, jnp.where(counts_K, logprobs_K / length, -jnp.inf))
    scores_N, best_N = jax.lax.top_k(scores, N)
    ended_NT = jnp.concatenate([beam.ended_NT, tokens_KT])[best_N]
    # Hugging Face's guess, for a score that may rise with the length: what it would be if it ended now.
    hopeful = beam.hopeful & (on_N[0] / length > scores_N[-1])
    return _Beam(tokens_KT[kept_N], on_N, from_K[kept_N], ended_NT, scores_N, hopeful)


def _candidates(stop_tokens: tuple[int, ...]) -> int:
    """How many continuations to look at for each beam."""
    return max(2, 1 + len(stop_tokens))

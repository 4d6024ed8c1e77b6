"""Mixture of experts on the tokens of one example: who goes to which expert, and the way there and back.

Every expert has room for so many tokens (its capacity), so that shapes are known while tracing and all experts are one
product of matrices. Tokens are carried by gathers, which JAX differentiates and maps in any order.

J is the number of experts that a token is sent to, C the capacity.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.ops.precision import widened


class RouterStatistics(NamedTuple):
    """What a router did, all float32 or wider. Each is a mean over tokens: the mean over examples of one length is that
    of the batch."""

    share_E: jax.Array
    """Of all choices, those that fell on each expert; they sum to 1, and pass no gradient."""
    probability_E: jax.Array
    """The softmax over all experts, `(E,)`."""
    z: jax.Array
    """The square of the logsumexp of the logits."""
    dropped: jax.Array
    """Of all choices, those that found no room."""


def route(logits_TE: jax.Array, n_chosen: int) -> tuple[jax.Array, jax.Array]:
    """The experts with the largest logits, the largest first, `(T, J)` int32, and their weights `(T, J)`.

    Weights are the softmax over the chosen (Jiang et al. 2024, section 2.1). Where one alone is chosen, that would be
    1 whatever the router says, and it is the probability among all instead (Fedus et al. 2022, equation 2).
    """
    top_TJ, experts_TJ = jax.lax.top_k(logits_TE, n_chosen)
    among = logits_TE if n_chosen == 1 else top_TJ
    return experts_TJ, jnp.exp(top_TJ - jax.nn.logsumexp(among, axis=-1, keepdims=True))


def capacity(n_tokens: int, n_experts: int, n_chosen: int, factor: float | None) -> int:
    """Tokens that an expert has room for: its even share times a factor (Fedus et al. 2022, equation 3), rounded up;
    without one all tokens, so that none is ever dropped."""
    return n_tokens if factor is None else min(n_tokens, ceil(factor * n_chosen * n_tokens / n_experts))


def assign(experts_TJ: jax.Array, n_experts: int, room: int) -> jax.Array:
    """The place of each choice among the E · C that there are, `(T, J)` int32; E · C where its expert is full.

    Earlier tokens go first, with all their choices: so no token's place depends on a later one.
    """
    chosen_N = experts_TJ.reshape(-1)
    chosen_NE = jax.nn.one_hot(chosen_N, n_experts, dtype=jnp.int32)
    rank_N = jnp.sum((jnp.cumsum(chosen_NE, axis=0) - 1) * chosen_NE, axis=-1, dtype=jnp.int32)
    places_N = jnp.where(rank_N < room, chosen_N * room + rank_N, n_experts * room)
    return places_N.reshape(experts_TJ.shape)


def dispatch(x_TD: jax.Array, places_TJ: jax.Array, n_experts: int, room: int) -> jax.Array:
    """What stands at each place, `(E, C, D)`: a token, or zeros."""
    T, J = places_TJ.shape
    token_N = jnp.repeat(jnp.arange(T), J)
    token_P = jnp.full(n_experts * room, T).at[places_TJ.reshape(-1)].set(token_N, mode="drop")
    return x_TD.at[token_P].get(mode="fill", fill_value=0).reshape(n_experts, room, -1)


def combine(y_ECD: jax.Array, places_TJ: jax.Array, weights_TJ: jax.Array) -> jax.Array:
    """Each token's weighted sum of what its experts made of it, `(T, D)`; of one that was full, nothing."""
    y_PD = y_ECD.reshape(-1, y_ECD.shape[-1])
    y_TJD = y_PD.at[places_TJ].get(mode="fill", fill_value=0)
    return jnp.einsum("tjd,tj->td", y_TJD, weights_TJ.astype(y_TJD.dtype))


def router_statistics(logits_TE: jax.Array, experts_TJ: jax.Array, places_TJ: jax.Array, room: int) -> RouterStatistics:
    """Of one example; average them over the batch before `balance_loss`, which is no mean of its examples'."""
    E = logits_TE.shape[-1]
    logits_TE = widened(logits_TE)
    return RouterStatistics(
        jnp.mean(jax.nn.one_hot(experts_TJ, E, dtype=logits_TE.dtype), axis=(0, 1)),
        jnp.mean(jax.nn.softmax(logits_TE), axis=0),
        jnp.mean(jnp.square(jax.nn.logsumexp(logits_TE, axis=-1))),
        jnp.mean(places_TJ == E * room, dtype=logits_TE.dtype),
    )


def balance_loss(statistics: RouterStatistics) -> jax.Array:
    """E · Σ share · probability, a scalar: 1 where tokens spread evenly, E where all go to one expert.

    Fedus et al. 2022, equation 4, without its factor α; for the aim of Shazeer et al. 2017, section 4. With several
    experts a token, shares are of its choices. The router z-loss (Zoph et al. 2022, equation 5) is `statistics.z`.
    """
    return statistics.share_E.size * jnp.sum(statistics.share_E * statistics.probability_E)

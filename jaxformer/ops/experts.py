"""Mixture of experts on the tokens of one example: routing, dispatch and combination.

Every expert has a capacity in tokens, so that shapes are static and all experts run as one batched matmul. Tokens are
moved by gathers, which JAX can differentiate and map in any order.

J is the number of experts per token, C the capacity.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.ops.precision import upcast


class RouterStatistics(NamedTuple):
    """Statistics of a router, all float32 or wider. Each is a mean over tokens, so for examples of equal length the
    mean over examples is the mean over the batch."""

    share_E: jax.Array
    """Fraction of the choices that fall on each expert, `(E,)`; the fractions sum to 1 and pass no gradient."""
    probability_E: jax.Array
    """Softmax over all experts, `(E,)`."""
    z: jax.Array
    """Square of the logsumexp of the logits."""
    dropped: jax.Array
    """Fraction of the choices that were dropped."""


def route(logits_TE: jax.Array, n_chosen: int, renormalize: bool | None = None) -> tuple[jax.Array, jax.Array]:
    """Return the experts with the largest logits in descending order, `(T, J)` int32, and their weights `(T, J)`.

    Weights are the softmax over the chosen experts (Jiang et al. 2024, section 2.1). With one expert per token, where
    that would always be 1, the weight is its probability among all experts (Fedus et al. 2022, equation 2).

    Args:
      renormalize: True for the softmax over the chosen experts, False for the softmax over all; None as above.
    """
    top_TJ, experts_TJ = jax.lax.top_k(logits_TE, n_chosen)
    among = top_TJ if (n_chosen > 1 if renormalize is None else renormalize) else logits_TE
    return experts_TJ, jnp.exp(top_TJ - jax.nn.logsumexp(among, axis=-1, keepdims=True))


def capacity(n_tokens: int, n_experts: int, n_chosen: int, factor: float | None) -> int:
    """Return the capacity of an expert in tokens: its even share times a factor, rounded up (Fedus et al. 2022,
    equation 3). Without a factor it is all tokens, so that none is dropped."""
    return n_tokens if factor is None else min(n_tokens, ceil(factor * n_chosen * n_tokens / n_experts))


def assign(experts_TJ: jax.Array, n_experts: int, capacity: int) -> jax.Array:
    """Return the slot of each choice among the E · C slots, `(T, J)` int32; E · C where its expert is full.

    Earlier tokens are assigned first, with all their choices, so no token's slot depends on a later token.
    """
    chosen_N = experts_TJ.reshape(-1)
    chosen_NE = jax.nn.one_hot(chosen_N, n_experts, dtype=jnp.int32)
    rank_N = jnp.sum((jnp.cumsum(chosen_NE, axis=0) - 1) * chosen_NE, axis=-1, dtype=jnp.int32)
    slots_N = jnp.where(rank_N < capacity, chosen_N * capacity + rank_N, n_experts * capacity)
    return slots_N.reshape(experts_TJ.shape)


def dispatch(x_TD: jax.Array, slots_TJ: jax.Array, n_experts: int, capacity: int) -> jax.Array:
    """Return the token in each slot, `(E, C, D)`; zeros in empty slots."""
    T, J = slots_TJ.shape
    token_N = jnp.repeat(jnp.arange(T), J)
    token_P = jnp.full(n_experts * capacity, T).at[slots_TJ.reshape(-1)].set(token_N, mode="drop")
    return x_TD.at[token_P].get(mode="fill", fill_value=0).reshape(n_experts, capacity, -1)


def combine(y_ECD: jax.Array, slots_TJ: jax.Array, weights_TJ: jax.Array) -> jax.Array:
    """Return the weighted sum of each token's expert outputs, `(T, D)`; dropped choices contribute zero."""
    y_PD = y_ECD.reshape(-1, y_ECD.shape[-1])
    y_TJD = y_PD.at[slots_TJ].get(mode="fill", fill_value=0)
    return jnp.einsum("tjd,tj->td", y_TJD, weights_TJ.astype(y_TJD.dtype))


def router_statistics(
    logits_TE: jax.Array, experts_TJ: jax.Array, slots_TJ: jax.Array, capacity: int
) -> RouterStatistics:
    """Return the statistics of one example. Average them over the batch before calling `balance_loss`, which is not a
    mean over examples."""
    E = logits_TE.shape[-1]
    logits_TE = upcast(logits_TE)
    return RouterStatistics(
        jnp.mean(jax.nn.one_hot(experts_TJ, E, dtype=logits_TE.dtype), axis=(0, 1)),
        jnp.mean(jax.nn.softmax(logits_TE), axis=0),
        jnp.mean(jnp.square(jax.nn.logsumexp(logits_TE, axis=-1))),
        jnp.mean(slots_TJ == E * capacity, dtype=logits_TE.dtype),
    )


def balance_loss(statistics: RouterStatistics) -> jax.Array:
    """Return the load-balancing loss E · Σ share · probability, a scalar: 1 for an even load, E if all tokens go to one
    expert.

    This is equation 4 of Fedus et al. 2022 without its factor α; the aim is that of Shazeer et al. 2017, section 4.
    With several experts per token, shares are fractions of the choices. The router z-loss (Zoph et al. 2022, equation
    5) is `statistics.z`.
    """
    return statistics.share_E.size * jnp.sum(statistics.share_E * statistics.probability_E)

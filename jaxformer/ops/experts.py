"""Mixture of experts on the tokens of one example: routing, dispatch and combination.

Every expert has a capacity in tokens, so that shapes are static and all experts run as one batched matmul. Tokens are
moved by gathers, which JAX can differentiate and map in any order.

Padding is routed nowhere: it takes no slot, and no share of the capacity, the statistics or the auxiliary losses. A
token that only the loss leaves out, such as one of a prompt, is routed like any other.

J is the number of experts per token, C the capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.ops.broadcasting import expand
from jaxformer.ops.precision import upcast


class RouterStatistics(NamedTuple):
    """Statistics of a router, all float32 or wider: means over the tokens of an example or, after
    `average_statistics`, of a batch, without padding."""

    share_E: jax.Array
    """Fraction of the choices that fall on each expert, `(E,)`; the fractions sum to 1 and pass no gradient."""
    probability_E: jax.Array
    """Softmax over all experts, `(E,)`."""
    z: jax.Array
    """Square of the logsumexp of the logits."""
    dropped: jax.Array
    """Fraction of the choices that were dropped."""
    n_tokens: jax.Array | None = None
    """Number of tokens, 0 for an example of only padding; None if the examples have no padding."""


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


def route_in_groups(
    logits_TE: jax.Array,
    n_chosen: int,
    correction_E: jax.Array | float = 0.0,
    n_groups: int = 1,
    n_chosen_groups: int = 1,
    renormalize: bool = True,
    factor: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Return experts and weights, each `(T, J)`, by the sigmoid of their logits (DeepSeek-AI 2024b, equations 12 to
    16): of the groups with the largest sums of two experts' scores, the experts with the largest scores.

    Args:
      correction_E: added to the scores when experts are chosen, and not to their weights, to balance the load.
      n_groups: groups of E / n_groups consecutive experts, such as those of one device.
      n_chosen_groups: groups from which a token's experts are chosen.
      renormalize: divide weights by their sum.
      factor: factor of the weights.

    Raises:
      ValueError: the experts cannot be divided into so many groups, or the chosen groups have too few experts.
    """
    E = logits_TE.shape[-1]
    if E % n_groups or not 1 <= n_chosen_groups <= n_groups or n_chosen > n_chosen_groups * (E // n_groups):
        problem = f"{n_chosen} experts cannot be chosen from {n_chosen_groups} of {n_groups} groups"
        raise ValueError(f"{problem} of {E} experts in all")
    scores_TE = jax.nn.sigmoid(logits_TE)
    choice_TNE = (scores_TE + expand(jnp.asarray(correction_E), 2)).reshape(len(logits_TE), n_groups, -1)
    if n_chosen_groups < n_groups:
        groups_TJ = jax.lax.top_k(jax.lax.top_k(choice_TNE, min(2, E // n_groups))[0].sum(-1), n_chosen_groups)[1]
        is_chosen_TN = jax.nn.one_hot(groups_TJ, n_groups, dtype=bool).any(1)
        choice_TNE = jnp.where(is_chosen_TN[..., None], choice_TNE, -jnp.inf)
    experts_TJ = jax.lax.top_k(choice_TNE.reshape(logits_TE.shape), n_chosen)[1]
    weights_TJ = jnp.take_along_axis(scores_TE, experts_TJ, axis=-1)
    total_T1 = weights_TJ.sum(-1, keepdims=True) + 1e-20 if renormalize else 1.0
    return experts_TJ, factor * weights_TJ / total_T1


def clamped_swiglu(gate: jax.Array, y: jax.Array | float, limit: float = 7.0, alpha: float = 1.702) -> jax.Array:
    """Return the gated activation of GPT-OSS's experts, gate · σ(α · gate) · (y + 1), of inputs clamped to at most
    `limit`, and `y` also to at least -limit."""
    gate, y = jnp.minimum(gate, limit), jnp.clip(y, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (y + 1)


def capacity(n_tokens: int, n_experts: int, n_chosen: int, factor: float | None) -> int:
    """Return the capacity of an expert in tokens: its even share times a factor, rounded up (Fedus et al. 2022,
    equation 3). Without a factor it is all tokens, so that none is dropped."""
    return n_tokens if factor is None else min(n_tokens, ceil(factor * n_chosen * n_tokens / n_experts))


def capacity_without_padding(valid_T: jax.Array, n_experts: int, n_chosen: int, factor: float | None) -> jax.Array:
    """Return the `capacity` for the tokens of an example that are not padding, an int32 scalar."""
    # From a table, since float32 arithmetic could round it up once more.
    rooms = [capacity(n, n_experts, n_chosen, factor) for n in range(len(valid_T) + 1)]
    return jnp.asarray(np.array(rooms, np.int32))[jnp.sum(valid_T)]


def assign(
    experts_TJ: jax.Array,
    n_experts: int,
    capacity: int,
    valid_T: jax.Array | None = None,
    limit: jax.Array | None = None,
) -> jax.Array:
    """Return the slot of each choice among the E · C slots, `(T, J)` int32; E · C for padding, and where its expert is
    full.

    Earlier tokens are assigned first, with all their choices, so no token's slot depends on what a later token chooses.

    Args:
      valid_T: False for padding; None without padding.
      limit: number of each expert's slots to fill; None for all.
    """
    if valid_T is not None:  # padding chooses an expert after the last, which has no slots
        experts_TJ = jnp.where(valid_T[:, None], experts_TJ, n_experts)
    chosen_N = experts_TJ.reshape(-1)
    chosen_NE = jax.nn.one_hot(chosen_N, n_experts, dtype=jnp.int32)
    rank_N = jnp.sum((jnp.cumsum(chosen_NE, axis=0) - 1) * chosen_NE, axis=-1, dtype=jnp.int32)
    has_slot_N = rank_N < (capacity if limit is None else limit)
    slots_N = jnp.where(has_slot_N, chosen_N * capacity + rank_N, n_experts * capacity)
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
    logits_TE: jax.Array, experts_TJ: jax.Array, slots_TJ: jax.Array, capacity: int, valid_T: jax.Array | None = None
) -> RouterStatistics:
    """Return the statistics of one example; of a batch, by `average_statistics`.

    Args:
      valid_T: False for padding, which does not count; None without padding.
    """
    E = logits_TE.shape[-1]
    logits_TE = upcast(logits_TE)
    n_tokens = None if valid_T is None else jnp.sum(valid_T, dtype=logits_TE.dtype)

    def mean(x: jax.Array, n_axes: int = 1) -> jax.Array:
        """Average over tokens and, with two axes, over their choices."""
        axes = tuple(range(n_axes))
        if valid_T is None or n_tokens is None:
            return jnp.mean(x, axis=axes, dtype=logits_TE.dtype)
        counted = jnp.where(valid_T.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
        n = jnp.maximum(n_tokens, 1) * prod(x.shape[1:n_axes])
        return jnp.sum(counted, axis=axes, dtype=logits_TE.dtype) / n

    return RouterStatistics(
        mean(jax.nn.one_hot(experts_TJ, E, dtype=logits_TE.dtype), n_axes=2),
        mean(jax.nn.softmax(logits_TE)),
        mean(jnp.square(jax.nn.logsumexp(logits_TE, axis=-1))),
        mean(slots_TJ == E * capacity, n_axes=2),
        n_tokens,
    )


def average_statistics(
    statistics_B: RouterStatistics, mean_over_shards: Callable[[Any], Any] = lambda tree: tree
) -> RouterStatistics:
    """Return the statistics of a batch from those of its examples, stacked along a leading axis B: each is the mean
    over all tokens, so that an example counts by its tokens without padding.

    Args:
      mean_over_shards: function that averages a tree over the shards of the batch; `n_tokens` becomes its mean.
    """
    if (n_B := statistics_B.n_tokens) is None:
        return mean_over_shards(jax.tree.map(lambda x_B: jnp.mean(x_B, axis=0), statistics_B))
    sums = [jnp.sum(jax.vmap(jnp.multiply)(n_B, x_B), axis=0) for x_B in statistics_B[:-1]]
    *means, n = mean_over_shards((*sums, jnp.sum(n_B)))
    share_E, probability_E, z, dropped = (x / jnp.where(n == 0, 1, n) for x in means)
    return RouterStatistics(share_E, probability_E, z, dropped, n)


def balance_loss(statistics: RouterStatistics) -> jax.Array:
    """Return the load-balancing loss E · Σ share · probability, a scalar: 1 for an even load, E if all tokens go to one
    expert.

    This is equation 4 of Fedus et al. 2022 without its factor α, with the shares of their equation 5 and the
    probabilities of their equation 6: means over the tokens of a batch, without padding. It is not a mean over
    examples, so `statistics` must be those of the batch. The aim is that of Shazeer et al. 2017, section 4. With
    several experts per token, shares are fractions of the choices. The router z-loss (Zoph et al. 2022, equation 5) is
    `statistics.z`, a mean over the same tokens.
    """
    return statistics.share_E.size * jnp.sum(statistics.share_E * statistics.probability_E)

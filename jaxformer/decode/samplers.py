"""From logits to a token."""

from dataclasses import dataclass
from math import inf

import jax
import jax.numpy as jnp

from jaxformer.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Filters apply after the temperature: top-k, then top-p of what is left."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens whose chances add up to this (Holtzman et al. 2020)."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise UserError(
                f"temperature is {self.temperature}; it must be at least 0 (0 takes the likeliest token) and finite."
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k is {self.top_k}; it must be at least 1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p}; it must be above 0 and at most 1.")


def filter_top_k(logits_V: jax.Array, k: int) -> jax.Array:
    """All but the k largest become -inf; ties with the k-th stay."""
    smallest = jax.lax.top_k(logits_V, min(k, logits_V.shape[-1]))[0][-1]
    return jnp.where(logits_V >= smallest, logits_V, -jnp.inf)


def filter_top_p(logits_V: jax.Array, p: float) -> jax.Array:
    """All become -inf but the fewest largest whose probabilities add up to at least p; ties with the last stay."""
    if p >= 1:  # the sum below reaches 1 in float32 before the last token does
        return logits_V
    largest_first = jnp.sort(logits_V)[::-1]
    probs = jax.nn.softmax(largest_first)
    before = jnp.cumsum(probs) - probs
    last = jnp.min(jnp.where(before < p, largest_first, jnp.inf))
    return jnp.where(logits_V >= last, logits_V, -jnp.inf)


def sample(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draw one token, an int32 scalar."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    logits_V = logits_V.astype(jnp.float32)
    logits_V = (logits_V - logits_V.max()) / sampling.temperature  # at most 0: no temperature overflows
    if sampling.top_k is not None:
        logits_V = filter_top_k(logits_V, sampling.top_k)
    if sampling.top_p is not None:
        logits_V = filter_top_p(logits_V, sampling.top_p)
    return jax.random.categorical(key, logits_V).astype(jnp.int32)

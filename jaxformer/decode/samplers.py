"""From logits to a token: pure functions on one row of logits, `(V,)`, that know no model.

Steps apply in the order of Hugging Face. First those that look at the text so far (`apply_penalties`): logit bias,
repetition penalty, presence and frequency penalties, bad words, minimum of new tokens. Then, unless the temperature
is 0, those that look at the logits alone (`apply_filters`): temperature, top-k, top-p, min-p, typical. What is left is
drawn in proportion to its probability. A step that is not asked for computes nothing and carries nothing.

A logit of -inf is a token that cannot be drawn. No step leaves only those: a filter keeps at least one token,
and a ban that would leave none is not applied, so that a row goes on where all it could say is banned.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.errors import UserError
from jaxformer.ops.masks import EMPTY


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Hashable, so that jitted functions take it as a static argument."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token, and then no filter applies."""
    top_k: int | None = None
    """Draw among the k likeliest."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens whose probabilities add up to this."""
    min_p: float | None = None
    """Draw among tokens at least this probable, as a share of the likeliest one's probability."""
    typical_p: float | None = None
    """Draw among the tokens of the most typical surprise whose probabilities add up to this."""
    repetition_penalty: float = 1.0
    """Divides what speaks for tokens of the prompt and of the text made; below 1 it favours them."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token made before."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as it was made before."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and what is added to its logit; biases of one token add up."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences never to complete: the last is banned where the ones before it stand, in the prompt or not."""
    min_new_tokens: int = 0
    """Stop tokens are banned until so many tokens are made."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end a row."""
    top_logprobs: int = 0
    """Log-probabilities to report beside the drawn token's: those of so many likeliest tokens."""

    def __post_init__(self) -> None:
        # Bounds on what would otherwise overflow float32 or int32, far beyond what is of use.
        self._require(
            "temperature", 0 <= self.temperature <= 1e6, "at least 0 (0 takes the likeliest token) and at most 1e6"
        )
        self._require("top_k", self.top_k is None or self.top_k >= 1, "at least 1; leave it out to keep all")
        for name in ("top_p", "typical_p"):
            p = getattr(self, name)
            self._require(name, p is None or 0 < p <= 1, "above 0 and at most 1; leave it out to keep all")
        self._require("min_p", self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1; leave it out to keep all")
        self._require(
            "repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "from 1e-6 to 1e6; 1 changes nothing"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, -2 <= getattr(self, name) <= 2, "from -2 to 2; 0 changes nothing")
        self._require("min_new_tokens", 0 <= self.min_new_tokens < 2**31, "at least 0 and below 2**31")
        self._require("top_logprobs", self.top_logprobs >= 0, "at least 0")
        for token, bias in self.logit_bias:
            if not -1e6 <= bias <= 1e6:
                raise UserError(
                    f"the logit bias of token {token} is {bias}; it must be finite, from -1e6 to 1e6: to rule a token "
                    "out, make it a bad word."
                )
        if not all(self.bad_words):
            raise UserError("a bad word has no tokens; it must have at least 1: leave it out.")
        if self.min_new_tokens and not self.stop_tokens:
            raise UserError(
                f"min-new-tokens is {self.min_new_tokens}, but there is no stop token to hold back; give stop tokens."
            )

    def _require(self, name: str, fits: bool, limit: str) -> None:
        if not fits:
            raise UserError(f"{name.replace('_', '-')} is {getattr(self, name)}; it must be {limit}.")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise a UserError if a token is not one of the vocabulary, or if there are too few for `top_logprobs`."""
        named = {
            "a stop token": self.stop_tokens,
            "a token of a logit bias": tuple(token for token, _ in self.logit_bias),
            "a token of a bad word": tuple(token for word in self.bad_words for token in word),
        }
        for what, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise UserError(f"{what} is {token}; it must be from 0 to {vocab_size - 1}, the vocabulary's last.")
        self._require("top_logprobs", self.top_logprobs <= vocab_size, f"at most the vocabulary's {vocab_size}")

    @property
    def n_recalled(self) -> int:
        """How many tokens the longest bad word has before its last."""
        return max(map(len, self.bad_words), default=1) - 1


class History(NamedTuple):
    """What a sampling asks of the text so far; of size 0 where it does not ask."""

    made: jax.Array
    """Tokens made, `()` int32."""
    seen_V: jax.Array
    """Whether a token stands in the prompt or was made; bool. For the repetition penalty."""
    counts_V: jax.Array
    """How often each token was made; int32. For the presence and frequency penalties."""
    last_N: jax.Array
    """The last `n_recalled` tokens, `EMPTY` where there were fewer. For bad words."""


class Drawn(NamedTuple):
    """A token, and log-probabilities as the model gave them: before any step."""

    token: jax.Array
    """`()` int32."""
    logprob: jax.Array
    """Of the token, `()` float32."""
    top_tokens_N: jax.Array
    """The `top_logprobs` likeliest tokens, the likeliest first; int32."""
    top_logprobs_N: jax.Array
    """Of those; float32."""


def begin(sampling: Sampling, vocab_size: int, tokens_T: jax.Array, length: jax.Array | int) -> History:
    """The history of a row that has a prompt, the first `length` of `tokens_T`, and made nothing yet.

    Raises:
      UserError: the sampling names tokens beyond the vocabulary.
    """
    sampling.check_vocabulary(vocab_size)
    tokens_T = jnp.asarray(tokens_T, jnp.int32)
    seen_V = jnp.zeros(0, bool)
    if sampling.repetition_penalty != 1:
        inside_T = jnp.where(jnp.arange(len(tokens_T)) < length, tokens_T, vocab_size)
        seen_V = jnp.zeros(vocab_size, bool).at[inside_T].set(True, mode="drop")
    counts_V = jnp.zeros(vocab_size if sampling.presence_penalty or sampling.frequency_penalty else 0, jnp.int32)
    place_N = length - sampling.n_recalled + jnp.arange(sampling.n_recalled)
    last_N = jnp.where(place_N >= 0, tokens_T[jnp.maximum(place_N, 0)], EMPTY)
    return History(jnp.int32(0), seen_V, counts_V, last_N)


def update(history: History, token: jax.Array, sampling: Sampling) -> History:
    """The history with one more token made."""
    made, seen_V, counts_V, last_N = history
    if sampling.repetition_penalty != 1:
        seen_V = seen_V.at[token].set(True)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts_V = counts_V.at[token].add(1)
    if sampling.n_recalled:
        last_N = jnp.append(last_N[1:], token)
    return History(made + 1, seen_V, counts_V, last_N)


def sample(logits_V: jax.Array, history: History, key: jax.Array, sampling: Sampling) -> Drawn:
    """Draw one token; equal keys and logits draw equal tokens."""
    logits_V = logits_V.astype(jnp.float32)
    adjusted_V = apply_penalties(logits_V, history, sampling)
    token = likeliest(adjusted_V) if sampling.temperature == 0 else draw(apply_filters(adjusted_V, sampling), key)
    return with_logprobs(logits_V, token, sampling)


def distribution(logits_V: jax.Array, history: History, sampling: Sampling) -> jax.Array:
    """The probabilities, `(V,)` float32, with which `sample` draws each token."""
    adjusted_V = apply_penalties(logits_V.astype(jnp.float32), history, sampling)
    if sampling.temperature == 0:
        return jax.nn.one_hot(likeliest(adjusted_V), adjusted_V.shape[-1])
    return jax.nn.softmax(apply_filters(adjusted_V, sampling))


def with_logprobs(logits_V: jax.Array, token: jax.Array, sampling: Sampling) -> Drawn:
    """A token with the log-probabilities that the model's logits give it and the likeliest."""
    logits_V = logits_V.astype(jnp.float32)
    top_logits_N, top_tokens_N = jax.lax.top_k(logits_V, sampling.top_logprobs)
    total = jax.nn.logsumexp(logits_V)
    return Drawn(token, logits_V[token] - total, top_tokens_N, top_logits_N - total)


def apply_penalties(logits_V: jax.Array, history: History, sampling: Sampling) -> jax.Array:
    """Apply the steps that look at the text so far."""
    s = sampling
    if s.logit_bias:
        logits_V = add_bias(logits_V, s.logit_bias)
    if s.repetition_penalty != 1:
        logits_V = penalise_repetition(logits_V, history.seen_V, s.repetition_penalty)
    if s.presence_penalty or s.frequency_penalty:
        logits_V = penalise_counts(logits_V, history.counts_V, s.presence_penalty, s.frequency_penalty)
    if s.bad_words:
        logits_V = ban(logits_V, completions(logits_V.shape[-1], history.last_N, s.bad_words))
    if s.min_new_tokens:
        stop_V = jnp.zeros(logits_V.shape, bool).at[np.array(s.stop_tokens)].set(True)
        logits_V = ban(logits_V, stop_V & (history.made < s.min_new_tokens))
    return logits_V


def apply_filters(logits_V: jax.Array, sampling: Sampling) -> jax.Array:
    """Apply the steps that look at the logits alone; tokens are drawn from the softmax of what comes out.

    The temperature must be above 0.
    """
    s = sampling
    # At most 0, and divided by no less than the smallest float32: no temperature overflows.
    logits_V = (logits_V - logits_V.max()) / max(s.temperature, float(jnp.finfo(jnp.float32).tiny))
    if s.top_k is not None:
        logits_V = filter_top_k(logits_V, s.top_k)
    if s.top_p is not None:
        logits_V = filter_top_p(logits_V, s.top_p)
    if s.min_p:
        logits_V = filter_min_p(logits_V, s.min_p)
    if s.typical_p is not None:
        logits_V = filter_typical(logits_V, s.typical_p)
    return logits_V


def add_bias(logits_V: jax.Array, bias: tuple[tuple[int, float], ...]) -> jax.Array:
    """Add to the logits of the tokens named."""
    tokens, added = zip(*bias, strict=True)
    return logits_V.at[np.array(tokens)].add(np.array(added, np.float32))


def penalise_repetition(logits_V: jax.Array, seen_V: jax.Array, penalty: float) -> jax.Array:
    """Divide logits above 0 of tokens seen by the penalty, and multiply those below 0 (Keskar et al. 2019,
    section 4.1, who divide all; the sign is Hugging Face's)."""
    return jnp.where(seen_V, jnp.where(logits_V > 0, logits_V / penalty, logits_V * penalty), logits_V)


def penalise_counts(logits_V: jax.Array, counts_V: jax.Array, presence: float, frequency: float) -> jax.Array:
    """Subtract `frequency` times a token's count, and `presence` once where it is above 0 (OpenAI's definition)."""
    return logits_V - frequency * counts_V - presence * (counts_V > 0)


def completions(vocab_size: int, last_N: jax.Array, words: tuple[tuple[int, ...], ...]) -> jax.Array:
    """Tokens that would complete one of the words after the last N tokens, `(V,)` bool; N is at least the length of
    the longest word without its last token."""
    N = last_N.shape[0]
    before = [[EMPTY] * (N + 1 - len(word)) + list(word[:-1]) for word in words]
    before_WN = np.array(before, np.int32).reshape(len(words), N)
    stands_W = ((before_WN == EMPTY) | (before_WN == last_N)).all(axis=1)
    return jnp.zeros(vocab_size, bool).at[np.array([word[-1] for word in words])].max(stands_W)


def ban(logits_V: jax.Array, banned_V: jax.Array) -> jax.Array:
    """Banned tokens become -inf; unless nothing would be left, then none does."""
    without_V = jnp.where(banned_V, -jnp.inf, logits_V)
    return jnp.where(jnp.any(without_V > -jnp.inf), without_V, logits_V)


def filter_top_k(logits_V: jax.Array, k: int) -> jax.Array:
    """All become -inf but the k largest (Fan et al. 2018); ties with the last stay."""
    largest_K = jax.lax.top_k(logits_V, min(k, logits_V.shape[-1]))[0]
    # The minimum, for the last: XLA's CPU compiler turns a slice of the k largest back into a sort of all.
    return jnp.where(logits_V >= largest_K.min(), logits_V, -jnp.inf)


def filter_top_p(logits_V: jax.Array, p: float) -> jax.Array:
    """All become -inf but the fewest largest whose probabilities add up to at least p (Holtzman et al. 2020,
    section 3.1); ties with the last stay."""
    return jnp.where(largest_of_mass(logits_V, jax.nn.softmax(logits_V), p), logits_V, -jnp.inf)


def filter_min_p(logits_V: jax.Array, p: float) -> jax.Array:
    """All become -inf whose probability is below p times the largest (Nguyen et al. 2024, equation 1)."""
    return jnp.where(logits_V >= logits_V.max() + log(p), logits_V, -jnp.inf)


def filter_typical(logits_V: jax.Array, p: float) -> jax.Array:
    """All become -inf but the fewest whose surprise, -log probability, is closest to the entropy and whose
    probabilities add up to at least p (Meister et al. 2022, equation 10); ties with the last stay."""
    logprobs_V = jax.nn.log_softmax(logits_V)
    probs_V = jnp.exp(logprobs_V)
    entropy = -jnp.sum(jnp.where(probs_V > 0, probs_V * logprobs_V, 0.0))
    return jnp.where(largest_of_mass(-jnp.abs(entropy + logprobs_V), probs_V, p), logits_V, -jnp.inf)


def largest_of_mass(x_V: jax.Array, weights_V: jax.Array, mass: float) -> jax.Array:
    """The fewest largest x whose weights add up to at least `mass`, with ties, `(V,)` bool; all from a mass of 1 on.

    The smallest x to keep is found bit by bit, the highest first; a sort takes at least five times as long on a CPU.
    """
    if mass >= 1:  # the sum of all can be just below 1 in float32, or reach it before the last
        return jnp.ones(x_V.shape, bool)
    mass = max(mass, float(jnp.finfo(jnp.float32).tiny))  # at 0, nothing would be enough
    x_V = jnp.where(x_V == 0, 0.0, x_V)  # -0.0 has other bits, and adding 0.0 is optimised away
    bits_V = jax.lax.bitcast_convert_type(x_V.astype(jnp.float32), jnp.uint32)
    highest = jnp.uint32(1 << 31)
    order_V = jnp.where(bits_V >= highest, ~bits_V, bits_V | highest)  # as integers, in the order of the floats

    def set_bit(i: jax.Array, smallest: jax.Array) -> jax.Array:
        larger = smallest | (highest >> i.astype(jnp.uint32))
        return jnp.where(jnp.sum(jnp.where(order_V >= larger, weights_V, 0.0)) >= mass, larger, smallest)

    return order_V >= jax.lax.fori_loop(0, 32, set_bit, jnp.uint32(0))


def likeliest(logits_V: jax.Array) -> jax.Array:
    """The first of the largest, `()` int32; `argmax`, but several times as fast for a batch on a CPU."""
    places_V = jnp.arange(logits_V.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(logits_V == logits_V.max(), places_V, places_V[-1]))


def draw(logits_V: jax.Array, key: jax.Array) -> jax.Array:
    """A token from softmax(logits), `()` int32.

    Inverts the cumulative distribution, of blocks of tokens and then within one. On a CPU it is many times as fast as
    `jax.random.categorical`, which draws noise for every token of the vocabulary. Probabilities are exact to 2^-23,
    the step of a uniform float32.
    """
    weights_V = jnp.exp(logits_V - logits_V.max())
    blocks_RC = jnp.pad(weights_V, (0, -len(weights_V) % BLOCK)).reshape(-1, BLOCK)
    u_2 = jax.random.uniform(key, (2,))
    row = _invert(blocks_RC.sum(axis=1), u_2[0])
    return row * BLOCK + _invert(blocks_RC[row], u_2[1])


BLOCK = 256
"""Tokens of a block of `draw`: near the square root of usual vocabularies."""


def _invert(weights_N: jax.Array, u: jax.Array) -> jax.Array:
    """The first place whose weight, with those before it, is above the share u of all, 0 ≤ u < 1; never one of weight
    0, also where a parallel scan rounds its sum and that of the place before differently."""
    sums_N = jnp.where(weights_N > 0, jnp.cumsum(weights_N), 0.0)
    return likeliest(sums_N > u * sums_N.max())

"""From logits to a token: pure functions on one row of logits, `(V,)`, independent of any model.

The order is Hugging Face's: first the logits processors, which read the text so far (`apply_penalties`): logit bias,
repetition penalty, presence and frequency penalties, bad words, minimum new tokens; then, unless the temperature is 0,
the warpers, which read only the logits (`apply_filters`): temperature, top-k, top-p, min-p, typical. The token is
sampled from the softmax. A disabled step costs no computation or state.

A compiled function takes the numbers of its `Sampling` as values: another temperature compiles nothing.

A token with a logit of -inf is never drawn. At least one token always remains: every filter keeps one, and a ban that
would exclude all remaining tokens is not applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from math import inf, ulp
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.errors import UserError, batch_hint
from jaxformer.ops.masks import EMPTY
from jaxformer.ops.workarounds import kth_largest
from jaxformer.terminal import short_repr

ABOVE_ZERO = ulp(0.0)
"""Smallest positive float."""
SMALLEST_NORMAL = 2.0**-126
"""Smallest positive normal float32."""
TRACED = {
    "temperature": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0,
}  # fmt: skip
"""Fields of `Sampling` that compiled functions take as values, with the value besides None that disables their step."""


@dataclass(frozen=True)
class Sampling:
    """Options for sampling a token.

    A pytree: its leaves are the fields of `TRACED` whose step is not disabled, so that a jitted function is compiled
    for the steps and the other fields, and serves all values of these. Also hashable, for a static argument.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy, without filters."""
    top_k: int | None = None
    """Number of most likely tokens to sample from."""
    top_p: float | None = None
    """Probability mass to sample from: the smallest set of most likely tokens that has it (nucleus sampling)."""
    min_p: float | None = None
    """Minimum probability of a token, as a fraction of the most likely token's."""
    typical_p: float | None = None
    """Probability mass of the most typical tokens to sample from: those whose surprise is closest to the entropy."""
    repetition_penalty: float = 1.0
    """Penalty on tokens in the prompt or the completion: it divides positive logits and multiplies negative ones; below
    1 it favours them."""
    presence_penalty: float = 0.0
    """Amount subtracted from the logit of every token in the completion."""
    frequency_penalty: float = 0.0
    """Amount subtracted from a token's logit per occurrence in the completion."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and its logit bias; biases for the same token add up."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences never to complete: the last token is banned after the others, even if these are in the prompt."""
    min_new_tokens: int = 0
    """Minimum new tokens; stop tokens are banned before."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end a row."""
    n_tokens: int | None = None
    """Number of token ids to sample from, starting at 0: the tokenizer's, if the model has more; none for all."""
    top_logprobs: int = 0
    """Number of most likely tokens whose log-probabilities are returned besides the sampled token's."""

    def __post_init__(self) -> None:
        for name, (minimum, maximum, limit) in LIMITS.items():
            value = getattr(self, name)
            is_off = value is None and getattr(Sampling, name) is None
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            self._require(name, is_off or (is_number and minimum <= value <= maximum), limit)
        biases_fit = all(-1e6 <= bias <= 1e6 for _, bias in self.logit_bias)
        self._require("logit_bias", biases_fit, "finite, from -1e6 to 1e6: to rule a token out, make it a bad word")
        self._require("bad_words", all(self.bad_words), "words of at least 1 token each")

    def _require(self, name: str, valid: bool, limit: str) -> None:
        if not valid:
            raise UserError(f"`{name}` is {getattr(self, name)}; it must be {limit}.")

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node(cls, _flatten, _unflatten)

    def uses(self, name: str) -> bool:
        """Return True unless the value of a field disables its step. A field of `TRACED` may hold an array."""
        value = getattr(self, name)
        return value is not None and (not isinstance(value, Real) or value != TRACED.get(name, 0))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `UserError` if a token is not in the vocabulary, or there are fewer than `top_logprobs`."""
        options = {
            "a stop token": self.stop_tokens,
            "a token of a logit bias": tuple(token for token, _ in self.logit_bias),
            "a token of a bad word": tuple(token for word in self.bad_words for token in word),
        }
        for name, tokens in options.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise UserError(f"{name} is {token}; it must be from 0 to {vocab_size - 1}, the vocabulary's last.")
        self._require("top_logprobs", self.top_logprobs <= vocab_size, f"at most the vocabulary's {vocab_size}")

    def filter_logits(self, logits_V: jax.Array) -> jax.Array:
        """Return the logits after a subclass's own filters; -inf excludes a token, and at least one must remain."""
        return logits_V

    @property
    def n_recent(self) -> int:
        """Number of tokens in the longest bad word, without its last."""
        return max(map(len, self.bad_words), default=1) - 1


def _flatten(sampling: Sampling) -> tuple[list[Any], Sampling]:
    """Return the leaves, and the sampling with infinity in place of each."""
    leaves = {name: getattr(sampling, name) for name in TRACED if sampling.uses(name)}
    values = [float(x) if isinstance(x, Real) else x for x in leaves.values()]  # 1 and 1.0 are one program
    return values, _with(sampling, dict.fromkeys(leaves, inf))


def _unflatten(sampling: Sampling, values: Iterable[Any]) -> Sampling:
    """Return the inverse of `_flatten`, whose values may be arrays, which no limit is checked for."""
    return _with(sampling, dict(zip(filter(sampling.uses, TRACED), values, strict=True)))


def _with(sampling: Sampling, values: dict[str, Any]) -> Sampling:
    """Return a sampling with other values of some fields, without checks, and without what else is cached in it."""
    other = object.__new__(type(sampling))
    vars(other).update({f.name: getattr(sampling, f.name) for f in fields(sampling)} | values)
    return other


jax.tree_util.register_pytree_node(Sampling, _flatten, _unflatten)


class History(NamedTuple):
    """The text so far, as far as `Sampling` reads it; arrays that it does not read have size 0."""

    n_new: jax.Array
    """Number of new tokens, `()` int32."""
    occurs_V: jax.Array
    """True for tokens in the prompt or the completion, for the repetition penalty; bool."""
    counts_V: jax.Array
    """Occurrences of each token in the completion, for the presence and frequency penalties; int32."""
    recent_N: jax.Array
    """The last `n_recent` tokens, `EMPTY` before the first, for bad words; int32."""


class Samples(NamedTuple):
    """Sampled tokens, with the model's own log-probabilities, before any processor or filter.

    From `sample`, a single one; batches and steps add axes in front.

    Attributes:
      tokens: `()` int32, `masks.EMPTY` after a row's end, where the other fields are undefined.
      logprobs: log-probability of the token, `()` float32.
      top_tokens: the `top_logprobs` most likely tokens, most likely first, `(n,)` int32.
      top_logprobs: their log-probabilities, `(n,)` float32.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array

    def __repr__(self) -> str:
        return short_repr(self)


def init_history(sampling: Sampling, vocab_size: int, tokens_T: jax.Array, length: jax.Array | int) -> History:
    """Return the history of a prompt, the first `length` of `tokens_T`. Raises `UserError` if the sampling has tokens
    outside the vocabulary."""
    sampling.check_vocabulary(vocab_size)
    tokens_T = jnp.asarray(tokens_T, jnp.int32)
    occurs_V = jnp.zeros(0, bool)
    if sampling.uses("repetition_penalty"):
        inside_T = jnp.where(jnp.arange(len(tokens_T)) < length, tokens_T, vocab_size)
        occurs_V = jnp.zeros(vocab_size, bool).at[inside_T].set(True, mode="drop")
    counts = sampling.uses("presence_penalty") or sampling.uses("frequency_penalty")
    counts_V = jnp.zeros(vocab_size if counts else 0, jnp.int32)
    position_N = length - sampling.n_recent + jnp.arange(sampling.n_recent)
    recent_N = jnp.where(position_N >= 0, tokens_T[jnp.maximum(position_N, 0)], EMPTY)
    return History(jnp.int32(0), occurs_V, counts_V, recent_N)


def update_history(history: History, token: jax.Array, sampling: Sampling) -> History:
    """Return the history with one more new token."""
    n_new, occurs_V, counts_V, recent_N = history
    if history.occurs_V.size:
        occurs_V = occurs_V.at[token].set(True)
    if history.counts_V.size:
        counts_V = counts_V.at[token].add(1)
    if sampling.n_recent:
        recent_N = jnp.append(recent_N[1:], token)
    return History(n_new + 1, occurs_V, counts_V, recent_N)


def sample(logits_V: jax.Array, history: History, key: jax.Array, sampling: Sampling) -> Samples:
    """Sample one token; equal keys and logits give equal tokens."""
    logits_V = logits_V.astype(jnp.float32)
    penalised_V = apply_penalties(logits_V, history, sampling)
    token = draw(apply_filters(penalised_V, sampling), key) if sampling.uses("temperature") else argmax(penalised_V)
    return with_logprobs(logits_V, token, sampling)


def distribution(logits_V: jax.Array, history: History, sampling: Sampling) -> jax.Array:
    """Return the probabilities, `(V,)` float32, with which `sample` draws each token."""
    penalised_V = apply_penalties(logits_V.astype(jnp.float32), history, sampling)
    if not sampling.uses("temperature"):
        return jax.nn.one_hot(argmax(penalised_V), penalised_V.shape[-1])
    return jax.nn.softmax(apply_filters(penalised_V, sampling))


def with_logprobs(logits_V: jax.Array, token: jax.Array, sampling: Sampling) -> Samples:
    """Return a token with its log-probability by the model's logits, and those of the most likely tokens."""
    logits_V = logits_V.astype(jnp.float32)
    top_logits_N, top_tokens_N = jax.lax.top_k(logits_V, sampling.top_logprobs)
    total = jax.nn.logsumexp(logits_V)
    return Samples(token, logits_V[token] - total, top_tokens_N, top_logits_N - total)


def apply_penalties(logits_V: jax.Array, history: History, sampling: Sampling) -> jax.Array:
    """Apply the logits processors, which read the text so far. Raises `ValueError` for a batch."""
    if logits_V.ndim != 1:
        raise ValueError(f"expected logits of shape (V,), got {logits_V.shape}{batch_hint(logits_V.shape, 1)}")
    s = sampling
    if s.n_tokens is not None:
        logits_V = jnp.where(jnp.arange(len(logits_V)) < s.n_tokens, logits_V, -jnp.inf)
    if s.logit_bias:
        tokens, biases = zip(*s.logit_bias, strict=True)
        logits_V = logits_V.at[np.array(tokens)].add(np.array(biases, np.float32))
    if s.uses("repetition_penalty"):  # Keskar et al. 2019, section 4.1; the sign rule is Hugging Face's
        penalty = s.repetition_penalty
        penalised_V = jnp.where(logits_V > 0, logits_V * reciprocal(penalty), logits_V * penalty)
        logits_V = jnp.where(history.occurs_V, penalised_V, logits_V)
    if s.uses("presence_penalty") or s.uses("frequency_penalty"):  # OpenAI's definition
        counts_V = history.counts_V
        logits_V = logits_V - s.frequency_penalty * counts_V - s.presence_penalty * (counts_V > 0)
    if s.bad_words:
        logits_V = ban(logits_V, bad_word_ends(logits_V.shape[-1], history.recent_N, s.bad_words))
    if s.min_new_tokens and s.stop_tokens:
        stop_V = jnp.zeros(logits_V.shape, bool).at[np.array(s.stop_tokens)].set(True)
        logits_V = ban(logits_V, stop_V & (history.n_new < s.min_new_tokens))
    return logits_V


def apply_filters(logits_V: jax.Array, sampling: Sampling) -> jax.Array:
    """Apply the warpers, which read only the logits; the temperature must be above 0."""
    s = sampling
    # Logits of at most 0, divided by no less than the smallest normal float32: no temperature overflows.
    logits_V = (logits_V - logits_V.max()) * reciprocal(jnp.maximum(s.temperature, SMALLEST_NORMAL))
    for name, (apply, *_) in FILTERS.items():
        if s.uses(name):
            logits_V = apply(logits_V, getattr(s, name))
    return s.filter_logits(logits_V)


def bad_word_ends(vocab_size: int, recent_N: jax.Array, words: tuple[tuple[int, ...], ...]) -> jax.Array:
    """Return True for tokens that would complete a word after the last N tokens, `(V,)` bool; N must be at least the
    length of the longest word without its last token."""
    N = recent_N.shape[0]
    before = [[EMPTY] * (N + 1 - len(word)) + list(word[:-1]) for word in words]
    before_WN = np.array(before, np.int32).reshape(len(words), N)
    matches_W = ((before_WN == EMPTY) | (before_WN == recent_N[None])).all(axis=1)
    return jnp.zeros(vocab_size, bool).at[np.array([word[-1] for word in words])].max(matches_W)


def ban(logits_V: jax.Array, banned_V: jax.Array) -> jax.Array:
    """Set the logits of banned tokens to -inf, unless no token would remain."""
    without_V = jnp.where(banned_V, -jnp.inf, logits_V)
    return jnp.where(jnp.any(without_V > -jnp.inf), without_V, logits_V)


def filter_top_k(logits_V: jax.Array, k: int) -> jax.Array:
    """Set all logits to -inf but the k largest (Fan et al. 2018) and ties with the smallest of them."""
    return jnp.where(logits_V >= kth_largest(logits_V, min(k, logits_V.shape[-1])), logits_V, -jnp.inf)


def filter_top_p(logits_V: jax.Array, p: float | jax.Array) -> jax.Array:
    """Set all logits to -inf but the smallest set of largest ones with a total probability of at least p (Holtzman et
    al. 2020, section 3.1), and ties with the smallest of them."""
    return jnp.where(top_mass(logits_V, jax.nn.softmax(logits_V), p), logits_V, -jnp.inf)


def filter_min_p(logits_V: jax.Array, p: float | jax.Array) -> jax.Array:
    """Set logits to -inf whose probability is below p times the largest (Nguyen et al. 2024, equation 1)."""
    return jnp.where(logits_V >= logits_V.max() + jnp.log(p), logits_V, -jnp.inf)


def filter_typical(logits_V: jax.Array, p: float | jax.Array) -> jax.Array:
    """Set all logits to -inf but the smallest set with a total probability of at least p whose surprise, -log
    probability, is closest to the entropy (Meister et al. 2022, equation 10), and ties with the last of them."""
    logprobs_V = jax.nn.log_softmax(logits_V)
    probs_V = jnp.exp(logprobs_V)
    entropy = -jnp.sum(jnp.where(probs_V > 0, probs_V * logprobs_V, 0.0))
    return jnp.where(top_mass(-jnp.abs(entropy + logprobs_V), probs_V, p), logits_V, -jnp.inf)


def top_mass(x_V: jax.Array, weights_V: jax.Array, mass: float | jax.Array) -> jax.Array:
    """Return a mask of the fewest largest x whose weights sum to at least `mass`, with ties, `(V,)` bool; all True from
    a mass of 1. The smallest x to keep is determined bit by bit, from the highest; sorting takes at least five times as
    long on a CPU."""
    mass = jnp.maximum(mass, SMALLEST_NORMAL)  # at 0, no token would be needed
    x_V = jnp.where(x_V == 0, 0.0, x_V)  # -0.0 has other bits; XLA would optimise away adding 0.0
    bits_V = jax.lax.bitcast_convert_type(x_V.astype(jnp.float32), jnp.uint32)
    highest = jnp.uint32(1 << 31)
    order_V = jnp.where(bits_V >= highest, ~bits_V, bits_V | highest)  # integers that sort like the floats

    def set_bit(i: jax.Array, smallest: jax.Array) -> jax.Array:
        larger = smallest | (highest >> i.astype(jnp.uint32))
        return jnp.where(jnp.sum(jnp.where(order_V >= larger, weights_V, 0.0)) >= mass, larger, smallest)

    # In float32, the sum of all can be just below 1, or reach it before the last.
    return (mass >= 1) | (order_V >= jax.lax.fori_loop(0, 32, set_bit, jnp.uint32(0)))


def reciprocal(x: float | jax.Array) -> jax.Array:
    """Return 1/x in float32. A division by it is a product, as XLA makes it of one by a constant, so that a value
    inside and one outside of a compiled function give the same bits."""
    return 1 / jnp.float32(x)


def argmax(logits_V: jax.Array) -> jax.Array:
    """Return the index of the first maximum, `()` int32; several times as fast as `jnp.argmax` for a batch on a CPU."""
    index_V = jnp.arange(logits_V.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(logits_V == logits_V.max(), index_V, index_V[-1]))


def draw(logits_V: jax.Array, key: jax.Array) -> jax.Array:
    """Return a token sampled from softmax(logits), `()` int32. Inverts the cumulative distribution, first over blocks
    of tokens, then within one block. On a CPU it is many times as fast as `jax.random.categorical`, which draws noise
    for every token of the vocabulary. Probabilities are exact to 2^-23, the resolution of a uniform float32."""
    weights_V = jnp.exp(logits_V - logits_V.max())
    blocks_RC = jnp.pad(weights_V, (0, -len(weights_V) % TOKENS_PER_BLOCK)).reshape(-1, TOKENS_PER_BLOCK)
    u_2 = jax.random.uniform(key, (2,))
    row = _invert(blocks_RC.sum(axis=1), u_2[0])
    return row * TOKENS_PER_BLOCK + _invert(blocks_RC[row], u_2[1])


TOKENS_PER_BLOCK = 256
"""Tokens per block in `draw`: near the square root of usual vocabulary sizes."""


def _invert(weights_N: jax.Array, u: jax.Array) -> jax.Array:
    """Return the first index whose cumulative weight exceeds the fraction u of the total, 0 ≤ u < 1; never one of
    weight 0, even if a parallel scan rounds its cumulative weight differently from its predecessor's."""
    sums_N = jnp.where(weights_N > 0, jnp.cumsum(weights_N), 0.0)
    return argmax(sums_N > u * sums_N.max())


FILTERS: dict[str, tuple[Callable[[jax.Array, Any], jax.Array], float, float, str]] = {
    "top_k": (filter_top_k, 1, inf, "at least 1; omit it to keep all"),
    "top_p": (filter_top_p, ABOVE_ZERO, 1, "above 0 and at most 1; omit it to keep all"),
    "min_p": (filter_min_p, 0, 1, "from 0 to 1; omit it to keep all"),
    "typical_p": (filter_typical, ABOVE_ZERO, 1, "above 0 and at most 1; omit it to keep all"),
}
"""Filters in order of application, by the field of `Sampling` that is their second argument, with its limits as in
`LIMITS`; None and 0 disable a filter."""
LIMITS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 1e6, "at least 0 (0 is greedy) and at most 1e6"),
    "repetition_penalty": (1e-6, 1e6, "from 1e-6 to 1e6; 1 changes nothing"),
    "presence_penalty": (-2, 2, "from -2 to 2; 0 changes nothing"),
    "frequency_penalty": (-2, 2, "from -2 to 2; 0 changes nothing"),
    "min_new_tokens": (0, 2**31 - 1, "at least 0 and below 2**31"),
    "n_tokens": (1, inf, "at least 1; omit it for all"),
    "top_logprobs": (0, inf, "at least 0"),
    **{name: (minimum, maximum, limit) for name, (_, minimum, maximum, limit) in FILTERS.items()},
}
"""Smallest and largest value of each option, and its limit in words. The bounds prevent overflow of float32 or int32
and are far beyond useful values."""

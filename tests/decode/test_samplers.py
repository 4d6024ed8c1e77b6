"""The samplers against hand-computed values, properties, and Hugging Face's logits processors.

The values of Hugging Face are stored by `tests/fixtures/make_samplers_hf.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import inf, nan

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxformer.decode import samplers
from jaxformer.decode.samplers import (
    TOKENS_PER_BLOCK,
    History,
    Samples,
    Sampling,
    _invert,
    apply_filters,
    draw,
    init_history,
    sample,
    top_mass,
    update_history,
)
from jaxformer.errors import UserError
from jaxformer.ops.masks import EMPTY
from tests.arrays import assert_close, normal
from tests.fixtures.samplers_cases import CASES, PROMPT
from tests.helpers import ROOT

PROBS = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
LOGITS = np.log(PROBS).astype(np.float32)
TIED = np.array([0.2, 0.4, 0.2, 0.2])
SIGNIFICANCE = 1e-3
"""Of the chi-squared tests: how often one would fail by chance, were the key not fixed."""
UNCHANGED = ("nothing", "top-k beyond the vocabulary", "minimum reached")
"""Cases that leave probabilities as they are."""
LARGEST = jax.jit(top_mass, static_argnames="mass")
argmax = jax.jit(samplers.argmax)
apply_penalties = jax.jit(samplers.apply_penalties)
distribution = jax.jit(samplers.distribution)
filter_top_k, filter_top_p, filter_typical = (
    jax.jit(function, static_argnums=1)
    for function in (samplers.filter_top_k, samplers.filter_top_p, samplers.filter_typical)
)
EVERYTHING = Sampling(**CASES["all"])


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-squared test."""
    from scipy.stats import chisquare  # for which each worker would otherwise wait

    return float(chisquare(counts, expected).pvalue)


def history(sampling: Sampling, prompt: list[int], generated: list[int], vocab_size: int = 5) -> History:
    """Of a row with these tokens; the prompt is padded with token 1, which must not count."""
    padded = [np.array(row + [1] * (6 - len(row)), np.int32) for row in (prompt, generated)]
    return _history(sampling, vocab_size, *padded, len(prompt), len(generated))


@partial(jax.jit, static_argnames="vocab_size")
def _history(
    sampling: Sampling, vocab_size: int, prompt_T: jax.Array, generated_T: jax.Array, n_prompt: int, n_generated: int
) -> History:
    after = init_history(sampling, vocab_size, prompt_T, n_prompt)
    update = lambda i, after: update_history(after, generated_T[i], sampling)  # noqa: E731
    return jax.lax.fori_loop(0, n_generated, update, after)


@jax.jit
def first(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> Samples:
    """What is drawn after a prompt of token 0."""
    return sample(logits_V, init_history(sampling, len(logits_V), jnp.zeros(1, jnp.int32), 1), key, sampling)


@partial(jax.jit, static_argnames="n")
def frequencies(sampling: Sampling, n: int) -> jax.Array:
    """How often each token of `LOGITS` is drawn, of n."""
    keys = jax.random.split(jax.random.key(0), n)
    return jnp.bincount(jax.vmap(partial(first, jnp.asarray(LOGITS), sampling=sampling))(keys).tokens, length=5)


def kept_tokens(filtered: jax.Array) -> list[int]:
    return np.flatnonzero(np.isfinite(filtered)).tolist()


def options(sampling: object) -> str:
    """The fields of a sampling that ask for something."""
    if not isinstance(sampling, Sampling):
        return ""
    plain = vars(Sampling())
    return " ".join(f"{name}={value}" for name, value in vars(sampling).items() if value != plain[name])


@pytest.fixture(scope="module")
def hugging_face() -> dict[str, np.ndarray]:
    with np.load(ROOT / "tests/fixtures/samplers_hf.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("name", CASES)
def test_probabilities_equal_hugging_face(name: str, hugging_face: dict) -> None:
    sampling = Sampling(**CASES[name])
    logits_BV, tokens_BT = hugging_face["logits"], hugging_face["tokens"]

    def one(logits_V: jax.Array, tokens_T: jax.Array) -> jax.Array:
        after = init_history(sampling, len(logits_V), tokens_T, PROMPT)
        for token in tokens_T[PROMPT:]:
            after = update_history(after, token, sampling)
        return apply_filters(apply_penalties(logits_V, after, sampling), sampling)

    ours_BV = jax.jit(jax.vmap(one))(logits_BV, tokens_BT)
    assert_array_equal(np.isfinite(ours_BV), np.isfinite(hugging_face[name]))
    assert_close(jax.nn.softmax(ours_BV), jax.nn.softmax(hugging_face[name]))
    moved = np.abs(jax.nn.softmax(ours_BV) - jax.nn.softmax(logits_BV)).max()
    assert moved < 1e-6 if name in UNCHANGED else moved > 0.01


def kept_by(kept: Callable, values: Sequence[float], probs: np.ndarray = PROBS) -> list[list[int]]:
    """Return the tokens that a filter keeps with each value, by one program."""
    logits = np.log(probs).astype(np.float32)
    results = jax.jit(lambda logits: [kept(logits, value) for value in values])(logits)
    for filtered in map(np.asarray, results):
        assert_array_equal(filtered[np.isfinite(filtered)], logits[np.isfinite(filtered)])
    return [kept_tokens(filtered) for filtered in results]


ALL_TOKENS = [0, 1, 2, 3, 4]


def test_top_k_by_hand() -> None:
    expected = {1: [1], 2: [1, 3], 4: [0, 1, 3, 4], 5: ALL_TOKENS, 6: ALL_TOKENS}
    assert kept_by(samplers.filter_top_k, [*expected]) == [*expected.values()]
    assert kept_by(samplers.filter_top_k, [2], TIED) == [[0, 1, 2, 3]]


def test_top_p_by_hand() -> None:
    expected = {
        1e-60: [1],  # 0 in float32
        0.39: [1], 0.41: [1, 3], 0.69: [1, 3], 0.71: [1, 3, 4], 0.94: [0, 1, 3, 4], 0.96: ALL_TOKENS, 1.0: ALL_TOKENS,
    }  # fmt: skip
    assert kept_by(samplers.filter_top_p, [*expected]) == [*expected.values()]
    assert kept_by(samplers.filter_top_p, [0.5, 0.3], TIED) == [[0, 1, 2, 3], [1]]


def test_min_p_by_hand() -> None:
    """Shares of the largest, 0.4: 0.25, 1, 0.125, 0.75, 0.375."""
    expected = {1.0: [1], 0.76: [1], 0.74: [1, 3], 0.3: [1, 3, 4], 0.1: ALL_TOKENS}
    assert kept_by(samplers.filter_min_p, [*expected]) == [*expected.values()]


def test_typical_by_hand() -> None:
    """Surprises 2.303, 0.916, 2.996, 1.204, 1.897; the entropy is 1.392, so distances are 0.910,
    0.476, 1.604, 0.188, 0.505."""
    expected = {0.29: [3], 0.31: [1, 3], 0.71: [1, 3, 4], 0.86: [0, 1, 3, 4], 1.0: ALL_TOKENS}
    assert kept_by(samplers.filter_typical, [*expected]) == [*expected.values()]


@pytest.mark.parametrize("filtered", [filter_top_p, filter_typical])
def test_a_mass_of_one_keeps_every_token_of_a_large_vocabulary(filtered) -> None:
    # Probabilities down to 1e-10, below what is left of 1 in float32.
    assert len(kept_tokens(filtered(3 * normal(2048), 1.0))) == 2048


def test_top_p_restores_no_token_that_top_k_removed() -> None:
    assert kept_tokens(filter_top_p(filter_top_k(jnp.asarray(LOGITS), 3), 1.0)) == [1, 3, 4]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 8)), min_size=1, max_size=12),
    st.sampled_from([1e-60, 1 / 64, 0.1, 8 / 64, 0.3, 63 / 64]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_top_mass_equals_a_sort(pairs: list[tuple[int, int]], mass: float) -> None:
    # 64ths, so that sums have no rounding; up to 1.5 in all. Filled up with what weighs nothing, to one shape.
    x, weights = np.full(12, -inf, np.float32), np.zeros(12, np.float32)
    x[: len(pairs)], weights[: len(pairs)] = zip(*((value, weight / 64) for value, weight in pairs), strict=True)
    expected = np.zeros(12, bool)
    for value in sorted(set(x), reverse=True):
        if float(weights[expected].sum()) >= mass:
            break
        expected |= x == value
    assert_array_equal(LARGEST(x, weights, mass=mass), expected)


def test_negative_and_positive_zero_are_a_tie() -> None:
    finite = LARGEST(jnp.array([-0.0, 0.0, -1.0]), jnp.array([0.3, 0.3, 0.4]), mass=0.1)
    assert finite.tolist() == [True, True, False]


@pytest.mark.slow
def test_repetition_penalty_by_hand() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    logits = jnp.array([1.0, 1.0, -1.0, -1.0, 3.0])
    after = history(sampling, [2, 0], [4, 4])  # 1 stands only in the padding
    assert_array_equal(apply_penalties(logits, after, sampling), [0.5, 1, -2, -1, 1.5])


def test_presence_and_frequency_penalties_count_only_new_tokens() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    after = history(sampling, [0, 2, 2], [3, 4, 3, 3])
    assert_array_equal(apply_penalties(jnp.zeros(5), after, sampling), [0, 0, 0, -0.5 - 3 * 0.25, -0.5 - 0.25])
    reward = Sampling(frequency_penalty=-2.0)
    assert_array_equal(apply_penalties(jnp.zeros(5), history(reward, [0], [4, 4]), reward), [0, 0, 0, 0, 4])


def test_biases_of_one_token_add_up() -> None:
    sampling = Sampling(logit_bias=((1, 2.0), (3, -1.0), (1, 0.5)))
    assert_array_equal(apply_penalties(jnp.zeros(5), history(sampling, [0], []), sampling), [0, 2.5, 0, -1, 0])


@pytest.mark.parametrize(
    ("prompt", "generated", "expected"),
    [
        ([0], [], [0, 2, 3, 4]),  # 1 alone is always banned
        ([4, 2], [], [0, 2, 4]),  # 2 stands before 3
        ([4], [2], [0, 2, 4]),
        ([2], [4], [0, 2, 3, 4]),
        ([0, 4], [4], [2, 3, 4]),  # 4, 4 before 0
        ([4], [4, 2], [0, 2]),  # 4, 4, 2 before 4; and 2 before 3
        ([4, 2], [], [0, 2, 4]),  # not 4, 4, 2
        ([4, 4, 2], [0], [0, 2, 3, 4]),
    ],
)
def test_bad_words_by_hand(prompt: list[int], generated: list[int], expected: list[int]) -> None:
    sampling = Sampling(bad_words=((1,), (2, 3), (4, 4, 0), (4, 4, 2, 4)))
    assert kept_tokens(apply_penalties(jnp.asarray(LOGITS), history(sampling, prompt, generated), sampling)) == expected


def test_stop_tokens_are_banned_before_min_new_tokens() -> None:
    sampling = Sampling(min_new_tokens=2, stop_tokens=(1, 3))
    histories = [history(sampling, [0, 0], [0] * n) for n in range(4)]
    left = [kept_tokens(apply_penalties(jnp.asarray(LOGITS), after, sampling)) for after in histories]
    assert left == [[0, 2, 4], [0, 2, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert_array_equal(apply_penalties(jnp.asarray(LOGITS), histories[0], Sampling(min_new_tokens=2)), LOGITS)


def test_a_ban_of_every_token_left_is_not_applied() -> None:
    every = Sampling(bad_words=tuple((token,) for token in range(5)))
    assert_array_equal(apply_penalties(jnp.asarray(LOGITS), history(every, [0], []), every), LOGITS)
    # Only the stop token is no bad word: the row may stop before its minimum.
    stop = Sampling(bad_words=((0,), (1,), (2,), (3,)), stop_tokens=(4,), min_new_tokens=9)
    assert kept_tokens(apply_penalties(jnp.asarray(LOGITS), history(stop, [0], []), stop)) == [4]


def test_the_order_is_bias_penalties_ban() -> None:
    sampling = Sampling(
        logit_bias=((0, 4.0), (1, 9.0)), repetition_penalty=2.0, presence_penalty=1.0, bad_words=((1,),)
    )
    after = history(sampling, [2], [0, 1])
    assert_array_equal(apply_penalties(jnp.ones(5), after, sampling), [(1 + 4) / 2 - 1, -inf, 0.5, 1, 1])


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(3.0, top_p=1e-6), Sampling(1e-60)], ids=options)
def test_greedy_returns_the_likeliest_token(sampling: Sampling) -> None:
    token = first(jnp.array([0.1, 2.0, -1.0, 1.9, 0.0]), jax.random.key(0), sampling).tokens
    assert token == 1
    assert token.dtype == jnp.int32


@pytest.mark.parametrize("logits", [[0.0, 3.0, 1.0, 3.0], [-inf, 2.0, 2.0], [5.0], [-1e30, -1e29]])
def test_argmax_is_the_first_of_equals(logits: list[float]) -> None:
    assert argmax(jnp.array(logits)) == np.argmax(logits)


def test_greedy_applies_bans() -> None:
    sampling = Sampling(0, bad_words=((1,),))
    assert first(jnp.asarray(LOGITS), jax.random.key(0), sampling).tokens == 3


@pytest.mark.parametrize(
    ("sampling", "probs"),
    [
        (Sampling(), PROBS),
        # Squared: .01, .16, .0025, .09, .0225; the three largest make 0.59, 0.33, 0.08 and the first two 0.92.
        (Sampling(0.5, top_k=3, top_p=0.9), np.where(PROBS >= 0.3, PROBS**2, 0)),
        (Sampling(bad_words=((0, 1),)), np.where(PROBS == 0.4, 0, PROBS)),
    ],
    ids=options,
)
def test_frequencies_are_the_filtered_probabilities(sampling: Sampling, probs: np.ndarray) -> None:
    n = 10_007
    counts, possible = np.asarray(frequencies(sampling, n)), probs > 0
    assert not counts[~possible].any()
    expected = probs / probs.sum() * n
    assert p_value(counts[possible], expected[possible]) > SIGNIFICANCE


@pytest.mark.slow
def test_frequencies_over_several_blocks_of_the_vocabulary() -> None:
    n, V = 30_011, 3 * TOKENS_PER_BLOCK + 7  # the last block is not full
    logits = 2 * normal(V)
    keys = jax.random.split(jax.random.key(0), n)
    counts = np.bincount(jax.jit(jax.vmap(partial(draw, logits)))(keys), minlength=V)
    expected = np.asarray(jax.nn.softmax(logits), np.float64) * n
    rare = expected < 5  # too few each for the statistic's distribution: one class
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    assert len(counts) > V / 2
    assert p_value(counts, expected * n / expected.sum()) > SIGNIFICANCE


def test_the_chi_squared_test_rejects_a_temperature_off_by_a_fifth() -> None:
    n = 10_007
    assert p_value(frequencies(Sampling(1.2), n), PROBS * n) < SIGNIFICANCE


@pytest.mark.parametrize("V", [3, 5 * TOKENS_PER_BLOCK + 1])
def test_a_filtered_token_is_never_drawn(V: int) -> None:
    # One token in 40 can be drawn, and some of these are e^60 times likelier than others.
    logits = np.where(np.arange(V) % 40 == min(V - 1, 33), 20 * np.asarray(normal(V)), -inf)
    drawn = jax.jit(jax.vmap(partial(draw, jnp.asarray(logits, jnp.float32))))(
        jax.random.split(jax.random.key(1), 2000)
    )
    assert np.isfinite(logits[drawn]).all()


@pytest.mark.parametrize(("u", "expected"), [(0.0, 1), (0.24, 1), (0.25, 3), (1 - 2**-23, 3)])
def test_the_first_and_last_share_invert_to_nonzero_weights(u: float, expected: int) -> None:
    assert _invert(jnp.array([0.0, 1.0, 0.0, 3.0, 0.0]), jnp.float32(u)) == expected


@pytest.mark.parametrize("logits", [[-inf, -inf, -inf], [nan, nan, nan], [inf, 0.0, inf]])
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(), Sampling(top_p=0.5, min_p=0.1, top_k=2)], ids=options)
def test_non_finite_logits_give_tokens_of_the_vocabulary(logits: list[float], sampling: Sampling) -> None:
    assert 0 <= first(jnp.array(logits), jax.random.key(0), sampling).tokens < 3


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(0.3, top_k=2, logit_bias=((2, 50.0),))], ids=options)
def test_logprobs_are_of_the_unmodified_logits(sampling: Sampling) -> None:
    with_top = Sampling(**{**vars(sampling), "top_logprobs": 3})
    drawn = first(jnp.asarray(LOGITS) + 7, jax.random.key(0), with_top)
    assert_close(drawn.logprobs, np.log(PROBS[drawn.tokens]))
    assert drawn.top_tokens.tolist() == [1, 3, 4]
    assert_close(drawn.top_logprobs, np.log([0.4, 0.3, 0.15]))
    assert first(jnp.asarray(LOGITS), jax.random.key(0), sampling).top_tokens.shape == (0,)


@pytest.mark.slow
def test_bfloat16_logits_are_drawn_from_in_float32() -> None:
    logits = 3 * normal(101).astype(jnp.bfloat16)
    for sampling in (Sampling(0), EVERYTHING):
        drawn = jax.jit(partial(first, key=jax.random.key(0), sampling=sampling))
        got, expected = drawn(logits), drawn(logits.astype(jnp.float32))
        assert got.tokens == expected.tokens
        assert got.logprobs.dtype == jnp.float32
        assert got.logprobs == expected.logprobs


def test_history_has_only_what_the_sampling_reads() -> None:
    sizes = {
        Sampling(0.7, 5, 0.9, 0.1, 0.9, logit_bias=((1, 1.0),), bad_words=((1,),)): (0, 0, 0),
        Sampling(stop_tokens=(1,), min_new_tokens=4): (0, 0, 0),
        Sampling(repetition_penalty=1.1): (5, 0, 0),
        Sampling(presence_penalty=1.1): (0, 5, 0),
        Sampling(frequency_penalty=1.1): (0, 5, 0),
        Sampling(bad_words=((1, 2, 3), (4,))): (0, 0, 2),
    }
    for sampling, expected in sizes.items():
        for after in (history(sampling, [0], []), history(sampling, [0], [3, 3, 3])):
            assert (after.occurs_V.size, after.counts_V.size, after.recent_N.size) == expected
    assert history(Sampling(bad_words=((1, 2, 3, 4),)), [0], [3]).recent_N.tolist() == [EMPTY, 0, 3]


def test_plain_sampling_has_no_sort_no_loop_and_two_random_numbers() -> None:
    V = 2053
    program = str(jax.make_jaxpr(partial(first, sampling=Sampling()))(jnp.zeros(V), jax.random.key(0)))
    assert " sort[" not in program and " while[" not in program and " scan[" not in program
    assert "random_bits[bit_width=32 shape=(2,)]" in program
    assert program.count("random_bits") == 1


def test_values_that_disable_a_step_are_structure_and_others_are_leaves() -> None:
    off = {"top_p": 1, "min_p": 0, "typical_p": 1, "repetition_penalty": 1, "presence_penalty": 0}
    assert jax.tree.leaves(Sampling(0, **off)) == [] != jax.tree.leaves(Sampling(**off)) == [1.0]
    assert jax.tree.structure(Sampling(1)) == jax.tree.structure(Sampling(0.3)) != jax.tree.structure(Sampling(0))
    every = replace(EVERYTHING, presence_penalty=0.3, frequency_penalty=0.7)
    assert len(jax.tree.leaves(every)) == len(samplers.TRACED) and jax.tree.map(lambda x: x, every) == every
    assert len({Sampling(0.3): 0, Sampling(0.5): 0, Sampling(0.3, top_k=None): 0}) == 2


class Inverse(Sampling):
    @cached_property
    def inverse(self) -> float:
        return 1 / self.temperature


def test_a_sampling_with_other_values_has_nothing_cached_of_the_first() -> None:
    sampling = Inverse(0.5)
    assert sampling.inverse == 2
    assert jax.tree.map(lambda x: x / 2, sampling).inverse == 4


@pytest.mark.slow
def test_values_give_the_bits_of_constants() -> None:
    sampling = replace(EVERYTHING, presence_penalty=0.3, frequency_penalty=0.7)
    logits_V = 3 * normal(307)
    after = history(sampling, [0, 5], [3, 3, 9], len(logits_V))
    constant = jax.jit(samplers.distribution, static_argnames="sampling")(logits_V, after, sampling=sampling)
    assert_array_equal(distribution(logits_V, after, sampling), constant)
    assert 1 < np.count_nonzero(constant) < 40


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_extreme_options_give_a_distribution(size: float) -> None:
    """With a banned token, too, whose -inf must not meet a factor of 0."""
    sampling = Sampling(size, repetition_penalty=size, logit_bias=((0, -1e6), (1, 1e6)), bad_words=((2,),))
    probs_V = distribution(jnp.arange(5.0), history(sampling, [3], []), sampling)
    assert probs_V[2] == 0
    assert_allclose(probs_V.sum(), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.5}, "`temperature` is -0.5; it must be at least 0"),
        ({"temperature": nan}, "`temperature` is nan"),
        ({"temperature": inf}, "`temperature` is inf"),
        ({"temperature": 1.1e6}, "`temperature` is 1100000.0; .* at most 1e6"),
        ({"top_k": 0}, "`top_k` is 0; it must be at least 1"),
        ({"top_k": -3}, "-3"),
        ({"top_p": 0.0}, "`top_p` is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "1.1"),
        ({"min_p": -0.1}, "`min_p` is -0.1; it must be from 0 to 1"),
        ({"min_p": 1.5}, "1.5"),
        ({"typical_p": 0.0}, "`typical_p` is 0.0"),
        ({"typical_p": nan}, "`typical_p` is nan"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` is 0.0; it must be from 1e-6"),
        ({"repetition_penalty": inf}, "`repetition_penalty` is inf"),
        ({"repetition_penalty": 1e39}, "`repetition_penalty` is 1e.39"),
        ({"presence_penalty": 2.1}, "`presence_penalty` is 2.1; it must be from -2 to 2"),
        ({"frequency_penalty": -3.0}, "`frequency_penalty` is -3.0"),
        ({"logit_bias": ((4, -inf),)}, r"`logit_bias` is \(\(4, -inf\),\); it must be finite, from -1e6 to 1e6"),
        ({"logit_bias": ((3, 1.0), (4, 1e39))}, "it must be finite"),
        ({"bad_words": ((1,), ())}, r"`bad_words` is \(\(1,\), \(\)\); it must be words of at least 1 token"),
        ({"min_new_tokens": -1, "stop_tokens": (1,)}, "`min_new_tokens` is -1"),
        ({"min_new_tokens": 2**31, "stop_tokens": (1,)}, "`min_new_tokens` is 2147483648; .* below 2..31"),
        ({"top_logprobs": -1}, "`top_logprobs` is -1"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_with_their_value(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**fields)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(stop_tokens=(0, 5)), "a stop token is 5; it must be from 0 to 4"),
        (Sampling(logit_bias=((-1, 1.0),)), "a token of a logit bias is -1"),
        (Sampling(bad_words=((1, 2), (3, 7))), "a token of a bad word is 7"),
        (Sampling(top_logprobs=6), "`top_logprobs` is 6; it must be at most the vocabulary's 5"),
    ],
    ids=options,
)
def test_a_token_beyond_the_vocabulary_is_refused(sampling: Sampling, message: str) -> None:
    with pytest.raises(UserError, match=message):
        history(sampling, [0], [])


def test_only_the_first_tokens_are_drawn_where_a_number_is_given() -> None:
    logits_V = np.float32([0, 1, 2, 9, 8])
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, n_tokens=3)
        probabilities_V = distribution(logits_V, history(sampling, [0], []), sampling)
        wanted = np.exp(logits_V[:3] - 2) if temperature else np.array([0, 0, 1])
        assert_close(probabilities_V, np.append(wanted / wanted.sum(), [0, 0]))
        assert {int(first(logits_V, jax.random.key(i), sampling).tokens) for i in range(9)} <= {0, 1, 2}
    with pytest.raises(UserError, match="`n_tokens` is 0; it must be at least 1"):
        Sampling(n_tokens=0)


def test_a_batch_of_logits_and_no_temperature_are_refused() -> None:
    """A batch would give one token."""
    past, key = init_history(Sampling(), 5, jnp.array([1]), 1), jax.random.key(0)
    logits_BV = np.zeros((2, 5), np.float32)
    for sampling in (Sampling(), Sampling(temperature=0)):
        with pytest.raises(ValueError, match=r"of shape \(V,\), got \(2, 5\); use jax.vmap for a batch"):
            sample(logits_BV, past, key, sampling)
        with pytest.raises(ValueError, match=r"use jax.vmap for a batch"):
            samplers.distribution(logits_BV, past, sampling)
    with pytest.raises(UserError, match="`temperature` is None; it must be at least 0"):
        Sampling(temperature=None)

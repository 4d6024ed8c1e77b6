from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.positions import (
    NTK,
    Llama3Scaling,
    LongRoPE,
    RoPE,
    Scaling,
    Yarn,
    query_and_key_at,
    rope,
    sinusoidal,
    yarn_amplitude,
)
from tests.arrays import assert_close, normal

H, T, K = 3, 7, 10


def test_sinusoidal_by_hand() -> None:
    # d_model 512, i = 1: the angle is 10000^(-2/512) = 0.9647; its sine and cosine to three decimals.
    encoding = sinusoidal(jnp.arange(2), 512)
    np.testing.assert_allclose(encoding[1, 2:4], [0.822, 0.570], atol=5e-4)
    # Position 0 is sin 0, cos 0 throughout, and the first pair turns by one radian a position.
    np.testing.assert_array_equal(encoding[0], np.tile([0.0, 1.0], 256))
    np.testing.assert_allclose(encoding[1, :2], [np.sin(1), np.cos(1)], rtol=1e-6)
    lowest = np.asarray(sinusoidal(jnp.arange(2), 512, interleaved=False, includes_lowest=True))
    np.testing.assert_allclose(lowest[1, [0, 1, 255]], np.sin([1, 10_000 ** (-1 / 255), 1e-4]), rtol=1e-5)


@pytest.mark.parametrize("d_model", [1, 2, 13, 32])
def test_sinusoidal_agrees_with_the_formula_in_float64(d_model: int) -> None:
    positions = np.array([0, 1, 5, 101])
    wanted = np.empty((4, d_model))
    for i in range(d_model):
        angle = positions / 10_000 ** (2 * (i // 2) / d_model)
        wanted[:, i] = np.cos(angle) if i % 2 else np.sin(angle)
    assert_close(sinusoidal(jnp.asarray(positions), d_model), wanted)  # 101 rad in float32: 4e-6


def complex_rope(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Multiply the complex numbers x_i + j·x_{i + K/2} by e^(j·position·base^(-2i/K))."""
    K = x.shape[-1]
    z = x[..., : K // 2] + 1j * x[..., K // 2 :]
    z = z * np.exp(1j * positions[:, None] * base ** (-2 * np.arange(K // 2) / K))
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("base", [10_000.0, 100.0])
def test_rope_agrees_with_complex_numbers_in_float64(base: float) -> None:
    x, positions = normal(H, T, K), np.array([0, 1, 2, 3, 11, 29, 101])
    assert_close(rope(x, jnp.asarray(positions), base), complex_rope(np.float64(x), positions, base), 3e-5)


def test_scaled_rope_turns_as_at_the_position_divided() -> None:
    x, positions = normal(H, T, K), jnp.arange(T)
    assert_close(rope(x, 4 * positions, scaling=4.0), rope(x, positions))
    half = np.arange(T) / 2  # between positions, too
    assert_close(rope(x, positions, scaling=2.0), complex_rope(np.float64(x), half, 10_000.0))


def test_rope_keeps_norms_and_leaves_position_zero_alone() -> None:
    x = normal(H, T, K)
    turned = rope(x, jnp.arange(T))
    assert_close(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1))
    np.testing.assert_array_equal(turned[:, 0], x[:, 0])
    assert (jnp.abs(turned[:, 1:] - x[:, 1:]).max(-1) > 0.1).all()


def test_rope_scores_depend_on_the_distance_only() -> None:
    q, k = normal(1, 1, K, seed=1), normal(1, 1, K, seed=2)

    def score(query: int, key: int) -> float:
        return float((rope(q, jnp.array([query])) * rope(k, jnp.array([key]))).sum())

    assert score(5, 2) == pytest.approx(score(3, 0), abs=1e-5)
    assert score(103, 100) == pytest.approx(score(3, 0), abs=1e-4)  # 100 rad in float32 is 8e-6 off, 5 pairs
    assert abs(score(5, 2) - score(5, 3)) > 1e-2
    assert abs(score(5, 2) - score(2, 5)) > 1e-2


def test_rope_keeps_bfloat16() -> None:
    assert rope(normal(H, T, K).astype(jnp.bfloat16), jnp.arange(T)).dtype == jnp.bfloat16


def test_llama3_scaling_divides_only_slow_frequencies() -> None:
    """By hand, with 16 positions and a factor of 8: below 1 period in 16 positions divided, above 4 unchanged."""
    # Periods per 16 positions of 1 rad a position: 16/2π = 2.546, between 1 and 4: 51.5 % unscaled.
    # Of base^(-1/5) = 0.398 (base 100): 1.014, 0.5 % unscaled; all slower ones are below 1.
    scaling = Llama3Scaling(factor=8.0, low=1.0, high=4.0, original_context=16)
    plain = 100.0 ** (-np.arange(5) / 5)
    ratios = scaling.frequencies(5, 100.0) / plain
    np.testing.assert_allclose(ratios[:2], [1 / 8 + 0.5155 * 7 / 8, 1 / 8 + 0.0046 * 7 / 8], atol=1e-4)
    np.testing.assert_allclose(ratios[2:], 1 / 8)
    fast = Llama3Scaling(factor=8.0, low=1.0, high=4.0, original_context=64).frequencies(5, 100.0)
    assert fast[0] == 1  # 10.2 periods
    x, positions = normal(H, T, K), np.array([0, 1, 2, 3, 11, 29, 101])
    z = (np.float64(x)[..., :5] + 1j * np.float64(x)[..., 5:]) * np.exp(1j * positions[:, None] * plain * ratios)
    wanted = np.concatenate([z.real, z.imag], axis=-1)
    assert_close(rope(x, jnp.asarray(positions), 100.0, scaling), wanted, 3e-5)


def test_yarn_interpolates_between_two_indices_by_hand() -> None:
    """With base 100, K 10 and 1000 positions: 159.2 periods of the first frequency; 32 and 1 at the indices
    5 ln(159.2 / 32) / ln 100 = 1.74 and 5.50, which are truncated to 1 and 6."""
    yarn = Yarn(factor=4.0, original_context=1000)
    ratios = yarn.frequencies(5, 100.0) / 100.0 ** (-np.arange(5) / 5)
    np.testing.assert_allclose(ratios, [1, 1, 1 - 0.2 * 0.75, 1 - 0.4 * 0.75, 1 - 0.6 * 0.75])
    assert yarn.amplitude == pytest.approx(1.13863, abs=1e-5)  # 0.1 ln 4 + 1
    assert Yarn(4.0, 1000, attention_factor=1.5).amplitude == 1.5
    x = normal(H, T, K)
    longer = jax.jit(rope, static_argnums=(2, 3))(x, np.arange(T), 100.0, yarn)
    assert_close(np.linalg.norm(longer, axis=-1), 1.13863 * np.linalg.norm(x, axis=-1))


def test_ntk_divides_the_lowest_frequency_and_by_more_in_longer_sequences() -> None:
    def ratios(scaling: NTK, length: int) -> np.ndarray:
        return scaling.frequencies(3, 100.0, np.arange(length)) / 100.0 ** (-np.arange(3) / 3)

    np.testing.assert_allclose(ratios(NTK(9.0), 5), [1, 1 / 3, 1 / 9])
    np.testing.assert_allclose(ratios(NTK(2.0, 100), 100), 1)
    np.testing.assert_allclose(ratios(NTK(2.0, 100), 250), [1, 1 / 2, 1 / 4])  # 1 + 2 · 1.5
    traced = jax.jit(lambda positions: NTK(2.0, 100).frequencies(3, 1.0, positions))(jnp.arange(250))
    assert_close(traced, [1, 1 / 2, 1 / 4])


def test_longrope_has_a_divisor_of_each_frequency_short_and_long() -> None:
    longrope = LongRoPE((1.0, 2.0), (4.0, 8.0), original_context=100, factor=100.0)
    assert longrope.amplitude == pytest.approx(2**0.5)
    for positions, wanted in (([99], [1, 0.05]), ([100], [1 / 4, 0.1 / 8])):
        np.testing.assert_allclose(longrope.frequencies(2, 100.0, np.array(positions)), wanted)
        assert_close(longrope.frequencies(2, 100.0, jnp.array(positions)), wanted)
    with pytest.raises(ValueError, match="one divisor for each of 5 frequencies, got 2 short and 2 long"):
        rope(normal(H, T, K), jnp.arange(T), scaling=longrope)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "dynamic", "longrope"])
def test_scalings_are_those_of_transformers(kind: str) -> None:
    """Frequencies, to the rounding of theirs in float32, and amplitude, for sequences of 1 to 131,072 positions."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    init = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS[kind]
    context, factor, draw = 4096, 7.3, np.random.default_rng(0)
    short, long = (tuple(draw.uniform(1, 30, 16).tolist()) for _ in range(2))
    ours: dict[str, float | Scaling] = {
        "linear": factor,
        "llama3": Llama3Scaling(factor, 1.0, 4.0, context),
        "yarn": Yarn(factor, context, 16.0, 2.0, yarn_amplitude(factor, 0.7) / yarn_amplitude(factor, 1.2), False),
        "dynamic": NTK(factor, context),
        "longrope": LongRoPE(short, long, context, factor),
    }
    theirs = {
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
        "longrope": {"short_factor": list(short), "long_factor": list(long)},
    }.get(kind, {})
    parameters = {"rope_type": kind, "rope_theta": 5e5, "factor": factor, "partial_rotary_factor": 0.5, **theirs}
    if kind not in ("linear", "dynamic"):
        parameters["original_max_position_embeddings"] = context
    longest = context if kind == "dynamic" else 131_072
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=longest, rope_parameters=parameters)
    rotation = RoPE(5e5, ours[kind], fraction=0.5)
    for length in (1, context, context + 1, 131_072):
        wanted, amplitude = init(config, "cpu", seq_len=length)
        for last in (np.array([length - 1]), jnp.array([length - 1])):
            np.testing.assert_allclose(rotation.frequencies(64, last), wanted, rtol=1e-6)
        assert getattr(ours[kind], "amplitude", 1.0) == pytest.approx(amplitude)


def test_interleaved_pairs_and_a_fraction_agree_with_complex_numbers() -> None:
    """GPT-J's features 2i and 2i + 1 are one complex number; of K 10, 60 % are three."""
    x, positions = normal(H, T, K), np.array([0, 1, 2, 3, 11, 29, 101])
    halves = np.float64(x)[..., [0, 2, 4, 1, 3, 5]]
    wanted = np.array(x, np.float64)
    wanted[..., [0, 2, 4, 1, 3, 5]] = complex_rope(halves, positions, 100.0)
    interleaved = jax.jit(RoPE(100.0, fraction=0.6, interleaved=True).__call__)
    assert_close(interleaved(x, positions), wanted, 3e-5)
    wanted = np.concatenate([complex_rope(np.float64(x)[..., :6], positions, 100.0), np.asarray(x)[..., 6:]], -1)
    assert_close(jax.jit(RoPE(100.0, fraction=0.6).__call__)(x, positions), wanted, 3e-5)
    for fraction, rotated in ((0.5, 5), (0.05, 0), (1.2, 12)):
        with pytest.raises(ValueError, match=f"of which RoPE rotates {rotated} features"):
            RoPE(fraction=fraction)(x, positions)


@pytest.mark.parametrize("distance", [1, 3, -2])
@pytest.mark.parametrize(("K", "base"), [(64, 10_000.0), (6, 100.0)])
def test_query_and_key_match_at_their_distance_alone(distance: int, K: int, base: float) -> None:
    """The mean of cosines by hand: of frequencies 1, 0.7499, 0.5623 and 0.4217, and of 1 alone."""
    T = 12
    query_TK, key_TK = (np.tile(x_K, (T, 1)) for x_K in query_and_key_at(distance, K, base))
    turned = [complex_rope(np.float64(x_TK), np.arange(T), base) for x_TK in (query_TK, key_TK)]
    frequencies = [1, 0.749894, 0.562341, 0.421697] if K == 64 else [1]
    back_TT = np.arange(T)[:, None] - np.arange(T)
    wanted_TT = np.mean([np.cos((back_TT - distance) * x) for x in frequencies], axis=0)
    np.testing.assert_allclose(turned[0] @ turned[1].T, wanted_TT, atol=1e-5)
    assert np.diagonal(wanted_TT, -distance).min() == 1


@pytest.mark.parametrize(
    ("x", "positions", "error", "message"),
    [
        ((1, H, T, K), range(T), ValueError, r"of shape \(H, T, K\) .*; use jax.vmap for a batch"),
        ((T, H, K), range(T), ValueError, "expected positions of shape"),  # positions first, as in Flax
        ((H, T, 3), range(T), ValueError, "even K"),
        ((H, T, K), [3], ValueError, r"expected positions of shape \(7,\), one per token, got \(1,\)"),
        ((H, T, K), np.ones(T, bool), TypeError, "positions are bool; give integers"),
        ((H, T, K), jnp.zeros(T, jnp.bfloat16), TypeError, "positions are bfloat16; give integers"),
    ],
)
def test_positions_that_would_broadcast_or_be_rounded_are_refused(
    x: tuple, positions: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        rope(normal(*x), positions)
    with pytest.raises(ValueError, match="expected positions of shape"):
        sinusoidal(T, K)


def test_rope_is_an_argument_of_a_jitted_function():
    x_HTK, positions_T = normal(2, 3, 10), jnp.arange(3)
    call = jax.jit(lambda rope, *args: rope(*args))
    for scaling in (2.0, Yarn(8.0, 16)):
        assert not jax.tree.leaves(RoPE(100.0, scaling))
        assert_close(call(RoPE(100.0, scaling), x_HTK, positions_T), rope(x_HTK, positions_T, 100.0, scaling))

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.positions import Llama3Scaling, RoPE, query_and_key_at, rope, sinusoidal
from tests.arrays import assert_close, normal

H, T, K = 3, 7, 10


def test_sinusoidal_by_hand() -> None:
    # d_model 512, i = 1: the angle is 10000^(-2/512) = 0.9647; its sine and cosine to three decimals.
    encoding = sinusoidal(jnp.arange(2), 512)
    np.testing.assert_allclose(encoding[1, 2:4], [0.822, 0.570], atol=5e-4)
    # Position 0 is sin 0, cos 0 throughout, and the first pair turns by one radian a position.
    np.testing.assert_array_equal(encoding[0], np.tile([0.0, 1.0], 256))
    np.testing.assert_allclose(encoding[1, :2], [np.sin(1), np.cos(1)], rtol=1e-6)


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
    for scaling in (2.0, Llama3Scaling(8.0, 1.0, 4.0, 16)):
        assert not jax.tree.leaves(RoPE(100.0, scaling))
        assert_close(call(RoPE(100.0, scaling), x_HTK, positions_T), rope(x_HTK, positions_T, 100.0, scaling))

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.norms import l2_normalize, layer_norm, rms_norm
from tests.arrays import assert_close, normal

T, D = 5, 13
GAMMA, BETA = normal(D, seed=1), normal(D, seed=2)


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_agree_with_flax(eps: float, size: float) -> None:
    x = size * normal(T, D) + size
    rms = nn.RMSNorm(epsilon=eps).apply({"params": {"scale": GAMMA}}, x)
    layer = nn.LayerNorm(epsilon=eps, use_fast_variance=False).apply({"params": {"scale": GAMMA, "bias": BETA}}, x)
    assert_close(rms_norm(x, GAMMA, eps), rms)
    assert_close(layer_norm(x, GAMMA, BETA, eps), layer)
    plain = nn.LayerNorm(epsilon=eps, use_fast_variance=False, use_bias=False, use_scale=False).apply({}, x)
    assert_close(layer_norm(x, eps=eps), plain)
    assert_close(layer_norm(x, GAMMA, eps=eps), plain * GAMMA[None])


def test_by_hand() -> None:
    x = jnp.array([3.0, 4.0])  # mean square 12.5; mean 3.5, variance 0.25
    np.testing.assert_allclose(rms_norm(x, jnp.array([1.0, 2.0]), 0.0), [3 / 12.5**0.5, 8 / 12.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(layer_norm(x, jnp.ones(2), jnp.array([0.0, 5.0]), 0.0), [-1, 6], rtol=1e-6)
    np.testing.assert_allclose(l2_normalize(x), [0.6, 0.8], rtol=1e-6)


@pytest.mark.slow
def test_zero_rows_give_finite_gradients() -> None:
    for norm in (lambda x: rms_norm(x, GAMMA), lambda x: layer_norm(x, GAMMA, BETA), l2_normalize):
        gradient = jax.jit(jax.grad(lambda x, norm=norm: norm(x).sum()))
        assert np.isfinite(gradient(np.zeros((T, D), np.float32))).all()


@pytest.mark.parametrize("gain_dtype", [jnp.float32, jnp.bfloat16])
def test_the_result_has_the_dtype_of_x(gain_dtype: jnp.dtype) -> None:
    x, gamma, beta = normal(T, D).astype(jnp.bfloat16), GAMMA.astype(gain_dtype), BETA.astype(gain_dtype)
    assert rms_norm(x, gamma).dtype == jnp.bfloat16
    assert layer_norm(x, gamma, beta).dtype == jnp.bfloat16


def test_statistics_of_bfloat16_are_taken_in_float32() -> None:
    x = (normal(1, 1009) + 1).astype(jnp.bfloat16)  # a bfloat16 sum of 1009 terms stalls near 256
    ones, zeros = jnp.ones(1009), jnp.zeros(1009)
    assert_close(rms_norm(x, ones), rms_norm(x.astype(jnp.float32), ones), 2**-8)
    assert_close(layer_norm(x, ones, zeros), layer_norm(x.astype(jnp.float32), ones, zeros), 2**-8)


NORMS = {
    "rms": lambda x, eps: rms_norm(x, GAMMA.astype(x.dtype), eps),
    "layer": lambda x, eps: layer_norm(x, GAMMA.astype(x.dtype), BETA.astype(x.dtype), eps),
    "l2": l2_normalize,
}


def reference(name: str, x: np.ndarray, eps: float) -> np.ndarray:
    """The textbook formula in float64."""
    gamma, beta = (np.asarray(w, np.float64) for w in (GAMMA, BETA))
    if name == "l2":
        return x / np.sqrt(np.sum(x**2, -1, keepdims=True) + eps)
    centred = x - np.mean(x, -1, keepdims=True) if name == "layer" else x
    y = gamma * centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + eps)
    return y + beta if name == "layer" else y


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e12, 1e18])
def test_values_and_gradients_from_tiny_to_huge_are_those_of_float64(name: str, size: float) -> None:
    eps = 1e-6
    x, direction = size * np.asarray(normal(T, D), np.float64), np.asarray(normal(T, D, seed=3), np.float64)
    step = 1e-4 * max(size, 1e-6)  # a central difference in float64
    y, dy = jax.jvp(lambda x: NORMS[name](x, eps), (jnp.float32(x),), (jnp.float32(direction),))
    slope = (reference(name, x + step * direction, eps) - reference(name, x - step * direction, eps)) / (2 * step)
    np.testing.assert_allclose(y, reference(name, x, eps), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dy, slope, rtol=1e-3, atol=1e-3 * np.abs(slope).max())
    _, pull = jax.vjp(lambda x: NORMS[name](x, eps), jnp.float32(x))
    onto = jnp.float32(normal(T, D, seed=4))
    np.testing.assert_allclose(jnp.sum(pull(onto)[0] * direction), jnp.sum(onto * dy), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_second_derivatives_are_those_of_the_textbook_formula(name: str) -> None:
    """Statistics are stored for the backward pass, which is differentiated here."""
    x = normal(2, D)
    textbook = {
        "rms": lambda x: GAMMA * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1),
        "layer": lambda x: BETA + GAMMA * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 0.1),
        "l2": lambda x: x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) + 0.1),
    }
    hessians = [
        jax.jit(jax.hessian(lambda x, f=f: (f(x) ** 3).sum()))(x)
        for f in (lambda x: NORMS[name](x, 0.1), textbook[name])
    ]
    assert_close(*hessians)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e15])
def test_a_row_alone_is_as_among_others(name: str, size: float) -> None:
    """Decode steps compute it by another formula."""
    x, norm = size * normal(T, D), lambda x: NORMS[name](x, 1e-6)
    pull = lambda x, onto: jax.vjp(norm, x)[1](onto)[0]  # noqa: E731
    onto = normal(T, D, seed=4)
    assert_close(jax.vmap(norm)(x), norm(x))
    np.testing.assert_allclose(jax.vmap(pull)(x, onto), pull(x, onto), rtol=1e-4, atol=1e-5 / size)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("is_alone", "dtype"), [(True, jnp.float32), (False, jnp.float32), (False, jnp.bfloat16)])
def test_a_row_whose_squares_overflow_is_not_finite_and_the_others_are(
    name: str, is_alone: bool, dtype: jnp.dtype
) -> None:
    sizes = np.float32([1, 1e25, 1, 1e37, 1])[:, None]
    x = (np.asarray(normal(T, D)) * sizes).astype(dtype)
    norm = lambda x: NORMS[name](x, 1e-6)  # noqa: E731
    norm = jax.vmap(norm) if is_alone else norm
    for y in map(np.asarray, jax.jit(lambda x: (norm(x), jax.grad(lambda x: norm(x).sum())(x)))(x)):
        np.testing.assert_array_equal(np.isnan(y).all(-1), [False, True, False, True, False])
        assert np.isfinite(y[[0, 2, 4]]).all()


@pytest.mark.parametrize(
    ("norm", "error", "message"),
    [
        (lambda x: rms_norm(x, jnp.ones(1)), ValueError, "expected a gain or shift of shape"),
        (lambda x: rms_norm(x, 1e-6), ValueError, "expected a gain or shift of shape"),  # ε in its place
        (lambda x: layer_norm(x, GAMMA, 1e-5), ValueError, "expected a gain or shift of shape"),
        (lambda x: rms_norm(x, GAMMA, 16), ValueError, "eps is 16; it must be at least 0 and below 1"),  # the width
        (lambda x: l2_normalize(x, -1.0), ValueError, "eps is -1"),
        (lambda x: l2_normalize(x.astype(int)), TypeError, "the features are int"),  # would be rounded to 0
    ],
)
def test_what_a_norm_would_misread_is_refused(norm: Callable, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        norm(normal(T, D))

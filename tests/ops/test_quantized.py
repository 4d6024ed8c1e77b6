"""Matrices of 8 bits, against the same matmuls in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops import quantized
from jaxformer.ops.quantized import Quantized, _integer_matmul, _matmul, rows

quantize = jax.jit(quantized.quantize, static_argnums=(1, 2))  # one program in place of one per primitive
DRAW = np.random.default_rng(0)
MATRIX = DRAW.normal(size=(17, 23)).astype(np.float32) * np.exp(DRAW.normal(size=(1, 23))).astype(np.float32)


def whole(q: Quantized) -> np.ndarray:
    return np.asarray(q.values, np.float64) * np.asarray(q.scale, np.float64)


def test_no_number_is_off_by_more_than_half_a_step_of_its_channel():
    q = quantize(jnp.asarray(MATRIX), (0,))
    assert q.values.dtype == jnp.int8 and q.scale.shape == (1, 23)
    step = np.abs(MATRIX).max(0) / 127
    assert (np.abs(whole(q) - MATRIX) <= step * 0.5001).all()
    assert (np.abs(q.values).max(0) == 127).all()


@pytest.mark.slow
def test_a_channel_of_zeros_stays_zero():
    q = quantize(np.zeros((4, 3), np.float32), (0,))
    assert (whole(q) == 0).all()
    matmul = jax.jit(lambda x: x @ q)
    assert not any(np.any(matmul(np.full((2, 4), value, np.float32))) for value in (0, 1))


@pytest.mark.parametrize("multiply", [_matmul, _integer_matmul])
@pytest.mark.parametrize("shape", [(17,), (2, 3, 17)])
def test_the_other_factor_has_15_bits(shape, multiply):
    """Also as other devices than a CPU multiply."""
    q, x = quantize(jnp.asarray(MATRIX), (0,)), DRAW.normal(size=shape).astype(np.float32)
    got, wanted = jax.jit(multiply)(x, q.values, q.scale), x @ whole(q)
    # Half a step of 1/(127 · 254) of the largest number, at most, in each of 17 terms.
    bound = np.abs(x).max(-1, keepdims=True) / (127 * 254) * 0.51 * np.abs(whole(q)).sum(0) + 1e-5
    assert got.dtype == jnp.float32 and (np.abs(got - wanted) <= bound).all()
    rounded = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert jax.eval_shape(multiply, rounded, q.values, q.scale).dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_cpu_multiplies_few_rows_with_integers_also_under_vmap():
    q, x = quantize(jnp.asarray(MATRIX), (0,)), jnp.asarray(DRAW.normal(size=(2, 3, 17)), jnp.float32)
    wanted = jax.jit(_integer_matmul)(x, q.values, q.scale)
    matmul = lambda x: x @ q  # noqa: E731
    np.testing.assert_array_equal(jax.jit(matmul)(x), wanted)
    np.testing.assert_array_equal(jax.jit(jax.vmap(matmul))(x), wanted)
    many = jnp.tile(x[0], (11, 1))
    np.testing.assert_array_equal(jax.jit(matmul)(many), jax.jit(_matmul)(many, q.values, q.scale))


@pytest.mark.parametrize("n", [1, 5])
def test_weights_are_multiplied_without_a_copy_in_another_dtype(n):
    """As the passes of a draft need, which are under no `vmap`."""
    q = quantize(jnp.ones((576, 1536)), (0,))
    matmul = lambda x, values_FD, scale: _integer_matmul(x, values_FD.T, scale)  # noqa: E731  # as `lay_out` stores it
    program = jax.jit(matmul).lower(jnp.ones((n, 576)), q.values.T, q.scale).compile().as_text()
    assert "s8[1536,576]" in program and "s32[1536,576]" not in program


@pytest.mark.parametrize("multiply", [_matmul, _integer_matmul])
def test_a_matmul_with_heads_equals_that_with_a_flat_matrix(multiply):
    multiply = jax.jit(multiply)
    x, y = (jnp.asarray(DRAW.normal(size=(3, n)), jnp.float32) for n in (17, 34))
    into = quantize(jnp.asarray(MATRIX[:, :22].reshape(17, 2, 11)), (0,))  # (D, H, K): queries
    wanted = multiply(x, into.values.reshape(17, 22), into.scale.reshape(1, 22)).reshape(3, 2, 11)
    np.testing.assert_allclose(multiply(x, into.values, into.scale), wanted, rtol=1e-6)
    np.testing.assert_allclose(wanted, np.tensordot(x, whole(into), 1), atol=1e-2)
    out = quantize(jnp.asarray(np.stack([MATRIX, 3 * MATRIX], 1)), (0, 1))  # (H, K, D): the output
    wanted = multiply(y, out.values.reshape(34, 23), out.scale.reshape(1, 23))
    np.testing.assert_array_equal(multiply(y, out.values, out.scale), wanted)
    np.testing.assert_allclose(wanted, y @ whole(out).reshape(34, 23), atol=3e-2)


@pytest.mark.slow
def test_transposed_it_is_the_same_matrix():
    by_row = quantize(jnp.asarray(MATRIX), (1,))
    np.testing.assert_array_equal(whole(by_row.T), whole(by_row).T)


def test_rows_are_those_of_the_matrix():
    by_row, index = quantize(jnp.asarray(MATRIX), (1,)), jnp.array([3, 0, 3])
    np.testing.assert_allclose(rows(by_row, index), whole(by_row)[index], rtol=1e-6)
    by_column = quantize(jnp.asarray(MATRIX), (0,))
    np.testing.assert_allclose(rows(by_column, index), whole(by_column)[index], rtol=1e-6)
    assert rows(quantize(jnp.asarray(MATRIX), (1,), jnp.bfloat16), index).dtype == jnp.bfloat16
    np.testing.assert_array_equal(jax.jit(lambda i: rows(MATRIX, i))(index), MATRIX[np.array(index)])


@pytest.mark.parametrize("multiply", [_matmul, _integer_matmul])
def test_nan_in_a_row_or_a_column_stays_nan_and_changes_no_other(multiply):
    """No integer is NaN: those of a diverged model would become zeros, and its tokens look drawn from a model."""
    multiply = jax.jit(multiply)
    matrix, x = jnp.asarray(MATRIX), jnp.asarray(DRAW.normal(size=(3, 17)), jnp.float32)
    q, spoilt = quantize(matrix, (0,)), quantize(matrix.at[4, 2].set(jnp.nan), (0,))
    wanted = multiply(x, q.values, q.scale)
    rows = multiply(x.at[1, 5].set(jnp.nan), q.values, q.scale)
    np.testing.assert_array_equal(rows, wanted.at[1].set(jnp.nan))
    np.testing.assert_array_equal(multiply(x, spoilt.values, spoilt.scale), wanted.at[:, 2].set(jnp.nan))

"""Work-arounds compute what the plain form computes."""

from collections.abc import Callable
from functools import partial, reduce
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.workarounds import (
    FirstFactor,
    converted_after,
    kth_largest,
    low_memory_options,
    ring_groups,
    rings,
    run_once_options,
    separate_gradient_transpose,
)


def line(coordinates, platform="tpu"):
    """Return devices at these coordinates."""
    return [SimpleNamespace(coords=coords, platform=platform) for coords in coordinates]


@pytest.mark.parametrize(
    ("coordinates", "lengths"),
    [
        ([(x, y, 0) for x in range(4) for y in range(2)], (4, 2)),
        ([(x, y, z) for z in range(2) for x in range(3) for y in range(2)], (2, 3, 2)),
        ([(x, 0, 0) for x in range(5)], (5,)),
        ([(0, 0, 0)], (1,)),
        ([(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 3, 0)], (4,)),  # no straight line
        ([(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 2, 0)], (4,)),  # lines of three and of one
        ([(0, 0, 0), (0, 0, 0)], (2,)),  # in two machines
    ],
)
def test_tpus_form_straight_lines(coordinates, lengths):
    assert rings(line(coordinates)) == lengths


def test_devices_that_are_no_tpus_form_one_ring():
    assert rings(line([(x, y, 0) for x in range(4) for y in range(2)], "gpu")) == (8,)
    assert rings(jax.devices()) == (8,)
    assert ring_groups((8,)) == [None]


def test_groups_of_rings_differ_in_one_coordinate():
    assert ring_groups((2, 3)) == [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]


def test_a_gradient_that_is_transposed_separately_is_the_gradient():
    w, x = np.random.default_rng(0).normal(size=(2, 3, 3)).astype(np.float32)
    loss = lambda w, f: jnp.sum(jnp.sin(x @ f(w)))  # noqa: E731
    plain, separate = (jax.grad(loss)(w, f) for f in (lambda w: w, separate_gradient_transpose))
    np.testing.assert_array_equal(plain, separate)


@pytest.mark.parametrize("n_rows", [1, 5, 17])
def test_a_matmul_with_the_matrix_first_equals_the_matmul(n_rows):
    x_BTD, W_DF = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(2, n_rows, 11), (11, 7)]))
    y_BTF = jax.vmap(lambda x_TD: x_TD @ FirstFactor(W_DF))(x_BTD)
    np.testing.assert_allclose(y_BTF, x_BTD @ W_DF, atol=1e-5)


@pytest.mark.parametrize("axis", [None, 0])
def test_a_matrix_converted_late_is_that_matrix_also_beside_nan(axis):
    matrices = jnp.arange(-127, 127, dtype=jnp.int8).reshape(2, -1)
    x = jnp.array([[jnp.nan, 1.0], [-jnp.inf, 2.0]])
    converted = jax.vmap(converted_after, (axis, 0))(matrices, x)
    assert converted.dtype == jnp.float32
    np.testing.assert_array_equal(converted, matrices if axis == 0 else [matrices, matrices])


def test_matrices_converted_late_are_not_held_at_once():
    """Of eight, a program holds two in float32, and its gradients are those of the plain form."""
    matrices, x = [jnp.full((256, 256), i, jnp.int8) for i in range(8)], jnp.ones((4, 64, 256))

    def chain(convert, x, matrices):
        for matrix in matrices:
            x = x + jnp.tanh(x @ convert(matrix, x))
        return x

    late, plain = (partial(chain, convert) for convert in (converted_after, lambda matrix, x: matrix.astype(x.dtype)))
    program = jax.jit(jax.vmap(late, (0, None))).lower(x, matrices).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 2 * 4 * 256 * 256
    gradients = (jax.jit(jax.vmap(jax.grad(lambda x, f=f: f(x, matrices).sum())))(x) for f in (late, plain))
    np.testing.assert_array_equal(*gradients)


def test_the_kth_largest_counts_equal_numbers():
    assert [kth_largest(jnp.array([3.0, 7.0, 5.0, 7.0]), k) for k in (1, 2, 3, 4)] == [7, 7, 5, 3]


@pytest.mark.slow
def test_options_of_a_program_that_runs_once_change_no_bit(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    draw = jax.jit(lambda key: jax.random.normal(key, (17, 23))).lower(jax.random.key(0))
    options = run_once_options("cpu")
    assert options
    plain, quick = (
        draw.compile(compiler_options=o)(jax.random.key(0)) for o in ({**options, next(iter(options)): 3}, options)
    )
    np.testing.assert_array_equal(plain, quick)


def test_an_optimisation_level_in_xla_flags_is_left_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    assert run_once_options("cpu") is None
    assert run_once_options("gpu") is None


def test_a_program_of_low_memory_recomputes_and_changes_no_bit():
    def gradient(remat: Callable) -> jax.stages.Lowered:
        layer = remat(lambda x, w: jnp.sin(x @ w))
        loss = lambda w, x: jnp.sum(reduce(layer, [w] * 8, x))  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(w, w)

    w = np.random.default_rng(0).normal(size=(101, 101)).astype(np.float32) / 10
    options = low_memory_options(jax.default_backend())
    lean = gradient(jax.checkpoint).compile(compiler_options=options)
    plain = gradient(lambda f: f).compile()
    np.testing.assert_array_equal(lean(w, w), plain(w, w))
    assert low_memory_options("gpu") is None
    if options:
        sizes = [program.memory_analysis().temp_size_in_bytes for program in (lean, plain)]
        assert sizes[0] < 0.8 * sizes[1], sizes

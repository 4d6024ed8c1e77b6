from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.ops.linear_cross_entropy import (
    ALIGNMENT,
    Unembedding,
    _in_one_pass,
    _in_two_passes,
    linear_cross_entropy,
    rows_per_chunk,
)
from jaxformer.ops.losses import negative_log_likelihood
from jaxformer.ops.quantized import quantize
from tests.arrays import as_array, assert_close, normal, random_tokens

N, D, V = 37, 5, 11
X, W, BIAS = normal(N, D), 2 * normal(D, V, seed=1), normal(V, seed=2)
TARGETS = random_tokens(V, N)
WEIGHTS = as_array(np.random.default_rng(3).random(N))
CASES = {
    "plain": (None, None, 0.0),
    "bias": (BIAS, None, 0.0),
    "all": (BIAS, 3.0, 0.2),
}
"""Bias, soft cap, label smoothing."""
LIMITS = {"at once": 10**6, "chunks of 10 rows": 10 * V, "one by one": V}


def by_optax(smoothing: float, soft_cap: float | None, x: Any, W: Any, b: Any, weights: Any) -> tuple[Any, Any]:
    """Return both sums from all logits."""
    logits = x @ W + (0 if b is None else b[None])
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    labels = optax.smooth_labels(jax.nn.one_hot(TARGETS, V), smoothing)
    plain = optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS)
    return jnp.sum(optax.softmax_cross_entropy(logits, labels) * weights), jnp.sum(plain * weights)


def by_chunks(limit: int, smoothing: float, soft_cap: float | None, x: Any, W: Any, b: Any, weights: Any) -> Any:
    return linear_cross_entropy(x, Unembedding(W, b, soft_cap), TARGETS, weights, limit, smoothing)


def test_leaves_of_an_unembedding_are_its_arrays():
    """A soft cap among them would be trained."""
    leaves, tree = jax.tree.flatten(Unembedding(W, BIAS, 3.0))
    assert len(leaves) == 2 and leaves[0] is W and leaves[1] is BIAS
    assert jax.tree.unflatten(tree, leaves).soft_cap == 3.0
    grad = jax.jit(jax.grad(lambda layer: jnp.sum(layer.logits(X))))(Unembedding(W, BIAS, 3.0))
    assert grad.W_DV.shape == W.shape and grad.soft_cap == 3.0


def objective(function: Callable, *args: Any) -> Any:
    return function(*args)[0]


@cache
def program(function: Callable, *options: Any) -> Callable:
    """Both sums and all gradients of the first, by one compiled program."""
    f = partial(function, *options)

    def run(*args: Any) -> Any:
        wrt = [i for i in (0, 1, 2, 3) if args[i] is not None]
        return f(*args), jax.grad(partial(objective, f), wrt)(*args)

    return jax.jit(run)


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        ("plain", "chunks of 10 rows"),
        ("bias", "at once"),
        ("all", "at once"),
        ("all", "chunks of 10 rows"),
        ("all", "one by one"),
    ],
)
def test_sums_and_all_gradients_agree_with_optax(case: str, limit: str) -> None:
    b, soft_cap, smoothing = CASES[case]
    args = X, W, b, WEIGHTS
    ours = program(by_chunks, LIMITS[limit], smoothing, soft_cap)(*args)
    jax.tree.map(assert_close, ours, program(by_optax, smoothing, soft_cap)(*args))


def test_without_smoothing_both_sums_have_the_same_gradient() -> None:
    chunked = partial(by_chunks, 10 * V, 0.0, None)
    of_first, of_second = (jax.jit(jax.grad(lambda W, i=i: chunked(X, W, BIAS, WEIGHTS)[i]))(W) for i in (0, 1))
    np.testing.assert_array_equal(of_first, of_second)
    assert np.abs(of_first).max() > 0.1


def test_per_example_gradients_equal_those_of_a_loop() -> None:
    """Of examples in several chunks each; a sum over the batch would give each example the gradient of all."""
    x_BTD, targets_BT = (np.asarray(x) for x in (normal(4, 9, D, seed=4), random_tokens(V, 4, 9)))

    def loss(W_DV: jax.Array, x_TD: jax.Array, targets_T: jax.Array) -> jax.Array:
        return linear_cross_entropy(x_TD, Unembedding(W_DV, BIAS), targets_T, jnp.full(9, 1 / 9), 4 * V, 0.1)[0]

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    mapped = jax.device_get(jax.jit(jax.vmap(gradient, (None, 0, 0)))(W, x_BTD, targets_BT))
    loop = [gradient(W, *example) for example in zip(x_BTD, targets_BT, strict=True)]
    jax.tree.map(assert_close, mapped, tuple(np.stack(grads) for grads in zip(*loop, strict=True)))
    assert np.abs(mapped[0][0] - mapped[0][1]).max() > 0.01


@pytest.mark.parametrize("limit", [10**6, 10 * V])
def test_forward_mode_and_second_derivatives_agree_with_those_of_all_logits(limit: int) -> None:
    chunked, whole = (
        lambda W, f=f: f(X, W, BIAS, WEIGHTS)[0]
        for f in (partial(by_chunks, limit, 0.1, 4.0), partial(by_optax, 0.1, 4.0))
    )
    direction = normal(D, V, seed=5)
    both = lambda f: jax.jit(lambda W: [jax.jvp(g, (W,), (direction,))[1] for g in (f, jax.grad(f))])(W)  # noqa: E731
    jax.tree.map(assert_close, both(chunked), both(whole))


def test_loss_beside_large_logits_keeps_its_digits() -> None:
    """The logits are exact; float32 has ten binary digits after the point at 1e4."""
    logits = np.array([[10_000, 9_998.3125, 5000, 0]])
    expected = np.log(np.exp(logits - 10_000).sum())
    x_ND, first = as_array(logits), as_array([0], np.int32)
    loss = jax.jit(
        lambda x: linear_cross_entropy(x, Unembedding(np.eye(4, dtype=np.float32)), first, jnp.ones(1), 100)
    )(x_ND)
    np.testing.assert_allclose(loss, [expected] * 2, atol=2**-23)  # of the logarithm of 1.185
    nll = jax.jit(negative_log_likelihood)(x_ND, first)
    np.testing.assert_allclose(nll, [expected], atol=2**-23)


def test_padded_classes_and_rows_count_for_nothing_beside_very_negative_logits() -> None:
    """A class of logit 0 would outweigh them all, as would a row without a weight."""
    layer = Unembedding(jnp.zeros((D, V)), jnp.full(V, -1e4))
    loss = lambda b: linear_cross_entropy(X, replace(layer, b_V=b), TARGETS, jnp.ones(N), 10 * V)  # noqa: E731
    losses, to_bias = jax.jit(lambda b: (loss(b), jax.grad(partial(objective, loss))(b)))(layer.b_V)
    np.testing.assert_allclose(losses, N * np.log(V), rtol=1e-6)
    assert_close(to_bias, N / V - np.bincount(TARGETS, minlength=V))


def test_a_target_that_is_no_class_gives_nan_unless_its_weight_is_0() -> None:
    """Padded classes have logits, as of a tokenizer with more tokens than the model has rows."""
    loss = jax.jit(lambda weights, targets: linear_cross_entropy(X, Unembedding(W), targets, weights, 10 * V, 0.1))
    at = np.arange(N) == 3
    ignored = np.where(at, 0, WEIGHTS)
    wanted = loss(ignored, TARGETS)
    for target in (-1, V, V + ALIGNMENT):
        targets = np.where(at, np.int32(target), TARGETS)
        assert np.isnan(loss(WEIGHTS, targets)).all()
        jax.tree.map(np.testing.assert_array_equal, loss(ignored, targets), wanted)


def test_an_int8_matrix_counts_as_rounded() -> None:
    matrix = quantize(W, (0,))
    losses = [
        linear_cross_entropy(X, Unembedding(W, BIAS), TARGETS, WEIGHTS, 10 * V)
        for W in (matrix, matrix.values * matrix.scale)
    ]
    jax.tree.map(assert_close, *losses)


@pytest.mark.parametrize("function", [_in_one_pass, _in_two_passes])
def test_largest_logit_and_sum_agree_with_float64_on_every_platform(function: Callable) -> None:
    """GPUs read the logits once for both; some are masked, large, or all far below 0."""
    logits = np.array([[1.0, -2, 3, -np.inf], [1e4, 9_998.3125, 0, -np.inf], [-1e4, -1e4, -9_999, -np.inf]])
    largest, total = jax.jit(function)(jnp.asarray(logits, jnp.float32))
    np.testing.assert_array_equal(largest, logits.max(axis=1))
    np.testing.assert_allclose(total, np.exp(logits - logits.max(axis=1)[:, None]).sum(axis=1), rtol=1e-6)


def products(function: Callable, *args: Any) -> int:
    """Return the number of matrix products in a traced function."""
    return str(jax.make_jaxpr(function)(*args)).count("dot_general")


def test_only_gradients_that_are_needed_are_computed() -> None:
    """A product for the logits, and one for each gradient: of the rows, and of the matrix, which adapters freeze."""
    chunked = lambda x, W: by_chunks(10 * V, 0.0, None, x, W, None, WEIGHTS)[0]  # noqa: E731
    assert products(chunked, X, W) == 1
    assert [products(jax.grad(chunked, wrt), X, W) for wrt in (0, 1, (0, 1))] == [2, 2, 3]


def test_bfloat16_rows_have_sums_and_matrix_gradients_added_in_float32() -> None:
    """One chunk per row: sums in bfloat16 would lose what is below 1/256 of them."""
    rows, matrix = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    exact = jax.jit(jax.grad(lambda W: by_optax(0.0, None, rows.astype(jnp.float32), W, None, WEIGHTS)[0]))(
        matrix.astype(jnp.float32)
    )
    loss, grad = jax.jit(jax.value_and_grad(lambda W: by_chunks(V, 0.0, None, rows, W, None, WEIGHTS)[0]))(matrix)
    assert loss.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    assert np.linalg.norm(grad.astype(jnp.float32) - exact) < 2**-7 * np.linalg.norm(exact)


def test_lowered_for_cuda_no_array_has_all_logits_and_no_product_is_of_float32() -> None:
    n_rows, n_classes = 4096, 1000
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731

    def loss(x: jax.Array, W: jax.Array, targets: jax.Array) -> jax.Array:
        weights = jnp.full(n_rows, 1 / n_rows)
        return linear_cross_entropy(x, Unembedding(W), targets, weights, 512 * 1024)[0]

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(
        shape(n_rows, 64), shape(64, n_classes), shape(n_rows, dtype=jnp.int32)
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    rows = [line for line in text.splitlines() if "dot_general" in line]
    assert len(rows) == 3 and all(line.count("bf16") >= 2 for line in rows)
    padded = n_classes + -n_classes % ALIGNMENT
    assert f"512x{padded}xbf16" in text
    assert not any(f"{n_rows}x{size}x" in text or f"8x512x{size}x" in text for size in (n_classes, padded))


def test_chunks_are_the_fewest_of_aligned_rows() -> None:
    assert rows_per_chunk(16 * 128, 2048, 2**27) == 16 * 128  # the default run: all at once
    assert rows_per_chunk(32 * 1024, 50_257, 2**28) == 4736  # 7 of 37 · 128, where 2^28 / 50,257 = 5,341 rows may be
    assert rows_per_chunk(2**17, 128_256, 2**28) == 2048  # 64 chunks
    assert rows_per_chunk(4096, 2**14, 2**26) == 4096  # as many logits as may be
    assert rows_per_chunk(7, 2**26, 2**26) == 1  # too few to align
    assert rows_per_chunk(3, 2**28, 2**26) == 1  # one row alone is too much, and there is nothing smaller


def test_targets_and_weights_that_would_broadcast_are_refused() -> None:
    x, unembedding, targets, weights = jnp.ones((3, 4)), Unembedding(jnp.ones((4, 5))), jnp.zeros(3, int), jnp.ones(3)
    with pytest.raises(TypeError, match="targets are float32; give integer classes"):
        linear_cross_entropy(x, unembedding, weights, targets, 100)
    with pytest.raises(ValueError, match=r"expected weights of shape \(3,\), one per row of logits, got \(1,\)"):
        linear_cross_entropy(x, unembedding, targets, weights[:1], 100)

from math import log

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.ops.losses import cross_entropy, negative_log_likelihood, pair_nll, top1_correct, uniform_cross_entropy
from tests.arrays import assert_close, normal, random_tokens

T, V = 7, 11
LOGITS, TARGETS = 3 * normal(T, V), random_tokens(V, T)


def test_by_hand() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    assert_close(negative_log_likelihood(logits, jnp.array([1, 2])), [2 * log(2), -log(0.8)], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_value_and_gradient_agree_with_optax(size: float) -> None:
    optax_nll = optax.softmax_cross_entropy_with_integer_labels
    ours = lambda x: (negative_log_likelihood(x, TARGETS), jax.value_and_grad(cross_entropy)(x, TARGETS))  # noqa: E731
    wanted = lambda x: (optax_nll(x, TARGETS), jax.value_and_grad(lambda x: optax_nll(x, TARGETS).mean())(x))  # noqa: E731
    jax.tree.map(assert_close, *(jax.jit(f)(size * np.asarray(LOGITS)) for f in (ours, wanted)))


def test_smoothing_and_the_largest_logit_by_hand() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    assert_close(uniform_cross_entropy(logits), [log(2) * 5 / 3, -(2 * log(0.1) + log(0.8)) / 3], 1e-6)
    ties = jnp.array([[2.0, 1, 2], [0, 0, 1]])
    np.testing.assert_array_equal(top1_correct(ties, jnp.array([0, 2])), [True, True])
    np.testing.assert_array_equal(top1_correct(ties, jnp.array([2, 0])), [False, False])  # one guess, though two tie
    assert top1_correct(ties[0], jnp.array(0))  # one class, no positions


@pytest.mark.slow
def test_hessian_vector_product_is_the_softmax_covariance() -> None:
    direction = normal(T, V, seed=5)
    _, product = jax.jvp(jax.grad(lambda x: cross_entropy(x, TARGETS)), (LOGITS,), (direction,))
    p = np.asarray(jax.nn.softmax(LOGITS), np.float64)
    wanted = p * (direction - (p * direction).sum(-1, keepdims=True)) / T
    assert_close(product, wanted)


@pytest.mark.parametrize("weights", [[1, 0, 1, 1, 0, 0, 1], [0.5, 0.25, 0.0, 2.0, 1.0, 0.1, 0.3]], ids=["0/1", "real"])
def test_weights_give_a_weighted_mean_and_its_gradient(weights: list[float]) -> None:
    w = np.array(weights)
    nll = np.asarray(negative_log_likelihood(LOGITS, TARGETS), np.float64)
    loss, grad = jax.jit(jax.value_and_grad(cross_entropy))(LOGITS, TARGETS, jnp.asarray(w, jnp.float32))
    assert_close(loss, (nll * w).sum() / w.sum())
    np.testing.assert_array_equal(np.abs(grad).max(-1) > 0, w > 0)


def test_all_zero_weights_give_zero_and_a_zero_gradient() -> None:
    loss, grad = jax.jit(jax.value_and_grad(cross_entropy))(LOGITS, TARGETS, jnp.zeros(T))
    assert loss == 0
    assert (grad == 0).all()


def test_bfloat16_logits_give_a_float32_loss() -> None:
    loss = negative_log_likelihood(LOGITS.astype(jnp.bfloat16), TARGETS)
    assert loss.dtype == jnp.float32
    assert_close(loss, negative_log_likelihood(LOGITS, TARGETS), 2**-7)  # logits rounded to 8 bits


@pytest.mark.slow
def test_pair_nll_by_hand() -> None:
    """Of two images and two texts at right angles, scaled by 2: log(1 + e^-2) each way; alone, nothing."""
    both = one, two = np.eye(2, dtype=np.float32)
    nll, scale = jax.jit(pair_nll), np.float32(log(2))
    assert_close(nll(one, one, both, both, scale), np.log1p(np.exp(-2)), 1e-6)
    # Its text is told from a second like it, its image from a second at a right angle.
    wanted = (log(2) + np.log1p(np.exp(-2))) / 2
    assert_close(nll(one, one, np.stack([two, one]), np.stack([one, one]), scale), wanted, 1e-6)
    assert_close(nll(one, one, both, both, scale, np.array([True, False])), 0.0, 1e-6)


@pytest.mark.slow
def test_logits_of_weight_0_change_no_bit_also_where_they_are_nan() -> None:
    targets_T, weights_T = np.array([1, 0, 2]), np.float32([1, 0, 3])
    run = jax.jit(jax.value_and_grad(lambda logits_TV: cross_entropy(logits_TV, targets_T, weights_T)))
    is_row_1 = np.arange(3)[:, None] == 1
    (wanted, to_wanted), (got, to_got) = (
        run(np.where(is_row_1, np.float32(value), normal(3, 4))) for value in (0.0, np.nan)
    )
    assert got == wanted and np.isfinite(got)
    np.testing.assert_array_equal(to_got, to_wanted)


@pytest.mark.slow
def test_a_target_that_is_no_class_gives_nan_unless_its_weight_is_0() -> None:
    """torch's `ignore_index`; JAX counts negative indices from the end."""
    targets_T = TARGETS.at[2].set(-1).at[3].set(-100).at[4].set(V)
    np.testing.assert_array_equal(
        np.isnan(negative_log_likelihood(LOGITS, targets_T)), np.isin(np.arange(T), [2, 3, 4])
    )
    is_class_T = (targets_T >= 0) & (targets_T < V)
    kept = cross_entropy(LOGITS[is_class_T], targets_T[is_class_T])
    assert_close(cross_entropy(LOGITS, targets_T, is_class_T), kept)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TARGETS, LOGITS), TypeError, "targets are float32; give integer classes, after the logits"),
        ((LOGITS, TARGETS[:1]), ValueError, r"expected targets of shape \(7,\), one per row of logits, got \(1,\)"),
        ((LOGITS, TARGETS, jnp.ones(1)), ValueError, r"expected weights of shape \(7,\).* got \(1,\)"),
        ((LOGITS, TARGETS, jnp.ones(V)), ValueError, r"expected weights .* got \(11,\)"),  # torch's, one per class
        ((LOGITS[None], TARGETS[None], jnp.ones(T)), ValueError, r"expected weights of shape \(1, 7\)"),
    ],
)
def test_targets_and_weights_that_would_broadcast_are_refused(arguments: tuple, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        cross_entropy(*arguments)


def test_targets_may_be_a_list() -> None:
    assert cross_entropy(LOGITS, TARGETS.tolist()) == cross_entropy(LOGITS, TARGETS)

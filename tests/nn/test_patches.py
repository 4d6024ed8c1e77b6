"""Patches into the residual stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.patches import LearnedPositions, PatchEmbedding
from tests.arrays import apply, assert_close, first_params, normal, random_params

N, P, D = 5, 7, 3


def test_an_embedding_is_a_linear_layer() -> None:
    x_NP = normal(N, P)
    params = random_params(PatchEmbedding(D), x_NP)
    assert_close(apply(PatchEmbedding(D), params, x_NP), x_NP @ params["W_patch"] + params["b_patch"][None])


def test_pixels_take_the_dtype_of_the_weights() -> None:
    """Else all that follows would be computed in float32."""
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), random_params(PatchEmbedding(D), normal(N, P)))
    assert apply(PatchEmbedding(D), params, normal(N, P)).dtype == jnp.bfloat16


def test_each_place_has_its_row() -> None:
    x_ND, module = normal(N, D), LearnedPositions(N)
    params = random_params(module, x_ND)
    assert_close(apply(module, params, x_ND), x_ND + params["W_pos"])


def test_a_class_token_is_the_first_row_before_every_sequence() -> None:
    x, module = normal(2, N, D), LearnedPositions(N, n_tokens=1)
    params = random_params(module, x)
    placed, W_pos = apply(module, params, x), params["W_pos"]
    assert W_pos.shape == (N + 1, D)
    for sequence, was in zip(placed, x, strict=True):
        np.testing.assert_array_equal(sequence[0], W_pos[0])
        assert_close(sequence[1:], was + W_pos[1:])


def test_rows_are_drawn_as_asked() -> None:
    """Of 6,400 numbers the spread is known to 1%."""
    W_pos = first_params(LearnedPositions(100, init_std=0.5), normal(100, 64))["W_pos"]
    assert abs(W_pos.std() - 0.5) < 0.02


def test_a_sequence_of_another_length_is_refused() -> None:
    """One row would broadcast."""
    with pytest.raises(ValueError, match=r"expected a sequence of 5 positions, got shape \(1, 3\)"):
        LearnedPositions(N).init(jax.random.key(0), normal(1, D))

"""Products with the Hessian and the Gauss-Newton matrix, and their largest eigenvalues."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from jaxformer.data.dataset import Batch
from jaxformer.inspect.curvature import (
    gauss_newton_product,
    hessian_product,
    largest_eigenvalues,
    nesterov_limit,
    sharpness,
)
from jaxformer.models.objective import mean_loss
from tests.arrays import plain_decoder

CONFIG = plain_decoder(5, 4, 4, n_heads=2, d_ff=(6,), activation="gelu", norm="rmsnorm")


def example(dtype: str = "float64") -> tuple:
    model = CONFIG.build()
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(4, jnp.int32))["params"]
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.7, x.shape), dtype), shapes)
    tokens_BT, weights_BT = rng.integers(0, 5, (3, 5)), rng.integers(0, 2, (3, 4)).astype("float32")
    return model, params, Batch((jnp.asarray(tokens_BT[:, :-1]),), jnp.asarray(tokens_BT[:, 1:]), weights_BT)


@pytest.mark.slow
def test_products_and_eigenvalues_are_those_of_the_dense_matrices():
    with jax.enable_x64(True):
        model, params, batch = example()
        flat, unravel = ravel_pytree(params)

        H = jax.jit(jax.hessian(lambda flat: mean_loss(model, unravel(flat), batch)))(flat)
        logits = jax.jit(lambda p: jax.vmap(lambda t: model.apply({"params": unravel(p)}, t))(batch.inputs[0]))
        J, p = jax.jit(jax.jacrev(logits))(flat), jax.nn.softmax(logits(flat))
        of_logits = jnp.einsum("btv,vw->btvw", p, jnp.eye(5)) - jnp.einsum("btv,btw->btvw", p, p)
        G = jnp.einsum("btvi,btvw,btwj,bt->ij", J, of_logits, J, batch.weights) / jnp.sum(batch.weights)
        v = jnp.asarray(np.random.default_rng(1).normal(size=flat.size))
        for product, dense in ((hessian_product, H), (gauss_newton_product, G)):
            times = partial(product, model, params, batch)
            np.testing.assert_allclose(ravel_pytree(times(unravel(v)))[0], dense @ v, rtol=1e-6, atol=1e-9)
            values, vectors = largest_eigenvalues(times, params, 3, tolerance=1e-8)
            expected = np.linalg.eigvalsh(dense)[::-1]
            np.testing.assert_allclose(values, expected[:3], rtol=1e-6)
            np.testing.assert_allclose(dense @ ravel_pytree(vectors[1])[0], values[1] * ravel_pytree(vectors[1])[0],
                                       atol=1e-5)  # fmt: skip
        assert np.linalg.eigvalsh(G)[0] > -1e-9 > np.linalg.eigvalsh(H)[0]


@pytest.mark.slow
def test_sharpness_of_bfloat16_parameters_is_computed_in_float32():
    model, params, batch = example("float32")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    assert sharpness(model, half, batch)[0] == sharpness(model, wide, batch)[0]


def test_eigenvalues_are_those_of_a_dense_matrix():
    A = np.random.default_rng(0).normal(size=(7, 7))
    A = np.float32(A + A.T)
    params = {"a": jnp.zeros((2, 2)), "b": jnp.zeros(3)}

    def product(tree):
        flat = A @ np.concatenate([np.ravel(tree["a"]), tree["b"]])
        return {"a": flat[:4].reshape(2, 2), "b": flat[4:]}

    values, vectors = largest_eigenvalues(product, params, 2)
    expected, columns = np.linalg.eigh(A)
    np.testing.assert_allclose(values, expected[:-3:-1], rtol=1e-4)
    flat = np.concatenate([np.ravel(vectors[0]["a"]), vectors[0]["b"]])
    np.testing.assert_allclose(abs(flat @ columns[:, -1]), 1, rtol=1e-3)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)  # directions of which are rounded
    np.testing.assert_allclose(largest_eigenvalues(product, half, tolerance=0.1)[0], expected[-1], rtol=0.05)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nesterov_sgd_on_a_quadratic_diverges_above_its_limit(momentum: float):
    limit = nesterov_limit(0.1, momentum)
    optimizer = optax.sgd(0.1, momentum, nesterov=True)

    def distance(curvature: float) -> float:
        def step(carry, _):
            x, state = carry
            update, state = optimizer.update(curvature * x, state, x)
            return (x + update, state), None

        start = jnp.float32(1), optimizer.init(jnp.float32(1))
        return abs(float(jax.lax.scan(step, start, None, 2000)[0][0]))

    assert distance(0.99 * limit) < 1e-3 < 1e3 < distance(1.01 * limit)

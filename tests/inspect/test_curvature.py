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
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import mean_loss

CONFIG = DecoderConfig(5, 4, 4, n_heads=2, d_ff=(6,), activation="gelu", norm="rmsnorm")


def example(dtype: str = "float64") -> tuple:
    model = CONFIG.build()
    rng = np.random.default_rng(0)
    params = model.init(jax.random.key(0), jnp.zeros(4, jnp.int32))["params"]
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.7, x.shape), dtype), params)
    tokens_BT, weights_BT = rng.integers(0, 5, (3, 5)), rng.integers(0, 2, (3, 4)).astype("float32")
    return model, params, Batch((jnp.asarray(tokens_BT[:, :-1]),), jnp.asarray(tokens_BT[:, 1:]), weights_BT)


@pytest.mark.slow
def test_hessian_product_is_the_difference_quotient_of_the_gradient():
    with jax.enable_x64(True):
        model, params, batch = example()
        step = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) * 1e-5, params)
        grad = jax.jit(jax.grad(lambda params: mean_loss(model, params, batch)))
        ahead, behind = (grad(jax.tree.map(f, params, step)) for f in (jnp.add, jnp.subtract))
        quotient = ravel_pytree(jax.tree.map(lambda a, b: (a - b) / 2, ahead, behind))[0]
        product = ravel_pytree(hessian_product(model, params, batch, step))[0]
        np.testing.assert_allclose(product, quotient, rtol=1e-4, atol=1e-6 * float(jnp.abs(quotient).max()))


@pytest.mark.slow
def test_products_and_eigenvalues_are_those_of_the_dense_matrices():
    with jax.enable_x64(True):
        model, params, batch = example()
        flat, unravel = ravel_pytree(params)

        def loss(flat):
            logits = jax.vmap(lambda t: model.apply({"params": unravel(flat)}, t))(batch.inputs[0])
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
            return jnp.sum(nll * batch.weights) / jnp.sum(batch.weights)

        np.testing.assert_allclose(loss(flat), mean_loss(model, params, batch), rtol=1e-6)
        H = jax.hessian(loss)(flat)
        J = jax.jacobian(lambda p: jax.vmap(lambda t: model.apply({"params": unravel(p)}, t))(batch.inputs[0]))(flat)
        p = jax.nn.softmax(jax.vmap(lambda t: model.apply({"params": params}, t))(batch.inputs[0]))
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
def test_sharpness_from_an_earlier_eigenvector_takes_fewer_products():
    model, params, batch = example("float32")
    cold, vector = sharpness(model, params, batch)
    moved = jax.tree.map(lambda x: x * 1.001, params)
    counts = []
    for start in (None, vector):
        products = 0

        def times(v):
            nonlocal products
            products += 1
            return hessian_product(model, moved, batch, v)

        largest_eigenvalues(times, moved, start=start, tolerance=0.05)
        counts.append(products)
    assert counts[1] <= counts[0]
    assert sharpness(model, moved, batch, vector)[0] == pytest.approx(cold, rel=0.05)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
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

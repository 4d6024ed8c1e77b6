"""Curvature of the loss: products with its Hessian, its largest eigenvalues, and the step size that they allow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.dataset import Batch
from jaxformer.inspect.of_run import of_run
from jaxformer.models.objective import Params, objective_of
from jaxformer.ops.losses import negative_log_likelihood
from jaxformer.ops.precision import accumulation_dtype, upcast

EXAMPLES_AT_ONCE = 4
"""Examples whose gradients are computed together."""


@of_run
@partial(jax.jit, static_argnames="model")
def hessian_product(model: nn.Module, params: Params, batch: Batch, direction: Params) -> Params:
    """Return H v, the Hessian of a batch's mean loss times a direction: the derivative of the gradient along it
    (Pearlmutter 1994). It takes about three times as long as the gradient, and nothing larger than that is stored.

    Args:
      batch: examples of a task whose loss is a mean over examples. Auxiliary losses of experts are left out.
      direction: arrays of the parameters' shapes and dtypes.
    """
    return jax.jvp(jax.grad(lambda params: _mean_loss(model, params, batch)), (params,), (direction,))[1]


@of_run
@partial(jax.jit, static_argnames="model")
def gauss_newton_product(model: nn.Module, params: Params, batch: Batch, direction: Params) -> Params:
    """Return G v, the Gauss-Newton matrix of a batch's mean cross-entropy times a direction (Schraudolph 2002): the
    Hessian of the loss with respect to the logits, between the Jacobian of the logits and its transpose. For a
    cross-entropy it is Fisher's information matrix, and has no negative eigenvalue.

    Args:
      batch: examples with target classes.
      direction: arrays of the parameters' shapes and dtypes.
    """

    def of_logits(params: Params, example: Batch) -> jax.Array:
        logits = model.apply({"params": params}, *example.inputs)
        assert isinstance(logits, jax.Array)
        return logits

    def product(params: Params, example: Batch) -> Params:
        def loss(logits: jax.Array) -> jax.Array:
            nll = negative_log_likelihood(logits, example.targets)
            return jnp.mean(nll) if example.weights is None else jnp.sum(nll * example.weights)

        logits, pullback = jax.vjp(lambda params: of_logits(params, example), params)
        tangent = jax.jvp(lambda params: of_logits(params, example), (params,), (direction,))[1]
        return pullback(jax.jvp(jax.grad(loss), (logits,), (tangent,))[1])[0]

    add = lambda total, example: (jax.tree.map(jnp.add, total, product(params, example)), None)  # noqa: E731
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
    return jax.tree.map(lambda x: x / _total_weight(batch), total)


def largest_eigenvalues(
    product: Callable[[Params], Params],
    params: Params,
    n: int = 1,
    start: Params | None = None,
    tolerance: float = 1e-3,
) -> tuple[np.ndarray, list[Params]]:
    """Return the n largest eigenvalues of a symmetric matrix, `(n,)`, the largest first, and their eigenvectors, by
    Lanczos iterations (scipy's `eigsh`).

    Args:
      product: function from a direction to its product with the matrix, such as `hessian_product` of a batch.
      params: parameters, whose shapes a direction has.
      start: first direction, such as the eigenvector of an earlier step; by default a random one.
      tolerance: relative accuracy of the eigenvalues.

    Raises:
      scipy.sparse.linalg.ArpackError: a product is not finite; or the eigenvalues were not found in 10 iterations per
        parameter.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh  # which every training would otherwise import

    leaves, structure = jax.tree.flatten(params)
    size, cuts = sum(x.size for x in leaves), np.cumsum([x.size for x in leaves])[:-1]
    dtype = accumulation_dtype(leaves[0].dtype)  # scipy has no bfloat16
    # In numpy: for each shape, jax would compile a program.
    flatten = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(dtype)  # noqa: E731

    def unflatten(flat: np.ndarray) -> Params:
        parts = np.split(np.asarray(flat, dtype), cuts)
        arrays = [part.reshape(x.shape).astype(x.dtype) for part, x in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(structure, arrays)

    matrix = LinearOperator((size, size), lambda x: flatten(product(unflatten(x))), dtype=dtype)
    first = np.random.default_rng(0).standard_normal(size) if start is None else flatten(start)
    few = min(2 * n + 6, size)  # products before the first test of convergence; by default 20
    values, vectors = eigsh(matrix, n, which="LA", v0=np.asarray(first, dtype), ncv=few, tol=tolerance)
    return values[::-1], [jax.tree.map(jnp.asarray, unflatten(v)) for v in vectors.T[::-1]]


@of_run
def sharpness(
    model: nn.Module, params: Params, batch: Batch, start: Params | None = None, tolerance: float = 1e-3
) -> tuple[float, Params]:
    """Return the largest eigenvalue of the Hessian of a batch's mean loss, in float32 or wider, and its eigenvector.

    Args:
      batch: examples; see `hessian_product`.
      start: eigenvector of an earlier step, from which it is found in fewer iterations.
      tolerance: relative accuracy.
    """
    params = jax.tree.map(upcast, params)  # in bfloat16, products are too inexact for the iterations
    product = partial(hessian_product, model, params, jax.tree.map(jnp.asarray, batch))
    values, vectors = largest_eigenvalues(product, params, 1, start, tolerance)
    return float(values[0]), vectors[0]


def nesterov_limit(learning_rate: float, momentum: float) -> float:
    """Return the curvature above which SGD with Nesterov's momentum diverges on a quadratic: 2 (1 + β) / ((1 + 2 β) η).
    Gradient descent, with β = 0, has the limit 2 / η; Polyak's momentum 2 (1 + β) / η (Cohen et al. 2021, appendix B).

    On a quadratic of curvature λ, the error follows x' = (1 + β) (1 - η λ) x - β (1 - η λ) x'', whose roots leave the
    unit circle at -1.
    """
    return 2 * (1 + momentum) / ((1 + 2 * momentum) * learning_rate)


def _mean_loss(model: nn.Module, params: Params, batch: Batch) -> jax.Array:
    # Not `mean_loss`, whose own derivative cannot be differentiated again.
    loss = lambda example: objective_of(model).example_loss(model, params, example)  # noqa: E731
    return jnp.sum(jax.lax.map(loss, batch, batch_size=EXAMPLES_AT_ONCE)) / _total_weight(batch)


def _total_weight(batch: Batch) -> jax.Array | int:
    return len(batch.targets) if batch.weights is None else jnp.sum(batch.weights)

"""Lenses: what the residual stream before the last block says about the output, by a linear map of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.dataset import Batch
from jaxformer.inspect.activations import Activations, capture_gradients, capturing
from jaxformer.inspect.names import unknown_name
from jaxformer.inspect.of_run import of_run
from jaxformer.inspect.residual_stream import STREAM, check_stream
from jaxformer.models.objective import Params, objective_of

ROWS_AT_ONCE = 8
"""Rows of a Jacobian that are computed together."""


class Affine(NamedTuple):
    """A map from a residual stream to the last one, x ↦ A x + b, which the final norm and the unembedding follow."""

    A_DD: np.ndarray
    b_D: np.ndarray

    def __repr__(self) -> str:
        return f"Affine(A_DD: {np.shape(self.A_DD)}, b_D: {np.shape(self.b_D)})"


Lens = Mapping[str, Affine] | None
"""A map for the embedding and each block, named as by `logit_lens`; None for that lens, which maps nothing."""


class Agreement(NamedTuple):
    """Agreement of a lens with the model's prediction, over the positions of some texts."""

    same: float
    """Fraction of positions where the most likely token is the model's."""
    divergence: float
    """Mean Kullback-Leibler divergence of the lens from the model's distribution, in nats."""


@of_run
def jacobian_lens(
    model: nn.Module, params: Params, texts: Iterable[jax.Array], key: jax.Array | None = None
) -> dict[str, Affine]:
    """Return the model's own linear map from each residual stream to the last one at the same position, to first order
    around the mean stream: the mean Jacobian over positions and texts.

    Each row takes one backward pass per text, for all blocks and positions at once: the outputs of position t are
    multiplied by a random sign s_t, and the gradient at position t by s_t, so that the effects on other positions
    cancel on average.

    Args:
      texts: tokens `(T,)`; equal lengths share a program.
      key: key of the signs; by default the same in each call.

    Raises:
      ValueError: the model has no residual stream, or normalises the stream after each part.
    """
    check_stream(model)
    key = jax.random.key(0) if key is None else key
    sums: Any = None
    for n, tokens_T in enumerate(texts, start=1):
        sign_T = jax.random.rademacher(jax.random.fold_in(key, n), jnp.shape(tokens_T), jnp.float32)
        measured = jax.device_get(mean_jacobian(model, params, jnp.asarray(tokens_T), sign_T))
        sums = measured if sums is None else jax.tree.map(np.add, sums, measured)
    jacobians, streams = jax.tree.map(lambda total: total / n, sums)
    last_D = list(streams.values())[-1]
    return {name: Affine(A_DD, last_D - A_DD @ streams[name]) for name, A_DD in jacobians.items()}


@partial(jax.jit, static_argnames="model")
def mean_jacobian(
    model: nn.Module, params: Params, tokens_T: jax.Array, sign_T: jax.Array
) -> tuple[Activations, Activations]:
    """Return, over the positions of a text, the mean Jacobian `(D, D)` of the last residual stream by each, estimated
    with the signs `(T,)`, and each mean stream `(D,)`."""
    shapes = jax.eval_shape(lambda: _streams(model, params, tokens_T))
    zeros = OrderedDict((name, jnp.zeros(x.shape, x.dtype)) for name, x in shapes.items())

    def last_stream(shifts: Activations) -> tuple[jax.Array, Activations]:
        streams = _streams(model, params, tokens_T, shifts)
        return list(streams.values())[-1], streams

    last_TD, pullback, streams = jax.vjp(last_stream, zeros, has_aux=True)

    def row(unit_D: jax.Array) -> Activations:
        (grads,) = pullback((sign_T[:, None] * unit_D[None]).astype(last_TD.dtype))
        return OrderedDict((name, jnp.einsum("t,td->d", sign_T, g_TD) / len(sign_T)) for name, g_TD in grads.items())

    jacobians = jax.lax.map(row, jnp.eye(last_TD.shape[1]), batch_size=ROWS_AT_ONCE)
    return jacobians, OrderedDict((name, x_TD.mean(axis=0)) for name, x_TD in streams.items())


@of_run
def regression_lens(
    model: nn.Module, params: Params, texts: Iterable[jax.Array], ridge: float = 0.001
) -> dict[str, Affine]:
    """Return the linear regression of the last residual stream on each one at the same position (Din et al. 2023): the
    tuned lens (Belrose et al. 2023) in closed form, by least squares instead of by its divergence.

    Args:
      texts: tokens `(T,)`, of several times as many positions as the model is wide; equal lengths share a program.
      ridge: penalty, as a fraction of the variance of each feature.

    Raises:
      ValueError: the model has no residual stream, or normalises the stream after each part.
    """
    check_stream(model)
    n, sums = 0, dict[str, np.ndarray]()
    for tokens_T in texts:
        streams = jax.device_get(_streams(model, params, jnp.asarray(tokens_T)))
        y_TD = list(streams.values())[-1].astype(np.float64)
        n, D = n + len(y_TD), y_TD.shape[1]
        for name, x_TD in streams.items():  # features of real models differ by factors of 1e4, so not in float32
            both = np.concatenate([x_TD, y_TD, np.ones((len(y_TD), 1))], axis=1, dtype=np.float64)
            sums[name] = sums.get(name, 0) + both.T @ both

    def fit(moments: np.ndarray) -> Affine:
        mean, second = moments[-1, :-1] / n, moments[:-1, :-1] / n
        covariance = second - np.outer(mean, mean)
        xx_DD, yx_DD = covariance[:D, :D], covariance[D:, :D]
        xx_DD[np.diag_indices(D)] *= 1 + ridge
        A_DD = np.linalg.lstsq(xx_DD, yx_DD.T)[0].T
        return Affine(A_DD.astype(np.float32), (mean[D:] - A_DD @ mean[:D]).astype(np.float32))

    return {name: fit(moments) for name, moments in sums.items()}


@of_run
@partial(jax.jit, static_argnames="model")
def lens_logits(model: nn.Module, params: Params, lens: Mapping[str, Affine], tokens_T: jax.Array) -> Activations:
    """Return the logits, `(T, V)`, that a lens gives for the residual stream after the embedding and after each block;
    `logit_lens` does so without a lens.

    Raises:
      ValueError: the model has no residual stream, or normalises the stream after each part.
      KeyError: the lens has no map for a block.
    """
    check_stream(model)
    unembed: Callable[..., Any] = partial(model.apply, {"params": params}, method="unembed")
    streams = _through(lens, _streams(model, params, tokens_T))
    return OrderedDict((name, unembed(x_TD)) for name, x_TD in streams.items())


@of_run
def agreement(model: nn.Module, params: Params, lens: Lens, texts: Iterable[jax.Array]) -> dict[str, Agreement]:
    """Return how far the predictions of a lens after the embedding and each block are the model's own.

    Args:
      texts: tokens `(T,)`, others than a lens was fitted to; equal lengths share a program.
    """
    check_stream(model)
    texts = [jnp.asarray(tokens_T) for tokens_T in texts]
    measured = [jax.device_get(_agreement(model, params, lens, tokens_T)) for tokens_T in texts]
    lengths = [len(tokens_T) for tokens_T in texts]
    return {
        name: Agreement(*np.average([x[name] for x in measured], axis=0, weights=lengths).tolist())
        for name in measured[0]
    }


@partial(jax.jit, static_argnames="model")
def _agreement(
    model: nn.Module, params: Params, lens: Lens, tokens_T: jax.Array
) -> OrderedDict[str, tuple[jax.Array, jax.Array]]:
    streams = _streams(model, params, tokens_T)
    unembed: Callable[..., Any] = partial(model.apply, {"params": params}, method="unembed")
    final_TV = jax.nn.log_softmax(unembed(list(streams.values())[-1]))

    def compare(x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_p_TV = jax.nn.log_softmax(unembed(x_TD))
        same = jnp.mean(log_p_TV.argmax(-1) == final_TV.argmax(-1))
        return same, jnp.mean(jnp.sum(jnp.exp(final_TV) * (final_TV - log_p_TV), axis=-1))

    # One (T, V) at a time.
    same_L, divergence_L = jax.lax.map(compare, jnp.stack(list(_through(lens, streams).values())))
    return OrderedDict((name, (same_L[i], divergence_L[i])) for i, name in enumerate(streams))


@of_run
@partial(jax.jit, static_argnames="model")
def backward_lens(model: nn.Module, params: Params, example: Batch) -> Activations:
    """Return minus the gradient of an example's loss with respect to the residual stream after the embedding and each
    block, unembedded, `(T, V)` by name: the tokens towards which the loss pulls the stream (Katz et al. 2024). The
    final norm, a bias and a soft cap of the logits are left out, since a gradient is a direction: -g W.

    Raises:
      ValueError: the model has no residual stream, or normalises the stream after each part.
    """
    check_stream(model)
    _, grads = capture_gradients(lambda: objective_of(model).example_loss(model, params, example), names=STREAM)
    unembedding: Any = model.apply({"params": params}, method="unembedding")
    return OrderedDict((name, -g_TD @ unembedding.W_DV) for name, g_TD in grads.items())


@partial(jax.jit, static_argnames="model")
def _streams(model: nn.Module, params: Params, tokens_T: jax.Array, shifts: Activations | None = None) -> Activations:
    """Return the residual stream `(T, D)` after the embedding and each block, with shifts added to it there."""
    with capturing(STREAM, lambda name, x_TD: x_TD if shifts is None else x_TD + shifts[name]) as streams:
        model.apply({"params": params}, tokens_T, method="features")
    return streams


def _through(lens: Lens, streams: Activations) -> Activations:
    if lens is None:
        return streams
    if missing := [name for name in streams if name not in lens]:
        raise unknown_name(missing[0], lens, "map of the lens")
    return OrderedDict((name, x_TD @ lens[name].A_DD.T + lens[name].b_D[None]) for name, x_TD in streams.items())

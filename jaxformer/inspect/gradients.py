"""Gradients: the table of the sources, a row a parameter with attention heads apart; and each example's own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.dataset import Batch
from jaxformer.models.objective import Params, objective_of
from jaxformer.parameters import Norms, Row, norm_rows, parameter_norms, row_names, row_norms

EXAMPLES_AT_ONCE = 8
"""As many gradients of all parameters are held."""


@dataclass(frozen=True)
class GradientReport:
    """Rows in the order of the parameters; `str` of it is the table."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{'parameter':<{width}}  {'g':>9}  {'w':>9}  {'u = lr·g/w':>10}  {'update/w':>9}"]
        for row in self.rows:
            update = "" if row.update is None else f"{row.update:9.2e}"
            lines.append(f"{row.name:<{width}}  {row.g:9.2e}  {row.w:9.2e}  {row.u:10.2e}  {update:>9}")
        return "\n".join(lines)


def gradient_report(params: Params, grads: Params, lr: float, updates: Params | None = None) -> GradientReport:
    """Compare gradients with weights, parameter by parameter.

    Args:
      params: the parameters.
      grads: the gradient with respect to them, of the same structure.
      lr: learning rate, for `u`.
      updates: what the optimizer is about to add to the parameters, of the same structure.
    """
    norms = [row_norms(tree).tolist() for tree in (grads, params, *([] if updates is None else [updates]))]
    return GradientReport(tuple(norm_rows(row_names(params), lr, *norms)))


@dataclass(frozen=True)
class ExampleGradients:
    """The gradient of each example's own loss, and how these agree."""

    loss_B: np.ndarray
    """Nats, of each the mean over its targets as weighted."""
    norm_B: np.ndarray
    """Of each gradient."""
    cosine_B: np.ndarray
    """Of each gradient with the mean of all."""
    parameters: dict[str, np.ndarray]
    """Norms of each parameter's part, `(B,)` by its dotted name, or `(B, H)` where heads lie apart."""
    mean_norm: float
    """Of the mean of all gradients."""

    @property
    def noise_scale(self) -> float:
        """In examples; see `noise_scale`."""
        return noise_scale(self.norm_B, self.mean_norm)


def example_gradients(model: nn.Module, params: Params, batch: Batch) -> ExampleGradients:
    """Look at the gradient of each example by itself, without dropout.

    An example counts as much as any other here, however many targets it has.

    Args:
      batch: examples side by side, each with a target of some weight.
    """
    loss_B, norms, along_B, mean_norms = jax.device_get(_own(model, params, jax.tree.map(jnp.asarray, batch)))
    whole = lambda norms: np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in norms.values()))  # noqa: E731
    norm_B = np.array([whole({name: x[b] for name, x in norms.items()}) for b in range(len(loss_B))])
    mean_norm = float(whole(mean_norms))
    with np.errstate(invalid="ignore", divide="ignore"):  # of a gradient that is 0
        return ExampleGradients(loss_B, norm_B, along_B / (norm_B * mean_norm), norms, mean_norm)


def noise_scale(norm_B: np.ndarray, mean_norm: float) -> float:
    """How many examples make a batch whose gradient is as much signal as noise: tr(Σ) / |G|², of the covariance Σ of
    examples' gradients and their true mean G (McCandlish et al. 2018, equation 2.9).

    Both are estimated without bias, by their appendix A.1 with batches of 1 and B. Infinite where no signal shows among
    so few.

    Args:
      norm_B: of each example's gradient.
      mean_norm: of their mean.
    """
    B, mean_square = len(norm_B), mean_norm**2
    if B < 2:
        return float("nan")
    noise = max(0.0, (float(np.mean(np.square(norm_B))) - mean_square) * B / (B - 1))
    signal = mean_square - noise / B
    return noise / signal if signal > 0 else float("inf")


@partial(jax.jit, static_argnames="model")
def _own(model: nn.Module, params: Params, batch: Batch) -> tuple[jax.Array, Norms, jax.Array, Norms]:
    """Of each example the loss, its gradient's norms, and that gradient times the mean one; the mean one's norms."""

    def loss(params: Params, example: Batch) -> jax.Array:
        nats = objective_of(model).example_loss(model, params, example)
        return nats if example.weights is None else nats / jnp.sum(example.weights)

    mean = jax.grad(lambda params: jnp.mean(jax.vmap(partial(loss, params))(batch)))(params)

    def one(example: Batch) -> tuple[jax.Array, Norms, jax.Array]:
        nats, grads = jax.value_and_grad(loss)(params, example)
        along = sum(jnp.vdot(g, m) for g, m in zip(*map(jax.tree.leaves, (grads, mean)), strict=True))
        return nats, parameter_norms(grads), jnp.asarray(along)

    return *jax.lax.map(one, batch, batch_size=EXAMPLES_AT_ONCE), parameter_norms(mean)

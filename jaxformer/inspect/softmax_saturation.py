"""Attention saturation: gradients of an attention layer as its weights become one-hot, measured on a trained model.

For weights w = softmax(z) of scores z, and u the gradient of the loss with respect to w, the gradient with respect to z
is

    ∂L/∂z_s = w_s (u_s - Σ_r w_r u_r),

which is 0 if w is one-hot, whatever u is: the two terms are equal at the one position with all the weight, and the
others have no weight. But W_Q is upstream of z = x W_Q kᵀ / (τ √K): its gradient is the gradient of z times the keys
divided by τ. At a low temperature τ, one factor grows as the other vanishes, and the gradient of W_Q can rise until
rows are one-hot up to rounding. If instead both W_Q and W_K grow by 1/√τ, only the keys do here, and the gradient is √τ
times that one: it stays level, and falls relative to W_Q.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.dataset import Batch
from jaxformer.inspect.activations import Activations, capture_shapes, capturing
from jaxformer.inspect.attention import row_tokens_and_mask
from jaxformer.inspect.of_run import of_run
from jaxformer.models.objective import Params, objective_of
from jaxformer.nn.parameter_norms import dotted
from jaxformer.ops.attention import row_entropy

TARGETS_AT_ONCE = 256
"""Maximum targets of the examples that are computed together, unless a single one has more: a matmul of a few rows
takes as long as its weights take to be read."""


@dataclass(frozen=True)
class Saturation:
    """Gradients of one attention layer at one temperature, for the mean loss over a batch."""

    temperature: float
    """Divisor of the layer's scores, in addition to their own scale."""
    entropy: float
    """Mean entropy of the attention map's rows, without padding, in nats."""
    scores: float
    """Norm of the gradient with respect to the scores after the temperature, by automatic differentiation."""
    scores_by_hand: float
    """The same norm from the formula above, given the weights and the gradient with respect to them."""
    median_row: float
    """Median norm of the rows of the scores' gradient, without padding."""
    W_Q: float
    """Norm of the gradient of `W_Q`."""
    W_K: float
    """Norm of the gradient of `W_K`."""


@of_run
def saturation(
    model: nn.Module,
    params: Params,
    batch: Batch,
    temperatures: Sequence[float] | float,
    layer: str = "blocks.0.attention",
) -> list[Saturation]:
    """Measure the gradients of one attention layer at several temperatures.

    Args:
      temperatures: divisors of the layer's scores, above 0, or one of them.
      layer: name of a self-attention layer.

    Raises:
      KeyError: the model has no such layer.
      ValueError: a temperature is not above 0.
    """
    if not (np.atleast_1d(temperatures) > 0).all():
        raise ValueError(f"the temperatures are {temperatures}; they must be above 0.")
    batch = jax.tree.map(jnp.asarray, batch)
    return [
        Saturation(float(temperature), *map(float, _measure(model, layer, params, batch, jnp.float32(temperature))))
        for temperature in np.atleast_1d(temperatures)
    ]


@partial(jax.jit, static_argnames=("model", "layer"))
def _measure(model: nn.Module, layer: str, params: Params, batch: Batch, temperature: jax.Array) -> tuple:
    """Return the fields of `Saturation` after its temperature."""
    names = scores, weights = f"{layer}.attn_scores", f"{layer}.pattern"

    def loss(params: Params, shifts: Activations, example: Batch) -> tuple[jax.Array, jax.Array]:
        def edit(name: str, value: jax.Array) -> jax.Array:
            return (value / temperature if name == scores else value) + shifts[name]

        with capturing(names, edit) as captured:
            nll = objective_of(model).example_loss(model, params, example)
        return nll, captured[weights]

    def measure_example(example: Batch) -> tuple:
        shapes = capture_shapes(model, params, *example.inputs, names=names)
        zeros = OrderedDict((name, jnp.zeros(x.shape)) for name, x in shapes.items())
        (_, w_HTS), (grads, g) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, zeros, example)
        by_name = {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}
        target_mask_T = None if example.weights is None else example.weights > 0
        _, valid_T = row_tokens_and_mask(model, layer, example.inputs, target_mask_T)
        valid_HT = jnp.broadcast_to(True if valid_T is None else valid_T, w_HTS.shape[:2])
        return w_HTS, g[scores], g[weights], [by_name[f"{layer}.{name}"] for name in ("W_Q", "W_K")], valid_HT

    chunk = min(len(batch.targets), max(1, TARGETS_AT_ONCE // batch.targets[0].size))
    w_BHTS, g_scores, g_weights, grads_B, valid_BHT = jax.lax.map(measure_example, batch, batch_size=chunk)
    n = len(w_BHTS) if batch.weights is None else jnp.sum(batch.weights)  # the loss is a mean
    by_hand = w_BHTS * (g_weights - jnp.sum(w_BHTS * g_weights, axis=-1, keepdims=True))
    row_norms_BHT = jnp.where(valid_BHT, jnp.linalg.norm(g_scores, axis=-1), jnp.nan)
    return (
        jnp.mean(row_entropy(w_BHTS), where=valid_BHT),
        *(jnp.sqrt(jnp.sum(x * x)) / n for x in (g_scores, by_hand)),
        jnp.nanmedian(row_norms_BHT) / n,
        *(jnp.linalg.norm(g_B.sum(axis=0) / n) for g_B in grads_B),
    )

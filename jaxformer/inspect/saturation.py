"""What becomes of the gradient of attention as its weights become one-hot: an exercise that the sources leave to their
reader, on a model's own weights.

With weights w = softmax(z) of scores z, and u the gradient of the loss with respect to w, that with respect to z is

    ∂L/∂z_s = w_s (u_s - Σ_r w_r u_r),

which is 0 where w is one-hot, whatever u is: of the one place that has all the weight the two terms are the same, and
all others have no weight. Nothing tells such a row to look elsewhere. But W_Q is upstream of z = x W_Q kᵀ / (τ √K): its
gradient is that of z times the keys over τ, so where weights become one-hot because scores are large, by large
projections or a low temperature τ, one factor grows as the other vanishes, and the gradient of W_Q can rise until rows
are one-hot to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.data.dataset import Batch
from jaxformer.inspect.trace import editing, trace
from jaxformer.models.objective import Params, objective_of
from jaxformer.ops.attention import row_entropy
from jaxformer.parameters import dotted


@dataclass(frozen=True)
class Saturation:
    """One layer of attention at one temperature; the loss is the mean over a batch."""

    temperature: float
    """What the layer's scores are divided by, beside what they are anyway."""
    entropy: float
    """Of a row of its weights in nats, the mean."""
    scores: float
    """Norm of the gradient with respect to the scores, as the softmax gets them."""
    scores_by_hand: float
    """The same by the formula above, from the weights and the gradient with respect to them."""
    median_row: float
    """Of the norms of that gradient's rows, the median: half of all queries have no more."""
    W_Q: float
    """Norm of the gradient."""
    W_K: float


def saturation(
    model: nn.Module, params: Params, batch: Batch, temperatures: Sequence[float], layer: str = "blocks.0.attention"
) -> list[Saturation]:
    """Measure one layer at several temperatures, all else as ever.

    Args:
      batch: examples side by side.
      layer: a module of attention of the model to itself, by name.

    Raises:
      ValueError: the model has no such layer.
    """
    batch = jax.tree.map(jnp.asarray, batch)
    rows = []
    for temperature in temperatures:
        found = jax.device_get(_measure(model, layer, params, batch, jnp.float32(temperature)))
        rows.append(Saturation(float(temperature), *map(float, found)))
    return rows


@partial(jax.jit, static_argnames=("model", "layer"))
def _measure(model: nn.Module, layer: str, params: Params, batch: Batch, temperature: jax.Array) -> tuple:
    """The fields of `Saturation` but its temperature."""
    scores, weights = f"{layer}.scores", f"{layer}.weights"

    def loss(params: Params, moved: dict[str, jax.Array], example: Batch) -> tuple[jax.Array, jax.Array]:
        found: dict[str, jax.Array] = {}

        def edit(name: str, value: jax.Array) -> jax.Array:
            if name == scores:
                return value / temperature + moved[name]
            if name == weights:
                found[name] = value
                return value + moved[name]
            return value

        with editing(edit):
            nats = objective_of(model).example_loss(model, params, example)
        return nats, found[weights]

    def one(example: Batch) -> tuple:
        shapes: Any = jax.eval_shape(lambda: trace(model, params, *example.inputs, names=(scores, weights)))
        if not shapes:
            raise ValueError(f"the model has no {layer}")
        still = {name: jnp.zeros(x.shape) for name, x in shapes.items()}
        (_, w_HTS), (grads, to) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, still, example)
        by_name = {dotted(path): g for path, g in jax.tree_util.tree_leaves_with_path(grads)}
        return w_HTS, to[scores], to[weights], [by_name[f"{layer}.{name}"] for name in ("W_Q", "W_K")]

    w_BHTS, to_scores, to_weights, grads_B = jax.lax.map(one, batch)
    n = len(w_BHTS) if batch.weights is None else jnp.sum(batch.weights)  # the loss is a mean
    by_hand = w_BHTS * (to_weights - jnp.sum(w_BHTS * to_weights, axis=-1, keepdims=True))
    rows_BHT = jnp.linalg.norm(to_scores, axis=-1)
    norms = [jnp.linalg.norm(g_B.sum(axis=0) / n) for g_B in grads_B]
    return (
        jnp.mean(row_entropy(w_BHTS)), *(jnp.sqrt(jnp.sum(x * x)) / n for x in (to_scores, by_hand)),
        jnp.median(rows_BHT) / n, *norms,
    )  # fmt: skip

"""Activation patching, exact and to first order: the effect of one input's activations on the output for another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.inspect.activations import Activations, capture, intervene, value_and_capture_gradients
from jaxformer.inspect.names import position_axis
from jaxformer.inspect.of_run import of_run
from jaxformer.models.inputs import check_example
from jaxformer.models.objective import Params
from jaxformer.ops.precision import upcast


@of_run
def patch_activations(
    model: nn.Module,
    params: Params,
    inputs: Sequence[jax.Array],
    source: Sequence[jax.Array],
    names: str | Sequence[str],
    metric: Callable[[jax.Array], jax.Array],
) -> Activations:
    """Return a metric of the logits after an activation at one position is replaced by its value for another input,
    `(T,)` by name, one value per position: activation patching (Meng et al. 2022, section 2).

    Args:
      inputs: inputs of the model, whose logits are measured.
      source: inputs of the same shapes, which provide the replacements.
      names: patterns of activations with a position axis, first or after the head axis, such as `blocks.*.resid_pre`.
      metric: function from logits to a scalar, such as the difference between two tokens' logits at the last position.
        Pass the same function object in each call: a new one triggers compilation.

    Raises:
      ValueError: the inputs are a batch, or differ from the source in shape; an activation has no position axis; the
        metric is no scalar.
      KeyError, IndexError: see `capture`.
    """
    return _patch(model, params, *check_pair(model, inputs, source, names), metric)


@partial(jax.jit, static_argnames=("model", "names", "metric"))
def _patch(
    model: nn.Module, params: Params, inputs: tuple, source: tuple, names: tuple[str, ...], metric: Callable
) -> Activations:
    replacements = capture(model, params, *source, names=names)
    lengths = [x.shape[position_axis(name, x.shape)] for name, x in replacements.items()]
    numbers = dict(
        zip(replacements, jnp.arange(len(lengths)), strict=True)
    )  # no Python numbers: one scan of all blocks

    def patched_metric(place: tuple[jax.Array, jax.Array]) -> jax.Array:
        number, position = place

        def patched(name: str, value: jax.Array) -> jax.Array:
            axis = position_axis(name, value.shape)
            is_patched = (jnp.arange(value.shape[axis]) == position) & (number == numbers[name])
            others = [a for a in range(value.ndim) if a != axis]
            return jnp.where(jnp.expand_dims(is_patched, others), replacements[name], value)

        with intervene(names, patched):
            value = metric(model.apply({"params": params}, *inputs))
        if shape := jnp.shape(value):
            raise ValueError(f"the metric returns an array of shape {shape}; it must return a scalar.")
        return value

    places = np.array([(i, t) for i, length in enumerate(lengths) for t in range(length)])
    results = jax.lax.map(patched_metric, tuple(jnp.array(places.T)))
    return OrderedDict(zip(replacements, jnp.split(results, np.cumsum(lengths)[:-1]), strict=True))


@of_run
def attribution_patching(
    model: nn.Module,
    params: Params,
    inputs: Sequence[jax.Array],
    source: Sequence[jax.Array],
    names: str | Sequence[str],
    metric: Callable[[jax.Array], jax.Array],
) -> Activations:
    """Return first-order estimates of `patch_activations`, `(T,)` by name: the metric of `inputs` plus its gradient by
    the activation times the difference of the two activations (Nanda 2023; Syed et al. 2023).

    The estimates take two forward passes and one backward pass for any number of names and positions; exact patching
    takes one forward pass for each. They are exact if the metric is linear in the activation, and fail where it
    saturates or a norm intervenes; check important ones with `patch_activations`.

    Args:
      inputs: as in `patch_activations`.
      source: inputs of the same shapes.
      names: patterns of activations; integer and bool activations have no estimate.
      metric: function from logits to a scalar.

    Raises:
      ValueError: the inputs are a batch, or differ from the source in shape; an activation has no position axis.
      KeyError, IndexError: see `capture`.
    """
    return _estimate(model, params, *check_pair(model, inputs, source, names), metric)


@partial(jax.jit, static_argnames=("model", "names", "metric"))
def _estimate(
    model: nn.Module, params: Params, inputs: tuple, source: tuple, names: tuple[str, ...], metric: Callable
) -> Activations:
    replacements = capture(model, params, *source, names=names)
    value, values, grads = value_and_capture_gradients(lambda: metric(model.apply({"params": params}, *inputs)), names)

    def estimate_each_position(name: str, grad: jax.Array) -> jax.Array:
        effect = upcast(grad) * (upcast(replacements[name]) - upcast(values[name]))
        axis = position_axis(name, effect.shape)
        return value + effect.sum(axis=[a for a in range(effect.ndim) if a != axis])

    return OrderedDict((name, estimate_each_position(name, grad)) for name, grad in grads.items())


def check_pair(
    model: nn.Module, inputs: Sequence[jax.Array], source: Sequence[jax.Array], names: str | Sequence[str]
) -> tuple[tuple, tuple, tuple[str, ...]]:
    """Check the inputs; return them and the patterns as tuples."""
    for example in (inputs, source):
        check_example(model, *example)
    shapes, source_shapes = ([None if x is None else jnp.shape(x) for x in xs] for xs in (inputs, source))
    if shapes != source_shapes:
        raise ValueError(f"inputs have shapes {shapes} and source {source_shapes}")
    return tuple(inputs), tuple(source), (names,) if isinstance(names, str) else tuple(names)

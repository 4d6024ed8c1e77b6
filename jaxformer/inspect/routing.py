"""Expert load in a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax

from jaxformer.inspect.activations import Inputs
from jaxformer.inspect.of_run import of_run
from jaxformer.models.objective import Params
from jaxformer.nn.execution import ROUTER
from jaxformer.nn.experts import routers
from jaxformer.nn.parameter_norms import dotted
from jaxformer.ops.experts import RouterStatistics, average_statistics


@of_run
def router_report(model: nn.Module, params: Params, inputs_B: Inputs) -> dict[str, dict[str, Any]]:
    """Return, per expert layer, the fraction of choices that each expert gets, and the fraction dropped in training.

    Args:
      model: any model; `{}` is returned for one without experts.
      inputs_B: inputs of the model, each array with leading axis B.

    Returns:
      JSON for the log: `{'blocks.0.mlp': {'share': [0.3, …], 'dropped': 0.02}}`.
    """
    layers = jax.device_get(_statistics(model, params, inputs_B))
    return {name: {"share": s.share_E.tolist(), "dropped": float(s.dropped)} for name, s in layers.items()}


@partial(jax.jit, static_argnums=0)
def _statistics(model: nn.Module, params: Params, inputs: Inputs) -> dict[str, RouterStatistics]:
    """Return router statistics of the batch by layer."""

    def example_statistics(inputs: Inputs) -> Mapping[str, Any]:
        # A dropout key selects training mode, in which the capacity of experts is limited.
        _, sown = model.apply({"params": params}, *inputs, mutable=[ROUTER], rngs={"dropout": jax.random.key(0)})
        return sown.get(ROUTER, {})

    by_layer = routers(jax.vmap(example_statistics)(inputs))
    return {dotted(name.split(".")): average_statistics(statistics_B) for name, statistics_B in by_layer.items()}

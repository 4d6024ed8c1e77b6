"""What the routers of a mixture of experts do with tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.models.objective import Params
from jaxformer.nn.execution import ROUTER
from jaxformer.nn.experts import routers
from jaxformer.ops.experts import RouterStatistics
from jaxformer.parameters import dotted


def router_report(model: nn.Module, params: Params, inputs: tuple[Any, ...]) -> dict[str, dict[str, Any]]:
    """Of each layer of experts, the share of choices that fall on each, and of those that find no room in training.

    Args:
      inputs: what the model is called with, each array with B first.

    Returns:
      For the log, `{'blocks.0.mlp': {'share': [0.3, …], 'dropped': 0.02}}`, numbers of Python; `{}` for a model without
      experts.
    """
    found = jax.device_get(_statistics(model, params, inputs))
    return {
        name: {"share": statistics.share_E.tolist(), "dropped": float(statistics.dropped)}
        for name, statistics in found.items()
    }


@partial(jax.jit, static_argnums=0)
def _statistics(model: nn.Module, params: Params, inputs: tuple[Any, ...]) -> dict[str, RouterStatistics]:
    """By layer, averaged over the batch."""

    def one(inputs: tuple[Any, ...]) -> Mapping[str, Any]:
        # As in training, where room is limited: that is what a key for dropout says.
        _, sown = model.apply({"params": params}, *inputs, mutable=[ROUTER], rngs={"dropout": jax.random.key(0)})
        return sown.get(ROUTER, {})

    mean = jax.tree.map(lambda x_B: jnp.mean(x_B, axis=0), jax.vmap(one)(inputs))
    return {dotted(name.split(".")): statistics for name, statistics in routers(mean).items()}

"""What the heads look at."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.inspect.trace import trace
from jaxformer.models.objective import Params
from jaxformer.ops.attention import row_entropy


def attention_maps(model: nn.Module, params: Params, *inputs: jax.Array | None) -> list[jax.Array]:
    """The attention weights of one example, `(H, T, S)` float32 a layer of attention, in the order of the computation:
    for a `Decoder`, a map a block."""
    return list(named_attention_maps(model, params, *inputs).values())


def named_attention_maps(model: nn.Module, params: Params, *inputs: jax.Array | None) -> dict[str, jax.Array]:
    """The same by the layers' names: `decoder_blocks.0.cross_attention` is where an `EncoderDecoder` looks at its
    source.

    Args:
      inputs: what the model is called with, such as tokens.
    """
    found = trace(model, params, *inputs, names="*attention.weights")
    return {name.removesuffix(".weights"): weights_HTS for name, weights_HTS in found.items()}


@partial(jax.jit, static_argnums=0)
def attention_entropy(model: nn.Module, params: Params, *inputs_B: jax.Array) -> list[jax.Array]:
    """Mean entropy of the rows of attention in nats, `(H,)` a layer of attention; empty for a model without any.

    log t is the most that row t can have, 0 means that every query looks at one place.

    Args:
      inputs_B: what the model is called with, of several examples.
    """

    def one(inputs: tuple[jax.Array, ...]) -> list[jax.Array]:
        return [row_entropy(weights_HTS).mean(axis=-1) for weights_HTS in attention_maps(model, params, *inputs)]

    # One example after the other: the weights are as large as the square of its length.
    found = jax.lax.map(one, jax.tree.map(jnp.asarray, inputs_B))
    return [entropy_BH.mean(axis=0) for entropy_BH in found]

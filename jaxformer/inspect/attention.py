"""What the heads look at."""

from __future__ import annotations

from functools import partial
from typing import Any

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


CROSS = "cross_attention"
"""In the name of a layer that looks at another sequence than its rows are of."""


def text_of(
    layer: str, inputs: tuple[Any, ...], counts_T: jax.Array | None = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """The tokens that the rows of a layer are of, where it looks at them, and which rows are no padding; None where
    there is none, or all are.

    Args:
      inputs: of one example.
      counts_T: True where its target is no padding, which only a layer that reads the target goes by.
    """
    if CROSS in layer:
        return None, counts_T
    if layer.startswith("decoder_blocks"):
        return inputs[2], counts_T
    tokens, *rest = inputs[int(layer.startswith("text_blocks")) :]
    if tokens.ndim != 1 or tokens.dtype == jnp.uint8:
        return None, None
    return tokens, rest[0] if rest and rest[0] is not None and rest[0].dtype == bool else None


@partial(jax.jit, static_argnums=0)
def attention_entropy(model: nn.Module, params: Params, *inputs_B: Any, counts_BT: Any = None) -> list[jax.Array]:
    """Entropy of the rows of attention in nats, `(H,)` a layer of attention: the mean over examples of each one's mean
    over rows that are no padding. Empty for a model without attention.

    log t is the most that row t can have, 0 means that every query looks at one place.

    Args:
      inputs_B: what the model is called with, of several examples.
      counts_BT: True where a target of theirs is no padding.
    """

    def one(example: tuple[tuple[Any, ...], Any]) -> list[jax.Array]:
        inputs, counts_T = example
        maps = named_attention_maps(model, params, *inputs)
        return [row_entropy(w_HTS).mean(axis=-1, where=text_of(at, inputs, counts_T)[1]) for at, w_HTS in maps.items()]

    # One example after the other: the weights are as large as the square of its length.
    found = jax.lax.map(one, jax.tree.map(jnp.asarray, (inputs_B, counts_BT)))
    return [entropy_BH.mean(axis=0) for entropy_BH in found]

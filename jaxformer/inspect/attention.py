"""Attention maps and their entropy."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxformer.contract import contract_of
from jaxformer.inspect.activations import Activations, Inputs, capture
from jaxformer.inspect.of_run import of_run
from jaxformer.models.inputs import valid_tokens
from jaxformer.models.objective import Params, is_causal_lm
from jaxformer.ops.attention import row_entropy

CROSS = "cross_attention"
"""Substring in the names of layers that attend to another sequence."""


@of_run
def attention_maps(model: nn.Module, params: Params, *inputs: jax.Array | None) -> list[jax.Array]:
    """Return the attention map of each layer for one example, `(H, T, S)` float32, in order of computation."""
    return list(named_attention_maps(model, params, *inputs).values())


@of_run
def named_attention_maps(model: nn.Module, params: Params, *inputs: jax.Array | None) -> Activations:
    """Return the attention maps of one example, `(H, T, S)` float32, by layer, such as `blocks.0.attention`.

    Args:
      model: any model; `{}` is returned for one without attention.
      inputs: inputs of the model, such as tokens `(T,)`.
    """
    patterns = capture(model, params, *inputs, names="*attention.pattern", missing_ok=True)
    return OrderedDict((name.removesuffix(".pattern"), pattern_HTS) for name, pattern_HTS in patterns.items())


def row_tokens_and_mask(
    model: nn.Module, layer: str, inputs: Inputs, target_mask_T: jax.Array | None = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the tokens `(T,)` of the rows of a layer's attention map, and a mask `(T,)` that is False for padding, for
    the inputs of one example. The tokens are None for cross-attention and images; the mask is None without padding.

    `target_mask_T` is the mask of layers that read the target. In a causal language model without segments, what
    follows the last target is padding; what precedes it, such as a prefix, is not, target or no.
    """
    if CROSS in layer:
        return None, target_mask_T
    if layer.startswith("decoder_blocks"):
        return inputs[2], target_mask_T
    tokens, *rest = inputs[int(layer.startswith("text_blocks")) :]
    if tokens.ndim != 1 or tokens.dtype == jnp.uint8:
        return None, None
    if rest and rest[0] is not None and rest[0].dtype == bool:
        return tokens, rest[0]
    valid_T = valid_tokens(contract_of(model), inputs)
    if valid_T is None and target_mask_T is not None and is_causal_lm(model) and len(target_mask_T) == len(tokens):
        valid_T = jax.lax.cummax(jnp.asarray(target_mask_T, jnp.int32), reverse=True) > 0
    return tokens, valid_T


@of_run
@partial(jax.jit, static_argnums=0)
def attention_entropy(
    model: nn.Module, params: Params, *inputs_B: ArrayLike | None, target_mask_BT: ArrayLike | None = None
) -> list[jax.Array]:
    """Return the attention entropy of each head in nats, `(H,)` per layer: the mean over examples of the mean over rows
    that are not padding.

    The entropy of row t is at most log t, and 0 if the query attends to one position only. Returns `[]` for a model
    without attention.

    Args:
      inputs_B: inputs of the model, for several examples.
      target_mask_BT: True where a target is not padding.
    """

    def example_entropy(example: tuple[Inputs, jax.Array | None]) -> list[jax.Array]:
        inputs, mask_T = example
        return [
            row_entropy(weights_HTS).mean(axis=-1, where=row_tokens_and_mask(model, layer, inputs, mask_T)[1])
            for layer, weights_HTS in named_attention_maps(model, params, *inputs).items()
        ]

    # One example at a time: the size of attention maps is quadratic in the sequence length.
    entropies = jax.lax.map(example_entropy, jax.tree.map(jnp.asarray, (inputs_B, target_mask_BT)))
    return [jnp.nanmean(entropy_BH, axis=0) for entropy_BH in entropies]  # NaN for an example of only padding

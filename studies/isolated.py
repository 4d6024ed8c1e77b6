"""Rungs of the ladder with one thing changed that no option changes, for `studies.ladder`: attention without its
softmax, one of the two residual connections, one of the two norms, and a smaller output of attention."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxformer.config import Config
from jaxformer.config.files import load_module
from jaxformer.ladder.rungs import RungDecoderConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.nn.block import Block, Make
from jaxformer.nn.execution import Execution
from jaxformer.ops.attention import attention_scores, weighted_sum
from jaxformer.ops.masks import as_array

LADDER = load_module("ladder_small")
SMALLER = 0.25
"""Factor of W_O's products in `small_output`."""


def without_softmax(q_HTK: jax.Array, k_HTK: jax.Array, v_HTK: jax.Array, mask: Any, scale: float) -> jax.Array:
    """Return mask(Q Kᵀ · scale / √t) V, `(H, T, K)`, where t is the number of visible keys: the root keeps the variance
    of the sum that of one term."""
    visible_TS = as_array(mask, q_HTK.shape[-2], k_HTK.shape[-2])
    weights_HTS = jnp.where(visible_TS, attention_scores(q_HTK, k_HTK, scale), 0)
    return weighted_sum(weights_HTS / jnp.sqrt(visible_TS.sum(-1, keepdims=True)), v_HTK)


class AttentionResidual(Block):
    """`Block` with a residual connection around attention only."""

    def _add(self, sublayer: str, name: str, x_TD: jax.Array, y_TD: jax.Array, key: jax.Array | None) -> jax.Array:
        return y_TD if sublayer == "mlp" else super()._add(sublayer, name, x_TD, y_TD, key)


class NormBeforeAttention(Block):
    """`Block` with a norm before attention only."""

    def _normalized(self, sublayer: str, x_TD: jax.Array) -> jax.Array:
        return super()._normalized(sublayer, x_TD) if sublayer == "attention" else x_TD


class NormBeforeMLP(Block):
    """`Block` with a norm before the MLP only."""

    def _normalized(self, sublayer: str, x_TD: jax.Array) -> jax.Array:
        return super()._normalized(sublayer, x_TD) if sublayer == "mlp" else x_TD


class SmallOutput(Block):
    """`Block` whose attention adds `SMALLER` times its output."""

    def _add(self, sublayer: str, name: str, x_TD: jax.Array, y_TD: jax.Array, key: jax.Array | None) -> jax.Array:
        return super()._add(sublayer, name, x_TD, SMALLER * y_TD if sublayer == "attention" else y_TD, key)


BLOCKS: dict[str, type[Block]] = {
    "plain": Block,
    "attention_residual": AttentionResidual,
    "norm_before_attention": NormBeforeAttention,
    "norm_before_mlp": NormBeforeMLP,
    "small_output": SmallOutput,
}
"""Blocks by `IsolatedConfig.block`."""


@dataclass(frozen=True)
class IsolatedConfig(RungDecoderConfig):
    """Shape of a rung's decoder with one part of its blocks changed."""

    block: Literal["plain", "attention_residual", "norm_before_attention", "norm_before_mlp", "small_output"] = "plain"
    """Kind of the blocks."""
    softmax: bool = True
    """False for `without_softmax`."""

    def make_attention(self, execution: Execution, *args: Any, **options: Any) -> Make:
        make = super().make_attention(execution, *args, **options)
        return make if self.softmax else partial(make, attention=without_softmax)

    def make_decoder_block(self, execution: Execution, i: int, **parts: Any) -> Block:
        if self.mlp_logits:  # of the one block
            parts["make_mlp"] = partial(self.make_mlp(execution, i), d_out=self.vocab_size)
        return DecoderConfig.make_decoder_block(self, execution, i, block=BLOCKS[self.block], **parts)


def changed(rung: str, **changes: Any) -> Config:
    """Return a rung at the small size with other fields of its model."""
    config: Config = getattr(LADDER, rung)
    return replace(config, model=IsolatedConfig(**vars(config.model) | changes))


no_softmax = changed("residual", softmax=False)
plus_around_attention = changed("attention_scaled", block="attention_residual")
plus_and_unembedding = changed("residual", block="attention_residual")
norm_before_attention = changed("four_blocks", norm="rmsnorm", block="norm_before_attention")
norm_before_mlp = changed("four_blocks", norm="rmsnorm", block="norm_before_mlp")
small_output = changed("four_blocks", block="small_output")

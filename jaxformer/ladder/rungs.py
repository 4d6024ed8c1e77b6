"""Decoder of the ladder's rungs, with what only they have: blocks without residual connections, heads without `W_O`,
logits directly from an MLP, other scales of attention, and values of the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.config.fields import NonNegativeFloat, Size
from jaxformer.contract import Contract
from jaxformer.errors import UserError
from jaxformer.models.decoder import Decoder, DecoderConfig
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.block import PARALLEL, Block, Make
from jaxformer.nn.embedding import Embedding
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.local_heads import LocalHeads
from jaxformer.ops.cache import KVCache


@dataclass(frozen=True)
class RungDecoderConfig(DecoderConfig):
    """Shape of a `RungDecoder`."""

    value_dim: Size | None = None
    """Width of a head's values and output; by default, that of its queries and keys."""
    scaled: bool = True
    """Divide the scores by the square root of the head's width."""
    scaled_by_model: bool = False
    """If scaled, divide the scores by the square root of the model's width instead, however wide the heads are."""
    projection_std: NonNegativeFloat | None = None
    """Standard deviation of W_Q, W_K, W_V, W_O at initialisation; by default, 1/sqrt(d_model)."""
    output_projection: bool = False
    """Multiply the concatenated heads by W_O. If false, heads that split the model's width are concatenated, and heads
    as wide as the model are summed."""
    residual: bool = True
    """Add the output of attention and of the MLP to their input (residual connections)."""
    value_embedding: bool = False
    """A second embedding per token, times embedding_scale, added to the token's values in every block, so that values
    carry the token's identity (after Zhou et al. 2024, who share the values of the first block). Zero at
    initialisation."""
    mlp_logits: bool = False
    """Logits directly from the last block's MLP, whatever unembedding is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.n_heads * self.width_of_values
        if not self.output_projection and not self.sums_heads and total != self.d_model:
            name = "head_dim" if self.value_dim is None else "value_dim"
            remedy = f"set output_projection, or {name} to {self.d_model} for their sum"
            problem = f"{self.n_heads} heads of width {self.width_of_values} make {total}, not d_model {self.d_model}"
            raise UserError(f"{problem}; {remedy}.")
        if self.local_heads and not self.output_projection:
            raise UserError(f"local_heads is {self.local_heads}, which needs output_projection; set it, or omit both.")
        if self.mlp_logits and self.residual:
            problem = "mlp_logits makes the last block vocab_size wide, which cannot be added to the residual stream"
            raise UserError(f"{problem}; set residual or mlp_logits to false.")
        if self.mlp_logits and self.experts is not None:
            raise UserError("mlp_logits needs one MLP per block, not experts; omit one of them.")
        if self.mlp_logits and self.unembedding_bias:
            raise UserError("mlp_logits has no unembedding for unembedding_bias; omit one of them.")
        if self.latents is not None:
            raise UserError(
                f"latents is {self.latents}, which a decoder of the ladder does not have; use DecoderConfig."
            )
        if not self.residual and self.norm_placement in PARALLEL:
            problem = f"norm_placement is {self.norm_placement}, whose parts are added to the residual stream"
            raise UserError(f"{problem}; set residual to true.")

    @property
    def has_W_out(self) -> bool:
        return super().has_W_out and not self.mlp_logits

    @property
    def sums_heads(self) -> bool:
        """True if the output of attention is the sum of the heads, each as wide as the model."""
        return not self.output_projection and self.width_of_values == self.d_model

    @property
    def width_of_values(self) -> int:
        return self.value_dim or self.width_of_head

    @property
    def scale(self) -> float:
        if self.score_scale is not None or (self.scaled and not self.scaled_by_model):
            return super().scale
        return self.d_model**-0.5 if self.scaled else 1.0

    @property
    def attention_std(self) -> float:
        return super().attention_std if self.projection_std is None else self.projection_std

    @property
    def attention_gain(self) -> float:
        return super().attention_gain if self.output_projection else self.n_heads if self.sums_heads else 1

    @property
    def contract(self) -> Contract:
        has_features = not self.mlp_logits  # the last block returns the logits
        return replace(super().contract, has_residual_stream=self.residual, has_features=has_features)

    def is_same_model(self, other: object) -> bool:
        if type(other) is DecoderConfig:
            other = RungDecoderConfig(**vars(other), output_projection=True, projection_std=self.projection_std)
        return self == other

    def build(self, execution: Execution = PLAIN) -> RungDecoder:
        return RungDecoder(self, execution)

    def make_attention(
        self, execution: Execution, heads: type[MultiHeadAttention] = LocalHeads, **options: Any
    ) -> Make:
        if not self.output_projection:
            heads = SummedHeads if self.sums_heads else ConcatenatedHeads
        if self.scale != super().scale:
            options["scale"] = self.scale
        return super().make_attention(
            execution, heads, value_dim=self.value_dim, init_std=self.projection_std, **options
        )

    def make_decoder_block(self, execution: Execution, i: int, **parts: Any) -> Block:
        if not self.residual:
            parts["block"] = PlainBlock
        if self.mlp_logits and i == self.n_blocks - 1:
            parts["make_mlp"] = partial(self.make_mlp(execution, i), d_out=self.vocab_size)
        return super().make_decoder_block(execution, i, **parts)


class RungDecoder(Decoder):
    """`Decoder` of a rung."""

    config: RungDecoderConfig

    def setup(self) -> None:
        super().setup()
        c = self.config
        if c.value_embedding:
            self.value_embedding = Embedding(
                vocab_size=c.vocab_size,
                n_positions=c.n_positions,
                d_model=c.kv_heads * c.width_of_values,
                positions="none",
                init_std=0.0,
                scale=c.embedding_scale,
            )

    def features(self, tokens_T: jax.Array, *args: Any, **options: Any) -> jax.Array:
        with self._adding_values(tokens_T):
            return super().features(tokens_T, *args, **options)

    def extend(self, tokens_T: jax.Array, *args: Any, **options: Any) -> tuple[jax.Array, KVCache]:
        with self._adding_values(tokens_T):
            return super().extend(tokens_T, *args, **options)

    @contextmanager
    def _adding_values(self, tokens_T: jax.Array) -> Iterator[None]:
        """Add the value embedding, `(G, T, K)`, to the values of each block, before they are cached."""
        if not self.config.value_embedding:
            yield
            return
        rows_TD = self.value_embedding(tokens_T, jnp.arange(len(tokens_T)))
        added_GTK = rows_TD.reshape(len(tokens_T), self.config.kv_heads, -1).swapaxes(0, 1)

        def with_added(call: Callable, args: tuple, named: dict, context: nn.module.InterceptorContext) -> Any:
            if context.method_name != "keys_values":
                return call(*args, **named)
            k_GTK, v_GTK = call(*args, **named)
            return k_GTK, v_GTK + added_GTK

        with nn.intercept_methods(with_added):
            yield

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        return self.readout(x_TD) if self.config.mlp_logits else super().unembed(x_TD)


class PlainBlock(Block):
    """`Block` without residual connections: f(norm(x)) instead of x + f(norm(x))."""

    def residual(self, x_TD: jax.Array, y_TD: jax.Array) -> jax.Array:
        return y_TD


class ConcatenatedHeads(LocalHeads):
    """`MultiHeadAttention` whose output is the heads themselves, `(T, H·K)`."""

    def merge_heads(self, y_HTK: jax.Array, d_model: int) -> jax.Array:
        return y_HTK.swapaxes(0, 1).reshape(y_HTK.shape[1], -1)


class SummedHeads(LocalHeads):
    """`MultiHeadAttention` whose output is the sum of the heads, `(T, K)`."""

    def merge_heads(self, y_HTK: jax.Array, d_model: int) -> jax.Array:
        return y_HTK.sum(axis=0)

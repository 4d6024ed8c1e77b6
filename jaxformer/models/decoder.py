"""Decoder-only transformer (Radford et al. 2018): a causal language model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.config.fields import Fraction, NonNegativeFloat, PositiveFloat, Size
from jaxformer.contract import ARRAY, Contract, Input
from jaxformer.errors import UserError
from jaxformer.models.causal import CausalAttentionConfig
from jaxformer.models.inputs import check_length
from jaxformer.nn.block import Block, SideInputs, run_blocks
from jaxformer.nn.capture import capture_point
from jaxformer.nn.embedding import Embedding, Positions
from jaxformer.nn.execution import PLAIN, Execution, traced_once
from jaxformer.nn.norms import Norm
from jaxformer.nn.parameters import parameter
from jaxformer.ops import masks
from jaxformer.ops.cache import KVCache, LayerCache, init_cache, write_positions
from jaxformer.ops.linear_cross_entropy import Unembedding
from jaxformer.ops.masks import Causal, Mask, Packed
from jaxformer.ops.positions import positions_in_segments


@dataclass(frozen=True)
class DecoderConfig(CausalAttentionConfig):
    """Shape of a `Decoder`."""

    d_model: Size = 256
    n_heads: Size = 1
    prefix: bool = False
    """Attend in both directions within a prefix of each sequence (prefix language model, Raffel et al. 2020). Its
    length is an input; in generation, the prefix is the prompt."""
    d_ff: tuple[Size, ...] = (2048, 2048)
    norm: Literal["none", Norm] = "none"  # type: ignore[assignment]
    """Kind of norm; none for no norms, whatever norm_placement is."""
    norm_placement: Literal["pre", "post", "both"] = "pre"  # type: ignore[assignment]
    """Norms before each sublayer (pre), after each residual connection (post), or before and after each sublayer
    (both)."""
    final_norm: bool = False
    """Additional norm before the unembedding."""
    positions: Positions = "learned"
    embedding_std: NonNegativeFloat = 1.0
    """Standard deviation of the embeddings of tokens and, if learned, positions at initialisation."""
    embedding_scale: float = 1.0
    """Factor applied to a token's row of the embedding."""
    unembedding: Literal["linear", "tied"] = "linear"
    """Logits from W_out (linear), or from the transposed embedding (tied: weight tying)."""
    unembedding_std: NonNegativeFloat | None = None
    """Standard deviation of W_out at initialisation; by default, 1/sqrt(d_model). With small values the initial loss is
    log(vocab_size)."""
    logit_soft_cap: PositiveFloat | None = None
    """Bound c of the logits, c · tanh(logits / c) (Gemma 2); none for no bound."""
    dropout: Fraction = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix and self.window is not None:
            raise UserError(f"window is {self.window}, but all positions attend to a prefix; omit one of them.")
        if self.final_norm and self.norm == "none":
            raise UserError("final_norm adds a norm of the kind that norm names; set norm to rmsnorm or layernorm.")
        if self.unembedding_std is not None and self.unembedding != "linear":
            raise UserError(f"unembedding_std is {self.unembedding_std}: {self.unembedding!r} has no W_out; omit it.")

    @property
    def routes_tokens(self) -> bool:
        """True if the MLPs are mixtures of experts, to which padding is not sent."""
        return False

    @property
    def contract(self) -> Contract:
        tokens, is_windowed = super().contract, self.attention_window < self.context_length
        mask = ARRAY if self.prefix else Causal(self.attention_window if is_windowed else None)
        return replace(
            tokens,
            inputs=(*tokens.inputs, Input("prefix", (), "int32")) if self.prefix else tokens.inputs,
            has_features=True,
            has_cache=True,
            attention_window=self.attention_window,
            layer_windows=self.block_windows,
            extrapolates=tokens.max_tokens is None,
            has_prefix=self.prefix,
            has_segments=not self.prefix,
            attention=self.attention_shape(self.context_length, mask),
            scaled_width=None if self.unembedding == "tied" else self.d_model,
            has_residual_stream=True,
        )

    def build(self, execution: Execution = PLAIN) -> Decoder:
        return Decoder(self, execution)

    def make_decoder_block(self, execution: Execution, i: int, **parts: Any) -> Block:
        """Return the i-th block; `parts` are those of `make_block`."""
        if self.norm == "none":
            parts["make_norm"] = None
        return self.make_block(execution, make_attention=self.make_attention(execution, rope=self.rope(i)), **parts)


class Decoder(nn.Module):
    """Causal language model: maps tokens `(T,)` int32 to next-token logits `(T, V)`.

    There is no batch axis: `jax.vmap` adds it around the call, so that no line below can mix two examples.
    """

    config: DecoderConfig
    execution: Execution = PLAIN

    def setup(self) -> None:
        c = self.config
        self.embedding = Embedding(
            vocab_size=c.vocab_size,
            n_positions=c.n_positions,
            d_model=c.d_model,
            positions=c.positions,
            init_std=c.embedding_std,
            scale=c.embedding_scale,
        )
        self.blocks = [c.make_decoder_block(self.execution, i) for i in range(c.n_blocks)]
        if c.final_norm:
            self.final_norm = c.make_norm()
        if c.unembedding == "linear":
            std = c.d_model**-0.5 if c.unembedding_std is None else c.unembedding_std
            self.W_out = parameter(
                self, "W_out", nn.initializers.normal(std), (c.d_model, c.vocab_size), "embed -> vocab"
            )

    def __call__(
        self, tokens_T: jax.Array, prefix: jax.Array | int | None = None, segments_T: jax.Array | None = None
    ) -> jax.Array:
        """Return logits `(T, V)`.

        Args:
          prefix: number of initial tokens that every token attends to (Raffel et al. 2020, figure 3); None for causal
            attention.
          segments_T: packed-document index of each token, int32, 0 for padding: attention and positions are separate
            for each document. None for a single document. Cannot be combined with a prefix.

        Raises:
          ValueError: positions are learned and T exceeds their number (other positions continue, and a token attends to
            the last `attention_window`); there is not one segment per token, or a prefix as well.
          TypeError: the prefix is not an integer.
        """
        return capture_point(self, "logits", self.unembed(self.features(tokens_T, prefix, segments_T)))

    def features(
        self, tokens_T: jax.Array, prefix: jax.Array | int | None = None, segments_T: jax.Array | None = None
    ) -> jax.Array:
        """Return the residual stream after the last block, `(T, D)`, the input of `unembed`."""
        c, positions_T, valid_T = self.config, jnp.arange(len(tokens_T)), None
        check_length(c.contract, len(tokens_T))  # beyond the last row of W_pos, JAX would repeat it
        # Before positions restart in each segment: masks of a whole sequence count from its beginning.
        mask_of = {window: self._mask(positions_T, prefix, segments_T, window) for window in set(c.block_windows)}
        if segments_T is not None:
            positions_T = positions_in_segments(segments_T)
            valid_T = segments_T != 0 if c.routes_tokens else None
        x_TD = self.embedding(tokens_T, positions_T)
        keys = jax.random.split(self.make_rng("dropout"), c.n_blocks) if self.has_rng("dropout") else None
        for window, part in c.block_groups:  # a scan needs blocks with the same mask
            inputs = SideInputs(positions_T, mask_of[window], valid_T=valid_T)
            x_TD = run_blocks(self.blocks[part], self.execution, x_TD, inputs, None if keys is None else keys[part])
        return x_TD

    def extend(
        self,
        tokens_T: jax.Array,
        positions_T: jax.Array,
        cache: KVCache,
        slot: jax.Array | int,
        prefix: jax.Array | int | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Return the features `(T, D)` of tokens that follow those in the cache, and the cache with them added at
        `slot`.

        Prefill is T tokens at slot 0; a decode step is one token. A token whose position is `masks.EMPTY` is padding:
        it is masked, and its own features are undefined. A `prefix` must be passed in a single call; later calls omit
        it.
        """
        # The mask reads positions, not slots, so prompts of a batch may be padded on either side and grow together.
        # Positions are written before it is computed, because a token attends to itself.
        c, position_S = self.config, write_positions(cache.position_S, positions_T, slot)
        mask_of = {window: self.mask(positions_T, position_S, prefix, window) for window in set(c.block_windows)}
        x_TD = self.embedding(tokens_T, positions_T)
        layers: list[LayerCache] = []
        for block, layer, window in zip(traced_once(self.blocks), cache.layers, c.block_windows, strict=True):
            x_TD, updated = block(x_TD, SideInputs(positions_T, mask_of[window], slot), layer)
            layers.append(updated)
        return x_TD, KVCache(tuple(layers), position_S)

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        """Return logits `(T, V)` for the residual stream `(T, D)`, or `(V,)` for `(D,)`."""
        return self.unembedding().logits(self.readout(x_TD))

    def readout(self, x_TD: jax.Array) -> jax.Array:
        """Return the input of `unembedding`, `(T, D)`: the residual stream after the final norm."""
        return self.final_norm(x_TD) if self.config.final_norm else x_TD

    def unembedding(self) -> Unembedding:
        """Return the layer from readout to logits."""
        c = self.config
        return Unembedding(self.embedding.W_E.T if c.unembedding == "tied" else self.W_out, None, c.logit_soft_cap)

    def mask(
        self, query_T: jax.Array, key_S: jax.Array, prefix: jax.Array | int | None = None, window: int | None = None
    ) -> jax.Array:
        """Return the mask `(T, S)` from positions. It extends back to `window`, by default `attention_window`, even in
        a prefix."""
        window = self.config.attention_window if window is None else window
        mask_TS = Causal(window)(query_T, key_S)
        if prefix is not None:
            masks.check_prefix(prefix)
            key_1S = key_S[None, :]
            mask_TS |= (key_1S < prefix) & (query_T[:, None] - key_1S < window)
        return mask_TS & masks.padding(query_T, key_S)

    def _mask(
        self, positions_T: jax.Array, prefix: jax.Array | int | None, segments_T: jax.Array | None, window: int
    ) -> Mask:
        """Return the mask of a whole sequence, which is an array only with a prefix."""
        causal = Causal(window if len(positions_T) > window else None)  # a longer window hides nothing
        if segments_T is not None:
            if np.shape(segments_T) != (T := len(positions_T),):
                raise ValueError(f"segments of shape {np.shape(segments_T)} for {T} tokens; give one per token")
            if prefix is not None:
                raise ValueError("segments and a prefix cannot be combined; give one of them")
            return Packed(segments_T, causal)
        return causal if prefix is None else self.mask(positions_T, positions_T, prefix, window)

    def init_cache(self, n_slots: int, dtype: DTypeLike = jnp.float32) -> KVCache:
        """Return an empty cache of `n_slots` slots for one sequence."""
        c = self.config
        return init_cache(c.n_blocks, c.kv_heads, n_slots, c.width_of_head, dtype, c.width_of_values)

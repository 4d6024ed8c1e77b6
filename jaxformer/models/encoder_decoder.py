"""Encoder-decoder transformer (Vaswani et al. 2017, figure 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.config import TokenModelConfig
from jaxformer.config.fields import Depth, Fraction, NonNegative, NormEps, PositiveFloat, Size
from jaxformer.contract import Contract, Task, token_inputs
from jaxformer.errors import UserError
from jaxformer.models import blocks
from jaxformer.models.inputs import check_length
from jaxformer.nn.block import SideInputs, input_dropout, run_blocks
from jaxformer.nn.capture import capture_point
from jaxformer.nn.embedding import AddedPositions, Embedding
from jaxformer.nn.execution import PLAIN, Execution, traced_once
from jaxformer.nn.mlp import Activation
from jaxformer.nn.norms import Norm
from jaxformer.nn.parameters import parameter
from jaxformer.ops import masks
from jaxformer.ops.bias import RelativePositionBias, relative_position_buckets
from jaxformer.ops.cache import KVCache, LayerCache, init_cache, write_layer, write_positions
from jaxformer.ops.linear_cross_entropy import Unembedding
from jaxformer.ops.masks import Causal
from jaxformer.ops.positions import RoPE


@dataclass(frozen=True)
class EncoderDecoderConfig(TokenModelConfig):
    """Shape of an `EncoderDecoder`. Source and target share one vocabulary, and each has at most `context_length`
    tokens. The defaults are those of the paper's `base`."""

    d_model: Size = 512
    """Width of the residual streams."""
    n_encoder_blocks: Depth = 6
    """Number of blocks of the encoder."""
    n_decoder_blocks: Depth = 6
    """Number of blocks of the decoder."""
    n_heads: Size = 8
    """Attention heads per block."""
    head_dim: Size | None = None
    """Width of a head; by default, d_model / n_heads."""
    attention_bias: bool = False
    """Biases in the attention projections."""
    score_scale: PositiveFloat | None = None
    """Factor applied to the attention scores; by default, 1/sqrt(head_dim)."""
    d_ff: tuple[Size, ...] = (2048,)
    """Widths of the MLP's hidden layers."""
    activation: Activation = "relu"
    """Activation of the MLP's hidden layers; with swiglu and geglu these are gated."""
    bias: bool = True
    """Biases in the MLP."""
    norm: Norm = "layernorm"
    """Kind of norm."""
    norm_eps: NormEps | None = None
    """ε added to the mean square or variance in norms; by default, 1e-6 for rmsnorm and 1e-5 for layernorm."""
    norm_placement: Literal["pre", "post"] = "post"
    """Norms after each residual connection (post), or before each sublayer and after the last block (pre)."""
    positions: AddedPositions = "sinusoidal"
    """Vectors added to the embedding: learned, sinusoidal, or none."""
    interleaved_sinusoids: bool = True
    """Order of sinusoidal positions: a sine and its cosine alternate (Vaswani et al. 2017); false for all sines before
    all cosines, as in tensor2tensor and Marian."""
    fairseq_sinusoids: bool = False
    """Sinusoidal positions from 2 on, with frequencies from 1 to 1/10000, as in fairseq and M2M100."""
    target_positions: bool = False
    """Learned positions of the target in a table of its own, W_pos_target; by default, those of the source."""
    position_buckets: NonNegative = 0
    """Buckets of distances with a learned bias of the scores per head in self-attention (T5, Raffel et al. 2020), one
    table for all blocks of the encoder and one for those of the decoder; 0 for no bias."""
    max_distance: Size = 128
    """Distance from which all keys are in the last bucket; with position_buckets."""
    rope: RoPE | None = None
    """Rotary position embedding (RoPE) of queries and keys; none for no rotation."""
    embedding_scale: float | None = None
    """Factor applied to a token's row of the embedding; by default, sqrt(d_model)."""
    embedding_norm: bool = False
    """A norm before the first block of the encoder, and one before that of the decoder."""
    unembedding: Literal["linear", "tied"] = "tied"
    """Logits from W_out (linear), or from the transposed embedding (tied: weight tying)."""
    unembedding_bias: bool = False
    """Bias of the logits."""
    scale_logits: bool = False
    """Logits divided by sqrt(d_model), as of T5, whose embedding is not scaled."""
    dropout: Fraction = 0.1
    """Dropout probability, in training, of features of the embedding and of each sublayer's output."""
    local_heads: NonNegative = 0
    """Heads of each self-attention that attend to a fixed distance at initialisation. In the decoder, the first attends
    one position back, the second two back, and so on; in the encoder, one back, one ahead, two back, and so on. Needs
    RoPE and attention_bias, whose b_Q and b_K are initialised accordingly."""
    diagonal_heads: NonNegative = 0
    """Heads of each cross-attention that, at initialisation, attend to about ten positions around the token's own
    position in the source. RoPE is then also applied in cross-attention. Needs RoPE and attention_bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks.check_attention(self)
        if self.target_positions and self.positions != "learned":
            problem = f"target_positions is true, but positions are {self.positions}"
            raise UserError(f"{problem}; set positions to learned, or target_positions to false.")
        if self.fairseq_sinusoids and (self.positions != "sinusoidal" or self.d_model % 2 or self.d_model < 4):
            problem = f"fairseq_sinusoids is true, but positions are {self.positions} and d_model is {self.d_model}"
            raise UserError(f"{problem}; it needs sinusoidal positions of an even width of at least 4; omit it.")
        try:
            for bidirectional in (True, False) if self.position_buckets else ():
                relative_position_buckets(np.arange(1), self.position_buckets, bidirectional, self.max_distance)
        except ValueError as error:
            raise UserError(f"position_buckets is {self.position_buckets}, but {error}.") from error

    @property
    def width_of_head(self) -> int:
        """Width K of a head."""
        return blocks.head_width(self)

    @property
    def final_norm(self) -> bool:
        """True if the stack ends in an additional norm: with pre-norm, the residual stream is not normalised
        otherwise."""
        return self.norm_placement == "pre"

    @property
    def contract(self) -> Contract:
        inputs = token_inputs(self.context_length, "source_S", "valid_S", "target_T")
        return replace(
            super().contract,
            task=Task.SEQUENCE_TO_SEQUENCE,
            max_tokens=self.context_length if self.positions == "learned" else None,
            inputs=inputs,
            has_features=True,
            has_cache=True,
            attention=blocks.attention_shape(self, self.context_length, Causal()),
            scaled_width=None if self.unembedding == "tied" else self.d_model,
        )

    def build(self, execution: Execution = PLAIN) -> EncoderDecoder:
        return EncoderDecoder(self, execution)


class EncoderDecoderCache(NamedTuple):
    """Cache of the source and of the target so far."""

    target: KVCache
    source: tuple[LayerCache, ...]
    """The source's keys and values in each block of the decoder."""
    valid_S: jax.Array | None
    """True for the source's tokens, False for padding; None if all are tokens."""


class EncoderDecoder(nn.Module):
    """Sequence-to-sequence model: maps a source and the target so far to the target's next-token logits.

    Source, target and logits share one embedding (section 3.4), which is scaled by √D at the input; in other models
    than the paper's, the logits may have a matrix of their own.
    """

    config: EncoderDecoderConfig
    execution: Execution = PLAIN

    def setup(self) -> None:
        c = self.config
        # Initialised so that, once scaled, it has the magnitude of the position encodings added to it.
        scale, init = sqrt(c.d_model) if c.embedding_scale is None else c.embedding_scale, c.d_model**-0.5
        self.embedding = Embedding(
            c.vocab_size, c.context_length, c.d_model, c.positions, init_std=init, scale=scale,
            interleaved=c.interleaved_sinusoids, fairseq=c.fairseq_sinusoids,
        )  # fmt: skip
        normal = nn.initializers.normal(init)
        self.W_pos_target = None
        if c.target_positions:
            self.W_pos_target = parameter(
                self, "W_pos_target", normal, (c.context_length, c.d_model), "positions -> embed"
            )
        if c.embedding_norm:
            self.encoder_embedding_norm, self.decoder_embedding_norm = blocks.make_norm(c), blocks.make_norm(c)
        if c.position_buckets:
            shape = c.position_buckets, c.n_heads
            self.encoder_bias = parameter(self, "encoder_bias", normal, shape, "buckets heads")
            self.decoder_bias = parameter(self, "decoder_bias", normal, shape, "buckets heads")
        self.embedding_dropout = nn.Dropout(c.dropout, deterministic=False)
        before = tuple(range(1, c.local_heads + 1))
        both = tuple(d for n in before for d in (n, -n))[: c.local_heads]
        attend: Any = partial(blocks.make_attention, c, self.execution, scale=c.score_scale)
        # Positions in the source and in the target are comparable only to heads that begin on the diagonal.
        diagonal = {"distances": (0,) * c.diagonal_heads, "is_wide": True} if c.diagonal_heads else {"rope": None}
        self.encoder_blocks = [
            blocks.make_block(c, self.execution, make_attention=attend(distances=both))
            for _ in range(c.n_encoder_blocks)
        ]
        self.decoder_blocks = [
            blocks.make_block(
                c, self.execution, make_attention=attend(distances=before), make_cross_attention=attend(**diagonal)
            )
            for _ in range(c.n_decoder_blocks)
        ]
        if c.final_norm:
            self.encoder_norm, self.decoder_norm = blocks.make_norm(c), blocks.make_norm(c)
        if c.unembedding == "linear":
            self.W_out = parameter(self, "W_out", normal, (c.d_model, c.vocab_size), "embed -> vocab")
        if c.unembedding_bias:
            self.b_out = parameter(self, "b_out", nn.initializers.zeros, (c.vocab_size,), "vocab")

    def __call__(self, source_S: jax.Array, valid_S: jax.Array | None, target_T: jax.Array) -> jax.Array:
        """Return logits `(T, V)` for the token after each token of the target (teacher forcing).

        Args:
          source_S: int32 tokens.
          valid_S: True for the source's tokens, False for padding; None if all are tokens.
          target_T: int32 tokens, beginning with a start token. Padding on the right does not affect positions before
            it.

        Raises:
          ValueError: positions are learned, and source or target has more tokens than positions.
        """
        return capture_point(self, "logits", self.unembed(self.features(source_S, valid_S, target_T)))

    def features(self, source_S: jax.Array, valid_S: jax.Array | None, target_T: jax.Array) -> jax.Array:
        """Return the decoder's residual stream after its last block, `(T, D)`, the input of `unembed`."""
        source_SD = self.encode(source_S, valid_S)
        check_length(self.config.contract, len(target_T))
        positions_T = jnp.arange(len(target_T))
        x_TD, keys = self._dropout(self._embed_target(target_T, positions_T), self.config.n_decoder_blocks)
        source_mask, bias = masks.tokens(len(target_T), valid_S), self._target_bias()
        inputs = SideInputs(positions_T, Causal(), source=source_SD, source_mask=source_mask, score_bias=bias)
        return run_blocks(self.decoder_blocks, self.execution, x_TD, inputs, keys)

    def encode(self, source_S: jax.Array, valid_S: jax.Array | None = None) -> jax.Array:
        """Return the encoded source, `(S, D)`, which the decoder attends to; rows at padding are undefined."""
        c, positions_S = self.config, jnp.arange(len(source_S))
        check_length(c.contract, len(source_S))
        x_SD = self.embedding(source_S, positions_S)
        x_SD, keys = self._dropout(self.encoder_embedding_norm(x_SD) if c.embedding_norm else x_SD, c.n_encoder_blocks)
        x_SD, visible_SS = masks.zero_padding(x_SD, valid_S), masks.tokens(len(source_S), valid_S)
        bias = RelativePositionBias(self.encoder_bias, max_distance=c.max_distance) if c.position_buckets else None
        inputs = SideInputs(positions_S, visible_SS, score_bias=bias)
        x_SD = run_blocks(self.encoder_blocks, self.execution, x_SD, inputs, keys)
        return self.encoder_norm(x_SD) if c.final_norm else x_SD

    def start(
        self, source_S: jax.Array, valid_S: jax.Array | None, n_slots: int, dtype: DTypeLike = jnp.float32
    ) -> EncoderDecoderCache:
        """Return a cache with the source's keys and values for each block and `n_slots` empty slots for the target."""
        c, source_SD = self.config, self.encode(source_S, valid_S)
        target, empty = (
            init_cache(c.n_decoder_blocks, c.n_heads, n, c.width_of_head, dtype) for n in (n_slots, len(source_S))
        )
        source = tuple(
            write_layer(layer, *block.keys_values(source_SD), 0)
            for block, layer in zip(self.decoder_blocks, empty.layers, strict=True)
        )
        return EncoderDecoderCache(target, source, valid_S)

    def extend(
        self, tokens_T: jax.Array, positions_T: jax.Array, cache: EncoderDecoderCache, slot: jax.Array | int
    ) -> tuple[jax.Array, EncoderDecoderCache]:
        """Return the features `(T, D)` of tokens that follow the target in the cache, and the cache with them added at
        `slot`.

        A token whose position is `masks.EMPTY` is padding, as in `Decoder`.
        """
        position_S = write_positions(cache.target.position_S, positions_T, slot)
        mask = masks.causal(positions_T, position_S) & masks.padding(positions_T, position_S)
        source_mask = masks.tokens(len(tokens_T), cache.valid_S)
        x_TD, bias = self._embed_target(tokens_T, positions_T), self._target_bias()
        bias_HTS = None if bias is None else bias(positions_T, position_S)
        layers: list[LayerCache] = []
        traced = traced_once(self.decoder_blocks)
        for block, layer, source in zip(traced, cache.target.layers, cache.source, strict=True):
            inputs = SideInputs(positions_T, mask, slot, source, source_mask, score_bias=bias_HTS)
            x_TD, updated = block(x_TD, inputs, layer)
            layers.append(updated)
        return x_TD, cache._replace(target=KVCache(tuple(layers), position_S))

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        """Return logits `(T, V)` for features `(T, D)`, or `(V,)` for `(D,)`."""
        return self.unembedding().logits(self.readout(x_TD))

    def readout(self, x_TD: jax.Array) -> jax.Array:
        """Return the input of `unembedding`, `(T, D)`: the decoder's residual stream after its final norm, scaled
        by 1/√D if the logits are."""
        x_TD = self.decoder_norm(x_TD) if self.config.final_norm else x_TD
        return x_TD * self.config.d_model**-0.5 if self.config.scale_logits else x_TD

    def unembedding(self) -> Unembedding:
        """Return the layer from readout to logits, by default the transposed embedding (Press and Wolf 2017)."""
        c = self.config
        W_DV = self.W_out if c.unembedding == "linear" else self.embedding.W_E.T
        return Unembedding(W_DV, self.b_out if c.unembedding_bias else None)

    def _embed_target(self, tokens_T: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Return the decoder's residual stream before its first block, `(T, D)`, without dropout."""
        x_TD = self.embedding(tokens_T, positions_T, self.W_pos_target)
        return self.decoder_embedding_norm(x_TD) if self.config.embedding_norm else x_TD

    def _target_bias(self) -> RelativePositionBias | None:
        """Return the bias of the decoder's self-attention scores; None for none."""
        c = self.config
        return RelativePositionBias(self.decoder_bias, False, c.max_distance) if c.position_buckets else None

    def _dropout(self, x_TD: jax.Array, n_blocks: int) -> tuple[jax.Array, jax.Array | None]:
        """Return the embedding after dropout, and one dropout key per block, if dropout is on."""
        return input_dropout(self, self.embedding_dropout, x_TD, n_blocks)

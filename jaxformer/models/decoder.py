"""Decoder-only transformer, for every rung of the ladder from a single head without residuals to RMSNorm and beyond."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import TokenModelConfig
from jaxformer.config.fields import (
    Depth,
    Fraction,
    Length,
    NonNegative,
    NonNegativeFloat,
    NormEps,
    PositiveFloat,
    Range,
    Size,
)
from jaxformer.contract import ARRAY, AttentionShape, Contract, Input
from jaxformer.errors import UserError
from jaxformer.models.blocks import check_heads, check_local_heads
from jaxformer.models.rungs import ConcatenatedHeads, PlainBlock, SummedHeads
from jaxformer.nn.block import Block, Make
from jaxformer.nn.capture import capture_point
from jaxformer.nn.embedding import Embedding, Positions
from jaxformer.nn.execution import PLAIN, Execution, run_blocks
from jaxformer.nn.experts import Experts
from jaxformer.nn.local_heads import LocalHeads
from jaxformer.nn.mlp import MLP, Activation
from jaxformer.nn.norms import Norm, epsilon, norm_maker
from jaxformer.nn.parameters import parameter
from jaxformer.ops import masks
from jaxformer.ops.cache import KVCache, LayerCache, init_cache, write_positions
from jaxformer.ops.linear_cross_entropy import Unembedding
from jaxformer.ops.masks import Causal, Mask, Packed
from jaxformer.ops.positions import Llama3Scaling, RoPE, positions_in_segments


@dataclass(frozen=True)
class DecoderConfig(TokenModelConfig):
    """Shape of a `Decoder`. The defaults are those of the `residual` rung."""

    d_model: Size = 256
    n_blocks: Depth = 1
    n_heads: Size = 1
    n_kv_heads: Size | None = None
    """Key/value heads, shared by the query heads; by default, n_heads."""
    head_dim: Size | None = None
    """Width of a head; by default, d_model / n_heads."""
    value_dim: Size | None = None
    """Width of a head's values and output; by default, that of its queries and keys."""
    scaled: bool = True
    """Divide the scores by the square root of the head's width."""
    projection_std: NonNegativeFloat | None = None
    """Standard deviation of W_Q, W_K, W_V, W_O at initialisation; by default, 1/sqrt(d_model)."""
    output_projection: bool = False
    """Multiply the concatenated heads by W_O. If false, heads that split the model's width are concatenated, and heads
    as wide as the model are summed."""
    attention_bias: bool = False
    """Biases in the attention projections."""
    output_bias: bool | None = None
    """Bias of W_O; by default, as attention_bias."""
    local_heads: NonNegative = 0
    """Heads of each block that attend to a fixed distance at initialisation: the first one position back, the second
    two back, and so on. Needs RoPE and attention_bias, whose b_Q and b_K are initialised accordingly."""
    score_scale: PositiveFloat | None = None
    """Factor applied to the attention scores; by default, set by scaled."""
    qk_norm: bool = False
    """RMS-normalise queries and keys."""
    window: Length | None = None
    """Positions that a query attends to, counting back from and including itself; by default, all."""
    global_blocks: tuple[int, ...] = ()
    """Indices, from 0, of the blocks without an attention window."""
    max_context: Length | None = None
    """Longest sequence, in tokens, over which attention is full, and the number of learned positions if there are any;
    by default context_length, which sets the length of training sequences."""
    prefix: bool = False
    """Attend in both directions within a prefix of each sequence (prefix language model, Raffel et al. 2020). Its
    length is an input; in generation, the prefix is the prompt."""
    d_ff: tuple[Size, ...] = (2048, 2048)
    """Widths of the MLP's hidden layers."""
    activation: Activation = "relu"
    bias: bool = True
    """Biases in the MLP."""
    n_experts: Size | None = None
    """Experts per block, MLPs with hidden layers as wide as d_ff; by default, one MLP for all tokens."""
    experts_per_token: Size = 2
    """Experts that process each token."""
    renormalize_experts: bool | None = None
    """Normalise the weights of a token's experts to sum to 1; by default, true unless experts_per_token is 1."""
    capacity_factor: Annotated[float, Range(above=0, hint=", such as 1.25, or none to drop nothing")] | None = None
    """Capacity of an expert in training, as a multiple of its even share of tokens; by default no token is dropped,
    which is slower but exact."""
    shared_expert: bool = False
    """Additional expert in each block that processes all tokens."""
    balance_weight: NonNegativeFloat = 0.01
    """Weight of the load-balancing loss of each block."""
    router_z_weight: NonNegativeFloat = 0.001
    """Weight of the router z-loss of each block."""
    residual: bool = True
    norm: Literal["none", Norm] = "none"
    norm_eps: NormEps | None = None
    """ε added to the mean square or variance in norms; by default, 1e-6 for rmsnorm and 1e-5 for layernorm."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Norms before each sublayer (pre), after each residual connection (post), or before and after each sublayer
    (both)."""
    final_norm: bool = False
    """Additional norm before the unembedding."""
    positions: Positions = "learned"
    rope_base: Annotated[float, Range(least=1)] = 10_000.0
    local_rope_base: Annotated[float, Range(least=1)] | None = None
    """Base of RoPE, without scaling, in the blocks with a window; by default, rope_base with the scaling."""
    rope_scaling: Annotated[float, Range(least=1)] = 1.0
    """Divisor of positions in RoPE; above 1 for sequences longer than the training context."""
    rope_original_context: Length | None = None
    """Training context in tokens of a model whose RoPE is scaled by frequency (Llama 3.1): rope_scaling then divides
    only frequencies with few periods in it. By default, rope_scaling divides all."""
    rope_low_periods: float = 1.0
    """Periods per rope_original_context below which a frequency is divided."""
    rope_high_periods: float = 4.0
    """Periods per rope_original_context above which a frequency is not divided."""
    embedding_std: NonNegativeFloat = 1.0
    embedding_scale: float = 1.0
    """Factor applied to a token's row of the embedding."""
    value_embedding: bool = False
    """A second embedding per token, times embedding_scale, added to the token's values in every block, so that values
    carry the token's identity (after Zhou et al. 2024, who share the values of the first block). Zero at
    initialisation."""
    unembedding: Literal["mlp", "linear", "tied"] = "linear"
    """Logits from W_out (linear), from the transposed embedding (tied: weight tying), or directly from the last block's
    MLP (mlp)."""
    unembedding_std: NonNegativeFloat | None = None
    """Standard deviation of W_out at initialisation; by default, 1/sqrt(d_model). With small values the initial loss is
    log(vocab_size)."""
    logit_soft_cap: PositiveFloat | None = None
    """Bound c of the logits, c · tanh(logits / c) (Gemma 2); none for no bound."""
    dropout: Fraction = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self)
        if self.n_heads % self.kv_heads:
            reason = "every key/value head serves equally many query heads"
            raise UserError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.kv_heads}; {reason}.")
        total = self.n_heads * self.width_of_values
        if not self.output_projection and not self.sums_heads and total != self.d_model:
            name = "head_dim" if self.value_dim is None else "value_dim"
            remedy = f"set output_projection, or {name} to {self.d_model} for their sum"
            problem = f"{self.n_heads} heads of width {self.width_of_values} make {total}, not d_model {self.d_model}"
            raise UserError(f"{problem}; {remedy}.")
        check_local_heads(self)
        if self.local_heads and not self.output_projection:
            raise UserError(f"local_heads is {self.local_heads}, which needs output_projection; set it, or omit both.")
        if self.prefix and self.window is not None:
            remedy = "omit one of them"
            raise UserError(f"window is {self.window}, but a prefix is attended to from every position; {remedy}.")
        if self.unembedding == "mlp" and self.residual:
            raise UserError(
                "unembedding 'mlp' makes the last block vocab_size wide, which cannot be added to "
                "the residual stream; set residual to false or use 'linear'."
            )
        if self.final_norm and self.norm == "none":
            remedy = "set norm to rmsnorm or layernorm"
            raise UserError(f"final_norm is one more norm of the kind that norm names; {remedy}.")
        if self.max_context is not None and self.max_context < self.context_length:
            problem = f"max_context is {self.max_context}, but context_length is {self.context_length}"
            raise UserError(f"{problem}; set it to at least that, or omit it.")
        if not self.rope_low_periods < self.rope_high_periods:
            limit = f"it must be below rope_high_periods {self.rope_high_periods}"
            raise UserError(f"rope_low_periods is {self.rope_low_periods}; {limit}.")
        self._check_experts()
        self._check_global_blocks()
        if self.unembedding_std is not None and self.unembedding != "linear":
            problem = f"unembedding_std is {self.unembedding_std}, but unembedding {self.unembedding!r} has no W_out"
            raise UserError(f"{problem}; omit it.")

    def _check_global_blocks(self) -> None:
        for name in ("global_blocks", "local_rope_base"):
            if getattr(self, name) and self.window is None:
                remedy = "set window, or omit it"
                raise UserError(f"{name} is {getattr(self, name)}, but without a window no block is local; {remedy}.")
        if any(not 0 <= i < self.n_blocks for i in self.global_blocks):
            limit = f"the indices of {self.n_blocks} blocks are 0 to {self.n_blocks - 1}"
            raise UserError(f"global_blocks is {self.global_blocks}; {limit}.")

    def _check_experts(self) -> None:
        if self.n_experts is None:
            if self.capacity_factor is not None or self.shared_expert:
                raise UserError("capacity_factor and shared_expert need experts; set n_experts to their number.")
            return
        if self.experts_per_token > self.n_experts:
            problem = f"experts_per_token is {self.experts_per_token}, but n_experts is {self.n_experts}"
            raise UserError(f"{problem}; use at most n_experts.")
        if self.unembedding == "mlp":
            raise UserError(f"unembedding 'mlp' needs one MLP per block, not n_experts {self.n_experts}; use 'linear'.")

    @property
    def kv_heads(self) -> int:
        """Number G of key/value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def sums_heads(self) -> bool:
        """True if the output of attention is the sum of the heads, each as wide as the model."""
        return not self.output_projection and self.width_of_values == self.d_model

    @property
    def width_of_head(self) -> int:
        """Width K of a head's queries and keys."""
        return self.head_dim or self.d_model // self.n_heads

    @property
    def width_of_values(self) -> int:
        """Width of a head's values and output."""
        return self.value_dim or self.width_of_head

    @property
    def attention_window(self) -> int:
        """Maximum number of positions that a query attends to, itself included: the window or, without one,
        `n_positions`, even in a longer sequence."""
        return max(self.block_windows)

    @property
    def block_windows(self) -> tuple[int, ...]:
        """Attention window of each block."""
        local = self.window or self.n_positions
        return tuple(self.n_positions if i in self.global_blocks else local for i in range(self.n_blocks))

    @property
    def block_groups(self) -> tuple[tuple[int, slice], ...]:
        """Window and slice of each group of consecutive blocks with the same kind of attention; each group is one
        scan."""
        kinds = [(window, i in self.global_blocks) for i, window in enumerate(self.block_windows)]
        ends = [i for i in range(1, len(kinds) + 1) if i == len(kinds) or kinds[i] != kinds[i - 1]]
        return tuple((kinds[end - 1][0], slice(first, end)) for first, end in zip([0, *ends], ends, strict=False))

    @property
    def n_positions(self) -> int:
        """Length in tokens of the longest sequence with full attention."""
        return self.max_context or self.context_length

    @property
    def rope_scale(self) -> float | Llama3Scaling:
        """Scaling of RoPE, as in `ops.positions.rope`."""
        if self.rope_original_context is None:
            return self.rope_scaling
        return Llama3Scaling(
            self.rope_scaling, self.rope_low_periods, self.rope_high_periods, self.rope_original_context
        )

    @property
    def extrapolates(self) -> bool:
        """True if positions continue past the context length: all but learned ones do."""
        return self.positions != "learned"

    @property
    def contract(self) -> Contract:
        tokens, is_windowed = super().contract, self.attention_window < self.context_length
        mask = ARRAY if self.prefix else Causal(self.attention_window if is_windowed else None)
        return replace(
            tokens,
            inputs=(*tokens.inputs, Input("prefix", (), "int32")) if self.prefix else tokens.inputs,
            max_tokens=None if self.extrapolates else self.n_positions,
            has_features=True,
            has_cache=True,
            attention_window=self.attention_window,
            layer_windows=self.block_windows,
            extrapolates=self.extrapolates,
            has_prefix=self.prefix,
            has_segments=not self.prefix,
            attention=AttentionShape(
                self.n_heads, self.kv_heads, self.width_of_head, self.width_of_values, self.context_length, mask
            ),
            scaled_width=None if self.unembedding == "tied" else self.d_model,
            has_residual_stream=self.residual,
        )

    def build(self, execution: Execution = PLAIN) -> Decoder:
        return Decoder(self, execution)


class Decoder(nn.Module):
    """Causal language model: maps tokens `(T,)` int32 to next-token logits `(T, V)`."""

    config: DecoderConfig
    execution: Execution = PLAIN

    def setup(self) -> None:
        c = self.config

        def make_attention(i: int) -> Make:
            rope = RoPE(c.rope_base, c.rope_scale)
            if c.local_rope_base is not None and i not in c.global_blocks:
                rope = RoPE(c.local_rope_base)
            heads: Make = partial(LocalHeads, distances=tuple(range(1, c.local_heads + 1)))
            if not c.output_projection:
                heads = SummedHeads if c.sums_heads else ConcatenatedHeads
            return partial(
                heads,
                n_heads=c.n_heads,
                head_dim=c.width_of_head,
                n_kv_heads=c.kv_heads,
                value_dim=c.value_dim,
                scale=c.score_scale if c.scaled or c.score_scale is not None else 1.0,
                init_std=c.projection_std,
                bias=c.attention_bias,
                output_bias=c.output_bias,
                qk_norm=c.qk_norm,
                norm_eps=epsilon("rmsnorm", c.norm_eps),
                rope=rope if c.positions == "rope" else None,
                attention=self.execution.attention,
            )

        norm = None if c.norm == "none" else norm_maker(c.norm, c.norm_eps)
        widths = [c.d_model] * c.n_blocks
        if c.unembedding == "mlp":
            widths[-1] = c.vocab_size

        def make_mlp(width: int) -> Make:
            mlp = partial(MLP, c.d_ff, width, c.activation, c.bias)
            if c.n_experts is None:
                return mlp
            return partial(
                Experts,
                make_expert=mlp,
                n_experts=c.n_experts,
                per_token=c.experts_per_token,
                capacity_factor=c.capacity_factor,
                shared_expert=c.shared_expert,
                shards=self.execution.expert_shards,
                renormalize=c.renormalize_experts,
            )

        self.embedding = Embedding(
            c.vocab_size, c.n_positions, c.d_model, c.positions, c.embedding_std, c.embedding_scale
        )
        if c.value_embedding:
            width = c.kv_heads * c.width_of_values
            self.value_embedding = Embedding(c.vocab_size, c.n_positions, width, "none", 0.0, c.embedding_scale)
        block = Block if c.residual else PlainBlock
        self.blocks = [
            block(make_attention(i), make_mlp(width), norm, c.norm_placement, c.dropout)
            for i, width in enumerate(widths)
        ]
        if norm is not None and c.final_norm:
            self.final_norm = norm()
        if c.unembedding == "linear":
            std = c.d_model**-0.5 if c.unembedding_std is None else c.unembedding_std
            init = nn.initializers.normal(std)
            self.W_out = parameter(self, "W_out", init, (c.d_model, c.vocab_size), "embed -> vocab")

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
            the last `attention_window`); or there is not one segment per token, or a prefix as well.
          TypeError: the prefix is not an integer.
        """
        return capture_point(self, "logits", self.unembed(self.features(tokens_T, prefix, segments_T)))

    def features(
        self, tokens_T: jax.Array, prefix: jax.Array | int | None = None, segments_T: jax.Array | None = None
    ) -> jax.Array:
        """Return the residual stream after the last block, `(T, D)`, the input of `unembed`."""
        c = self.config
        if c.positions == "learned" and len(tokens_T) > c.n_positions:
            raise ValueError(f"{len(tokens_T)} tokens, but there are {c.n_positions} learned positions")
        if segments_T is not None and np.shape(segments_T) != (len(tokens_T),):
            raise ValueError(f"segments of shape {np.shape(segments_T)} for {len(tokens_T)} tokens; give one per token")
        if segments_T is not None and prefix is not None:
            raise ValueError("segments and a prefix cannot be combined; give one of them")
        positions_T = jnp.arange(len(tokens_T))
        mask_by_window = {
            window: self._mask(positions_T, prefix, segments_T, window) for window in set(c.block_windows)
        }
        valid_T = None
        if segments_T is not None:
            positions_T = positions_in_segments(segments_T)
            valid_T = None if c.n_experts is None else segments_T != 0
        x_TD, values_GTK = self.embedding(tokens_T, positions_T), self._token_values(tokens_T, positions_T)
        keys = jax.random.split(self.make_rng("dropout"), c.n_blocks) if self.has_rng("dropout") else None
        for window, part in c.block_groups:
            part_keys = None if keys is None else keys if len(c.block_groups) == 1 else keys[part]
            x_TD = run_blocks(
                self.blocks[part], self.execution, x_TD, positions_T, mask_by_window[window],
                keys=part_keys, token_values=values_GTK, valid_T=valid_T,
            )  # fmt: skip
        return x_TD

    def _token_values(self, tokens_T: jax.Array, positions_T: jax.Array) -> jax.Array | None:
        """Return the value embedding per key/value head, `(G, T, K)`; None without one."""
        if not self.config.value_embedding:
            return None
        rows_TD = self.value_embedding(tokens_T, positions_T)
        return rows_TD.reshape(len(tokens_T), self.config.kv_heads, -1).swapaxes(0, 1)

    def _mask(
        self, positions_T: jax.Array, prefix: jax.Array | int | None, segments_T: jax.Array | None, window: int
    ) -> Mask:
        """Return the mask of a whole sequence, which is an array only with a prefix."""
        causal = Causal(window if len(positions_T) > window else None)
        if segments_T is not None:
            return Packed(segments_T, causal)
        if prefix is not None:
            return self.mask(positions_T, positions_T, prefix, window)
        return causal

    def extend(
        self, tokens_T: jax.Array, positions_T: jax.Array, cache: KVCache, slot: jax.Array | int,
        prefix: jax.Array | int | None = None,
    ) -> tuple[jax.Array, KVCache]:  # fmt: skip
        """Return the features `(T, D)` of tokens that follow those in the cache, and the cache with them added at
        `slot`.

        Prefill is T tokens at slot 0; a decode step is one token. A token whose position is `masks.EMPTY` is padding:
        it is masked, and its own features are undefined. A `prefix` must be passed in a single call; later calls omit
        it.
        """
        position_S = write_positions(cache.position_S, positions_T, slot)
        mask_by_window = {
            window: self.mask(positions_T, position_S, prefix, window) for window in set(self.config.block_windows)
        }
        x_TD, values_GTK = self.embedding(tokens_T, positions_T), self._token_values(tokens_T, positions_T)
        layers: list[LayerCache] = []
        for block, layer, window in zip(self.blocks, cache.layers, self.config.block_windows, strict=True):
            x_TD, updated = block(x_TD, positions_T, mask_by_window[window], layer, slot, token_values=values_GTK)
            assert updated is not None  # because a cache was passed
            layers.append(updated)
        return x_TD, KVCache(tuple(layers), position_S)

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        """Return logits `(T, V)` for the residual stream `(T, D)`, or `(V,)` for `(D,)`."""
        x_TD, layer = self.readout(x_TD), self.unembedding()
        return x_TD if layer is None else layer.logits(x_TD)

    def readout(self, x_TD: jax.Array) -> jax.Array:
        """Return the input of `unembedding`, `(T, D)`: the residual stream after the final norm."""
        return self.final_norm(x_TD) if self.config.norm != "none" and self.config.final_norm else x_TD

    def unembedding(self) -> Unembedding | None:
        """Return the layer from readout to logits; None if the readout, from the last block's MLP, is already the
        logits."""
        c = self.config
        if c.unembedding == "mlp":
            return None
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
            mask_TS |= (key_S < prefix) & (query_T[:, None] - key_S < window)
        return mask_TS & masks.padding(query_T, key_S)

    def init_cache(self, n_slots: int, dtype: Any = jnp.float32) -> KVCache:
        """Return an empty cache of `n_slots` slots for one sequence."""
        c = self.config
        return init_cache(c.n_blocks, c.kv_heads, n_slots, c.width_of_head, dtype, c.value_dim)

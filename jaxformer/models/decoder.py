"""Decoder-only transformer (Radford et al. 2018): a causal language model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.config import TokenModelConfig
from jaxformer.config.fields import (
    Depth,
    FieldDocs,
    Fraction,
    Length,
    NonNegative,
    NonNegativeFloat,
    NormEps,
    PositiveFloat,
    Range,
    Size,
    check_fields,
)
from jaxformer.contract import ARRAY, AttentionShape, Contract, Input
from jaxformer.errors import UserError
from jaxformer.models import blocks
from jaxformer.models.inputs import check_length
from jaxformer.nn.attention import MultiHeadAttention, QKNorm
from jaxformer.nn.block import Block, Make, SideInputs, run_blocks
from jaxformer.nn.capture import capture_point
from jaxformer.nn.embedding import AddedPositions, Embedding
from jaxformer.nn.execution import PLAIN, Execution, traced_once
from jaxformer.nn.experts import Experts
from jaxformer.nn.latent_attention import LatentAttention
from jaxformer.nn.local_heads import LocalHeads
from jaxformer.nn.mlp import Activation
from jaxformer.nn.norms import Norm, epsilon
from jaxformer.nn.parameters import parameter
from jaxformer.ops import masks
from jaxformer.ops.bias import ALiBi, alibi_slopes
from jaxformer.ops.cache import KVCache, LayerCache, init_cache, ring, write_positions
from jaxformer.ops.linear_cross_entropy import Unembedding
from jaxformer.ops.masks import Causal, Mask, Packed
from jaxformer.ops.positions import RoPE, positions_in_segments


@dataclass(frozen=True)
class BlockAttention(FieldDocs):
    """Attention of a block, as far as blocks differ in it. With a number, as in `model.attention.0.window`, an option
    sets one of the values that are repeated over the blocks, and without one all of them."""

    window: Length | None = None
    """Positions that a query attends to, counting back from and including itself, and in an encoder also as many
    after it; by default, all."""
    rope: RoPE | None = None
    """RoPE of the block, such as one with a smaller base in blocks with a window; by default, that of the model."""
    use_rope: bool = True
    """Rotate queries and keys, if the model has RoPE; false for a block without it (NoPE, Kazemnejad et al. 2023)."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class LatentsConfig(FieldDocs):
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1): the keys and values of all heads are projections of
    one latent vector per position, which a cache holds in their place."""

    width: Size = 512
    """Width of the latents of keys and values."""
    query_width: Size | None = None
    """Width of the latents of queries; none for queries from the input itself."""
    rope_width: Size = 64
    """Features of queries and keys that RoPE rotates, the last of head_dim; the keys of all heads share theirs."""
    value_width: Size | None = None
    """Width of a head's values; by default, head_dim without the rotated features."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ExpertsConfig(FieldDocs):
    """Mixture of experts in place of an MLP (Shazeer et al. 2017), MLPs with hidden layers as wide as d_ff."""

    n_experts: Size = 8
    """Experts per block."""
    per_token: Size = 2
    """Experts that process each token."""
    renormalize: bool | None = None
    """Normalise the weights of a token's experts to sum to 1; by default, true unless per_token is 1."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Weights of a token's experts: the softmax of the router's logits, or the sigmoid of each, where those chosen
    are the largest of n_groups after the addition of a correction, b_correction, which is not trained (DeepSeek-V3)."""
    n_groups: Size = 1
    """Groups of consecutive experts; with router sigmoid only."""
    groups_per_token: Size = 1
    """Groups that a token's experts are in, those with the largest sums of two experts' scores."""
    weight_factor: PositiveFloat = 1.0
    """Factor of the weights; with router sigmoid only."""
    dense_blocks: NonNegative = 0
    """Blocks, from the first on, that have an MLP in place of experts."""
    dense_width: Size | None = None
    """Width of the hidden layer of their MLP; by default, as the experts'."""
    capacity_factor: Annotated[float, Range(above=0, hint=", such as 1.25, or none to drop nothing")] | None = None
    """Capacity of an expert in training, as a multiple of its even share of tokens; by default no token is dropped,
    which is slower but exact."""
    shared_expert: bool = False
    """Additional expert in each block that processes all tokens."""
    shared_width: Size | None = None
    """Width of its hidden layer; by default, as the others'."""
    shared_gate: bool = False
    """Multiply its output by the sigmoid of a learned projection of the token."""
    bias: bool = False
    """Biases in all layers of experts, also in gates, and in the router (GPT-OSS)."""
    balance_weight: NonNegativeFloat = 0.01
    """Weight of the load-balancing loss of each block, of the softmax of the logits whatever the router. DeepSeek-V3
    balances its experts by b_correction instead, which is not trained here."""
    router_z_weight: NonNegativeFloat = 0.001
    """Weight of the router z-loss of each block."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.per_token > self.n_experts:
            raise UserError(f"per_token is {self.per_token}, but n_experts is {self.n_experts}; use at most that.")
        if not self.shared_expert and (self.shared_width is not None or self.shared_gate):
            given = f"shared_width is {self.shared_width}" if self.shared_width is not None else "shared_gate is True"
            raise UserError(f"{given}, but there is no shared expert; omit it, or set shared_expert.")
        if self.dense_width is not None and not self.dense_blocks:
            raise UserError(f"dense_width is {self.dense_width}, but dense_blocks is 0; omit it.")
        if self.router == "softmax":
            for name in ("n_groups", "groups_per_token", "weight_factor"):
                if (value := getattr(self, name)) != 1:
                    raise UserError(f"{name} is {value}, but router is softmax; omit it, or set router to sigmoid.")
        available = self.groups_per_token * (self.n_experts // self.n_groups)
        if self.n_experts % self.n_groups or self.groups_per_token > self.n_groups or self.per_token > available:
            problem = f"{self.groups_per_token} of {self.n_groups} groups of {self.n_experts} experts in all"
            remedy = "set n_groups to a divisor of n_experts, and groups_per_token to more, but at most n_groups"
            raise UserError(f"per_token is {self.per_token}, of {problem}; {remedy}.")


@dataclass(frozen=True)
class DecoderConfig(TokenModelConfig):
    """Shape of a `Decoder`."""

    d_model: Size = 256
    """Width of the residual stream."""
    n_blocks: Depth = 4
    """Number of blocks."""
    n_heads: Size = 4
    """Attention heads per block."""
    n_kv_heads: Size | None = None
    """Key/value heads, shared by the query heads; by default, n_heads."""
    head_dim: Size | None = None
    """Width of a head; by default, d_model / n_heads."""
    attention_bias: bool = False
    """Biases in the attention projections."""
    output_bias: bool | None = None
    """Bias of W_O; by default, as attention_bias."""
    score_scale: PositiveFloat | None = None
    """Factor applied to the attention scores; by default, 1/sqrt(head_dim)."""
    score_soft_cap: PositiveFloat | None = None
    """Bound c of the attention scores, c · tanh(scores / c) (Gemma 2); none for no bound."""
    sinks: bool = False
    """Learned logit of each head that takes part in the softmax of its scores, with no value (GPT-OSS)."""
    qk_norm: bool = False
    """Normalise queries and keys, by RMSNorm unless qk_norm_kind is layernorm."""
    qk_norm_kind: QKNorm = "head"
    """What qk_norm normalises: each head, with one gain for all heads; the whole width of all heads (OLMo 2); or, with
    layernorm, each head by LayerNorm without a bias and with gains of its own (Cohere)."""
    latents: LatentsConfig | None = None
    """Multi-head latent attention; none for keys and values from the input itself."""
    local_heads: NonNegative = 0
    """Heads of each block that attend to a fixed distance at initialisation: the first one position back, the second
    two back, and so on. Needs RoPE and attention_bias, whose b_Q and b_K are initialised accordingly."""
    prefix: bool = False
    """Attend in both directions within a prefix of each sequence (prefix language model, Raffel et al. 2020). Its
    length is an input; in generation, the prefix is the prompt."""
    max_context: Length | None = None
    """Longest sequence, in tokens, over which attention is full, and the number of learned positions if there are any;
    by default context_length, which sets the length of training sequences."""
    positions: Literal[AddedPositions, "alibi"] = "none"
    """Vectors added to the embedding (learned, sinusoidal) or biases of the attention scores in proportion to distance
    (alibi, Press et al. 2022), in either case with rope none; or none."""
    rope: RoPE | None = RoPE()  # noqa: RUF009  # frozen
    """Rotary position embedding (RoPE) of queries and keys; none for no rotation."""
    attention: tuple[BlockAttention, ...] = (BlockAttention(),)
    """What differs by block, repeated over the blocks: with two values, blocks 0, 2, 4, ... have the first."""
    d_ff: tuple[Size, ...] = (1024,)
    """Widths of the MLP's hidden layers."""
    activation: Activation = "gelu"
    """Activation of the MLP's hidden layers; with swiglu and geglu these are gated."""
    bias: bool = False
    """Biases in the MLP."""
    experts: ExpertsConfig | None = None
    """Mixture of experts in place of each MLP; none for one MLP for all tokens."""
    norm: Literal["none", Norm] = "rmsnorm"
    """Kind of norm; none for no norms, whatever norm_placement is."""
    norm_eps: NormEps | None = None
    """ε added to the mean square or variance in norms; by default, 1e-6 for rmsnorm and 1e-5 for layernorm."""
    norm_placement: Literal["pre", "post", "both", "output", "parallel", "parallel_two"] = "pre"
    """Norms before each sublayer (pre), after each residual connection (post), before and after each sublayer (both),
    or of each sublayer's output (output). With parallel and parallel_two, attention and MLP both read the block's
    input, after one norm, or a norm each."""
    final_norm: bool = True
    """Additional norm before the unembedding."""
    embedding_std: NonNegativeFloat = 1.0
    """Standard deviation of the embeddings of tokens and, if learned, positions at initialisation."""
    embedding_scale: float = 1.0
    """Factor applied to a token's row of the embedding."""
    embedding_norm: bool = False
    """Additional norm before the first block (BLOOM)."""
    unembedding: Literal["linear", "tied"] = "linear"
    """Logits from W_out (linear), or from the transposed embedding (tied: weight tying)."""
    unembedding_std: NonNegativeFloat | None = None
    """Standard deviation of W_out at initialisation; by default, 1/sqrt(d_model). With small values the initial loss is
    log(vocab_size)."""
    unembedding_bias: bool = False
    """Bias of the logits, b_out, 0 at initialisation."""
    logit_scale: PositiveFloat = 1.0
    """Factor of the final norm's output and so of the logits (Cohere, Granite), before unembedding_bias and
    logit_soft_cap."""
    logit_soft_cap: PositiveFloat | None = None
    """Bound c of the logits, c · tanh(logits / c) (Gemma 2); none for no bound."""
    residual_scale: PositiveFloat = 1.0
    """Factor of each sublayer's output before it is added to the residual stream (Granite)."""
    dropout: Fraction = 0.0
    """Dropout probability, in training, of features of the embedding and of each sublayer's output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attention:
            raise UserError("attention is empty; give at least one value, which is repeated over the blocks.")
        if unused := {*self.attention[self.n_blocks :]} - {*self.attention[: self.n_blocks]}:
            problem = f"attention has {len(self.attention)} values, but n_blocks is {self.n_blocks}"
            raise UserError(f"{problem}, so that no block has {next(iter(unused))}; omit it.")
        blocks.check_attention(self, map(self.block_rope, range(self.n_blocks)))
        if self.n_heads % self.kv_heads:
            reason = "every key/value head serves equally many query heads"
            raise UserError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.kv_heads}; {reason}.")
        if self.max_context is not None and self.max_context < self.context_length:
            problem = f"max_context is {self.max_context}, but context_length is {self.context_length}"
            raise UserError(f"{problem}; set it to at least that, or omit it.")
        window = next((kind.window for kind in self.attention if kind.window is not None), None)
        if self.prefix and window is not None:
            raise UserError(f"window is {window}, but all positions attend to a prefix; omit one of them.")
        for name in ("final_norm", "embedding_norm"):
            if getattr(self, name) and self.norm == "none":
                raise UserError(
                    f"norm is none, but {name} is True; set {name} to false, or norm to rmsnorm or layernorm."
                )
        if self.qk_norm_kind != "head" and not self.qk_norm:
            raise UserError(f"qk_norm_kind is {self.qk_norm_kind}, but qk_norm is False; set it to true.")
        if (latents := self.latents) is not None:
            if not latents.rope_width < self.width_of_head:
                limit = f"it must be below head_dim, {self.width_of_head}"
                raise UserError(f"latents.rope_width is {latents.rope_width}; {limit}.")
            for name, allowed in (("attention_bias", False), ("output_bias", None), ("qk_norm", False)):
                if getattr(self, name) not in (allowed, False):
                    raise UserError(f"{name} is {getattr(self, name)}, but with latents it must be false; omit it.")
            if self.kv_heads != self.n_heads:
                reason = "all heads share the latents"
                raise UserError(f"n_kv_heads is {self.kv_heads}, but {reason}, and n_heads is {self.n_heads}; omit it.")
        if self.experts is not None and self.experts.dense_blocks >= self.n_blocks:
            problem = f"experts.dense_blocks is {self.experts.dense_blocks}, but n_blocks is {self.n_blocks}"
            raise UserError(f"{problem}; set it to less, or experts to none.")
        if self.unembedding_std is not None and not self.has_W_out:
            raise UserError(f"unembedding_std is {self.unembedding_std}, but there is no W_out; omit it.")

    @property
    def width_of_head(self) -> int:
        """Width K of a head."""
        return blocks.head_width(self)

    @property
    def kv_heads(self) -> int:
        """Number G of key/value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def width_of_values(self) -> int:
        """Width of a head's values and output."""
        if self.latents is None:
            return self.width_of_head
        return self.latents.value_width or self.width_of_head - self.latents.rope_width

    @property
    def scale(self) -> float:
        """Factor applied to the attention scores."""
        return self.width_of_head**-0.5 if self.score_scale is None else self.score_scale

    @property
    def attention_std(self) -> float:
        """Standard deviation of the attention projections at initialisation."""
        return 1 / sqrt(self.d_model)

    @property
    def attention_gain(self) -> float:
        """Mean square of attention's output at initialisation, divided by that of the heads' outputs."""
        return self.n_heads * self.width_of_values * self.attention_std**2

    @property
    def score_bias(self) -> ALiBi | None:
        """Bias of the attention scores in all blocks; None for none."""
        return ALiBi(alibi_slopes(self.n_heads)) if self.positions == "alibi" else None

    @property
    def n_positions(self) -> int:
        """Length in tokens of the longest sequence with full attention."""
        return self.max_context or self.context_length

    @property
    def attention_window(self) -> int:
        """Maximum number of positions that a query attends to, itself included: the window or, without one,
        `n_positions`, even in a longer sequence."""
        return max(self.block_windows)

    @property
    def block_windows(self) -> tuple[int, ...]:
        """Attention window of each block."""
        return tuple(self.block_attention(i).window or self.n_positions for i in range(self.n_blocks))

    @property
    def has_query_latents(self) -> bool:
        """True if queries are projections of latents, too."""
        return self.latents is not None and self.latents.query_width is not None

    @property
    def block_groups(self) -> tuple[tuple[int, slice], ...]:
        """Window and slice of each group of consecutive blocks with the same window, RoPE and kind of MLP; each group
        is one scan."""
        kinds = [(window, self.block_rope(i), self.is_dense(i)) for i, window in enumerate(self.block_windows)]
        return tuple((kinds[part.start][0], part) for part in blocks.consecutive(kinds))

    def block_attention(self, i: int) -> BlockAttention:
        """Return the attention of the i-th block."""
        return self.attention[i % len(self.attention)]

    def block_rope(self, i: int) -> RoPE | None:
        """Return the rotation of the i-th block's queries and keys; None for no rotation."""
        kind = self.block_attention(i)
        return (kind.rope or self.rope) if kind.use_rope else None

    def is_dense(self, i: int) -> bool:
        """Return True if the i-th block has an MLP, and no experts."""
        return self.experts is None or i < self.experts.dense_blocks

    @property
    def has_W_out(self) -> bool:
        """True if logits come from a matrix of their own."""
        return self.unembedding == "linear"

    @property
    def routes_tokens(self) -> bool:
        """True if the MLPs are mixtures of experts, to which padding is not sent."""
        return self.experts is not None

    @property
    def contract(self) -> Contract:
        tokens, is_windowed = super().contract, self.attention_window < self.context_length
        mask = ARRAY if self.prefix else Causal(self.attention_window if is_windowed else None)
        return replace(
            tokens,
            max_tokens=self.n_positions if self.positions == "learned" else None,
            inputs=(*tokens.inputs, Input("prefix", (), "int32")) if self.prefix else tokens.inputs,
            has_features=True,
            has_cache=True,
            attention_window=self.attention_window,
            layer_windows=self.block_windows,
            extrapolates=self.positions != "learned",
            has_prefix=self.prefix,
            has_segments=not self.prefix,
            attention=AttentionShape(
                *(self.n_heads, self.kv_heads, self.width_of_head, self.width_of_values, self.context_length, mask),
                has_terms=self.score_bias is not None or self.score_soft_cap is not None or self.sinks,
            ),
            scaled_width=None if self.unembedding == "tied" else self.d_model,
            has_residual_stream=True,
        )

    def build(self, execution: Execution = PLAIN) -> Decoder:
        return Decoder(self, execution)

    def make_attention(
        self, execution: Execution, heads: type[MultiHeadAttention] = LocalHeads, **options: Any
    ) -> Make:
        """Return a function that constructs the attention of a block; see `blocks.make_attention`."""
        attributes = {
            "n_kv_heads": self.kv_heads,
            "output_bias": self.output_bias,
            "scale": self.score_scale,
            "soft_cap": self.score_soft_cap,
            "sinks": self.sinks,
            "qk_norm": self.qk_norm,
            "qk_norm_kind": self.qk_norm_kind,
            "norm_eps": epsilon("layernorm" if self.qk_norm_kind == "layernorm" else "rmsnorm", self.norm_eps),
            "distances": tuple(range(1, self.local_heads + 1)),
        }
        if (latents := self.latents) is not None:
            heads = LatentAttention
            del attributes["distances"]
            attributes |= {"value_dim": self.width_of_values, "latent_dim": latents.width}
            attributes |= {"rope_dim": latents.rope_width, "query_latent_dim": latents.query_width}
        return blocks.make_attention(self, execution, heads, **attributes | options)

    def make_mlp(self, execution: Execution, i: int) -> Make:
        """Return a function that constructs the MLP or the mixture of experts of the i-th block."""
        mlp, experts = blocks.make_mlp(self), self.experts
        if experts is None:
            return mlp
        if self.is_dense(i):
            return mlp if experts.dense_width is None else partial(mlp, hidden=(experts.dense_width,))
        if experts.bias:
            mlp = partial(mlp, bias=True, gate_bias=True)
        return partial(
            Experts,
            make_expert=mlp,
            n_experts=experts.n_experts,
            per_token=experts.per_token,
            capacity_factor=experts.capacity_factor,
            shared_expert=experts.shared_expert,
            make_shared=None if experts.shared_width is None else partial(mlp, hidden=(experts.shared_width,)),
            shared_gate=experts.shared_gate,
            router_bias=experts.bias,
            groups=None if experts.router == "softmax" else (experts.groups_per_token, experts.n_groups),
            weight_factor=experts.weight_factor,
            shards=execution.expert_shards,
            renormalize=experts.renormalize,
        )

    def make_decoder_block(self, execution: Execution, i: int, **parts: Any) -> Block:
        """Return the i-th block; `parts` are those of `blocks.make_block`."""
        if self.norm == "none":
            parts["make_norm"] = None
        attributes = {
            "make_attention": self.make_attention(execution, rope=self.block_rope(i)),
            "make_mlp": self.make_mlp(execution, i),
        }
        return blocks.make_block(self, execution, **attributes | {"residual_scale": self.residual_scale} | parts)


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
            positions="none" if c.positions == "alibi" else c.positions,
            init_std=c.embedding_std,
            scale=c.embedding_scale,
        )
        if c.embedding_norm:
            self.embedding_norm = blocks.make_norm(c)
        self.blocks = [c.make_decoder_block(self.execution, i) for i in range(c.n_blocks)]
        if c.final_norm:
            self.final_norm = blocks.make_norm(c)
        if c.has_W_out:
            std = c.d_model**-0.5 if c.unembedding_std is None else c.unembedding_std
            self.W_out = parameter(
                self, "W_out", nn.initializers.normal(std), (c.d_model, c.vocab_size), "embed -> vocab"
            )
        if c.unembedding_bias:
            self.b_out = parameter(self, "b_out", nn.initializers.zeros, (c.vocab_size,), "vocab")

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
        x_TD = self.embed(tokens_T, positions_T)
        keys = jax.random.split(self.make_rng("dropout"), c.n_blocks) if self.has_rng("dropout") else None
        for window, part in c.block_groups:  # a scan needs blocks with the same mask
            inputs = SideInputs(positions_T, mask_of[window], valid_T=valid_T, score_bias=c.score_bias)
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
        kinds, inputs = [(w, layer.n_slots) for w, layer in zip(c.block_windows, cache.layers, strict=True)], {}
        for window, n_slots in set(kinds):
            own_S, own_slot = ring(position_S, slot, len(tokens_T), n_slots)
            bias = None if c.score_bias is None else c.score_bias(positions_T, own_S)
            mask_TS = self.mask(positions_T, own_S, prefix, window)
            inputs[window, n_slots] = SideInputs(positions_T, mask_TS, own_slot, score_bias=bias)
        x_TD = self.embed(tokens_T, positions_T)
        layers: list[LayerCache] = []
        for block, layer, kind in zip(traced_once(self.blocks), cache.layers, kinds, strict=True):
            x_TD, updated = block(x_TD, inputs[kind], layer)
            layers.append(updated)
        return x_TD, KVCache(tuple(layers), position_S)

    def embed(self, tokens_T: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Return the residual stream before the first block, `(T, D)`."""
        x_TD = self.embedding(tokens_T, positions_T)
        return self.embedding_norm(x_TD) if self.config.embedding_norm else x_TD

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        """Return logits `(T, V)` for the residual stream `(T, D)`, or `(V,)` for `(D,)`."""
        return self.unembedding().logits(self.readout(x_TD))

    def readout(self, x_TD: jax.Array) -> jax.Array:
        """Return the input of `unembedding`, `(T, D)`: the residual stream after the final norm."""
        x_TD = self.final_norm(x_TD) if self.config.final_norm else x_TD
        return x_TD if self.config.logit_scale == 1 else self.config.logit_scale * x_TD

    def unembedding(self) -> Unembedding:
        """Return the layer from readout to logits."""
        c = self.config
        W_DV = self.embedding.W_E.T if c.unembedding == "tied" else self.W_out
        return Unembedding(W_DV, self.b_out if c.unembedding_bias else None, c.logit_soft_cap)

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
        if c.latents is not None:  # the rotated part of keys, and latents in the place of values
            return init_cache(c.n_blocks, 1, n_slots, c.latents.rope_width, dtype, c.latents.width)
        return init_cache(c.n_blocks, c.kv_heads, n_slots, c.width_of_head, dtype, c.width_of_values)

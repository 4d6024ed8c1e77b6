"""Encoder-only transformer with bidirectional attention (Devlin et al. 2019): masked language model, classifiers of
sequences and of tokens, and sentence encoder."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig, TokenModelConfig
from jaxformer.config.fields import Depth, Fraction, NonNegative, NonNegativeFloat, NormEps, Range, Size
from jaxformer.contract import ARRAY, Contract, Task, token_inputs
from jaxformer.errors import UserError
from jaxformer.models import blocks
from jaxformer.models.decoder import BlockAttention
from jaxformer.models.inputs import check_length
from jaxformer.nn.block import Block, SideInputs, input_dropout, run_blocks
from jaxformer.nn.capture import capture_point
from jaxformer.nn.embedding import AddedPositions, Embedding
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.mlp import MLP, Activation, activate
from jaxformer.nn.norms import Norm
from jaxformer.nn.parameters import parameter
from jaxformer.ops import masks
from jaxformer.ops.linear_cross_entropy import Unembedding
from jaxformer.ops.positions import RoPE
from jaxformer.ops.quantized import rows

Pooling = Literal["first", "mean"]
"""Features of a sequence: those of its first token, or their mean over all tokens."""
HeadActivation = Literal["tanh", Activation]
"""Activation of a head's hidden layer."""
Head = Literal["linear", "mlp", "mlp_norm"]
"""Layers from features to the logits of classes: one; a hidden layer as wide as the model before it; or one with a norm
after it (ModernBERT)."""

MAX_CLASSIFIED_TOKENS = 128
"""Longest texts that an encoder is fine-tuned to classify by default, in tokens; it may have positions for more."""


@dataclass(frozen=True)
class EncoderConfig(TokenModelConfig):
    """Shape of a `MaskedLanguageModel`. The defaults are those of BERT-mini in Turc et al. 2019, without segments."""

    d_model: Size = 256
    """Width of the residual stream."""
    n_blocks: Depth = 4
    """Number of blocks."""
    n_heads: Size = 4
    """Attention heads per block."""
    head_dim: Size | None = None
    """Width of a head; by default, d_model / n_heads."""
    attention_bias: bool = True
    """Biases in the attention projections."""
    d_ff: tuple[Size, ...] = (1024,)
    """Widths of the MLP's hidden layers."""
    activation: Activation = "gelu"
    """Activation of the MLP's hidden layers; with swiglu and geglu these are gated."""
    bias: bool = True
    """Biases in the MLP."""
    norm: Norm = "layernorm"
    """Kind of norm."""
    norm_eps: NormEps | None = None
    """ε added to the mean square or variance in norms; by default, 1e-6 for rmsnorm and 1e-5 for layernorm."""
    norm_placement: Literal["pre", "post"] = "post"
    """Norms after each residual connection (post), or before each sublayer and after the last block (pre)."""
    positions: AddedPositions = "learned"
    """Vectors added to the embedding: learned, sinusoidal, or none."""
    rope: RoPE | None = None
    """Rotary position embedding (RoPE) of queries and keys; none for no rotation."""
    attention: tuple[BlockAttention, ...] = (BlockAttention(),)
    """What differs by block, repeated over the blocks: with two values, blocks 0, 2, 4, ... have the first."""
    dropout: Fraction = 0.1
    """Dropout probability, in training, of features of the embedding and of each sublayer's output."""
    embedding_std: NonNegativeFloat = 0.02
    """Standard deviation of the embeddings of tokens, positions and segments at initialisation."""
    embedding_norm: bool = True
    """A norm before the first block."""
    first_norm: bool = True
    """A norm before the first block's attention, with norm_placement pre; ModernBERT has only that of the embedding."""
    embedding_dim: Size | None = None
    """Width of the embedding, which a linear layer maps to d_model (factorised embedding, Lan et al. 2020); by default,
    d_model, without the layer."""
    n_segments: Annotated[NonNegative, Range(most=2**20)] = 0
    """Number of segments, such as BERT's first and second sentence; 0 for no segment embedding."""
    head_activation: HeadActivation | None = None
    """Activation of the head's hidden layer; by default, that of the blocks, and in classifiers tanh."""
    head_bias: bool = True
    """Bias of the head's hidden layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= len(self.attention) <= self.n_blocks:
            limit = f"give at least one, and at most n_blocks, {self.n_blocks}"
            raise UserError(f"attention has {len(self.attention)} values; {limit}.")
        blocks.check_attention(self, map(self.block_rope, range(self.n_blocks)))
        if not self.first_norm and self.norm_placement != "pre":
            raise UserError("first_norm is False, but norm_placement is post; set it to pre.")

    def block_attention(self, i: int) -> BlockAttention:
        """Return the attention of the i-th block."""
        return self.attention[i % len(self.attention)]

    def block_rope(self, i: int) -> RoPE | None:
        """Return the rotation of the i-th block's queries and keys; None for no rotation."""
        kind = self.block_attention(i)
        return (kind.rope or self.rope) if kind.use_rope else None

    @property
    def width_of_embedding(self) -> int:
        """Width of the embedding."""
        return self.embedding_dim or self.d_model

    @property
    def activation_of_head(self) -> HeadActivation:
        """Activation of the head's hidden layer."""
        return self.head_activation or self.activation

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
        return replace(
            super().contract,
            task=Task.MASKED_LM,
            max_tokens=self.context_length if self.positions == "learned" else None,
            inputs=token_inputs(self.context_length, "tokens_T", "valid_T"),
            has_features=True,
            attention=blocks.attention_shape(self, self.context_length, ARRAY),
            head=("head.*", "head_norm.*", "b_out"),
        )

    def with_head(self, other: ModelConfig) -> ModelConfig:
        if isinstance(other, ClassifierConfig | TokenClassifierConfig) and type(other) is not type(self):
            return self.classifier(other)
        return self

    def classifier(self, head: AnyClassifierConfig) -> AnyClassifierConfig:
        """Return the config of a classifier with this encoder and a head."""
        own = ("head_activation", "head_bias")
        shared = {field.name: getattr(self, field.name) for field in fields(EncoderConfig) if field.name not in own}
        shared["context_length"] = min(self.context_length, MAX_CLASSIFIED_TOKENS)
        return replace(head, **shared)

    def build(self, execution: Execution = PLAIN) -> Encoder:
        return MaskedLanguageModel(self, execution)


@dataclass(frozen=True)
class ClassifierConfig(EncoderConfig):
    """Shape of a `Classifier`, an encoder that predicts one class per sequence."""

    n_classes: Size = 2
    """Number of classes."""
    pooling: Pooling = "first"
    """Features of the sequence: those of its first token, or their mean over all tokens."""
    head: Head = "mlp"
    """Layers from the features to the logits: one (linear), or a hidden layer before it (mlp) and a norm between them
    (mlp_norm)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self)

    @property
    def activation_of_head(self) -> HeadActivation:
        return self.head_activation or "tanh"

    @property
    def contract(self) -> Contract:
        return classifier_contract(self, super().contract, Task.TEXT_CLASSIFICATION)

    def build(self, execution: Execution = PLAIN) -> Classifier:
        return Classifier(self, execution)


@dataclass(frozen=True)
class TokenClassifierConfig(EncoderConfig):
    """Shape of a `TokenClassifier`, an encoder that predicts one class per token, such as a kind of named entity."""

    n_classes: Size = 2
    """Number of classes."""
    head: Head = "linear"
    """Layers from the features to the logits: one (linear), or a hidden layer before it (mlp) and a norm between them
    (mlp_norm)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self)

    @property
    def activation_of_head(self) -> HeadActivation:
        return self.head_activation or "tanh"

    @property
    def contract(self) -> Contract:
        return classifier_contract(self, super().contract, Task.TOKEN_CLASSIFICATION)

    def build(self, execution: Execution = PLAIN) -> TokenClassifier:
        return TokenClassifier(self, execution)


AnyClassifierConfig = TypeVar("AnyClassifierConfig", bound=ClassifierConfig | TokenClassifierConfig)


def check_head(config: ClassifierConfig | TokenClassifierConfig) -> None:
    """Raise `UserError` for a hidden layer without a bias, but no norm, which no published head is."""
    if not config.head_bias and config.head != "mlp_norm":
        raise UserError(f"head_bias is False, but head is {config.head}; set it to mlp_norm.")


def classifier_contract(config: ClassifierConfig | TokenClassifierConfig, encoder: Contract, task: Task) -> Contract:
    """Return the contract of a classifier, given that of its encoder."""
    return replace(
        encoder,
        task=task,
        n_classes=config.n_classes,
        has_features=False,
        scaled_width=config.d_model if config.width_of_embedding == config.d_model else None,
        head=("head.*", *(("head_norm.*", "head_out.*") if config.head == "mlp_norm" else ())),
    )


@dataclass(frozen=True)
class EmbedderConfig(EncoderConfig):
    """Shape of an `Embedder`, an encoder of sequences as vectors (Reimers and Gurevych 2019)."""

    pooling: Pooling = "mean"
    """Features of the sequence: those of its first token, or their mean over all tokens."""
    normalize: bool = True
    """Vectors of length 1, whose product is their cosine."""

    @property
    def contract(self) -> Contract:
        return replace(super().contract, task=Task.TEXT_EMBEDDING, n_classes=None, has_features=False, head=())

    def with_head(self, other: ModelConfig) -> ModelConfig:
        if isinstance(other, TokenClassifierConfig):
            return self.classifier(other)
        head = other if isinstance(other, ClassifierConfig) else ClassifierConfig()
        return replace(self.classifier(head), pooling=self.pooling)

    def build(self, execution: Execution = PLAIN) -> Embedder:
        return Embedder(self, execution)


class FirstBlock(Block):
    """Block whose attention reads the residual stream as it is, after the norm of the embedding (Warner et al. 2024,
    section 2.1)."""

    def _normalized(self, sublayer: str, x_TD: jax.Array) -> jax.Array:
        return x_TD if sublayer == "attention" else super()._normalized(sublayer, x_TD)


class Encoder(nn.Module):
    """Base of the models in this file; maps tokens to features."""

    config: EncoderConfig
    execution: Execution = PLAIN

    def setup(self) -> None:
        c = self.config
        width = c.width_of_embedding
        self.embedding = Embedding(c.vocab_size, c.context_length, width, c.positions, c.embedding_std)
        if c.n_segments:
            init = nn.initializers.normal(c.embedding_std)
            self.W_segment = parameter(self, "W_segment", init, (c.n_segments, width), "segments -> embed")
        if c.embedding_norm:
            self.embedding_norm = blocks.make_norm(c)
        self.embedding_dropout = nn.Dropout(c.dropout, deterministic=False)
        if width != c.d_model:
            self.embedding_projection = MLP((), c.d_model)
        self.blocks = [
            blocks.make_block(
                c,
                self.execution,
                Block if i or c.first_norm else FirstBlock,
                make_attention=blocks.make_attention(c, self.execution, rope=c.block_rope(i)),
            )
            for i in range(c.n_blocks)
        ]
        if c.final_norm:
            self.final_norm = blocks.make_norm(c)

    def features(
        self, tokens_T: jax.Array, valid_T: jax.Array | None = None, segments_T: jax.Array | None = None
    ) -> jax.Array:
        """Return features `(T, D)`, 0 at padding.

        Args:
          tokens_T: int32.
          valid_T: bool, True for tokens, False for padding; None if all are tokens.
          segments_T: int32, segment of each token; None if all are in the first.

        Raises:
          ValueError: there are more tokens than learned positions.
          ValueError: there are segments, but the model has none.
        """
        c = self.config
        check_length(c.contract, len(tokens_T))
        positions_T = jnp.arange(len(tokens_T))
        x_TD = masks.zero_padding(self.embedding(tokens_T, positions_T), valid_T)
        if c.n_segments:
            x_TD += rows(self.W_segment, jnp.zeros(len(tokens_T), jnp.int32) if segments_T is None else segments_T)
        elif segments_T is not None:
            raise ValueError("segments for a model whose n_segments is 0")
        if c.embedding_norm:
            x_TD = self.embedding_norm(x_TD)
        x_TD, keys = input_dropout(self, self.embedding_dropout, x_TD, c.n_blocks)
        if c.width_of_embedding != c.d_model:
            x_TD = self.embedding_projection(x_TD)
        kinds = [(c.block_attention(i).window, c.block_rope(i), i > 0 or c.first_norm) for i in range(c.n_blocks)]
        for part in blocks.consecutive(kinds):  # a scan needs blocks of one kind
            inputs = SideInputs(positions_T, self.mask(positions_T, valid_T, kinds[part.start][0]))
            x_TD = run_blocks(self.blocks[part], self.execution, x_TD, inputs, None if keys is None else keys[part])
        if c.final_norm:
            x_TD = self.final_norm(x_TD)
        return masks.zero_padding(x_TD, valid_T)

    def mask(self, positions_T: jax.Array, valid_T: jax.Array | None, window: int | None) -> jax.Array | None:
        """Return the mask `(T, T)` of the blocks with a window; None if all tokens are visible."""
        mask_TT = masks.tokens(len(positions_T), valid_T)
        if window is None:
            return mask_TT
        window_TT = masks.sliding_window(positions_T, positions_T, window)
        return window_TT if mask_TT is None else mask_TT & window_TT

    def pool(self, x_TD: jax.Array, valid_T: jax.Array | None, pooling: Pooling) -> jax.Array:
        """Return the features of a sequence that contains a token, `(D,)`, for those of `features`."""
        if pooling == "first":
            return x_TD[0]
        return x_TD.sum(0) / (len(x_TD) if valid_T is None else valid_T.sum().astype(x_TD.dtype))


class MaskedLanguageModel(Encoder):
    """Masked language model: maps tokens `(T,)` int32 to logits of the token at each position, `(T, V)`."""

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.head = MLP((), c.width_of_embedding, bias=c.head_bias)
        self.head_norm = blocks.make_norm(c)
        self.b_out = parameter(self, "b_out", nn.initializers.zeros, (c.vocab_size,), "vocab")

    def __call__(
        self, tokens_T: jax.Array, valid_T: jax.Array | None = None, segments_T: jax.Array | None = None
    ) -> jax.Array:
        """Return logits `(T, V)`; the arguments are those of `features`."""
        return capture_point(self, "logits", self.unembed(self.features(tokens_T, valid_T, segments_T)))

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        """Return logits `(T, V)` for features `(T, D)`, which may be those of masked positions only."""
        return self.unembedding().logits(self.readout(x_TD))

    def readout(self, x_TD: jax.Array) -> jax.Array:
        """Return the input of `unembedding`, `(T, D)`."""
        return self.head_norm(activate(self.config.activation_of_head, self.head(x_TD)))

    def unembedding(self) -> Unembedding:
        """Return the layer from readout to logits."""
        return Unembedding(self.embedding.W_E.T, self.b_out)


class ClassifyingEncoder(Encoder):
    """Base of the classifiers."""

    config: ClassifierConfig | TokenClassifierConfig

    def setup(self) -> None:
        super().setup()
        c = self.config
        if c.head == "mlp_norm":
            self.head, self.head_norm = MLP((), c.d_model, bias=c.head_bias), blocks.make_norm(c)
            self.head_out = MLP((), c.n_classes)
        else:
            self.head = MLP((c.d_model,) if c.head == "mlp" else (), c.n_classes, c.activation_of_head)

    def classify(self, x: jax.Array) -> jax.Array:
        """Return logits `(…, n_classes)` for features `(…, D)`."""
        x = self.head(x)
        if self.config.head == "mlp_norm":
            x = self.head_out(self.head_norm(activate(self.config.activation_of_head, x)))
        return capture_point(self, "logits", x)


class TokenClassifier(ClassifyingEncoder):
    """Token classifier: maps tokens `(T,)` int32 to logits of the class of each, `(T, n_classes)`."""

    config: TokenClassifierConfig

    def __call__(
        self, tokens_T: jax.Array, valid_T: jax.Array | None = None, segments_T: jax.Array | None = None
    ) -> jax.Array:
        """Return logits `(T, n_classes)`; the arguments are those of `features`."""
        return self.classify(self.features(tokens_T, valid_T, segments_T))


class Classifier(ClassifyingEncoder):
    """Sequence classifier: maps tokens `(T,)` int32 to logits `(n_classes,)`."""

    config: ClassifierConfig

    def __call__(
        self, tokens_T: jax.Array, valid_T: jax.Array | None = None, segments_T: jax.Array | None = None
    ) -> jax.Array:
        """Return logits `(n_classes,)`; the arguments are those of `features`. The sequence must contain a token."""
        x_D = self.pool(self.features(tokens_T, valid_T, segments_T), valid_T, self.config.pooling)
        return self.classify(x_D)


class Embedder(Encoder):
    """Sentence encoder: maps tokens `(T,)` int32 to a vector `(D,)`, for `decode.embed` and as the start of a
    `Classifier`; there is no objective to train it with."""

    config: EmbedderConfig

    def __call__(
        self, tokens_T: jax.Array, valid_T: jax.Array | None = None, segments_T: jax.Array | None = None
    ) -> jax.Array:
        """Return the vector `(D,)`; the arguments are those of `features`. The sequence must contain a token."""
        x_D = self.pool(self.features(tokens_T, valid_T, segments_T), valid_T, self.config.pooling)
        return x_D / jnp.maximum(jnp.linalg.norm(x_D), 1e-12) if self.config.normalize else x_D

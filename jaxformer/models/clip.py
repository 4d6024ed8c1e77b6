"""CLIP: an image tower and a text tower with a joint embedding space (Radford et al. 2021, figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log, prod
from typing import Annotated, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig, Resizing, TokenModelConfig
from jaxformer.config.fields import (
    Depth,
    Fraction,
    NonNegativeFloat,
    NormEps,
    PositiveFloat,
    Range,
    Side,
    Size,
    expand_patches,
)
from jaxformer.contract import Contract, Input, Task, token_inputs
from jaxformer.errors import UserError
from jaxformer.models import blocks
from jaxformer.models.inputs import check_length
from jaxformer.nn.block import SideInputs, input_dropout, run_blocks
from jaxformer.nn.capture import OUTPUT, capture_point
from jaxformer.nn.embedding import AddedPositions, Embedding
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.mlp import Activation
from jaxformer.nn.norms import Norm
from jaxformer.nn.parameters import parameter
from jaxformer.ops.masks import Causal, Mask, zero_padding
from jaxformer.ops.norms import l2_normalize
from jaxformer.ops.patches import patchify, standardize
from jaxformer.ops.positions import RoPE, sinusoidal
from jaxformer.ops.precision import upcast

LARGEST_LOG_SCALE = log(100)
"""Log of the largest logit scale, 100 (section 2.5)."""


@dataclass(frozen=True)
class ImageTowerConfig(ModelConfig):
    """Shape of the image tower, with blocks as in GPT-2 (section 2.4). The defaults are those of ViT-B/32."""

    image_size: tuple[Side, ...] = (224, 224)
    """Height and width in pixels; one value sets both."""
    patch_size: tuple[Side, ...] = (32, 32)
    """Height and width of a patch in pixels, which must divide those of the image; one value sets both."""
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    """Mean per channel of pixels from 0 to 1, which is subtracted; the default is that of CLIP's training images."""
    std: tuple[PositiveFloat, ...] = (0.26862954, 0.26130258, 0.27577711)
    """Standard deviation per channel, by which pixels are divided after that."""
    resizing: Resizing | None = None
    """How image files are resized before their centre is cropped to image_size; by default, both sides are resized to
    image_size by bicubic interpolation, whatever the proportions."""
    d_model: Size = 768
    """Width of the residual stream."""
    n_blocks: Depth = 12
    """Number of blocks."""
    n_heads: Size = 12
    """Attention heads per block."""
    head_dim: Size | None = None
    """Width of a head; by default, d_model / n_heads."""
    attention_bias: bool = True
    """Biases in the attention projections."""
    d_ff: tuple[Size, ...] = (3072,)
    """Widths of the MLP's hidden layers."""
    activation: Activation = "quick_gelu"
    """Activation of the MLP's hidden layers; with swiglu and geglu these are gated."""
    bias: bool = True
    """Biases in the MLP."""
    norm: Norm = "layernorm"
    """Kind of norm."""
    norm_eps: NormEps | None = None
    """ε added to the mean square or variance in norms; by default, 1e-6 for rmsnorm and 1e-5 for layernorm."""
    norm_placement: Literal["pre", "post"] = "pre"
    """Norms after each residual connection (post), or before each sublayer and after the last block (pre)."""
    positions: AddedPositions = "learned"
    """Vectors added to the patches: learned, sinusoidal, or none."""
    rope: RoPE | None = None
    """Rotary position embedding (RoPE) of queries and keys; none for no rotation."""
    dropout: Fraction = 0.0
    """Dropout probability, in training, of features of the embedding and of each sublayer's output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks.check_attention(self)
        expand_patches(self)
        if not self.mean or len(self.mean) != len(self.std):
            raise UserError(f"mean is {self.mean} and std {self.std}; give one of each for every channel.")

    @property
    def final_norm(self) -> bool:
        """True if the stack ends in an additional norm: with pre-norm, the residual stream is not normalised
        otherwise."""
        return self.norm_placement == "pre"

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return len(self.mean)

    @property
    def n_patches(self) -> int:
        """Number N of patches."""
        return prod(self.image_size) // prod(self.patch_size)


@dataclass(frozen=True)
class TextTowerConfig(TokenModelConfig):
    """Shape of the text tower, with blocks as in GPT-2 (section 2.4). A caption, with its start and end tokens, has at
    most `context_length` tokens. The defaults of widths are those paired with ViT-B/32."""

    d_model: Size = 512
    """Width of the residual stream."""
    n_blocks: Depth = 12
    """Number of blocks."""
    n_heads: Size = 8
    """Attention heads per block."""
    head_dim: Size | None = None
    """Width of a head; by default, d_model / n_heads."""
    attention_bias: bool = True
    """Biases in the attention projections."""
    d_ff: tuple[Size, ...] = (2048,)
    """Widths of the MLP's hidden layers."""
    activation: Activation = "quick_gelu"
    """Activation of the MLP's hidden layers; with swiglu and geglu these are gated."""
    bias: bool = True
    """Biases in the MLP."""
    norm: Norm = "layernorm"
    """Kind of norm."""
    norm_eps: NormEps | None = None
    """ε added to the mean square or variance in norms; by default, 1e-6 for rmsnorm and 1e-5 for layernorm."""
    norm_placement: Literal["pre", "post"] = "pre"
    """Norms after each residual connection (post), or before each sublayer and after the last block (pre)."""
    positions: AddedPositions = "learned"
    """Vectors added to the embedding: learned, sinusoidal, or none."""
    rope: RoPE | None = None
    """Rotary position embedding (RoPE) of queries and keys; none for no rotation."""
    dropout: Fraction = 0.0
    """Dropout probability, in training, of features of the embedding and of each sublayer's output."""
    embedding_std: NonNegativeFloat = 0.02
    """Standard deviation of the embeddings of tokens and positions at initialisation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks.check_attention(self)

    @property
    def final_norm(self) -> bool:
        """True if the stack ends in an additional norm: with pre-norm, the residual stream is not normalised
        otherwise."""
        return self.norm_placement == "pre"

    @property
    def contract(self) -> Contract:
        return replace(super().contract, max_tokens=self.context_length if self.positions == "learned" else None)


@dataclass(frozen=True)
class CLIPConfig(ModelConfig):
    """Shape of a `CLIP`. The defaults are those of the paper's ViT-B/32."""

    vision: ImageTowerConfig = field(default_factory=ImageTowerConfig)
    """Image tower."""
    text: TextTowerConfig = TextTowerConfig(vocab_size=49_408, context_length=77)
    """Text tower."""
    d_joint: Size = 512
    """Width of the joint embedding space."""
    temperature: Annotated[float, Range(least=0.01)] = 0.07
    """Divisor of cosine similarities in the logits at initialisation."""

    @property
    def contract(self) -> Contract:
        image = Input("image_HWC", (*self.vision.image_size, len(self.vision.mean)), "uint8")
        text = self.text.contract
        return Contract(
            Task.CONTRASTIVE,
            (image, *token_inputs(self.text.context_length, "tokens_T", "valid_T")),
            vocab_size=text.vocab_size,
            max_tokens=text.max_tokens,
            attention=blocks.attention_shape(self.vision, 1 + self.vision.n_patches),
            patches="vision",
            resizing=self.vision.resizing,
        )

    def build(self, execution: Execution = PLAIN) -> CLIP:
        return CLIP(self, execution)


class ImageEmbedding(nn.Module):
    """Class token and projected patches, with positions added."""

    config: ImageTowerConfig

    @nn.compact
    def __call__(self, image_HWC: jax.Array) -> jax.Array:
        """Map an image `(H, W, C)` uint8 to `(1 + N, D)`."""
        c = self.config
        init = nn.initializers.normal(c.d_model**-0.5)
        x_class_D = parameter(self, "x_class", init, (c.d_model,), "embed")
        W_E = parameter(self, "W_E", init, (prod(c.patch_size) * len(c.mean), c.d_model), "patches -> embed")
        patches_NP = patchify(standardize(image_HWC, c.mean, c.std), c.patch_size)
        x_ND = patches_NP.astype(W_E.dtype) @ W_E
        x_TD = jnp.concatenate([x_class_D[None], x_ND])
        if c.positions == "learned":
            x_TD = x_TD + parameter(self, "W_pos", init, (1 + c.n_patches, c.d_model), "positions -> embed")
        elif c.positions == "sinusoidal":
            x_TD = x_TD + sinusoidal(jnp.arange(len(x_TD)), c.d_model).astype(x_TD.dtype)
        return capture_point(self, OUTPUT, x_TD)


class CLIP(nn.Module):
    """Embeddings of an image and a text in a joint space; the closer they are, the better image and text match."""

    config: CLIPConfig
    execution: Execution = PLAIN

    def setup(self) -> None:
        vision, text, d_joint = self.config.vision, self.config.text, self.config.d_joint
        self.vision_embedding = ImageEmbedding(vision)
        self.vision_embedding_norm = blocks.make_norm(vision)
        self.vision_blocks = [blocks.make_block(vision, self.execution) for _ in range(vision.n_blocks)]
        self.text_embedding = Embedding(
            text.vocab_size, text.context_length, text.d_model, text.positions, text.embedding_std
        )
        self.text_blocks = [blocks.make_block(text, self.execution) for _ in range(text.n_blocks)]
        if vision.final_norm:
            self.vision_norm = blocks.make_norm(vision)
        if text.final_norm:
            self.text_norm = blocks.make_norm(text)
        self.W_i = parameter(
            self, "W_i", nn.initializers.normal(vision.d_model**-0.5), (vision.d_model, d_joint), "embed -> joint"
        )
        self.W_t = parameter(
            self, "W_t", nn.initializers.normal(text.d_model**-0.5), (text.d_model, d_joint), "embed -> joint"
        )
        self.t = parameter(self, "t", nn.initializers.constant(-log(self.config.temperature)), (), "")
        self.vision_dropout = nn.Dropout(vision.dropout, deterministic=False)
        self.text_dropout = nn.Dropout(text.dropout, deterministic=False)

    def __call__(
        self, image_HWC: jax.Array, tokens_T: jax.Array, valid_T: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return `encode_image`, `encode_text` and `log_scale`; logits are cosine similarities times
        exp(`log_scale`)."""
        return (
            capture_point(self, "output.0", self.encode_image(image_HWC)),
            capture_point(self, "output.1", self.encode_text(tokens_T, valid_T)),
            capture_point(self, "output.2", self.log_scale()),
        )

    def encode_image(self, image_HWC: jax.Array) -> jax.Array:
        """Return the embedding of an image, `(E,)` float32 with unit norm, from its class token.

        Args:
          image_HWC: uint8, of the config's size.
        """
        x_TD = self.vision_embedding_norm(self.vision_embedding(image_HWC))
        x_D = self._through(self.vision_blocks, self.vision_dropout, x_TD, None)[0]
        return _joint(self.vision_norm(x_D) if self.config.vision.final_norm else x_D, self.W_i)

    def encode_text(self, tokens_T: jax.Array, valid_T: jax.Array | None = None) -> jax.Array:
        """Return the embedding of a text, `(E,)` float32 with unit norm, from its last token, which attends to all
        others.

        Args:
          tokens_T: int32.
          valid_T: True for tokens, False for padding, which is on the right; None if all are tokens.

        Raises:
          ValueError: more tokens than learned positions.
        """
        check_length(self.config.text.contract, len(tokens_T))
        x_TD = zero_padding(self.text_embedding(tokens_T, jnp.arange(len(tokens_T))), valid_T)
        last = len(tokens_T) - 1 if valid_T is None else jnp.sum(valid_T) - 1
        x_D = self._through(self.text_blocks, self.text_dropout, x_TD, Causal())[last]
        return _joint(self.text_norm(x_D) if self.config.text.final_norm else x_D, self.W_t)

    def log_scale(self) -> jax.Array:
        """Return the log of the logit scale, a float32 scalar, at most log 100."""
        t = upcast(self.t)
        # Straight-through gradient: otherwise `t` could never return from beyond the limit.
        return t + jax.lax.stop_gradient(jnp.minimum(t, LARGEST_LOG_SCALE) - t)

    def _through(self, tower: Sequence[nn.Module], dropout: nn.Module, x_TD: jax.Array, mask: Mask) -> jax.Array:
        """Return the residual stream `(T, D)` after a tower's blocks."""
        x_TD, keys = input_dropout(self, dropout, x_TD, len(tower))
        return run_blocks(tower, self.execution, x_TD, SideInputs(mask=mask), keys)


def _joint(x_D: jax.Array, W_DE: jax.Array) -> jax.Array:
    return l2_normalize(upcast(x_D @ W_DE))

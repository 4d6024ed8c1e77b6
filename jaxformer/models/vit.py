"""Vision Transformer: an image is a sequence of patches (Dosovitskiy et al. 2021, figure 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.config import ImageModelConfig, ModelConfig, Resizing
from jaxformer.config.fields import (
    Depth,
    Fraction,
    NonNegative,
    NormEps,
    PositiveFloat,
    Side,
    Size,
    expand_patches,
)
from jaxformer.contract import Contract, Task
from jaxformer.errors import UserError
from jaxformer.models import blocks
from jaxformer.nn.block import SideInputs, input_dropout, run_blocks
from jaxformer.nn.capture import capture_point
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.mlp import GATED, Activation, uniform_fan_in
from jaxformer.nn.norms import Norm
from jaxformer.nn.parameters import parameter
from jaxformer.nn.patches import LearnedPositions, PatchEmbedding
from jaxformer.ops.patches import patchify, standardize


@dataclass(frozen=True)
class ViTConfig(ImageModelConfig):
    """Shape of a `ViT`. The defaults are those of the paper's ViT-B/16, table 1."""

    patch_size: tuple[Side, ...] = (16, 16)
    """Height and width of a patch in pixels, which must divide those of the image; one value sets both."""
    pooling: Literal["class", "mean", "class_and_mean", "distilled"] = "class"
    """Features of the image: those of an added class token, their mean over all patches, or both, one after the other;
    or those of a class and a distillation token, with a head each, whose logits are averaged (Touvron et al. 2021)."""
    n_registers: NonNegative = 0
    """Further learned tokens before the patches, which no head reads (Darcet et al. 2024)."""
    resizing: Resizing | None = None
    """How image files are resized before their centre is cropped to image_size; by default, both sides are resized to
    image_size by bicubic interpolation, whatever the proportions."""
    mean: tuple[float, ...] = (0.5,)
    """Mean of pixels from 0 to 1, for all channels or per channel. The model reads (pixel - mean) / std."""
    std: tuple[PositiveFloat, ...] = (0.5,)
    """Standard deviation of pixels from 0 to 1, for all channels or per channel."""
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
    activation: Activation = "gelu"
    """Activation of the MLP's hidden layers; with swiglu and geglu these are gated."""
    bias: bool = True
    """Biases in the MLP."""
    gate_bias: bool = False
    """Biases in the MLP's gates."""
    norm: Norm = "layernorm"
    """Kind of norm."""
    norm_eps: NormEps | None = None
    """ε added to the mean square or variance in norms; by default, 1e-6 for rmsnorm and 1e-5 for layernorm."""
    norm_placement: Literal["pre", "post"] = "pre"
    """Norms after each residual connection (post), or before each sublayer and after the last block (pre)."""
    dropout: Fraction = 0.1
    """Dropout probability, in training, of features of the embedding and of each sublayer's output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks.check_attention(self, ())
        if self.gate_bias and not (self.bias and self.activation in GATED):
            problem = f"gate_bias is true, but with bias {self.bias} and activation {self.activation!r} no gate has one"
            raise UserError(f"{problem}; omit it, or set bias and one of {' and '.join(GATED)}.")
        expand_patches(self)
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise UserError(f"{name} is {getattr(self, name)}; give 1 number, or {self.channels}, one per channel.")

    @property
    def final_norm(self) -> bool:
        """True if the stack ends in an additional norm: with pre-norm, the residual stream is not normalised
        otherwise."""
        return self.norm_placement == "pre"

    @property
    def contract(self) -> Contract:
        n_patches = prod(self.image_size) // prod(self.patch_size)
        attention = blocks.attention_shape(self, self.n_positions(n_patches))
        contract = replace(
            super().contract, attention=attention, patches="", scaled_width=self.d_model, resizing=self.resizing,
            head=("W_out", "b_out", "W_distilled", "b_distilled"),
        )  # fmt: skip
        return contract if self.n_classes else replace(contract, task=Task.IMAGE_EMBEDDING, n_classes=None, head=())

    @property
    def width_of_head(self) -> int:
        """Width K of a head."""
        return blocks.head_width(self)

    @property
    def n_tokens(self) -> int:
        """Number of learned tokens before the patches."""
        return {"mean": 0, "distilled": 2}.get(self.pooling, 1) + self.n_registers

    @property
    def n_features(self) -> int:
        """Width of the features that a head reads."""
        return self.d_model * (2 if self.pooling == "class_and_mean" else 1)

    def n_positions(self, n_patches: int) -> int:
        """Return the number of positions: the learned tokens and the patches."""
        return self.n_tokens + n_patches

    def with_head(self, other: ModelConfig) -> ModelConfig:
        if self.n_classes or not isinstance(other, ImageModelConfig):
            return self
        return replace(self, n_classes=other.n_classes or ViTConfig.n_classes)

    def build(self, execution: Execution = PLAIN) -> nn.Module:
        return ViT(self, execution)

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Shape of a patch without channels."""
        return self.patch_size

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of patches along each axis."""
        return tuple(n // size for n, size in zip(self.example()[0].shape[:-1], self.patch_shape, strict=True))

    def make_positions(self, length: int) -> LearnedPositions:
        """Return the position embedding of `length` patches, and the learned tokens before them."""
        return LearnedPositions(length, self.n_tokens)

    def pool(self, x: jax.Array) -> jax.Array:
        """Return the features of a sequence, `(…, F)` from `(…, N, D)`; F is D, or 2 D for features of two kinds."""
        tokens, patches = x[..., : self.n_tokens, :], x[..., self.n_tokens :, :]
        if self.pooling == "class":
            return tokens[..., 0, :]
        if self.pooling == "distilled":
            return jnp.concatenate([tokens[..., 0, :], tokens[..., 1, :]], axis=-1)
        mean = jnp.mean(patches, axis=-2)
        return mean if self.pooling == "mean" else jnp.concatenate([tokens[..., 0, :], mean], axis=-1)


class ViT(nn.Module):
    """Image classifier with bidirectional attention among patches: maps `(height, width, C)` uint8 to logits
    `(n_classes,)`; without classes, to the features of the image."""

    config: ViTConfig
    execution: Execution = PLAIN

    def setup(self) -> None:
        c = self.config
        self.patch_embedding = PatchEmbedding(c.d_model)
        self.position_embedding = c.make_positions(prod(c.grid))
        self.embedding_dropout = nn.Dropout(c.dropout, deterministic=False)
        self.blocks = [blocks.make_block(c, self.execution) for _ in range(c.n_blocks)]
        if c.final_norm:
            self.final_norm = blocks.make_norm(c)
        self._make_head()

    def _make_head(self) -> None:
        c, init = self.config, uniform_fan_in(self.config.n_features)
        if c.n_classes:
            self.W_out = parameter(self, "W_out", init, (c.n_features, c.n_classes), "embed -> classes")
            self.b_out = parameter(self, "b_out", init, (c.n_classes,), "classes")
        if c.n_classes and c.pooling == "distilled":
            self.W_distilled = parameter(self, "W_distilled", init, self.W_out.shape, "embed -> classes")
            self.b_distilled = parameter(self, "b_distilled", init, self.b_out.shape, "classes")

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Return logits `(n_classes,)`, or without classes `encode`; pixels may be floats with white at 1 instead of
        uint8."""
        x_F = self.encode(pixels)
        return capture_point(self, "logits", self._classify(x_F)) if self.config.n_classes else x_F

    def _classify(self, x_F: jax.Array) -> jax.Array:
        """Return logits `(n_classes,)`."""
        if self.config.pooling != "distilled":
            return x_F @ self.W_out + self.b_out
        class_D, distilled_D = jnp.split(x_F, 2)
        return (class_D @ self.W_out + self.b_out + distilled_D @ self.W_distilled + self.b_distilled) / 2

    def encode(self, pixels: jax.Array) -> jax.Array:
        """Return the features of the image, `(F,)`; see `ViTConfig.pool`."""
        c = self.config
        patches_NP = patchify(standardize(pixels, c.mean, c.std), c.patch_shape)
        x_TD = self.position_embedding(self.patch_embedding(patches_NP))
        x_TD, keys = input_dropout(self, self.embedding_dropout, x_TD, c.n_blocks)
        x_TD = run_blocks(self.blocks, self.execution, x_TD, SideInputs(), keys)
        return c.pool(self.final_norm(x_TD) if c.final_norm else x_TD)

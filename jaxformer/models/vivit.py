"""Video Vision Transformer: a video is a sequence of tubelets, patches that span several frames (Arnab et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.config.fields import Depth, Side
from jaxformer.contract import Contract, Input, Task
from jaxformer.errors import UserError
from jaxformer.models import blocks
from jaxformer.models.vit import ViT, ViTConfig
from jaxformer.nn.block import SideInputs, input_dropout, run_blocks
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.patches import PatchEmbedding
from jaxformer.ops import masks
from jaxformer.ops.attention import in_segments
from jaxformer.ops.patches import patchify, standardize


@dataclass(frozen=True)
class ViViTConfig(ViTConfig):
    """Shape of a `ViViT` or `FactorisedViViT`. The defaults are those of the paper's ViViT-B/16x2, with
    1,000 classes."""

    n_frames: Side = 32
    """Frames per video."""
    tubelet_frames: Side = 2
    """Frames per tubelet, whose height and width are patch_size; it must divide n_frames."""
    attention: Literal["joint", "factorised"] = "joint"
    """Attention among all tubelets (model 1), or first within and then across time steps (model 2)."""
    n_temporal_blocks: Depth = 4
    """Blocks of attention across time steps, if attention is factorised."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_frames % self.tubelet_frames:
            remedy = "change one"
            raise UserError(f"tubelet_frames {self.tubelet_frames} does not divide n_frames {self.n_frames}; {remedy}.")
        if not self.n_classes:
            raise UserError("n_classes is 0, but videos are only classified; set at least 1.")
        if self.pooling not in ("class", "mean"):
            raise UserError(f"pooling is {self.pooling}, but videos have a class token only; use class or mean.")

    @property
    def contract(self) -> Contract:
        pixels = Input("pixels", (self.n_frames, *self.image_size, self.channels), "uint8")
        n_times = self.n_frames // self.tubelet_frames
        n_patches = n_times * prod(self.image_size) // prod(self.patch_size)
        # Factorised attention has an array as its mask within a time step, and no mask across time steps.
        n_positions = self.n_positions(n_patches if self.attention == "joint" else n_times)
        return Contract(
            Task.VIDEO_CLASSIFICATION,
            (pixels,),
            n_classes=self.n_classes,
            attention=blocks.attention_shape(self, n_positions),
            scaled_width=self.d_model,
            resizing=self.resizing,
        )

    def build(self, execution: Execution = PLAIN) -> nn.Module:
        return (ViViT if self.attention == "joint" else FactorisedViViT)(self, execution)

    @property
    def patch_shape(self) -> tuple[int, ...]:
        return (self.tubelet_frames, *self.patch_size)


class ViViT(ViT):
    """Video classifier with joint space-time attention (model 1, section 3.3): maps `(frames, height, width, C)` uint8
    to logits `(n_classes,)`."""

    config: ViViTConfig


class FactorisedViViT(ViT):
    """Video classifier with a factorised encoder (model 2, figure 4): a ViT per time step, and a transformer over the
    features of the time steps. It maps `(frames, height, width, C)` uint8 to logits `(n_classes,)`.

    All time steps form one sequence, with one attention segment per time step.
    """

    config: ViViTConfig

    def setup(self) -> None:
        c = self.config
        n_times, *within = c.grid
        at_one_time = replace(self.execution, attention=in_segments(n_times, self.execution.attention))
        self.patch_embedding = PatchEmbedding(c.d_model)
        self.spatial_position_embedding = c.make_positions(prod(within))
        self.temporal_position_embedding = c.make_positions(n_times)
        self.embedding_dropout = nn.Dropout(c.dropout, deterministic=False)
        self.spatial_blocks = [blocks.make_block(c, at_one_time) for _ in range(c.n_blocks)]
        self.temporal_blocks = [blocks.make_block(c, self.execution) for _ in range(c.n_temporal_blocks)]
        if c.final_norm:
            self.spatial_norm, self.temporal_norm = blocks.make_norm(c), blocks.make_norm(c)
        self._make_head()

    def encode(self, pixels: jax.Array) -> jax.Array:
        """Return the features of the video, `(D,)`."""
        c = self.config
        n_times = c.grid[0]
        patches_NP = patchify(standardize(pixels, c.mean, c.std), c.patch_shape)
        x_ND = self.patch_embedding(patches_NP)
        x_TD = self.spatial_position_embedding(x_ND.reshape(n_times, -1, c.d_model)).reshape(-1, c.d_model)
        x_TD, keys = input_dropout(self, self.embedding_dropout, x_TD, c.n_blocks + c.n_temporal_blocks)
        spatial_keys, temporal_keys = (None, None) if keys is None else jnp.split(keys, [c.n_blocks])
        time_T = jnp.repeat(jnp.arange(n_times), len(x_TD) // n_times)
        mask_TT = masks.segment(time_T, time_T)
        x_TD = run_blocks(self.spatial_blocks, self.execution, x_TD, SideInputs(time_T, mask_TT), spatial_keys)
        x_TD = self.spatial_norm(x_TD) if c.final_norm else x_TD
        x_TD = self.temporal_position_embedding(c.pool(x_TD.reshape(n_times, -1, c.d_model)))
        x_TD = run_blocks(self.temporal_blocks, self.execution, x_TD, SideInputs(), temporal_keys)
        return c.pool(self.temporal_norm(x_TD) if c.final_norm else x_TD)

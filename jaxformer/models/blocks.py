"""Base of the configs of models that are stacks of `Block`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import flax.linen as nn

from jaxformer.config import ModelConfig, TokenModelConfig
from jaxformer.config.fields import Fraction, NormEps, Range, Size
from jaxformer.contract import AttentionShape, Contract
from jaxformer.errors import UserError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.block import Block, Make
from jaxformer.nn.embedding import Positions
from jaxformer.nn.execution import Execution
from jaxformer.nn.local_heads import NARROW, WIDE, LocalHeads
from jaxformer.nn.mlp import MLP, Activation
from jaxformer.nn.norms import NORMS, Norm, epsilon
from jaxformer.ops.masks import Causal
from jaxformer.ops.positions import RoPE, query_and_key_at


def check_heads(config: BlocksConfig) -> None:
    """Raise `UserError` if the number of heads does not divide the model's width, or the head width is odd with
    RoPE."""
    if config.head_dim is None and config.d_model % config.n_heads:
        fits = [h for h in range(1, config.d_model + 1) if config.d_model % h == 0]
        near = min(fits, key=lambda h: abs(h - config.n_heads))
        remedy = f"use {near} heads, or set head_dim"
        raise UserError(f"d_model {config.d_model} is not divisible by n_heads {config.n_heads}; {remedy}.")
    if config.positions == "rope" and config.width_of_head % 2:
        raise UserError(f"head_dim is {config.width_of_head}, but RoPE rotates pairs of features; make it even.")


def check_local_heads(config: BlocksConfig) -> None:
    """Raise `UserError` for more local or diagonal heads than heads, or for local or diagonal heads without RoPE,
    biases or a suitable RoPE frequency."""
    for name, (_, frequencies) in (("local_heads", NARROW), ("diagonal_heads", WIDE)):
        if not (n := getattr(config, name, 0)):
            continue
        if n > config.n_heads:
            raise UserError(f"{name} is {n}, but n_heads is {config.n_heads}; set at most that.")
        if not (config.positions == "rope" and config.attention_bias):
            problem = f"{name} is {n}, but heads at a fixed distance need RoPE and attention biases"
            raise UserError(f"{problem}; set positions to rope and attention_bias to true.")
        try:
            query_and_key_at(0, config.width_of_head, config.rope_base, *frequencies)
        except ValueError as error:
            raise UserError(f"{error}; make the heads wider, or rope_base smaller.") from error


@dataclass(frozen=True)
class BlocksConfig(ModelConfig):
    """Shape of a block, its dropout and positions. The defaults are those of `base` in Vaswani et al. 2017, table 3."""

    d_model: Size = 512
    """Width of the residual stream."""
    n_heads: Size = 8
    """Attention heads per block."""
    head_dim: Size | None = None
    """Width of a head; by default, d_model / n_heads."""
    attention_bias: bool = False
    """Biases in the attention projections."""
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
    positions: Positions = "sinusoidal"
    """Position encoding: learned or sinusoidal vectors added to the embedding, rotated queries and keys (rope), or
    none."""
    rope_base: Annotated[float, Range(least=1)] = 10_000.0
    """Base of RoPE: pair i of a head's K features rotates by rope_base^(-2i/K) per position."""
    dropout: Fraction = 0.1
    """Dropout probability, in training, of features of the embedding and of each sublayer's output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self)

    @property
    def width_of_head(self) -> int:
        """Width K of a head."""
        return self.head_dim or self.d_model // self.n_heads

    @property
    def final_norm(self) -> bool:
        """True if the stack ends in an additional norm: with pre-norm, the residual stream is not normalised
        otherwise."""
        return self.norm_placement == "pre"

    def attention_shape(self, n_positions: int, mask: Causal | str | None = None) -> AttentionShape:
        """Return the shape of self-attention over `n_positions` positions; for the mask, see `AttentionShape`."""
        K = self.width_of_head
        return AttentionShape(self.n_heads, self.n_heads, K, K, n_positions, mask)

    def make_norm(self) -> nn.Module:
        """Return a norm."""
        return NORMS[self.norm](epsilon(self.norm, self.norm_eps))

    def make_attention(
        self, execution: Execution, heads: type[MultiHeadAttention] = LocalHeads, **options: Any
    ) -> Make:
        """Return a function that constructs multi-head attention.

        Args:
          heads: class of the module.
          options: further attributes of the module, or others than those of this config.
        """
        rope = RoPE(self.rope_base) if self.positions == "rope" else None
        attributes = {
            "n_heads": self.n_heads,
            "head_dim": self.width_of_head,
            "bias": self.attention_bias,
            "rope": rope,
            "attention": execution.attention,
        }
        return partial(heads, **attributes | options)

    def make_mlp(self, execution: Execution) -> Make:
        """Return a function that constructs an MLP."""
        return partial(MLP, hidden=self.d_ff, d_out=self.d_model, activation=self.activation, bias=self.bias)

    def make_block(self, execution: Execution, block: type[Block] = Block, **parts: Any) -> Block:
        """Return a block.

        Args:
          block: class of the module.
          parts: further attributes of the block, such as `make_cross_attention`, or others than those of this config.
        """
        attributes = {
            "make_attention": self.make_attention(execution),
            "make_mlp": self.make_mlp(execution),
            "make_norm": self.make_norm,
            "norm_placement": self.norm_placement,
            "dropout": self.dropout,
        }
        return block(**attributes | parts)


@dataclass(frozen=True)
class TokenBlocksConfig(BlocksConfig, TokenModelConfig):
    """Base of the configs of token models that are stacks of `Block`."""

    @property
    def contract(self) -> Contract:
        return replace(super().contract, max_tokens=self.n_positions if self.positions == "learned" else None)

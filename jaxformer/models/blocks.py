"""Parts of blocks from the fields of a config: what decoders, encoders and towers of images and texts share.

Each model has all its fields in one class. The functions read those that describe blocks: `d_model`, `n_heads`,
`head_dim`, `attention_bias`, `rope`, `d_ff`, `activation`, `bias`, `norm`, `norm_eps`, `norm_placement` and `dropout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import flax.linen as nn

from jaxformer.config.fields import Range
from jaxformer.contract import AttentionShape
from jaxformer.errors import UserError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.block import Block, Make
from jaxformer.nn.execution import Execution
from jaxformer.nn.local_heads import NARROW, WIDE, LocalHeads
from jaxformer.nn.mlp import MLP
from jaxformer.nn.norms import NORMS, epsilon
from jaxformer.ops.masks import Causal
from jaxformer.ops.positions import Llama3Scaling, LongRoPE, RoPE, Yarn, query_and_key_at

SCALING_RANGES = {
    "factor": Range(least=1), "original_context": Range(least=1), "attention_factor": Range(above=0),
    "beta_fast": Range(above=0), "beta_slow": Range(above=0),
}  # fmt: skip
"""Ranges of the fields of RoPE's scalings, where a scaling has them."""


def head_width(config: Any) -> int:
    """Return the width K of a head."""
    return config.head_dim or config.d_model // config.n_heads


def check_attention(config: Any, ropes: Iterable[RoPE | None] | None = None) -> None:
    """Check the shape of heads, RoPE, and heads that begin at fixed distances.

    Args:
      ropes: RoPE of each block; by default, that of the config.

    Raises:
      UserError: the number of heads does not divide the model's width, the head width is odd with RoPE, a field of RoPE
        is out of range, or there are more local or diagonal heads than heads, or no RoPE, biases or suitable frequency
        for them.
    """
    ropes = {config.rope} if ropes is None else set(ropes)
    used = [rope for rope in ropes if rope is not None]
    if config.head_dim is None and config.d_model % config.n_heads:
        fits = [h for h in range(1, config.d_model + 1) if config.d_model % h == 0]
        near = min(fits, key=lambda h: abs(h - config.n_heads))
        remedy = f"use {near} heads, or set head_dim"
        raise UserError(f"d_model {config.d_model} is not divisible by n_heads {config.n_heads}; {remedy}.")
    latents = getattr(config, "latents", None)
    for rope in used:
        if latents is None:
            _check_rope(rope, head_width(config))
        else:
            _check_rope(rope, latents.rope_width, "latents.rope_width", "set it to an even number")
    for name, (_, frequencies) in (("local_heads", NARROW), ("diagonal_heads", WIDE)):
        if not (n := getattr(config, name, 0)):
            continue
        if n > config.n_heads:
            raise UserError(f"{name} is {n}, but n_heads is {config.n_heads}; set at most that.")
        if None in ropes or not config.attention_bias:
            missing = ["rope"] * (None in ropes) + ["attention_bias"] * (not config.attention_bias)
            problem = f"{name} is {n}, but heads at a fixed distance need RoPE and attention biases"
            raise UserError(f"{problem}; set {' and '.join(missing)}.")
        for rope in used:
            if rope.fraction < 1 or rope.interleaved:
                problem = f"{name} is {n}, but heads at a fixed distance need RoPE of all features, across halves"
                raise UserError(f"{problem}; set rope.fraction to 1 and rope.interleaved to false.")
            try:
                query_and_key_at(0, head_width(config), rope.base, *frequencies)
            except ValueError as error:
                raise UserError(f"{error}; make the heads wider, or rope.base smaller.") from error


def _check_rope(
    rope: RoPE, width: int, name: str = "head_dim", remedy: str = "change n_heads, set head_dim to an even number"
) -> None:
    """Raise `UserError` for an odd number of rotated features, or for a field of RoPE that is out of range.

    Args:
      name, remedy: field with the width of the vectors that RoPE rotates, and what to do if it is odd.
    """
    Range(above=0, most=1).check("rope.fraction", rope.fraction)
    n_rotated = int(rope.fraction * width)
    if n_rotated % 2 or not n_rotated:
        problem = f"{name} is {width}" + (f" and rope.fraction {rope.fraction}" if rope.fraction < 1 else "")
        raise UserError(f"{problem}, but RoPE rotates pairs of features; {remedy}, or rope to none.")
    if isinstance(rope.scaling, Yarn):  # whose ends are logarithms to this base
        Range(above=1).check("rope.base", rope.base)
    Range(least=1).check("rope.base", rope.base)
    scaling = rope.scaling
    if isinstance(scaling, float):
        Range(least=1).check("rope.scaling", scaling)
        return
    for name, limits in SCALING_RANGES.items():
        if (value := getattr(scaling, name, None)) is not None:
            limits.check(f"rope.scaling.{name}", value)
    if isinstance(scaling, LongRoPE):
        Range(least=2).check("rope.scaling.original_context", scaling.original_context)
        for name in ("short", "long"):
            Range(above=0).check(f"rope.scaling.{name}", min(getattr(scaling, name), default=1.0))
    if isinstance(scaling, Yarn) and not scaling.beta_slow < scaling.beta_fast:
        limit = f"it must be below rope.scaling.beta_fast, {scaling.beta_fast}"
        raise UserError(f"rope.scaling.beta_slow is {scaling.beta_slow}; {limit}.")
    if isinstance(scaling, Llama3Scaling) and not scaling.low < scaling.high:
        limit = f"it must be below rope.scaling.high, {scaling.high}"
        raise UserError(f"rope.scaling.low is {scaling.low}; {limit}.")
    try:
        scaling.frequencies(n_rotated // 2, rope.base)
    except ValueError as error:  # of LongRoPE, which has a divisor for each
        raise UserError(f"rope.scaling: {error}.") from error


def attention_shape(config: Any, n_positions: int, mask: Causal | str | None = None) -> AttentionShape:
    """Return the shape of self-attention over `n_positions` positions; for the mask, see `AttentionShape`."""
    H, K = config.n_heads, head_width(config)
    return AttentionShape(H, H, K, K, n_positions, mask)


def consecutive(kinds: Sequence[object]) -> list[slice]:
    """Return the slice of each group of consecutive blocks of the same kind, given the kind of each block."""
    ends = [i for i in range(1, len(kinds) + 1) if i == len(kinds) or kinds[i] != kinds[i - 1]]
    return [slice(first, end) for first, end in pairwise([0, *ends])]


def make_norm(config: Any) -> nn.Module:
    """Return a norm."""
    return NORMS[config.norm](epsilon(config.norm, config.norm_eps))


def make_attention(
    config: Any, execution: Execution, heads: type[MultiHeadAttention] = LocalHeads, **options: Any
) -> Make:
    """Return a function that constructs multi-head attention.

    Args:
      heads: class of the module.
      options: further attributes of the module, or others than those of the config.
    """
    attributes = {
        "n_heads": config.n_heads,
        "head_dim": head_width(config),
        "bias": config.attention_bias,
        "rope": getattr(config, "rope", None),
        "attention": execution.attention,
    }
    return partial(heads, **attributes | options)


def make_mlp(config: Any) -> Make:
    """Return a function that constructs an MLP."""
    options = {"hidden": config.d_ff, "d_out": config.d_model, "activation": config.activation, "bias": config.bias}
    return partial(MLP, **options, gate_bias=getattr(config, "gate_bias", False))


def make_block(config: Any, execution: Execution, block: type[Block] = Block, **parts: Any) -> Block:
    """Return a block.

    Args:
      block: class of the module.
      parts: further attributes of the block, such as `make_cross_attention`, or others than those of the config.
    """
    attributes = {
        "make_attention": make_attention(config, execution),
        "make_mlp": make_mlp(config),
        "make_norm": partial(make_norm, config),
        "norm_placement": config.norm_placement,
        "dropout": config.dropout,
    }
    return block(**attributes | parts)

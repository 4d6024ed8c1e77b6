"""The transformer block, and a stack of blocks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.capture import capture_point, is_capturing
from jaxformer.nn.execution import Execution, call_block, scan_blocks
from jaxformer.nn.mlp import MLP
from jaxformer.nn.norms import RMSNorm
from jaxformer.nn.parameters import check_name
from jaxformer.ops.bias import Bias
from jaxformer.ops.cache import LayerCache
from jaxformer.ops.masks import Mask

Make = Callable[..., nn.Module]
"""Function that constructs a module, such as `functools.partial(MLP, hidden=…, d_out=…)`."""
Function = Callable[[jax.Array], jax.Array]
"""Function from `(T, D)` to `(T, D)`."""
PARALLEL = ("parallel", "parallel_two")
"""Placements of norms in blocks whose attention and MLP both read the block's input (Wang and Komatsuzaki 2021)."""
PLACEMENTS = ("pre", "post", "both", "output", *PARALLEL)
"""Placements of norms; see `Block`."""


class SideInputs(NamedTuple):
    """Inputs of a block besides the residual stream: the same for all blocks of a pass, but for the masks of different
    kinds of attention, and a cached source.

    Attributes:
      positions_T: int32 positions; None for 0, 1, 2, …
      mask: keys that a query may attend to, True for visible; None for all.
      slot: index in the cache of the first new key and value.
      source: for cross-attention, a sequence `(S, D)`, or a block's cache with its `keys_values`.
      source_mask: mask of cross-attention.
      valid_T: False for padding, for an MLP whose tokens depend on each other; see `Experts`.
      score_bias: bias of attention's scores, not of cross-attention's; see `MultiHeadAttention`.
    """

    positions_T: jax.Array | None = None
    mask: Mask = None
    slot: jax.Array | int = 0
    source: jax.Array | LayerCache | None = None
    source_mask: Mask = None
    valid_T: jax.Array | None = None
    score_bias: Bias = None


def identity(x_TD: jax.Array) -> jax.Array:
    """Return x."""
    return x_TD


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); optionally with cross-attention in between.

    The default layers have the sizes of the base model of Vaswani et al. 2017, and any width D.

    Attributes:
      make_attention, make_mlp, make_norm: functions that construct the sublayers and norms; None for no norm.
      norm_placement: 'pre', before each sublayer; 'post', after each addition (Vaswani et al. 2017, section 3.1);
        'both', before and after each sublayer (Gemma 2); or 'output', after each sublayer, before the addition (OLMo
        2). With 'parallel', the MLP reads what attention reads, the block's input after one norm (GPT-J), and with
        'parallel_two', the block's input after a norm of its own (GPT-NeoX). Without 'post', the residual stream itself
        is never normalised, so that gradients reach the first block unchanged (Xiong et al. 2020).
      dropout: dropout probability of the outputs of each sublayer, applied if there is a dropout key.
      make_cross_attention: function that constructs cross-attention; None for no cross-attention.
      residual_scale: factor of each sublayer's output (Granite).
    """

    make_attention: Make = partial(MultiHeadAttention, n_heads=8, head_dim=64)
    make_mlp: Make = partial(MLP, hidden=(2048,))
    make_norm: Make | None = RMSNorm
    norm_placement: str = "pre"
    dropout: float = 0.0
    make_cross_attention: Make | None = None
    residual_scale: float = 1.0

    def setup(self) -> None:
        check_name("norm_placement", self.norm_placement, PLACEMENTS)
        if self.make_cross_attention is not None and self.norm_placement in PARALLEL:
            raise ValueError(
                f"norm_placement is {self.norm_placement!r}, and cross-attention stands between; use 'pre'."
            )
        no_norm: Callable[[], Function] = lambda: identity  # noqa: E731
        make_norm = self.make_norm or no_norm
        norm = no_norm if self.norm_placement == "output" else make_norm
        post_norm = make_norm if self.norm_placement in ("both", "output") else no_norm
        dropout = partial(nn.Dropout, self.dropout, deterministic=False)
        self.attention, self.attention_norm, self.attention_post_norm = self.make_attention(), norm(), post_norm()
        self.attention_dropout = dropout()
        self.mlp, self.mlp_post_norm, self.mlp_dropout = self.make_mlp(), post_norm(), dropout()
        self.mlp_norm = no_norm() if self.norm_placement == "parallel" else norm()
        if self.make_cross_attention is not None:
            self.cross_attention, self.cross_attention_norm = self.make_cross_attention(), norm()
            self.cross_attention_post_norm, self.cross_attention_dropout = post_norm(), dropout()

    def __call__(
        self,
        x_TD: jax.Array,
        inputs: SideInputs = SideInputs(),  # noqa: B008 (it is immutable)
        cache: LayerCache | None = None,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Map `(T, D)` to `(T, D)`, and the layer's cache, if given, to the cache with the new keys and values.

        Args:
          key: dropout key; None for no dropout.
        """
        positions_T, mask, slot, source, source_mask, valid_T, score_bias = inputs
        crosses = self.make_cross_attention is not None
        # One dropout key per sublayer: with one for all, they would drop the same features.
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3 if crosses else 2))
        x_TD = capture_point(self, "resid_pre", x_TD)
        h_TD = self._normalized("attention", x_TD)
        bias = {} if score_bias is None else {"score_bias": score_bias}
        y_TD, cache = self.attention(h_TD, positions_T, mask, cache, slot, **bias)
        before_TD, x_TD = x_TD, self._add("attention", "attn_out", x_TD, y_TD, keys[0])
        x_TD = capture_point(self, "resid_mid", x_TD)
        if crosses:
            h_TD = self._normalized("cross_attention", x_TD)
            y_TD, _ = self.cross_attention(h_TD, positions_T, source_mask, source=source)
            x_TD = self._add("cross_attention", "cross_attn_out", x_TD, y_TD, keys[1])
            x_TD = capture_point(self, "resid_mid_cross", x_TD)
        if self.norm_placement != "parallel":
            h_TD = self._normalized("mlp", before_TD if self.norm_placement == "parallel_two" else x_TD)
        y_TD = self.mlp(h_TD) if valid_T is None else self.mlp(h_TD, valid_T)
        return capture_point(self, "resid_post", self._add("mlp", "mlp_out", x_TD, y_TD, keys[-1])), cache

    def residual(self, x_TD: jax.Array, y_TD: jax.Array) -> jax.Array:
        """Return the residual stream `(T, D)` after a sublayer with the output y."""
        return x_TD + y_TD

    def keys_values(self, source_SD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of cross-attention from a source, each `(G, S, K)`."""
        return self.cross_attention.keys_values(source_SD, jnp.arange(len(source_SD)))

    def _normalized(self, sublayer: str, x_TD: jax.Array) -> jax.Array:
        """Return the input of a sublayer, `(T, D)`."""
        return x_TD if self.norm_placement == "post" else getattr(self, f"{sublayer}_norm")(x_TD)

    def _add(self, sublayer: str, name: str, x_TD: jax.Array, y_TD: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return the residual stream `(T, D)` after a sublayer with the output y, captured by this name, with dropout
        of y."""
        y_TD = getattr(self, f"{sublayer}_post_norm")(y_TD)
        if self.residual_scale != 1:
            y_TD = self.residual_scale * y_TD
        if self.dropout and key is not None:
            y_TD = getattr(self, f"{sublayer}_dropout")(y_TD, rng=key)
        x_TD = self.residual(x_TD, capture_point(self, name, y_TD))
        return getattr(self, f"{sublayer}_norm")(x_TD) if self.norm_placement == "post" else x_TD


def input_dropout(
    module: nn.Module, dropout: nn.Module, x: jax.Array, n_blocks: int
) -> tuple[jax.Array, jax.Array | None]:
    """Return the input of the first block after dropout, and one dropout key per block, `(n_blocks,)`.

    If `module` has no dropout key, these are `x` and None.
    """
    if not module.has_rng("dropout"):
        return x, None
    keys = jax.random.split(module.make_rng("dropout"), n_blocks + 1)
    return capture_point(module, str(dropout.name), dropout(x, rng=keys[0])), keys[1:]


def run_blocks(
    blocks: Sequence[nn.Module], execution: Execution, x_TD: jax.Array, inputs: Any, keys: jax.Array | None = None
) -> jax.Array:
    """Return the residual stream `(T, D)` after all blocks, each called as `block(x_TD, inputs, key=key)`.

    Args:
      blocks: bound modules whose calls return `(x_TD, cache)`.
      inputs: the same for all blocks; `SideInputs` for a `Block`.
      keys: one dropout key per block.

    Raises:
      ValueError: the blocks differ in shape and cannot be scanned.
    """
    # Values of a scan's body have no names of their own, so what is captured is computed block by block. A single block
    # may return another width than it reads.
    if execution.scan and len(blocks) > 1 and not is_capturing() and not blocks[0].is_initializing():
        return scan_blocks(blocks, execution, x_TD, inputs, keys)
    for i, block in enumerate(blocks):
        x_TD = call_block(block, execution, x_TD, inputs, None if keys is None else keys[i])
    return x_TD

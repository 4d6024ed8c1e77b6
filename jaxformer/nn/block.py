"""The transformer block."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.nn.capture import capture_point
from jaxformer.nn.parameters import check_name
from jaxformer.ops.cache import LayerCache
from jaxformer.ops.masks import Mask

Make = Callable[..., nn.Module]
"""Function that constructs a module, such as `functools.partial(MLP, hidden=…, d_out=…)`."""


class Block(nn.Module):
    """Attention and MLP, optionally with cross-attention in between, each with a residual connection and an optional
    norm.

    The norm precedes a sublayer ('pre', Xiong et al. 2020) or follows its residual connection ('post', Vaswani et al.
    2017). With 'both', one norm precedes the sublayer, and another, such as `attention_post_norm` or `mlp_post_norm`,
    is applied to its output before the residual connection (Gemma 2).

    Attributes:
      make_attention, make_mlp, make_norm: functions that construct the sublayers and norms; None for no norm.
      norm_placement: 'pre', 'post' or 'both'.
      residual: x + f(x) instead of f(x).
      dropout: dropout probability of the outputs of each sublayer, applied if there is a dropout key.
      make_cross_attention: function that constructs cross-attention; None for no cross-attention.
    """

    make_attention: Make
    make_mlp: Make
    make_norm: Make | None = None
    norm_placement: str = "pre"
    residual: bool = True
    dropout: float = 0.0
    make_cross_attention: Make | None = None

    def setup(self) -> None:
        check_name("norm_placement", self.norm_placement, ("pre", "post", "both"))
        parts = {"attention": self.make_attention, "cross_attention": self.make_cross_attention, "mlp": self.make_mlp}
        for part, make in parts.items():
            if make is None:
                continue
            setattr(self, part, make())
            if self.make_norm is not None:
                setattr(self, f"{part}_norm", self.make_norm())
                if self.norm_placement == "both":
                    setattr(self, f"{part}_post_norm", self.make_norm())
            if self.dropout:
                setattr(self, f"{part}_dropout", nn.Dropout(self.dropout, deterministic=False))

    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array,
        mask: Mask,
        cache: LayerCache | None = None,
        slot: jax.Array | int = 0,
        source: jax.Array | LayerCache | None = None,
        source_mask: Mask = None,
        key: jax.Array | None = None,
        token_values: jax.Array | None = None,
        valid_T: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Map `(T, D)` to `(T, D)`, and the layer's cache, if given, to the cache with the new keys and values.

        Args:
          source: for cross-attention, a sequence `(S, D)`, or a cache with its `keys_values`.
          source_mask: mask of cross-attention.
          key: dropout key; None for no dropout.
          token_values: additional values of self-attention, `(G, T, K)`; see `MultiHeadAttention`.
          valid_T: False for padding, for an MLP whose tokens depend on each other; see `Experts`.
        """
        cross = self.make_cross_attention is not None
        x_TD = capture_point(self, "before", x_TD)
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3 if cross else 2))
        # Attention modules defined elsewhere need not accept `token_values`.
        named = {} if token_values is None else {"token_values": token_values}
        y_TD, cache = self.attention(self._before(x_TD, "attention"), positions_T, mask, cache, slot, **named)
        x_TD = self._after(x_TD, y_TD, "attention", keys[0])
        if cross:
            normed_TD = self._before(x_TD, "cross_attention")
            y_TD, _ = self.cross_attention(normed_TD, positions_T, source_mask, source=source)
            x_TD = self._after(x_TD, y_TD, "cross_attention", keys[1])
        y_TD = self.mlp(self._before(x_TD, "mlp"), *(() if valid_T is None else (valid_T,)))
        return capture_point(self, "after", self._after(x_TD, y_TD, "mlp", keys[-1])), cache

    def keys_values(self, source_SD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of cross-attention from a source, each `(G, S, K)`."""
        keys_values: tuple[jax.Array, jax.Array] = self.cross_attention.keys_values(
            source_SD, jnp.arange(len(source_SD))
        )
        return keys_values

    def _before(self, x_TD: jax.Array, part: str) -> jax.Array:
        return self._norm(x_TD, part) if self.norm_placement in ("pre", "both") else x_TD

    def _after(self, x_TD: jax.Array, y_TD: jax.Array, part: str, key: jax.Array | None) -> jax.Array:
        if self.norm_placement == "both":
            y_TD = self._norm(y_TD, f"{part}_post")
        if self.dropout and key is not None:
            y_TD = capture_point(self, f"{part}_dropout", getattr(self, f"{part}_dropout")(y_TD, rng=key))
        x_TD = x_TD + y_TD if self.residual else y_TD
        return self._norm(x_TD, part) if self.norm_placement == "post" else x_TD

    def _norm(self, x_TD: jax.Array, part: str) -> jax.Array:
        return x_TD if self.make_norm is None else getattr(self, f"{part}_norm")(x_TD)

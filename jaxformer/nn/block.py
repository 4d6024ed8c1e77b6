"""The transformer block."""

from collections.abc import Callable

import flax.linen as nn
import jax

from jaxformer.ops.cache import LayerCache
from jaxformer.ops.masks import Mask

Make = Callable[..., nn.Module]
"""Makes a module when given its name: `functools.partial(MLP, hidden=…, d_out=…)`."""


class Block(nn.Module):
    """Attention, then an MLP, each optionally normalised before ('pre', Xiong et al. 2020) or after ('post',
    Vaswani et al. 2017) and added to what it read.

    Attributes:
      make_attention, make_mlp, make_norm: makers of the parts; no norm without `make_norm`.
      norm_placement: 'pre' or 'post'.
      residual: x + f(x) instead of f(x).
      dropout: share of each part's output set to zero, where a key is given.
    """

    make_attention: Make
    make_mlp: Make
    make_norm: Make | None = None
    norm_placement: str = "pre"
    residual: bool = True
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array,
        mask: Mask,
        cache: LayerCache | None = None,
        slot: jax.Array | int = 0,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """`(T, D)` to `(T, D)`, and the layer's cache, if one was given, with the new keys and values.

        Dropout is on where it gets a key.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        y_TD, cache = self.make_attention(name="attention")(
            self._before(x_TD, "attention"), positions_T, mask, cache, slot
        )
        x_TD = self._after(x_TD, y_TD, "attention", keys[0])
        y_TD = self.make_mlp(name="mlp")(self._before(x_TD, "mlp"))
        return self._after(x_TD, y_TD, "mlp", keys[1]), cache

    def _before(self, x_TD: jax.Array, part: str) -> jax.Array:
        return self._norm(x_TD, part) if self.norm_placement == "pre" else x_TD

    def _after(self, x_TD: jax.Array, y_TD: jax.Array, part: str, key: jax.Array | None) -> jax.Array:
        if self.dropout and key is not None:
            y_TD = nn.Dropout(self.dropout, deterministic=False, name=f"{part}_dropout")(y_TD, rng=key)
        x_TD = x_TD + y_TD if self.residual else y_TD
        return self._norm(x_TD, part) if self.norm_placement == "post" else x_TD

    def _norm(self, x_TD: jax.Array, part: str) -> jax.Array:
        return x_TD if self.make_norm is None else self.make_norm(name=f"{part}_norm")(x_TD)

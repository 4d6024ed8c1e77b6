"""Tokens and positions into the residual stream, and out of it again."""

from typing import Literal

import flax.linen as nn
import jax

from jaxformer.nn.parameters import parameter
from jaxformer.ops.positions import sinusoidal
from jaxformer.ops.quantized import rows

Positions = Literal["none", "learned", "sinusoidal", "rope"]
"""How a model is told where a token stands, as configs name it."""


class Embedding(nn.Module):
    """A row of `W_E` a token, plus its position: a row of `W_pos` ('learned'), or 'sinusoidal'.

    Attributes:
      n_positions: rows of `W_pos`.
      positions: 'learned', 'sinusoidal', or anything else for none here ('none', 'rope').
      init_std: standard deviation of both tables at first.
      scale: what a row of `W_E` is multiplied by before the position is added; √D in Vaswani et al. 2017, section 3.4.
    """

    vocab_size: int
    n_positions: int
    d_model: int
    positions: str = "learned"
    init_std: float = 1.0
    scale: float = 1.0

    def setup(self) -> None:
        init = nn.initializers.normal(self.init_std)
        self.W_E = parameter(self, "W_E", init, (self.vocab_size, self.d_model), "vocab -> embed")
        if self.positions == "learned":
            self.W_pos = parameter(self, "W_pos", init, (self.n_positions, self.d_model), "positions -> embed")

    def __call__(self, tokens_T: jax.Array, positions_T: jax.Array) -> jax.Array:
        """`(T,)` int32 to `(T, D)`."""
        x_TD = self.scale * rows(self.W_E, tokens_T)
        if self.positions == "learned":
            return x_TD + rows(self.W_pos, positions_T)
        if self.positions == "sinusoidal":
            return x_TD + sinusoidal(positions_T, self.d_model).astype(x_TD.dtype)
        return x_TD

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        """Logits `(T, V)` with the same table (Press and Wolf 2017)."""
        return x_TD @ self.W_E.T

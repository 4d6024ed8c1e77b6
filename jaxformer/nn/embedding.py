"""Embedding and unembedding of tokens, with positions."""

from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.errors import batch_hint
from jaxformer.nn.capture import capture_point
from jaxformer.nn.parameters import check_name, parameter
from jaxformer.ops.positions import check_positions, sinusoidal
from jaxformer.ops.quantized import rows

AddedPositions = Literal["none", "learned", "sinusoidal"]
"""Position encodings that are added to the embedding, by the names that configs use."""


FAIRSEQ_FIRST = 2
"""First position of fairseq, after the id of padding, 1."""


def check_tokens(tokens_T: Any, vocab_size: int) -> None:
    """Check the token ids of one sequence, `(T,)`; under tracing, only their shape and dtype. Raises `ValueError` for
    another number of axes or ids outside the vocabulary, `TypeError` for a text or a non-integer dtype."""
    if isinstance(tokens_T, str):
        raise TypeError(f"expected token ids, got the text {tokens_T:.40}; encode it: run.tokens(text)")
    if len(shape := np.shape(tokens_T)) != 1:
        raise ValueError(f"expected an input of shape (T,), got {shape}{batch_hint(shape, 1)}.")
    dtype = tokens_T.dtype if hasattr(tokens_T, "dtype") else np.asarray(tokens_T).dtype
    if len(tokens_T) and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"token ids are {dtype}; give integers, such as int32.")
    if not values_are_known(tokens_T):
        return
    ids_T = np.asarray(tokens_T)
    outside_T = (ids_T < 0) | (ids_T >= vocab_size)
    if outside_T.any():
        position = int(outside_T.argmax())
        raise ValueError(f"token {ids_T[position]} at position {position} is not in the vocabulary of {vocab_size}")


def values_are_known(x: Any) -> bool:
    """Return False for an array under tracing, the shape of one, or one that other processes hold parts of."""
    unknown = jax.core.Tracer | jax.ShapeDtypeStruct
    return not isinstance(x, unknown) and getattr(x, "is_fully_addressable", True)


def check_rows(positions_T: jax.Array, n_positions: int) -> None:
    """Raise `ValueError` for a position beyond the last row of `W_pos`, which JAX would take instead; under tracing,
    positions are not known."""
    if not values_are_known(positions_T) or not len(positions_T):
        return
    if (last := np.asarray(positions_T).max()) >= n_positions:
        raise ValueError(f"position {last} is beyond the {n_positions} learned positions")


class Embedding(nn.Module):
    """Row of `W_E` per token, plus a position encoding: a row of `W_pos` ('learned'), or 'sinusoidal'.

    Attributes:
      n_positions: rows of `W_pos`.
      positions: 'learned' or 'sinusoidal'; nothing is added for 'none'.
      init_std: standard deviation of both tables at initialisation.
      scale: factor applied to a row of `W_E` before the position is added; √D in Vaswani et al. 2017, section 3.4.
      interleaved: order of sinusoidal positions; see `ops.positions.sinusoidal`.
      fairseq: sinusoidal positions as fairseq has them: the first position is 2, and the lowest frequency included.
    """

    vocab_size: int
    n_positions: int
    d_model: int
    positions: str = "learned"
    init_std: float = 1.0
    scale: float = 1.0
    interleaved: bool = True
    fairseq: bool = False

    def setup(self) -> None:
        check_name("positions", self.positions, get_args(AddedPositions))
        init = nn.initializers.normal(self.init_std)
        self.W_E = parameter(self, "W_E", init, (self.vocab_size, self.d_model), "vocab -> embed")
        if self.positions == "learned":
            self.W_pos = parameter(self, "W_pos", init, (self.n_positions, self.d_model), "positions -> embed")

    def __call__(self, tokens_T: jax.Array, positions_T: jax.Array, W_pos: jax.Array | None = None) -> jax.Array:
        """Map token ids `(T,)` int32 to `(T, D)`; `W_pos` is another table of learned positions of the same shape.

        Raises `ValueError` for another number of axes or, unless traced, ids outside the vocabulary or positions
        without a row."""
        check_tokens(tokens_T, self.vocab_size)
        positions_T = check_positions(positions_T, len(tokens_T))
        x_TD = capture_point(self, "embed", self.scale * rows(self.W_E, tokens_T))
        if self.positions == "learned":
            check_rows(positions_T, self.n_positions)
            return x_TD + capture_point(self, "pos_embed", rows(self.W_pos if W_pos is None else W_pos, positions_T))
        if self.positions == "sinusoidal":
            if self.fairseq:
                positions_T += FAIRSEQ_FIRST
            encoding_TD = sinusoidal(positions_T, self.d_model, self.interleaved, self.fairseq)
            return x_TD + capture_point(self, "pos_embed", encoding_TD.astype(x_TD.dtype))
        return x_TD

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        """Return logits `(T, V)` from the transposed embedding table (Press and Wolf 2017)."""
        return x_TD @ self.W_E.T

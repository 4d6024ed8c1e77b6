"""Recurrent language model (Mikolov et al. 2010)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxformer.config import TokenModelConfig
from jaxformer.config.fields import Depth, Fraction, Size
from jaxformer.contract import Contract
from jaxformer.models.recurrent import check_floating
from jaxformer.nn.capture import capture_point
from jaxformer.nn.embedding import Embedding
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.parameters import parameter
from jaxformer.nn.recurrent import CELLS, Recurrence
from jaxformer.ops.linear_cross_entropy import Unembedding
from jaxformer.ops.masks import EMPTY
from jaxformer.ops.recurrent import State


@dataclass(frozen=True)
class RecurrentLMConfig(TokenModelConfig):
    """Shape of a `RecurrentLM`."""

    cell: Literal["tanh", "gru", "lstm"] = "gru"
    """Recurrent cell."""
    d_model: Size = 256
    """Width of the token embedding, and of the state of each layer."""
    n_layers: Depth = 1
    """Number of layers."""
    dropout: Fraction = 0.0
    """Dropout probability in training."""

    @property
    def contract(self) -> Contract:
        # There is no attention: however many tokens came before, a token sees them only through the state.
        return replace(
            super().contract,
            has_features=True,
            has_cache=True,
            attention_window=1,
            extrapolates=True,
            scaled_width=self.d_model,
        )

    def build(self, execution: Execution = PLAIN) -> RecurrentLM:
        """Return the module. `execution` has no effect, because there are no blocks and no self-attention."""
        return RecurrentLM(self)


class LMState(NamedTuple):
    """Cache of a `RecurrentLM`, whose size does not depend on the sequence length."""

    layers: tuple[State, ...]


class RecurrentLM(nn.Module):
    """Causal language model: maps tokens `(T,)` int32 to next-token logits `(T, V)`, computed from the states of the
    last of its recurrent layers. The initial state is 0."""

    config: RecurrentLMConfig

    def setup(self) -> None:
        c = self.config
        self.embedding = Embedding(c.vocab_size, 0, c.d_model, "none")
        self.layers = [Recurrence(c.cell, c.d_model, c.d_model) for _ in range(c.n_layers)]
        init = nn.initializers.normal(c.d_model**-0.5)
        self.W_out = parameter(self, "W_out", init, (c.d_model, c.vocab_size), "embed -> vocab")
        self.drop = nn.Dropout(c.dropout)

    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        """Return logits `(T, V)`."""
        return capture_point(self, "logits", self.unembed(self.features(tokens_T)))

    def features(self, tokens_T: jax.Array) -> jax.Array:
        """Return the states of the last layer, `(T, D)`."""
        return self._run(tokens_T, self._zeros(), None)[0]

    def init_cache(self, n_slots: int, dtype: DTypeLike = jnp.float32) -> LMState:
        """Return the state before the first token. `n_slots` is unused, and no parameters are needed.

        Raises:
          UserError: the dtype is not a floating-point type.
        """
        check_floating(dtype)
        c = self.config
        return LMState(((jnp.zeros(c.d_model, dtype),) * CELLS[c.cell].n_parts,) * c.n_layers)

    def extend(
        self, tokens_T: jax.Array, positions_T: jax.Array, cache: LMState, slot: jax.Array | int
    ) -> tuple[jax.Array, LMState]:
        """Return the features `(T, D)` of tokens that follow those in the cache, and the updated cache.

        A token whose position is `masks.EMPTY` is padding: it does not change the state, and its own features are
        undefined.
        """
        computed = jax.tree.map(lambda x, zeros: x.astype(zeros.dtype), cache.layers, self._zeros())
        x_TD, states = self._run(tokens_T, computed, positions_T != EMPTY)
        return x_TD, LMState(jax.tree.map(lambda x, stored: x.astype(stored.dtype), states, cache.layers))

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        """Return logits `(T, V)` for features `(T, D)`, or `(V,)` for `(D,)`."""
        return self.unembedding().logits(x_TD)

    def readout(self, x_TD: jax.Array) -> jax.Array:
        """Return the input of `unembedding`: the features."""
        return x_TD

    def unembedding(self) -> Unembedding:
        """Return the layer from readout to logits."""
        return Unembedding(self.W_out)

    def _zeros(self) -> tuple[State, ...]:
        """Return the state of each layer before the first token, in the layer's compute dtype."""
        return tuple(layer.zeros() for layer in self.layers)

    def _run(
        self, tokens_T: jax.Array, states: tuple[State, ...], valid_T: jax.Array | None
    ) -> tuple[jax.Array, tuple[State, ...]]:
        """Return the states of the last layer, `(T, D)`, and the last state of each layer."""
        x_TD, after = self.embedding(tokens_T, jnp.arange(len(tokens_T))), []
        for layer, state in zip(self.layers, states, strict=True):
            x_TD, last = layer(self._drop(x_TD), state, valid_T)
            after.append(last)
        return self._drop(x_TD), tuple(after)

    def _drop(self, x_TD: jax.Array) -> jax.Array:
        """Apply dropout, which is used on all but the recurrent connections (Zaremba et al. 2014)."""
        return capture_point(self, "drop", self.drop(x_TD, deterministic=not self.has_rng("dropout")))

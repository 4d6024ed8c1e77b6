"""Recurrent sequence to sequence: one network reads a sentence, another writes its translation (Sutskever et al. 2014,
Cho et al. 2014), from one fixed context or from what it attends to at each word (Bahdanau et al. 2015)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.config import TokenModelConfig
from jaxformer.contract import Contract, Task, token_inputs
from jaxformer.errors import UserError
from jaxformer.fields import at_least
from jaxformer.nn.embedding import Embedding
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.parameters import parameter
from jaxformer.nn.recurrent import CELLS, AttentiveRecurrence, FixedContext, Memory, Recurrence
from jaxformer.ops.masks import EMPTY, zero_padding
from jaxformer.ops.recurrent import State


@dataclass(frozen=True)
class RecurrentConfig(TokenModelConfig):
    """The shape of a `Recurrent`. Source and target have one vocabulary."""

    cell: Literal["gru", "lstm"] = "gru"
    d_embedding: int = 256
    """Width of a token, and of what logits are made from."""
    d_model: int = 256
    """Width of a state: of each direction of the encoder, and of the decoder."""
    n_layers: int = 1
    """Of the encoder, and of the decoder."""
    bidirectional: bool = True
    """The encoder also reads from the end."""
    attention: Literal["none", "additive", "dot"] = "additive"
    """How the decoder's state and a place of the source are compared; none gives it one fixed context instead."""
    d_attention: int | None = None
    """Width in which additive attention compares; without it, d_model."""
    tied: bool = False
    """One table of tokens for source, target and logits, in and out as in Vaswani et al. 2017, section 3.4."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "d_embedding", "d_model", "n_layers")
        if self.d_attention is not None:
            at_least(self, 1, "d_attention")
            if self.attention != "additive":
                raise UserError(
                    f"d_attention is {self.d_attention}, but attention is {self.attention!r}; only additive has it."
                )
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}; it must be at least 0 and below 1.")

    @property
    def d_source(self) -> int:
        """E, the width of an annotation: the states of all directions."""
        return self.d_model * (2 if self.bidirectional else 1)

    @property
    def contract(self) -> Contract:
        inputs = token_inputs(self.context_length, "source_S", "valid_S", "target_T")
        return replace(
            super().contract, task=Task.SEQUENCE_TO_SEQUENCE, inputs=inputs, has_features=True, has_cache=True
        )

    def build(self, execution: Execution = PLAIN) -> Recurrent:
        """It has no blocks and no self-attention: `execution` changes nothing."""
        return Recurrent(self)


class RecurrentCache(NamedTuple):
    """All that the next step needs."""

    memory: Memory
    states: tuple[State, ...]
    """Of each layer of the decoder."""


class Recurrent(nn.Module):
    """A source `(S,)` and the target's tokens so far `(T,)` in, the logits of each next one out, `(T, V)`.

    As in Bahdanau et al. 2015, appendix A.2, with two liberties: the decoder begins with what both directions of the
    encoder end with, layer for layer, and the output layer reads the new state, as their equation 4 has it. Of several
    layers, the first attends. A fixed context is what the last layer of the encoder ends with.
    """

    config: RecurrentConfig

    def setup(self) -> None:
        c = self.config
        D, E, width = c.d_model, c.d_source, c.d_embedding
        self.embedding = Embedding(c.vocab_size, 0, width, "none", width**-0.5 if c.tied else 1.0)
        if not c.tied:
            self.target_embedding = Embedding(c.vocab_size, 0, width, "none")
        inputs = [width] + [E] * (c.n_layers - 1)
        self.encoder = [Recurrence(c.cell, d_input, D) for d_input in inputs]
        if c.bidirectional:
            self.backward_encoder = [Recurrence(c.cell, d_input, D) for d_input in inputs]
        self.W_s = [
            parameter(
                self,
                f"W_s_{i}",
                nn.initializers.normal(E**-0.5),
                (CELLS[c.cell].n_parts, E, D),
                "gates embed -> hidden",
            )
            for i in range(c.n_layers)
        ]
        if c.attention == "none":
            self.reader: FixedContext | AttentiveRecurrence = FixedContext(c.cell, width, D, E)
        else:
            d_attention = (c.d_attention or D) if c.attention == "additive" else None
            self.reader = AttentiveRecurrence(c.cell, width, D, E, d_attention)
        self.decoder = [Recurrence(c.cell, D, D) for _ in range(c.n_layers - 1)]
        # Two numbers for each feature, of which the larger counts (maxout, Goodfellow et al. 2013).
        read = nn.initializers.normal((D + width + E) ** -0.5)
        self.W_o = parameter(self, "W_o", read, (D + width + E, 2 * width), "embed -> maxout")
        self.b_o = parameter(self, "b_o", nn.initializers.zeros, (2 * width,), "maxout")
        if not c.tied:
            self.W_out = parameter(
                self, "W_out", nn.initializers.normal(width**-0.5), (width, c.vocab_size), "embed -> vocab"
            )
        self.drop = nn.Dropout(c.dropout)

    def __call__(self, source_S: jax.Array, valid_S: jax.Array, target_T: jax.Array) -> jax.Array:
        """Logits `(T, V)` of what follows each token of the target, which begins with a start token.

        Args:
          valid_S: True where a token stands; padding is on the right.
        """
        return self.unembed(self.features(source_S, valid_S, target_T))

    def features(self, source_S: jax.Array, valid_S: jax.Array, target_T: jax.Array) -> jax.Array:
        """What `unembed` makes logits of, `(T, d_embedding)`."""
        return self._decode(target_T, None, self._encode(source_S, valid_S))[0]

    def alignment(self, source_S: jax.Array, valid_S: jax.Array, target_T: jax.Array) -> jax.Array:
        """How much each place of the source counted when the token after each of the target's was made, `(T, S)`
        float32.

        Raises:
          UserError: the model has no attention.
        """
        if self.config.attention == "none":
            raise UserError("this model has one fixed context and aligns nothing; set attention to additive or dot.")
        return self._decode(target_T, None, self._encode(source_S, valid_S))[1]

    def start(self, source_S: jax.Array, valid_S: jax.Array, n_slots: int, dtype: Any = jnp.float32) -> RecurrentCache:
        """What the decoder begins with once the source is read.

        Args:
          n_slots: of no use here; the state stays as large however long the target is.
          dtype: of what is kept of the source.

        Raises:
          UserError: the dtype is of integers.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            raise UserError(f"a recurrent model cannot keep its source as {jnp.dtype(dtype)}; use float32 or bfloat16.")
        memory, states = self._encode(source_S, valid_S)
        return RecurrentCache(_as(dtype, memory), states)

    def extend(
        self, tokens_T: jax.Array, positions_T: jax.Array, cache: RecurrentCache, slot: jax.Array | int
    ) -> tuple[jax.Array, RecurrentCache]:
        """The features `(T, d_embedding)` of tokens that follow what the cache holds, and the cache after them.

        A place whose position is `masks.EMPTY` is padding: it changes no state, and its own features mean nothing.
        """
        read = RecurrentCache(_as(cache.states[0][0].dtype, cache.memory), cache.states)
        x_TD, _, states = self._decode(tokens_T, positions_T != EMPTY, read)
        return x_TD, RecurrentCache(cache.memory, states)

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        """Features to logits `(T, V)`; of one place alone, `(d_embedding,)` to `(V,)`."""
        return self.embedding.unembed(x_TD) if self.config.tied else x_TD @ self.W_out

    def _encode(self, source_S: jax.Array, valid_S: jax.Array) -> RecurrentCache:
        """Read the source."""
        c = self.config
        x_SE = zero_padding(self._embed(self.embedding, source_S), valid_S)
        states: list[State] = []
        for i, forward in enumerate(self.encoder):
            x_SE = self._drop(x_SE) if i else x_SE
            h_SE, last = forward(x_SE, forward.zeros(), valid_S)
            if c.bidirectional:
                backward = self.backward_encoder[i]
                h_SD, first = backward(x_SE[::-1], backward.zeros(), valid_S[::-1])
                h_SE = jnp.concatenate([h_SE, h_SD[::-1]], axis=-1)
                last = jax.tree.map(lambda *parts: jnp.concatenate(parts), last, first)
            states.append(tuple(jnp.tanh(part_E @ W_ED) for part_E, W_ED in zip(last, self.W_s[i], strict=True)))
            x_SE = h_SE
        if c.attention == "none":
            return RecurrentCache(self.reader.read(last[0][None], jnp.ones(1, bool)), tuple(states))
        return RecurrentCache(self.reader.read(x_SE, valid_S), tuple(states))

    def _decode(
        self, tokens_T: jax.Array, valid_T: jax.Array | None, cache: RecurrentCache
    ) -> tuple[jax.Array, jax.Array, tuple[State, ...]]:
        """Features `(T, d_embedding)`, the weights `(T, S)` of what was read of the source, and the last states."""
        memory = cache.memory
        x_TI = self._embed(self.embedding if self.config.tied else self.target_embedding, tokens_T)
        h_TD, weights_TS, state = self.reader(x_TI, cache.states[0], memory, valid_T)
        states = [state]
        for layer, begin in zip(self.decoder, cache.states[1:], strict=True):
            h_TD, state = layer(self._drop(h_TD), begin, valid_T)
            states.append(state)
        context_TE = weights_TS.astype(x_TI.dtype) @ memory.annotations_SE
        both_T = self._drop(jnp.concatenate([h_TD, x_TI, context_TE], axis=-1)) @ self.W_o + self.b_o
        return both_T.reshape(len(both_T), -1, 2).max(axis=-1), weights_TS, tuple(states)

    def _embed(self, embedding: Embedding, tokens_T: jax.Array) -> jax.Array:
        x_TI = embedding(tokens_T, jnp.arange(len(tokens_T)))
        return self._drop(x_TI * sqrt(self.config.d_embedding) if self.config.tied else x_TI)

    def _drop(self, x: jax.Array) -> jax.Array:
        """Dropout, on all but the recurrent connections (Zaremba et al. 2014)."""
        return self.drop(x, deterministic=not self.has_rng("dropout"))


def _as(dtype: Any, memory: Memory) -> Memory:
    """Its numbers in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, memory)

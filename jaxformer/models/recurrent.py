"""Recurrent encoder-decoder (Sutskever et al. 2014, Cho et al. 2014), with a fixed context or with attention to the
source at each step (Bahdanau et al. 2015)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxformer.config import TokenModelConfig
from jaxformer.config.fields import Depth, Fraction, Size
from jaxformer.contract import Contract, Task, token_inputs
from jaxformer.errors import UserError
from jaxformer.nn.capture import capture_point
from jaxformer.nn.embedding import Embedding
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.parameters import parameter
from jaxformer.nn.recurrent import CELLS, AttentiveRecurrence, FixedContext, Memory, Recurrence
from jaxformer.ops.linear_cross_entropy import Unembedding
from jaxformer.ops.masks import EMPTY, zero_padding
from jaxformer.ops.recurrent import State


@dataclass(frozen=True)
class RecurrentConfig(TokenModelConfig):
    """Shape of a `Recurrent`. Source and target share one vocabulary."""

    cell: Literal["tanh", "gru", "lstm"] = "gru"
    """Recurrent cell."""
    d_embedding: Size = 256
    """Width of the token embedding, and of the features before the logits."""
    d_model: Size = 256
    """Width of the decoder's state, and of the encoder's state in each direction."""
    n_layers: Depth = 1
    """Number of encoder layers, and of decoder layers."""
    bidirectional: bool = True
    """Encode the source in both directions."""
    attention: Literal["none", "additive", "linear", "dot"] = "additive"
    """Attention scores of the decoder's state with the source; none for one fixed context. With linear, which is
    additive without its tanh, the state cancels in the softmax, and all steps read the same average of the source."""
    d_attention: Size | None = None
    """Width of additive or linear attention; by default, d_model."""
    tied: bool = False
    """One embedding for source, target and logits (weight tying), as in Vaswani et al. 2017, section 3.4."""
    dropout: Fraction = 0.0
    """Dropout probability in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_attention is not None and self.attention not in ("additive", "linear"):
            reason = "only additive and linear have it"
            raise UserError(f"d_attention is {self.d_attention}, but attention is {self.attention!r}; {reason}.")

    @property
    def d_source(self) -> int:
        """Width E of an annotation, the concatenated states of all directions."""
        return self.d_model * (2 if self.bidirectional else 1)

    @property
    def contract(self) -> Contract:
        inputs = token_inputs(self.context_length, "source_S", "valid_S", "target_T")
        return replace(
            super().contract, task=Task.SEQUENCE_TO_SEQUENCE, inputs=inputs, has_features=True, has_cache=True
        )

    def build(self, execution: Execution = PLAIN) -> Recurrent:
        """Return the module. `execution` has no effect, because there are no blocks and no self-attention."""
        return Recurrent(self)


class RecurrentCache(NamedTuple):
    """Source and decoding state."""

    memory: Memory
    states: tuple[State, ...]
    """State of each layer of the decoder."""


class Recurrent(nn.Module):
    """Sequence-to-sequence model: maps a source `(S,)` and the target so far `(T,)` to next-token logits, `(T, V)`.

    It follows Bahdanau et al. 2015, appendix A.2, with two changes: the decoder's initial state is computed from the
    last states of both directions of the encoder, layer by layer, and the output layer reads the new state, as in their
    equation 4. With several layers, the first attends. A fixed context is the last state of the encoder's last
    layer."""

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
            d_attention = None if c.attention == "dot" else c.d_attention or D
            self.reader = AttentiveRecurrence(c.cell, width, D, E, d_attention, c.attention == "linear")
        self.decoder = [Recurrence(c.cell, D, D) for _ in range(c.n_layers - 1)]
        # Two values per feature, of which the larger is used (maxout, Goodfellow et al. 2013).
        read = nn.initializers.normal((D + width + E) ** -0.5)
        self.W_o = parameter(self, "W_o", read, (D + width + E, 2 * width), "embed -> maxout")
        self.b_o = parameter(self, "b_o", nn.initializers.zeros, (2 * width,), "maxout")
        if not c.tied:
            self.W_out = parameter(
                self, "W_out", nn.initializers.normal(width**-0.5), (width, c.vocab_size), "embed -> vocab"
            )
        self.drop = nn.Dropout(c.dropout)

    def __call__(self, source_S: jax.Array, valid_S: jax.Array | None, target_T: jax.Array) -> jax.Array:
        """Return logits `(T, V)` for the token after each token of the target, which begins with a start token (teacher
        forcing).

        Args:
          source_S: int32 tokens.
          target_T: int32 tokens.
          valid_S: True for tokens, False for padding, which is on the right; None if all are tokens.
        """
        return capture_point(self, "logits", self.unembed(self.features(source_S, valid_S, target_T)))

    def features(self, source_S: jax.Array, valid_S: jax.Array | None, target_T: jax.Array) -> jax.Array:
        """Return the input of `unembed`, `(T, d_embedding)`."""
        return self._decode(target_T, None, self._encode(source_S, valid_S))[0]

    def start(
        self, source_S: jax.Array, valid_S: jax.Array | None, n_slots: int, dtype: DTypeLike = jnp.float32
    ) -> RecurrentCache:
        """Return the cache of a source: its annotations and the decoder's initial state.

        Args:
          source_S: int32 tokens.
          valid_S: True for tokens, False for padding, which is on the right; None if all are tokens.
          n_slots: unused; the state has a fixed size.
          dtype: dtype of the source's annotations, keys and values.

        Raises:
          UserError: the dtype is not a floating-point type.
        """
        check_floating(dtype)
        memory, states = self._encode(source_S, valid_S)
        return RecurrentCache(_as(dtype, memory), states)

    def extend(
        self, tokens_T: jax.Array, positions_T: jax.Array, cache: RecurrentCache, slot: jax.Array | int
    ) -> tuple[jax.Array, RecurrentCache]:
        """Return the features `(T, d_embedding)` of tokens that follow those in the cache, and the updated cache.

        A token whose position is `masks.EMPTY` is padding: it does not change the state, and its own features are
        undefined.
        """
        cast = RecurrentCache(_as(cache.states[0][0].dtype, cache.memory), cache.states)
        x_TD, states = self._decode(tokens_T, positions_T != EMPTY, cast)
        return x_TD, RecurrentCache(cache.memory, states)

    def unembed(self, x_TD: jax.Array) -> jax.Array:
        """Return logits `(T, V)` for features `(T, d_embedding)`, or `(V,)` for `(d_embedding,)`."""
        return self.unembedding().logits(x_TD)

    def readout(self, x_TD: jax.Array) -> jax.Array:
        """Return the input of `unembedding`: the features."""
        return x_TD

    def unembedding(self) -> Unembedding:
        """Return the layer from readout to logits."""
        return Unembedding(self.embedding.W_E.T if self.config.tied else self.W_out)

    def _encode(self, source_S: jax.Array, valid_S: jax.Array | None) -> RecurrentCache:
        """Return the annotations of the source and the decoder's initial state."""
        c = self.config
        valid_S = jnp.ones(len(source_S), bool) if valid_S is None else valid_S
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
    ) -> tuple[jax.Array, tuple[State, ...]]:
        """Return features `(T, d_embedding)` and the last states."""
        memory = cache.memory
        x_TI = self._embed(self.embedding if self.config.tied else self.target_embedding, tokens_T)
        h_TD, weights_TS, state = self.reader(x_TI, cache.states[0], memory, valid_T)
        states = [state]
        for layer, begin in zip(self.decoder, cache.states[1:], strict=True):
            h_TD, state = layer(self._drop(h_TD), begin, valid_T)
            states.append(state)
        context_TE = weights_TS.astype(x_TI.dtype) @ memory.annotations_SE
        both_T = self._drop(jnp.concatenate([h_TD, x_TI, context_TE], axis=-1)) @ self.W_o + self.b_o[None]
        return both_T.reshape(len(both_T), -1, 2).max(axis=-1), tuple(states)

    def _embed(self, embedding: Embedding, tokens_T: jax.Array) -> jax.Array:
        x_TI = embedding(tokens_T, jnp.arange(len(tokens_T)))
        return self._drop(x_TI * sqrt(self.config.d_embedding) if self.config.tied else x_TI)

    def _drop(self, x: jax.Array) -> jax.Array:
        """Apply dropout, which is used on all but the recurrent connections (Zaremba et al. 2014)."""
        return capture_point(self, "drop", self.drop(x, deterministic=not self.has_rng("dropout")))


def check_floating(dtype: DTypeLike) -> None:
    """Raise `UserError` for a cache dtype that is not floating-point."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(f"the cache's dtype is {jnp.dtype(dtype)}; use float32 or bfloat16 for a recurrent model.")


def _as(dtype: DTypeLike, memory: Memory) -> Memory:
    """Return the memory with its floating-point arrays converted to `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, memory)

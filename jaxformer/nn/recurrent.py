"""Recurrent layers with their parameters, with and without attention to a source.

E is the width of the source's annotations and A the width of attention; for C and D see `ops.recurrent`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxformer.nn.capture import OUTPUT, capture_point
from jaxformer.nn.parameters import parameter
from jaxformer.ops.alignment import additive_scores, alignment_weights, dot_scores, linear_scores
from jaxformer.ops.masks import zero_padding
from jaxformer.ops.recurrent import State, Step, gru_step, lstm_step, recur, tanh_step


class Cell(NamedTuple):
    """Recurrent cell: number of gates, number of arrays in its state, and step function."""

    n_gates: int
    n_parts: int
    step: Step


def _tanh(state: State, x_1D: jax.Array, u_1D: jax.Array, _: None) -> tuple[State, None]:
    return tanh_step(state, x_1D, u_1D), None


def _gru(state: State, x_3D: jax.Array, u_3D: jax.Array, b_D: jax.Array) -> tuple[State, None]:
    return gru_step(state, x_3D, u_3D, b_D), None


def _lstm(state: State, x_4D: jax.Array, u_4D: jax.Array, _: None) -> tuple[State, None]:
    return lstm_step(state, x_4D, u_4D), None


CELLS = {"tanh": Cell(1, 1, _tanh), "gru": Cell(3, 1, _gru), "lstm": Cell(4, 2, _lstm)}
"""Cells by their names in configs. Gates are in the order of the step functions: r, z, n and i, f, g, o."""


def orthogonal_gates(key: jax.Array, shape: tuple[int, int, int], dtype: DTypeLike = float) -> jax.Array:
    """Return one orthogonal matrix per gate, `shape` (Saxe et al. 2014; for U in Bahdanau et al. 2015, appendix
    B.1)."""
    one = partial(nn.initializers.orthogonal(), shape=shape[1:], dtype=dtype)
    return jnp.stack([one(key) for key in jax.random.split(key, shape[0])])


def lstm_bias(key: jax.Array, shape: tuple[int, int], dtype: DTypeLike = float) -> jax.Array:
    """Return the initial biases of an LSTM: 1 for the forget gate (Jozefowicz et al. 2015), 0 for the others."""
    return jnp.zeros(shape, dtype).at[1].set(1)


def gates_of(x_TI: jax.Array, W_CID: jax.Array) -> jax.Array:
    """Return the inputs times the matrix of each gate, `(T, C, D)`."""
    return jnp.einsum("ti,cid->tcd", x_TI, W_CID)


class Recurrence(nn.Module):
    """Unidirectional recurrent layer.

    Attributes:
      cell: a name in `CELLS`.
      d_input: width I of the input.
      d_model: width D of the state.
    """

    cell: str
    d_input: int
    d_model: int

    def setup(self) -> None:
        C, D = CELLS[self.cell].n_gates, self.d_model
        self.W = parameter(
            self, "W", nn.initializers.normal(self.d_input**-0.5), (C, self.d_input, D), "gates embed -> hidden"
        )
        self.U = parameter(self, "U", orthogonal_gates, (C, D, D), "gates embed -> hidden")
        self.b_W = parameter(
            self, "b_W", lstm_bias if self.cell == "lstm" else nn.initializers.zeros, (C, D), "gates hidden"
        )
        self.b_U = parameter(self, "b_U", nn.initializers.zeros, (D,), "embed") if self.cell == "gru" else None

    def project(self, x_TI: jax.Array) -> jax.Array:
        """Return the projected input of each step, `(T, C, D)`, from one matmul for all steps."""
        return gates_of(x_TI, self.W) + self.b_W[None]

    @property
    def recurrent_weights(self) -> jax.Array:
        """Recurrent weights `(D, C, D)`, with the axis that matmuls sum over first, so that they are transposed once
        and not at every step."""
        return self.U.swapaxes(0, 1)

    def zeros(self) -> State:
        """Return the state before the first step."""
        return (jnp.zeros(self.d_model, self.U.dtype),) * CELLS[self.cell].n_parts

    def __call__(self, x_TI: jax.Array, state: State, valid_T: jax.Array | None = None) -> tuple[jax.Array, State]:
        """Return outputs `(T, D)` and the last state. Invalid positions do not change the state."""
        h_TD, state = self.run(self.project(x_TI), state, valid_T)
        return capture_point(self, OUTPUT, h_TD), state

    def run(self, x_TCD: jax.Array, state: State, valid_T: jax.Array | None) -> tuple[jax.Array, State]:
        """Return outputs `(T, D)` and the last state from the output of `project`."""
        state, h_TD, _ = recur(CELLS[self.cell].step, state, x_TCD, valid_T, self.recurrent_weights, self.b_U)
        return h_TD, state


class Memory(NamedTuple):
    """Source in the form that `FixedContext` and `AttentiveRecurrence` read at each step."""

    annotations_SE: jax.Array
    values_SCD: jax.Array
    """Each annotation times the gates' matrices, C h; by linearity, their weighted sum equals C times the weighted sum
    of annotations."""
    keys_SA: jax.Array | None
    """Keys of attention; None without attention."""
    valid_S: jax.Array


class FixedContext(nn.Module):
    """Recurrence that reads the same context at each step (Cho et al. 2014, section 2.2).

    Attributes:
      cell, d_input, d_model: see `Recurrence`.
      d_source: width E of the context.
    """

    cell: str
    d_input: int
    d_model: int
    d_source: int

    def setup(self) -> None:
        self.recurrence = Recurrence(self.cell, self.d_input, self.d_model)
        shape = (CELLS[self.cell].n_gates, self.d_source, self.d_model)
        self.C = parameter(self, "C", nn.initializers.normal(self.d_source**-0.5), shape, "gates embed -> hidden")

    def read(self, annotations_SE: jax.Array, valid_S: jax.Array) -> Memory:
        """Return the source in the form that `__call__` reads; S must be 1."""
        return Memory(annotations_SE, gates_of(annotations_SE, self.C), None, valid_S)

    def __call__(
        self, x_TI: jax.Array, state: State, memory: Memory, valid_T: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, State]:
        """Return outputs `(T, D)`, the weight of the context at each step, `(T, 1)`, always 1, and the last state."""
        x_TCD = self.recurrence.project(x_TI) + memory.values_SCD
        h_TD, state = self.recurrence.run(x_TCD, state, valid_T)
        return capture_point(self, OUTPUT, h_TD), jnp.ones((len(x_TI), 1)), state


class AttentiveRecurrence(nn.Module):
    """Recurrence that attends to the source at each step, with its previous output as the query (Bahdanau et al. 2015,
    equations 5 and 6).

    Attributes:
      cell, d_input, d_model: see `Recurrence`.
      d_source: width E of the annotations.
      d_attention: width A of the alignment model; None for dot-product scores, where it is D.
      linear: use an alignment model without tanh; see `ops.alignment.linear_scores`.
    """

    cell: str
    d_input: int
    d_model: int
    d_source: int
    d_attention: int | None
    linear: bool = False

    def setup(self) -> None:
        self.recurrence = Recurrence(self.cell, self.d_input, self.d_model)
        A, D, E = self.d_attention or self.d_model, self.d_model, self.d_source
        self.C = parameter(
            self, "C", nn.initializers.normal(E**-0.5), (CELLS[self.cell].n_gates, E, D), "gates embed -> hidden"
        )
        self.U_a = parameter(self, "U_a", nn.initializers.normal(E**-0.5), (E, A), "embed -> alignment")
        if self.d_attention is not None:
            self.W_a = parameter(self, "W_a", nn.initializers.normal(D**-0.5), (D, A), "embed -> alignment")
            self.v_a = parameter(self, "v_a", nn.initializers.normal(A**-0.5), (A, 1), "alignment -> 1")

    def read(self, annotations_SE: jax.Array, valid_S: jax.Array) -> Memory:
        """Return the source in the form that `__call__` reads, with all matmuls that do not depend on the state.
        Invalid annotations become 0, even if they are NaN."""
        annotations_SE = zero_padding(annotations_SE, valid_S)
        return Memory(annotations_SE, gates_of(annotations_SE, self.C), annotations_SE @ self.U_a, valid_S)

    def __call__(
        self, x_TI: jax.Array, state: State, memory: Memory, valid_T: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, State]:
        """Return outputs `(T, D)`, the weights of the annotations at each step, `(T, S)` float32, and the last
        state."""
        weights = {"U": self.recurrence.recurrent_weights}
        fixed = {
            "keys": memory.keys_SA,
            "values": memory.values_SCD,
            "valid": memory.valid_S,
            "b": self.recurrence.b_U,
        }
        if self.d_attention is not None:
            weights["W_a"] = self.W_a
            fixed["v_a"] = self.v_a[:, 0]
        steps = _DOT_STEPS if self.d_attention is None else _LINEAR_STEPS if self.linear else _ADDITIVE_STEPS
        x_TCD = self.recurrence.project(x_TI)
        state, h_TD, weights_TS = recur(steps[self.cell], state, x_TCD, valid_T, weights, fixed)
        return capture_point(self, OUTPUT, h_TD), capture_point(self, "pattern", weights_TS), state


def _additive(state: State, u: dict, fixed: dict) -> jax.Array:
    return additive_scores(u["W_a"], fixed["keys"], fixed["v_a"])


def _linear(state: State, u: dict, fixed: dict) -> jax.Array:
    return linear_scores(u["W_a"], fixed["keys"], fixed["v_a"])


def _dot(state: State, u: dict, fixed: dict) -> jax.Array:
    return dot_scores(state[0], fixed["keys"])


def _attending_step(
    step: Step, score: Callable[[State, dict, dict], jax.Array], state: State, x_CD: jax.Array, u: dict, fixed: dict
) -> tuple:
    weights_S = alignment_weights(score(state, u, fixed), fixed["valid"])
    context_CD = jnp.tensordot(weights_S.astype(x_CD.dtype), fixed["values"], 1)
    state, _ = step(state, x_CD + context_CD, u["U"], fixed["b"])
    return state, weights_S


_ADDITIVE_STEPS = {name: partial(_attending_step, cell.step, _additive) for name, cell in CELLS.items()}
_LINEAR_STEPS = {name: partial(_attending_step, cell.step, _linear) for name, cell in CELLS.items()}
_DOT_STEPS = {name: partial(_attending_step, cell.step, _dot) for name, cell in CELLS.items()}

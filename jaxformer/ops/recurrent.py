"""Recurrent networks on one sequence: cells, and the loop over steps.

C is the number of gates of a cell, 1 for a cell without gates, and D the width of its state.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.ops.masks import check_valid

State = tuple[jax.Array, ...]
"""State between steps: `(h_D,)` for a plain cell or a GRU, `(h_D, c_D)` for an LSTM. h is also the step's output."""

Tree = Any
"""Pytree of arrays, or None."""

Step = Callable[[State, jax.Array, Tree, Tree], tuple[State, Tree]]
"""Function of `(state, x, u, fixed)` that returns the next state and a record of the step; u is the previous output
times each weight matrix, see `recur`."""


def tanh_step(state: State, x_1D: jax.Array, u_1D: jax.Array) -> State:
    """Return the next state of a plain cell: h ← tanh(x + u) (Elman 1990).

    Args:
      state: `(h_D,)`.
      x_1D: W x + b.
      u_1D: U h.
    """
    return (jnp.tanh(x_1D[0] + u_1D[0]),)


def gru_step(state: State, x_3D: jax.Array, u_3D: jax.Array, b_D: jax.Array) -> State:
    """Return the next state of a GRU: r, z = σ(x + u), n = tanh(x + r ∘ (u + b)), h ← (1 - z) ∘ n + z ∘ h.

    This follows Cho et al. 2014, section 2.3, with the reset gate r applied after the matmul with U, as in the first
    version of their paper and in cuDNN, so that all three matmuls are one.

    Args:
      state: `(h_D,)`.
      x_3D: W x + b of the gates r, z and n.
      u_3D: U h of the same gates.
      b_D: bias of U h in n; in r and z it is part of x.
    """
    (h_D,) = state
    r_D, z_D = jax.nn.sigmoid(x_3D[:2] + u_3D[:2])
    n_D = jnp.tanh(x_3D[2] + r_D * (u_3D[2] + b_D))
    return ((1 - z_D) * n_D + z_D * h_D,)


def lstm_step(state: State, x_4D: jax.Array, u_4D: jax.Array) -> State:
    """Return the next state of an LSTM: i, f, o = σ(x + u), g = tanh(x + u), c ← f ∘ c + i ∘ g, h ← o ∘ tanh(c).

    This follows Hochreiter and Schmidhuber 1997, with the forget gate f of Gers et al. 2000 and without peepholes.

    Args:
      state: `(h_D, c_D)`.
      x_4D: W x + b of the gates i, f, g and o.
      u_4D: U h of the same gates.
    """
    _, c_D = state
    i_D, f_D, g_D, o_D = x_4D + u_4D
    c_D = jax.nn.sigmoid(f_D) * c_D + jax.nn.sigmoid(i_D) * jnp.tanh(g_D)
    return jax.nn.sigmoid(o_D) * jnp.tanh(c_D), c_D


def recur(
    step: Step, state: State, x_T: jax.Array, valid_T: jax.Array | None, weights: Tree, fixed: Tree
) -> tuple[State, jax.Array, Tree]:
    """Run a cell over a sequence.

    Matmuls with the previous output h are computed here and not in `step`, so that a weight's derivative is one matmul
    over all steps after the loop instead of a sum of one matmul per step.

    Args:
      step: hashable function that uses no arrays but its arguments.
      state: state before the first step.
      x_T: `(T, …)`, one row per step: projections of the inputs, computed for all steps at once.
      valid_T: False where a step leaves the state unchanged, whatever its x; None if all steps are valid.
      weights: pytree of matrices `(D, …)`; a step receives h times each.
      fixed: pytree of arrays that each step reads.

    Returns:
      The last state, the outputs `(T, D)`, and the records of the steps, each with a first axis T. At an invalid
      position the output is the previous one.
    """
    if valid_T is None:
        valid_T = jnp.ones(len(x_T), bool)
    else:  # NaN would not reach the state, but the derivative, as 0 times NaN
        check_valid(valid_T, len(x_T))
        x_T = jnp.where(valid_T.reshape(-1, *(1,) * (x_T.ndim - 1)), x_T, 0)
    return _recur(step, state, x_T, valid_T, weights, fixed)


def _advance(
    step: Step, valid: jax.Array, state: State, x: jax.Array, u: Tree, fixed: Tree
) -> tuple[State, tuple[jax.Array, Tree]]:
    after, record = step(state, x, u, fixed)
    after = jax.tree.map(partial(jnp.where, valid), after, state)
    return after, (after[0], record)


def _matmul(h_D: jax.Array, weights: Tree) -> Tree:
    """Return h times each matrix, for one step `(D,)` or all steps `(T, D)`."""
    return jax.tree.map(lambda W: jnp.tensordot(h_D, W, 1), weights)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _recur(step: Step, state: State, x_T: jax.Array, valid_T: jax.Array, weights: Tree, fixed: Tree) -> Tree:
    def advance(state: State, now: tuple) -> tuple[State, Tree]:
        x, valid = now
        return _advance(step, valid, state, x, _matmul(state[0], weights), fixed)

    last, (h_TD, record_T) = jax.lax.scan(advance, state, (x_T, valid_T))
    return last, h_TD, record_T


@_recur.defjvp
def _recur_jvp(step: Step, primals: tuple, tangents: tuple) -> tuple:
    state, x_T, valid_T, weights, fixed = primals
    d_state, d_x_T, _, d_weights, d_fixed = tangents

    def advance(state: State, now: tuple) -> tuple[State, Tree]:
        x, valid = now
        u = _matmul(state[0], weights)
        after, out = _advance(step, valid, state, x, u, fixed)
        return after, (out, state, u)

    last, ((h_TD, record_T), state_T, u_T) = jax.lax.scan(advance, state, (x_T, valid_T))
    d_u_T = _matmul(state_T[0], d_weights)

    def advance_tangent(d_state: State, now: tuple) -> tuple[State, Tree]:
        state, x, u, valid, d_x, d_u = now
        d_u = jax.tree.map(jnp.add, d_u, _matmul(d_state[0], weights))
        return jax.jvp(partial(_advance, step, valid), (state, x, u, fixed), (d_state, d_x, d_u, d_fixed))[1]

    d_last, (d_h_TD, d_record_T) = jax.lax.scan(advance_tangent, d_state, (state_T, x_T, u_T, valid_T, d_x_T, d_u_T))
    return (last, h_TD, record_T), (d_last, d_h_TD, d_record_T)

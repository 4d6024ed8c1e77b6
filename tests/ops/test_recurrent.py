from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.recurrent import State, gru_step, lstm_step, recur
from tests.arrays import assert_close, normal

T, D = 5, 7
U = {"gru": normal(D, 3, D, seed=1) / 3, "lstm": normal(D, 4, D, seed=1) / 3}  # 1/√7 would be 1/2.6
X_T = {name: normal(T, *weights.shape[1:], seed=2) for name, weights in U.items()}
STATE = {"gru": (normal(D, seed=3),), "lstm": (normal(D, seed=3), normal(D, seed=4))}
BIAS = {"gru": normal(D, seed=5), "lstm": jnp.zeros(0)}
CELLS = ("gru", "lstm")


def gru(state: State, x: jax.Array, u: jax.Array, b: jax.Array) -> tuple[State, jax.Array]:
    return gru_step(state, x, u, b), x[0]


def lstm(state: State, x: jax.Array, u: jax.Array, b: jax.Array) -> tuple[State, jax.Array]:
    return lstm_step(state, x, u), x[0]


STEP = {"gru": gru, "lstm": lstm}


def plainly(cell: str, state: State, x_T: jax.Array, valid_T: jax.Array, U: jax.Array, b: jax.Array) -> tuple:
    """The same as a Python loop, of which JAX makes the derivative."""
    outputs = []
    for x, valid in zip(x_T, valid_T, strict=True):
        after, _ = STEP[cell](state, x, jnp.einsum("d,dck->ck", state[0], U), b)
        state = tuple(jnp.where(valid, new, old) for new, old in zip(after, state, strict=True))
        outputs.append(state[0])
    return state, jnp.stack(outputs)


def looped(cell: str, state: State, x_T: jax.Array, valid_T: jax.Array, U: jax.Array, b: jax.Array) -> tuple:
    return recur(STEP[cell], state, x_T, valid_T, U, b)[:2]


def summed(run: partial, valid_T: jax.Array, *args: object) -> jax.Array:
    """A number to differentiate: every output has a weight of its own."""
    state, x_T, U, b = args
    last, h_TD = run(state, x_T, valid_T, U, b)
    return jnp.sum(h_TD * normal(T, D, seed=6)) + sum(jnp.sum(jnp.square(part)) for part in last)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_a_gru_step_is_the_papers_in_float64():
    (h,), x, U_, b = STATE["gru"], X_T["gru"][0], np.asarray(U["gru"], np.float64), np.asarray(BIAS["gru"], np.float64)
    h, x = np.asarray(h, np.float64), np.asarray(x, np.float64)
    wanted = np.zeros(D)
    for i in range(D):
        r, z = sigmoid(x[0, i] + h @ U_[:, 0, i]), sigmoid(x[1, i] + h @ U_[:, 1, i])
        n = np.tanh(x[2, i] + r * (h @ U_[:, 2, i] + b[i]))
        wanted[i] = (1 - z) * n + z * h[i]
    (got,) = gru_step(STATE["gru"], X_T["gru"][0], jnp.einsum("d,dck->ck", STATE["gru"][0], U["gru"]), BIAS["gru"])
    assert_close(got, wanted, 1e-6)


def test_an_lstm_step_is_the_papers_in_float64():
    h, c = (np.asarray(part, np.float64) for part in STATE["lstm"])
    i, f, g, o = np.asarray(X_T["lstm"][0], np.float64) + np.einsum("d,dck->ck", h, np.asarray(U["lstm"], np.float64))
    cell = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    got = lstm_step(STATE["lstm"], X_T["lstm"][0], jnp.einsum("d,dck->ck", STATE["lstm"][0], U["lstm"]))
    assert_close(got[0], sigmoid(o) * np.tanh(cell), 1e-6)
    assert_close(got[1], cell, 1e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_places_that_are_not_valid_change_nothing(cell):
    valid_T = jnp.array([False, True, True, False, True])
    run = jax.jit(partial(looped, cell))
    last, h_TD = run(STATE[cell], X_T[cell], valid_T, U[cell], BIAS[cell])
    other = jnp.where(valid_T[:, None, None], X_T[cell], 100.0)
    jax.tree.map(np.testing.assert_array_equal, (last, h_TD), run(STATE[cell], other, valid_T, U[cell], BIAS[cell]))
    np.testing.assert_array_equal(h_TD[0], STATE[cell][0])  # nothing was read yet
    np.testing.assert_array_equal(h_TD[3], h_TD[2])
    kept = X_T[cell][valid_T]
    short_last, short_TD = looped(cell, STATE[cell], kept, jnp.ones(3, bool), U[cell], BIAS[cell])
    assert_close(h_TD[valid_T], short_TD, 1e-6)
    jax.tree.map(partial(assert_close, tolerance=1e-6), last, short_last)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_the_derivative_is_that_of_a_plain_loop(cell):
    """In reverse, also of each example apart, and forward, where the gradient's product with a direction is wanted."""
    valid_T = jnp.array([True, True, False, True, True])
    args = (STATE[cell], X_T[cell], U[cell], BIAS[cell])
    plain = jax.jit(jax.grad(partial(summed, partial(plainly, cell), valid_T), argnums=(0, 1, 2, 3)))
    wanted = jax.device_get(plain(*args))
    assert all(np.abs(leaf).max() > 0.01 for leaf in jax.tree.leaves(wanted) if leaf.size)
    function = partial(summed, partial(looped, cell), valid_T)
    gradient = jax.jit(jax.grad(function, argnums=(0, 1, 2, 3)))
    jax.tree.map(assert_close, gradient(*args), wanted)

    direction = jax.tree.map(lambda x: normal(*x.shape, seed=7), args)
    along = sum(np.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (wanted, direction)), strict=True))
    assert_close(jax.jit(lambda *args: jax.jvp(function, args, direction)[1])(*args), along)

    batch = np.stack([sign * np.asarray(X_T[cell]) for sign in (1, -1, 0)])
    each = jax.device_get(jax.jit(jax.vmap(gradient, (None, 0, None, None)))(args[0], batch, *args[2:]))
    for i, x_T in enumerate(batch):
        one = gradient(args[0], x_T, *args[2:])
        jax.tree.map(lambda together, alone, i=i: assert_close(together[i], alone), each, one)
    together = jax.grad(lambda U: jax.vmap(lambda x_T: function(args[0], x_T, U, args[3]))(batch).sum())
    assert_close(jax.jit(together)(U[cell]), each[2].sum(axis=0))


@pytest.mark.parametrize("cell", CELLS)
def test_invalid_positions_change_no_bit(cell: str) -> None:
    valid_T = jnp.array([True, False, True, True, False])
    run = jax.jit(jax.value_and_grad(partial(summed, partial(looped, cell), valid_T), argnums=(0, 1, 2, 3)))
    clean, hidden = (jnp.where(valid_T[:, None, None], X_T[cell], value) for value in (0, jnp.nan))
    got, wanted = (jax.tree.leaves(run(STATE[cell], x_T, U[cell], BIAS[cell])) for x_T in (hidden, clean))
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()

"""Recurrent layers against torch, whose side is stored; `tests/fixtures/make_recurrent_torch.py` made it."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxformer.models.objective import Params
from jaxformer.nn.recurrent import AttentiveRecurrence, FixedContext, Recurrence, lstm_bias, orthogonal_gates
from tests.arrays import apply, assert_close, normal
from tests.fixtures.recurrent_weights import LENGTHS, D, I, cases, recurrence_of, torch_says

TORCH = torch_says()
S = max(LENGTHS)


def stack(cell: str, layers: int, both: bool, params: list[list[Params]], x_SI: jax.Array, valid_S: jax.Array) -> tuple:
    """Layers one on another, each in one or two directions."""
    lasts = []
    for i in range(layers):
        outputs = []
        for direction, turn in zip(params[i], (slice(None), slice(None, None, -1)), strict=False):
            layer = Recurrence(cell.lower(), x_SI.shape[1], D)
            zeros = layer.apply({"params": direction}, method="zeros")
            h_SD, last = layer.apply({"params": direction}, x_SI[turn], zeros, valid_S[turn])
            outputs.append(h_SD[turn])
            lasts.append(last)
        x_SI = jnp.concatenate(outputs, axis=-1)
    return x_SI, lasts


@pytest.mark.parametrize(("cell", "layers", "both"), cases())
def test_outputs_and_last_states_are_torchs_with_padding_or_without(cell: str, layers: int, both: bool) -> None:
    name = f"{cell}, {layers}, {both}"
    params = [
        [recurrence_of(TORCH, f"{name}: ", f"_l{i}{side}") for side in ("", "_reverse")[: 1 + both]]
        for i in range(layers)
    ]
    run = jax.jit(lambda x_SI, valid_S: stack(cell, layers, both, params, x_SI, valid_S))
    for i, length in enumerate(LENGTHS):
        h_SE, lasts = run(TORCH["x"][i], jnp.arange(S) < length)
        assert_close(h_SE[:length], TORCH[f"{name}: out {i}"])
        for part, letter in enumerate("hc"[: len(lasts[0])]):
            assert_close(np.stack([last[part] for last in lasts]), TORCH[f"{name}: last {letter} {i}"])


@pytest.mark.slow
def test_a_fixed_context_is_read_as_one_more_input_at_each_step() -> None:
    """W x + C c is the product of both matrices, one on the other, with x and c, one on the other."""
    x_TI, c_1E = normal(4, I), normal(1, 3, seed=1)
    layer = FixedContext("gru", I, D, 3)
    zeros = (jnp.zeros(D),)
    memory_of = lambda module: module.read(c_1E, jnp.ones(1, bool))  # noqa: E731
    params = drawn(layer, lambda module: module(x_TI, zeros, memory_of(module)))
    run = jax.jit(lambda: layer.apply({"params": params}, method=lambda m: m(x_TI, zeros, memory_of(m))))
    h_TD, weights_TS, _ = run()
    np.testing.assert_array_equal(weights_TS, np.ones((4, 1)))
    inner = dict(params["recurrence"], W=np.concatenate([params["recurrence"]["W"], params["C"]], axis=1))
    both = np.concatenate([x_TI, np.broadcast_to(c_1E, (4, 3))], axis=1)
    assert_close(h_TD, apply(Recurrence("gru", I + 3, D), inner, both, zeros)[0], 1e-6)


@pytest.mark.slow
def test_attention_to_one_place_is_a_fixed_context() -> None:
    d_attention = 3
    x_TI, h_SE = normal(4, I), normal(S, 3, seed=1)
    valid_S = jnp.arange(S) == 2
    layer, zeros = AttentiveRecurrence("lstm", I, D, 3, d_attention), (jnp.zeros(D), jnp.zeros(D))
    call = lambda module: module(x_TI, zeros, module.read(h_SE, valid_S))  # noqa: E731
    params = drawn(layer, call)
    h_TD, weights_TS, last = jax.jit(lambda: layer.apply({"params": params}, method=call))()
    np.testing.assert_array_equal(weights_TS, jnp.broadcast_to(valid_S, (4, S)))
    fixed = FixedContext("lstm", I, D, 3)
    read = lambda m: m(x_TI, zeros, m.read(h_SE[2:3], jnp.ones(1, bool)))  # noqa: E731
    inner = {name: params[name] for name in ("recurrence", "C")}
    wanted_TD, _, wanted_last = jax.jit(lambda: fixed.apply({"params": inner}, method=read))()
    assert_close(h_TD, wanted_TD, 1e-6)
    jax.tree.map(assert_close, last, wanted_last)


@pytest.mark.slow
def test_the_derivative_through_attention_is_the_measured_one() -> None:
    """Of parameters, inputs, annotations and the first state, with places on both sides that are not valid."""
    layer, valid_T, valid_S = AttentiveRecurrence("gru", I, D, 3, 3), jnp.arange(4) != 1, jnp.arange(S) < 4

    def call(module: AttentiveRecurrence, x_TI: jax.Array, h_SE: jax.Array, state: tuple) -> tuple:
        return module(x_TI, state, module.read(h_SE, valid_S), valid_T)

    args = (normal(4, I), normal(S, 3, seed=1), (normal(D, seed=2),))
    params = drawn(layer, lambda module: call(module, *args))
    function = jax.jit(lambda params, *args: layer.apply({"params": params}, *args, method=call))
    # The measured one is a difference of float32 numbers over a step of 2⁻¹⁰.
    check_grads(function, (params, *args), order=1, eps=2**-10, atol=2e-3, rtol=2e-3)


@pytest.mark.slow
def test_gates_begin_orthogonal_and_an_lstm_remembering() -> None:
    U_CDD = orthogonal_gates(jax.random.key(0), (3, D, D))
    U_CDD = np.asarray(U_CDD)
    assert_close(np.einsum("cde,cfe->cdf", U_CDD, U_CDD), np.broadcast_to(np.eye(D), (3, D, D)))
    assert np.abs(U_CDD[0] - U_CDD[1]).max() > 0.1
    np.testing.assert_array_equal(lstm_bias(jax.random.key(0), (4, 2)), [[0, 0], [1, 1], [0, 0], [0, 0]])


def drawn(module: nn.Module, call: Callable) -> Params:
    """Parameters for a module that is called by a function."""
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), method=call)["params"])
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [normal(*leaf.shape, seed=i) / 2 for i, leaf in enumerate(leaves)])

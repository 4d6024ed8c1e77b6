from collections.abc import Callable
from functools import partial
from math import erf, sqrt
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.mlp import ACTIVATIONS, MLP, Activation, activate, uniform_fan_in
from tests.arrays import apply, assert_close, first_params, normal, random_params

T, D, OUT = 5, 7, 3
HIDDEN = (11, 13)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


NUMPY: dict[str, Callable] = {
    "relu": lambda x: np.maximum(x, 0),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3))),  # Hendrycks and Gimpel 2016
    "gelu_exact": lambda x: 0.5 * x * (1 + np.vectorize(erf)(x / sqrt(2))),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "silu": silu,
    "tanh": np.tanh,
}
GATES: dict[str, Callable] = {
    "swiglu": lambda gate, y: silu(gate) * y,
    "geglu": lambda gate, y: NUMPY["gelu"](gate) * y,
    "clamped_swiglu": lambda gate, y: NUMPY["quick_gelu"](np.minimum(gate, 7)) * (np.clip(y, -7, 7) + 1),
}


def test_every_name_that_a_config_may_use_is_an_activation() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS) - {"tanh"}  # which is no MLP's


@pytest.mark.parametrize(
    ("activation", "hidden", "bias"),
    [
        *((activation, HIDDEN, True) for activation in (*NUMPY, *GATES)),
        *((activation, HIDDEN, False) for activation in ("relu", "swiglu")),
        *(("relu", hidden, True) for hidden in ((), (11,))),
    ],
    ids=str,
)
def test_agrees_with_the_formula_in_numpy(activation: str, hidden: tuple[int, ...], bias: bool) -> None:
    module = MLP(hidden, OUT, activation, bias)
    x = 2 * normal(T, D)
    params = random_params(module, x)
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    h = np.asarray(x, np.float64)
    last = len(hidden) + 1
    for i in range(1, last + 1):
        y = h @ p[f"W_{i}"] + (p[f"b_{i}"] if bias else 0)
        if i < last:
            gate = GATES.get(activation)
            y = NUMPY[activation](y) if gate is None else gate(h @ p[f"W_gate_{i}"], y)
        h = y
    assert_close(apply(module, params, x), h)
    matrices = last + (last - 1) * (activation in GATES)
    assert len(params) == matrices + last * bias


@pytest.mark.slow
def test_first_weights_are_uniform_within_one_over_the_root_of_fan_in() -> None:
    params = first_params(MLP((211,), 101), normal(T, 307))
    for name, fan_in in {"W_1": 307, "b_1": 307, "W_2": 211, "b_2": 211}.items():
        bound, values = 1 / sqrt(fan_in), np.asarray(params[name])
        assert np.abs(values).max() <= bound
        assert values.min() < -0.9 * bound  # 101 draws all miss the last twentieth with a chance of 0.6 %
        assert values.max() > 0.9 * bound
        # The variance of U(-a, a) is a²/3, known from n draws to √(0.8/n) of itself; this is four of those.
        assert values.var() == pytest.approx(bound**2 / 3, rel=4 * sqrt(0.8 / values.size))


def test_initializer_is_centred_and_keeps_the_dtype() -> None:
    values = uniform_fan_in(4)(jax.random.key(0), (101, 103), jnp.bfloat16)
    assert values.dtype == jnp.bfloat16
    # Standard error 0.5/√3/√10403 = 0.0028; this is four of those.
    assert abs(float(values.astype(jnp.float32).mean())) < 0.012


@pytest.mark.parametrize("activation", ["gelu", "geglu"])
def test_gelu_saves_its_product_alone_for_the_backward_pass(activation: str) -> None:
    """And not the sum with the bias and its tanh, which are as large."""
    y, b = normal(T, D), normal(D, seed=1)
    _, pullback = jax.vjp(partial(activate, activation), y, b)
    saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == y.shape]
    assert len(saved) == 1
    np.testing.assert_array_equal(saved[0], y)
    gradients = jax.jit(jax.grad(lambda y, b: jax.nn.gelu(y + b[None]).sum(), argnums=(0, 1)))(y, b)
    for actual, expected in zip(jax.jit(pullback)(jnp.ones_like(y)), gradients, strict=True):
        assert_close(actual, expected)


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="activation is 'swish'; it must be one of relu, squared_relu"):
        MLP((D,), OUT, "swish").init(jax.random.key(0), normal(T, D))

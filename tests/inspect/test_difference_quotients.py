"""Gradients agree with difference quotients at kinks and jumps, and wrong ones are found in every parameter."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inspect.difference_quotients import Slope, compare_slopes

Params = dict[str, jax.Array]
N, D, F = 40, 6, 50


def parameters() -> Params:
    """Return parameters of a network whose biases are 0, with gradients of many sizes."""
    rng = np.random.default_rng(0)
    return {
        "W": rng.normal(size=(D, F)), "b": np.zeros(F), "out": 1e3 * rng.normal(size=(F, D)), "small": np.ones(3),
        "scale": np.float64(1e-3), "tiny": rng.normal(size=4), "unused": rng.normal(size=5),
    }  # fmt: skip


def network(p: Params) -> jax.Array:
    """Return a loss whose last inputs put every unit at its kink, and whose jumps are those of a choice by logits."""
    x_ND = np.random.default_rng(1).normal(size=(N, D))
    x_ND[-3:] = 0
    hidden_NF = jax.nn.relu(x_ND @ p["W"] + p["b"][None])
    y_ND = p["scale"] * hidden_NF @ p["out"]
    chosen_N = p["small"][jnp.argmax(y_ND, axis=-1) % 3]
    return jnp.mean(jnp.square(y_ND)) + jnp.mean(chosen_N * hidden_NF[:, 0]) + 1e-7 * jnp.sum(jnp.sin(p["tiny"]))


def compare(gradient: Callable[[Params], Params] | None = None) -> dict[str, Slope]:
    with jax.enable_x64(True):
        return compare_slopes(network, gradient or jax.grad(network), parameters())


def test_a_right_gradient_holds_although_units_are_at_their_kinks() -> None:
    slopes = compare()
    assert slopes.keys() == parameters().keys()
    assert all(slope.holds for slope in slopes.values()), slopes
    assert all(slope.uncertainty < 1e-3 for slope in slopes.values()), slopes


@pytest.mark.slow
def test_a_wrong_gradient_is_named_whichever_parameter_it_is_of() -> None:
    """By a thousandth, or missing in one entry; that of `tiny` is 1e-10 of the largest."""
    faults = {"W": lambda g: g * 1.001, "scale": lambda g: g * 1.001, "tiny": lambda g: g.at[0].set(0)}
    for name, fault in faults.items():
        slopes = compare(lambda p, name=name, fault=fault: (g := jax.grad(network)(p)) | {name: fault(g[name])})
        assert {key for key, slope in slopes.items() if not slope.holds} == {name}
        assert slopes[name].deviation > 2e-4 or name == "tiny"


def test_a_wrong_gradient_where_there_is_none_is_found() -> None:
    slopes = compare(lambda p: jax.grad(network)(p) | {"unused": jnp.full(5, 1e-6)})
    assert {key for key, slope in slopes.items() if not slope.holds} == {"unused"}


def test_an_infinite_gradient_does_not_hold() -> None:
    slopes = compare(lambda p: jax.grad(network)(p) | {"b": jnp.full(F, jnp.inf)})
    assert not slopes["b"].holds and slopes["W"].holds


def test_an_uncertain_slope_holds_within_its_uncertainty() -> None:
    assert Slope(0.01, 0.02).holds and not Slope(0.03, 0.02).holds
    assert not Slope(2e-5, 1e-6).holds and Slope(np.inf, np.inf).deviation != 0

"""Capture points change nothing by themselves, and pass values to a handler within a context."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.capture import OUTPUT, Captured, Path, capture_point, handled_by, is_capturing, lifted


class Squares(nn.Module):
    """The square of its input, plus 1."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return capture_point(self, OUTPUT, capture_point(self, "square", x * x) + 1)


class Twice(nn.Module):
    """Two modules, one after the other."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Squares(name="second")(Squares(name="first")(x))


def test_value_outside_a_context_is_the_same_object():
    value = jnp.ones(3)
    assert capture_point(Squares(), "square", value) is value and not is_capturing()


def test_points_add_no_equation():
    jaxpr = jax.make_jaxpr(lambda x: Squares().apply({}, x))(2.0)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["mul", "add"]


def test_handler_receives_path_and_value_in_order():
    listed = []

    def listen(root: object, path: Path, value: jax.Array) -> jax.Array:
        listed.append((".".join(path), float(value)))
        return value

    with handled_by(listen):
        assert is_capturing()
        Twice().apply({}, 2.0)
    assert listed == [("first.square", 4), ("first", 5), ("second.square", 25), ("second", 26)]
    Twice().apply({}, 2.0)
    assert len(listed) == 4 and not is_capturing()


def test_rest_is_computed_from_a_replacement_also_under_transformations():
    replace = lambda root, path, value: 3 * value if path[-1] == "square" else value  # noqa: E731

    def loss(x: jax.Array) -> jax.Array:
        with handled_by(replace):
            return Squares().apply({}, x)

    x_B = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(jax.vmap(loss))(x_B), 3 * x_B**2 + 1)
    np.testing.assert_array_equal(jax.vmap(jax.grad(jax.checkpoint(loss)))(x_B), 6 * x_B)


def test_inner_handler_receives_the_values_of_the_outer():
    def power(exponent: int):
        return lambda root, path, value: value**exponent if path[-1] == "square" else value

    with handled_by(lambda root, path, value: value + 1 if path[-1] == "square" else value), handled_by(power(2)):
        assert Squares().apply({}, 2.0) == (4 + 1) ** 2 + 1
        with handled_by(None):
            assert Squares().apply({}, 2.0) == 4 + 1


def test_kept_values_leave_lifted_transformations_and_no_others():
    captured = Captured()

    def keep(root: object, path: Path, value: jax.Array) -> jax.Array:
        captured.keep(".".join(path), value)
        return value

    apply = lambda x: Twice().apply({}, x)  # noqa: E731
    doubled = lambda f: lambda x: f(2 * x)  # noqa: E731
    with handled_by(keep):
        assert lifted(jax.jit, lifted(jax.checkpoint, lifted(doubled, apply)))(1.0) == 26
    assert captured.values == {"first.square": 4, "first": 5, "second.square": 25, "second": 26}
    with handled_by(keep), pytest.raises(ValueError, match=r"first\.square is computed within a transformation"):
        jax.checkpoint(apply)(1.0)
    with handled_by(keep), pytest.raises(ValueError, match=r"first\.square is computed in two calls"):
        apply(1.0)

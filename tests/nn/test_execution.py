"""Blocks run one by one, computed again, and in a loop: the same function."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.block import run_blocks
from jaxformer.nn.capture import Captured, capture_point, handled_by
from jaxformer.nn.execution import PLAIN, Execution
from tests.arrays import first_params, normal

D = 7
X_TD = normal(5, D)
KEYS = jax.random.split(jax.random.key(3), 3)


class Layer(nn.Module):
    """Something with a parameter, a second input and dropout."""

    width: int = D

    @nn.compact
    def __call__(self, x, scale, key=None):
        y = nn.tanh(x @ self.param("W_1", nn.initializers.normal(0.5), (D, self.width))) * scale
        y = capture_point(self, "product", y @ self.param("W_2", nn.initializers.normal(0.5), (self.width, D)))
        return x + (y if key is None else nn.Dropout(0.5, deterministic=False)(y, rng=key)), None


class Stack(nn.Module):
    """Three of them."""

    execution: Execution = PLAIN
    widths: tuple[int, ...] = (D, D, D)

    def setup(self):
        self.blocks = [Layer(width) for width in self.widths]

    def __call__(self, x, keys=None):
        return run_blocks(self.blocks, self.execution, x, 0.5, keys=keys)


PARAMS = {"params": first_params(Stack(), X_TD)}


@partial(jax.jit, static_argnames=("execution", "widths"))
def loss(params, execution, keys=None, **fields):
    return jnp.sum(Stack(execution, **fields).apply(params, X_TD, keys) ** 2)


value_and_grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)


@pytest.mark.parametrize(
    ("remat", "scan", "dropout"),
    [("none", True, True), ("dots", False, True), ("dots", True, True), ("block", False, True), ("block", True, False)],
)
def test_the_loss_and_its_gradient_are_the_same(remat, scan, dropout):
    keys = KEYS if dropout else None
    wanted = value_and_grad(PARAMS, PLAIN, keys)
    got = value_and_grad(PARAMS, Execution(remat=remat, scan=scan), keys)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)
    assert (keys is None) == (wanted[0] == value_and_grad(PARAMS, PLAIN, None)[0])


@pytest.mark.slow
def test_parameters_have_the_same_names_and_values_whatever_the_execution():
    scanned = {"params": first_params(Stack(Execution(remat="block", scan=True)), X_TD)}
    assert sorted(scanned["params"]) == ["blocks_0", "blocks_1", "blocks_2"]
    jax.tree.map(np.testing.assert_array_equal, scanned, PARAMS)


def test_remat_saves_fewer_activations():
    def stored(execution):
        _, pull = jax.vjp(lambda params: loss(params, execution), PARAMS)
        return sum(leaf.size for leaf in jax.tree.leaves(pull))

    assert stored(Execution(remat="block")) < stored(Execution(remat="dots")) < stored(PLAIN)


def test_a_scan_holds_one_block_and_a_loop_all():
    def products(execution):
        return str(jax.make_jaxpr(lambda params: loss(params, execution))(PARAMS)).count("dot_general")

    assert products(Execution(scan=True)) == 2 and products(PLAIN) == 6


@pytest.mark.parametrize("scan", [False, True])
def test_gather_receives_the_name_of_the_block(scan):
    asked = []

    def gather(name, params):
        asked.append(name)
        return jax.tree.map(lambda w: 2 * w, params)

    doubled = jax.tree.map(lambda w: 2 * w, PARAMS)
    np.testing.assert_allclose(loss(PARAMS, Execution(gather=gather, scan=scan)), loss(doubled, PLAIN), rtol=1e-5)
    assert asked == (["blocks_0"] if scan else ["blocks_0", "blocks_1", "blocks_2"])


@pytest.mark.slow
def test_blocks_that_differ_run_one_by_one_but_cannot_be_scanned():
    widths = (D, D + 1, D)
    params = {"params": first_params(Stack(widths=widths), X_TD)}
    again = loss(params, Execution(remat="block"), widths=widths)
    np.testing.assert_allclose(again, loss(params, PLAIN, widths=widths), rtol=1e-6)
    with pytest.raises(ValueError, match="differ in shape and cannot be scanned"):
        loss(params, Execution(scan=True), widths=widths)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scale_gradient(factor, x):
    return x


scale_gradient.defvjp(lambda factor, x: (x, None), lambda factor, _, g: (factor * g,))
EDITS = {
    "array": lambda i, x: jnp.arange(2.0, 5)[i] * x,
    "one block": lambda i, x: x[::-1] if i == 1 else x,
    "gradients alone": lambda i, x: scale_gradient(1.0 + i, x),
    "branches": lambda i, x: jax.lax.cond(x[0, 0] > 0, lambda x: x, lambda x: x + i, x),
}


@pytest.mark.parametrize("name", EDITS)
def test_each_block_has_its_own_edit_and_keeps_its_value(name):
    def edited_loss(params, execution):
        stored = Captured()

        def edit(root, path, x):
            x = EDITS[name](int(path[0].removeprefix("blocks_")), x)
            stored.keep(path[0], x)
            return x

        with handled_by(edit):
            return jnp.sum(Stack(execution).apply(params, X_TD, KEYS) ** 2), stored.values

    run = jax.grad(edited_loss, has_aux=True)
    expected, got = run(PARAMS, PLAIN), run(PARAMS, Execution(scan=True, remat="block"))
    assert list(got[1]) == ["blocks_0", "blocks_1", "blocks_2"]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, expected)


@pytest.mark.parametrize("fields", [{"scan": True}, {"remat": "block"}])
def test_each_call_of_a_block_keeps_its_values(fields):
    """Two passes through the same blocks are two calls in one `apply`, whose root they share."""

    class Twice(Stack):
        def __call__(self, x, keys=None):
            return run_blocks(self.blocks, self.execution, super().__call__(x, keys), 0.5)

    roots, captured = set(), Captured()

    def keep(root, path, x):
        if path[0] == "blocks_2":
            roots.add(root)
            captured.keep(f"pass {len(captured.values)}", x)
        return x

    with handled_by(keep):
        Twice(Execution(**fields)).apply(PARAMS, X_TD)
    assert len(roots) == 1 and list(captured.values) == ["pass 0", "pass 1"]
    assert bool((captured.values["pass 0"] != captured.values["pass 1"]).all())

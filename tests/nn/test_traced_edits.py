"""A scan applies to each step its own edits, and steps are alike only if they compute the same."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.capture import Captured, Path, capture_point, handled_by
from jaxformer.nn.execution import Execution, run_blocks
from jaxformer.nn.traced_edits import alike, traced_edit
from tests.arrays import first_params
from tests.helpers import slow

D, N = 3, 4
X_D = jnp.arange(1.0, 1 + D)
FACTORS_N = jnp.arange(2.0, 2 + N)
FACTORS = list(FACTORS_N)


class Layer(nn.Module):
    """A product with a matrix, which two capture points read."""

    @nn.compact
    def __call__(self, x_D: jax.Array, key: None = None) -> tuple[jax.Array, None]:
        W_DD = self.param("W", nn.initializers.normal(0.5), (D, D))
        return capture_point(self, "after", x_D + capture_point(self, "product", W_DD @ x_D)), None


class Stack(nn.Module):
    """Layers, one after the other, some of them twice."""

    execution: Execution
    passes: int = 1

    def setup(self) -> None:
        self.blocks = [Layer() for _ in range(N)]

    def __call__(self, x_D: jax.Array) -> jax.Array:
        for _ in range(self.passes):
            x_D = run_blocks(self.blocks, self.execution, x_D)
        return x_D


PARAMS = first_params(Stack(Execution()), X_D)
SHAPE = jax.ShapeDtypeStruct((D,), jnp.float32)
Edit = Callable[[int, jax.Array], jax.Array]


def editing(edit: Edit) -> AbstractContextManager[None]:
    """Return a context in which an edit of the block's number and value replaces products."""
    at = lambda path: int(path[0].removeprefix("blocks_"))  # noqa: E731
    return handled_by(lambda _, path, x: edit(at(path), x) if path[-1] == "product" else x)


def edited_loss(execution: Execution, edit: Edit, params: dict) -> jax.Array:
    with editing(edit):
        return jnp.sum(Stack(execution).apply({"params": params}, X_D) ** 2)


def number_of_scans(edit: Edit) -> int:
    with editing(edit):
        edits = [[traced_edit((f"blocks_{i}", "product"), SHAPE)] for i in range(N)]
    return len(alike(edits))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scale_gradient(factor: float, x: jax.Array) -> jax.Array:
    return x


scale_gradient.defvjp(lambda factor, x: (x, None), lambda factor, _, g: (factor * g,))

EDITS: dict[str, tuple[Edit, int]] = {
    "same": (lambda i, x: 2 * x, 1),
    "arrays": (lambda i, x: FACTORS[i] * x, 1),
    "slices": (lambda i, x: FACTORS_N[i] * x, N),
    "shared array": (lambda i, x: jnp.where(X_D > 1, x, FACTORS[0]), 1),
    "one block": (lambda i, x: x[::-1] if i == 1 else x, 3),
    "constants": (lambda i, x: (1.0 + i) * x, N),
    "constant arrays": (lambda i, x: np.float32([i, 1, 2]) * x, 1),
    "jitted": (lambda i, x: jax.jit(lambda x: x * i)(x), N),
    "gradients alone": (lambda i, x: scale_gradient(1.0 + i, x), N),
    "branches": (lambda i, x: jax.lax.cond(x[0] > 0, lambda x: x, lambda x: x + i, x), N),
}
SCANNED = ("arrays", "one block", "constant arrays")
"""Those that are scanned some of the way."""


@pytest.mark.parametrize("name", EDITS)
def test_edits_that_differ_by_arrays_alone_are_scanned(name):
    edit, scans = EDITS[name]
    assert number_of_scans(edit) == scans


@pytest.mark.parametrize("name", [*SCANNED, *(slow(name) for name in ("jitted", "gradients alone", "branches"))])
def test_each_step_has_its_own_edit(name):
    edit, _ = EDITS[name]
    expected, got = (
        jax.jit(jax.value_and_grad(partial(edited_loss, execution, edit)))(PARAMS)
        for execution in (Execution(), Execution(scan=True, remat="block"))
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, expected)


def test_array_of_all_edits_is_not_stacked():
    def inputs(edit: Edit) -> list[tuple[int, ...]]:
        jaxpr = jax.make_jaxpr(partial(edited_loss, Execution(scan=True), edit))(PARAMS)
        (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        return [x.aval.shape for x in scan.invars]

    table_D, tables_N = jnp.ones(D) * 7, [jnp.ones(D) * i for i in range(N)]
    assert (N, D) in inputs(lambda i, x: tables_N[i] * x)
    assert (N, D) not in inputs(lambda i, x: table_D * x)


@pytest.mark.parametrize("fields", [{"scan": True}, {"remat": "block"}, {"scan": True, "remat": "block"}])
def test_each_call_of_a_block_keeps_its_values(fields):
    """Two passes through the same blocks are two calls in one `apply`, whose root they share."""
    roots = set()

    def keep(root: object, path: Path, x: jax.Array) -> jax.Array:
        if path == ("blocks_3", "after"):
            roots.add(root)
            captured.keep(f"pass {len(captured.values)}", x)
        return x

    captured = Captured()
    with handled_by(keep):
        result = Stack(Execution(**fields), passes=2).apply({"params": PARAMS}, X_D)
    assert len(roots) == 1 and list(captured.values) == ["pass 0", "pass 1"]
    np.testing.assert_array_equal(captured.values["pass 1"], result)

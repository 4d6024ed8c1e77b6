"""A program depends on the contexts that it read, and on no others."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.trace_context import TraceContext

FACTOR = TraceContext(1.0)


class Counted:
    """A function under `jax.jit` that counts how often it is traced."""

    def __init__(self, reads: bool) -> None:
        self.n, self.reads = 0, reads
        self.call = jax.jit(self.traced)

    def traced(self, x: jax.Array) -> jax.Array:
        self.n += 1
        return x * (FACTOR.get() if self.reads else 1.0)


def test_program_is_reused_in_the_context_that_it_read_alone():
    f = Counted(reads=True)
    with FACTOR.set(2.0):
        assert [float(f.call(3.0)) for _ in range(3)] == [6.0] * 3 and f.n == 1
    assert [float(f.call(3.0)) for _ in range(2)] == [3.0] * 2 and f.n == 2
    with FACTOR.set(5.0):
        with FACTOR.set(7.0):
            assert [float(f.call(3.0)) for _ in range(2)] == [21.0] * 2 and f.n == 3
        assert [float(f.call(3.0)) for _ in range(2)] == [15.0] * 2 and f.n == 4
    assert float(f.call(3.0)) == 3.0 and f.n == 4


def test_program_that_read_no_context_is_shared_by_all():
    f = Counted(reads=False)
    for factor in (2.0, 3.0, 4.0):
        with FACTOR.set(factor):
            assert float(f.call(3.0) * FACTOR.get()) == 3 * factor and f.n == 1
            assert float(jax.grad(lambda x: f.call(x) * FACTOR.get())(3.0)) == factor


def test_program_that_is_called_between_reads_is_shared_by_all():
    f = Counted(reads=False)

    def blocks(x: float) -> jax.Array:
        for _ in range(3):
            x = f.call(FACTOR.get() * x)
        return FACTOR.get() * x

    for factor in (2.0, 3.0, 4.0):
        with FACTOR.set(factor):
            assert float(jax.jit(blocks)(3.0)) == 3 * factor**4 and f.n == 1


def test_contexts_that_end_in_another_order_leave_nothing_behind():
    f, first, second = Counted(reads=True), FACTOR.set(2.0), FACTOR.set(3.0)
    first.__enter__()
    second.__enter__()
    assert float(f.call(3.0)) == 9.0
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert float(f.call(3.0)) == 3.0
    with FACTOR.set(5.0):
        assert float(f.call(3.0)) == 15.0
    assert float(f.call(3.0)) == 3.0


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.jit, jax.checkpoint, jax.linearize])
def test_contexts_reach_programs_within_transformations(transform):
    f = Counted(reads=True)

    def result() -> np.ndarray:
        if transform is jax.linearize:
            return np.asarray(jax.linearize(f.call, 3.0)[1](1.0))
        return np.asarray(transform(f.call)(jnp.full(2 if transform is jax.vmap else (), 3.0)))

    plain = result()
    with FACTOR.set(2.0):
        np.testing.assert_array_equal(result(), 2 * plain)
        with FACTOR.set(5.0):
            np.testing.assert_array_equal(result(), 5 * plain)
        np.testing.assert_array_equal(result(), 2 * plain)
    np.testing.assert_array_equal(result(), plain)


def test_program_around_a_context_is_that_of_the_outer_one():
    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        outer = FACTOR.get()
        with FACTOR.set(10.0):
            inner = g(x)
        return inner + outer * g(x)

    g = Counted(reads=True).call
    with FACTOR.set(2.0):
        assert float(f(1.0)) == 10 + 2 * 2
    assert float(f(1.0)) == 10 + 1
    with FACTOR.set(3.0):
        assert float(f(1.0)) == 10 + 3 * 3


@pytest.mark.parametrize("call", [lambda g: g, lambda g: lambda x: jax.lax.map(g, x[None])[0]], ids=["jit", "scan"])
def test_program_depends_on_the_context_of_a_program_traced_before_it(call):
    inner = call(Counted(reads=True).call)
    outer = jax.jit(lambda x: 1.0 * inner(x))
    for factor in (2.0, 5.0):
        with FACTOR.set(factor):
            assert float(inner(jnp.float32(3.0))) == 3 * factor
            assert [float(outer(jnp.float32(3.0))) for _ in range(2)] == [3 * factor] * 2


def test_threads_have_their_own_contexts():
    f, barrier = Counted(reads=True), Barrier(4)

    def call(factor: float) -> float:
        with FACTOR.set(factor):
            barrier.wait()
            return float(f.call(3.0))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, (2.0, 3.0, 4.0, 5.0))) == [6.0, 9.0, 12.0, 15.0]
    assert float(f.call(3.0)) == 3.0


def test_caches_hold_no_values():
    class Value(float):
        pass

    f, value = Counted(reads=True), Value(2.0)
    with FACTOR.set(value):
        f.call(3.0)
    alive = weakref.ref(value)
    del value
    gc.collect()
    assert alive() is None

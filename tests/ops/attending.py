"""What tests of attention share: inputs, and one run forward and backward."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxformer.ops.masks import Mask
from tests.arrays import assert_close, normal

SCALE = 0.3


def value_and_gradients(attend: Any, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None) -> list[jax.Array]:
    """The output and the gradients to q, k and v, for one gradient to the output."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> list[jax.Array]:
        y, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask, SCALE), q, k, v)
        return [y, *pull(normal(*y.shape, seed=4).astype(y.dtype))]

    return jax.jit(run)(q, k, v, mask)


def qkv(H: int, G: int, T: int, S: int, K: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(H, T, K, seed=1), normal(G, S, K, seed=2), normal(G, S, K, seed=3)


def assert_all_close(got: Sequence[jax.Array], wanted: Sequence[jax.Array]) -> None:
    """`assert_close` one by one."""
    for g, w in zip(got, wanted, strict=True):
        assert_close(g, w)

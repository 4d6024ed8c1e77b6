"""One way to compare: a function and its gradients on a GPU, in some dtype, beside float64 on the CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

LIMITS = {"bfloat16": 2**-5, "float32": 5e-5}
"""Largest norm of a difference, relative to that of the value: bfloat16 keeps 8 bits, and a few roundings add up; in
float32, sums of a thousand terms are in another order."""


class Comparison:
    """What rounding allows, and the largest difference so far, which the test's report holds."""

    def __init__(self, device: jax.Device, request: pytest.FixtureRequest) -> None:
        self.device, self._request = device, request

    def close(self, name: str, got: Any, wanted: Any, limit: float) -> None:
        """Assert that the norm of the difference is at most `limit` times that of the wanted values."""
        got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        assert got.shape == wanted.shape, name
        difference = float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30))
        self._request.node.user_properties.append((name, difference / limit))
        assert difference <= limit, f"{name} is off by {difference:.2g} of its norm; {limit:.2g} is allowed"

    def agree(
        self,
        function: Callable[..., jax.Array],
        reference: Callable[..., jax.Array],
        dtype: str,
        *arrays: np.ndarray,
        limit: float | None = None,
        n_differentiated: int | None = None,
    ) -> None:
        """Assert that a function of arrays in a dtype and its gradients equal the reference's in float64, which reads
        the same rounded numbers."""
        n = len(arrays) if n_differentiated is None else n_differentiated
        narrow = [jnp.asarray(x, jnp.dtype(dtype)) for x in arrays]
        with jax.default_device(self.device):
            shape = jax.eval_shape(function, *narrow).shape
            dy = jnp.asarray(np.random.default_rng(9).normal(size=shape), jnp.dtype(dtype))
            got = run(function, n, dy, *(jax.device_put(x, self.device) for x in narrow))
            assert all(x.devices() == {self.device} for x in got)
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (dy, *narrow)]
            wanted = run(reference, n, *wide)
        names = ("value", *(f"gradient {i}" for i in range(n)))
        for name, x, y in zip(names, got, wanted, strict=True):
            self.close(name, np.asarray(x, np.float64), y, LIMITS[dtype] if limit is None else limit)


def run(function: Callable[..., jax.Array], n: int, dy: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Return the value and the gradients to the first n arrays, for a gradient to the value."""

    @jax.jit
    def forward_backward(dy: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        y, pull = jax.vjp(lambda *first: function(*first, *arrays[n:]), *arrays[:n])
        return [y, *pull(dy.astype(y.dtype))]

    return forward_backward(dy, *arrays)


@pytest.fixture
def beside(device: jax.Device, request: pytest.FixtureRequest) -> Comparison:
    """Return the comparison of one test."""
    return Comparison(device, request)

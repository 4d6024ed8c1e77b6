"""A process that multiplies large square matrices when asked, for the rate that a device reaches: see `processes`.

    python benchmarks/matmul.py SIZE PRECISION

In the dtype that `compute.precision` means on the device, on random numbers: a card does more a second on zeros.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from processes import serve

from jaxformer.config import ComputeConfig
from jaxformer.sharding import make_mesh
from jaxformer.train.setup import resolve_precision

PRODUCTS = 10
"""One after another in a step, so that starting them takes no time."""


def main(size: int, precision: Any) -> None:
    """Serve; a step is `PRODUCTS` products."""
    device = jax.devices()[0]
    dtype = resolve_precision(ComputeConfig(precision), make_mesh(devices=[device]))
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    b = b * size**-0.5  # keeps the products as large as a

    @jax.jit
    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, PRODUCTS, lambda _, product: product @ b, a)[0, 0].astype(jnp.float32)

    serve(
        lambda _: multiply(a, b), flops_a_step=2 * size**3 * PRODUCTS, size=size, dtype=dtype.name,
        platform=device.platform, device=device.device_kind,
    )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

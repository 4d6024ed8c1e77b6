"""Scatters, compiled for an H100 by the real compiler."""

import pytest

from tests.plan.gpu import needs_compiler, run_with_compiler

pytestmark = needs_compiler

SCATTER = """
import json, re, sys
from jaxformer.parallel.determinism import set_deterministic
if sys.argv[1] == "True":
    set_deterministic()
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxformer.plan.topology import topology_devices

sharding = SingleDeviceSharding(topology_devices("h100:1")[0])
gradient = jax.grad(lambda W_VD, tokens_T, dy_TD: (W_VD[tokens_T] * dy_TD).sum())
shapes = ((512, 128), jnp.bfloat16), ((64,), jnp.int32), ((64, 128), jnp.bfloat16)
arrays = [jax.ShapeDtypeStruct(*x, sharding=sharding) for x in shapes]
program = jax.jit(gradient).lower(*arrays).compile().as_text()
scatters = [line for line in program.splitlines() if re.search(r" scatter\\(", line)]
print(json.dumps(["unique_indices=true" in line for line in scatters]))
"""


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_of_an_embedding_is_a_sum_in_one_order_with_the_flags_alone(deterministic: bool) -> None:
    assert run_with_compiler(SCATTER, str(deterministic)) == [deterministic]  # rows added to at most once

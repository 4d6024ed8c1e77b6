"""Kernels and scatters, compiled for an H100 by the real compiler."""

import pytest

from tests.plan.gpu import needs_compiler, run_with_compiler

pytestmark = needs_compiler

TRITON = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxformer.ops.kernels import triton_attention
from jaxformer.ops.masks import Causal, Packed
from jaxformer.plan.topology import topology_devices

T, K = map(int, sys.argv[1:3])
sharding = SingleDeviceSharding(topology_devices("h100:1")[0])
arrays = [jax.ShapeDtypeStruct((2, heads, T, K), jnp.bfloat16, sharding=sharding) for heads in (4, 2, 2)]
masks = {"none": None, "causal": Causal(), "packed": Packed(jnp.arange(T) // 100)}
attend = jax.vmap(lambda *qkv: triton_attention(*qkv, masks[sys.argv[3]], K**-0.5))
gradient = jax.grad(lambda *qkv: attend(*qkv).astype(jnp.float32).sum(), argnums=(0, 1, 2))
text = jax.jit(gradient).lower(*arrays).compile().as_text()
print(json.dumps(text.count('custom_call_target="__gpu$xla.gpu.triton"')))
"""


@pytest.mark.parametrize(
    ("T", "K", "mask"),
    [
        (1000, 128, "packed"),  # padded; the widest heads that blocks of 128 positions fit into the shared memory with
        (1024, 256, "causal"),  # the widest at all, in blocks of 64
        (100, 24, "none"),  # heads padded to 32; one block, whose padding is a segment
    ],
)
def test_triton_attention_fits_the_shared_memory(T: int, K: int, mask: str) -> None:
    assert run_with_compiler(TRITON, str(T), str(K), mask) == 3  # forward, row sums and backward


SCATTER = """
import json, re, sys
from jaxformer.determinism import set_deterministic
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

"""Memory traffic of the loss, compiled for one H100 by the real compiler."""

from tests.plan.gpu import needs_compiler, run_with_compiler

pytestmark = needs_compiler

PROGRAM = """
import json, re
import jax, jax.numpy as jnp
from jaxformer.ops.linear_cross_entropy import Unembedding, linear_cross_entropy
from jaxformer.plan.hlo import parse
from jaxformer.plan.topology import topology_devices

N, D, V = 32 * 1024, 768, 50_257
sharding = jax.sharding.SingleDeviceSharding(topology_devices("h100:1")[0])
shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype, sharding=sharding)

def loss(W_VD, x_ND, targets_N, weights_N):
    layer = Unembedding(W_VD.astype(jnp.bfloat16).T)
    return linear_cross_entropy(x_ND, layer, targets_N, weights_N, 2**29)[0]

shapes = shape(jnp.float32, V, D), shape(jnp.bfloat16, N, D), shape(jnp.int32, N), shape(jnp.float32, N)
program = parse(jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().as_text())
stored = {
    type_ for name, i in program._instructions() if name not in program.fused
    for type_ in re.findall(r"\\w+\\[\\d[\\d,]*\\]", i.type)
}
print(json.dumps({"traffic": program.memory_traffic(), "stored": sorted(stored)}))
"""


def test_loss_of_gpt2_moves_a_quarter_of_98_gigabytes_and_stores_no_float32_logits():
    """98 GB were measured of logits computed twice, in chunks of 1,311 rows, with gradients in float32. Each of 32,768
    by 50,304 logits is now written in bfloat16 once, read for the logarithm and for the gradient, which is written
    once and read twice: 19.8 GB; four chunks read the matrix twice, and read and write its gradient: 1.9 GB."""
    result = run_with_compiler(PROGRAM)
    assert 19.8e9 + 1.9e9 < result["traffic"] < 24e9
    assert [type_ for type_ in result["stored"] if "8192,50304]" in type_] == ["bf16[8192,50304]"]
    assert not any("8192,50257]" in type_ or "[32768,50" in type_ for type_ in result["stored"])

import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import PartitionSpec

from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.nn.execution import Execution, Remat
from jaxformer.ops.attention import attention
from jaxformer.ops.blockwise import blockwise_attention
from jaxformer.ops.kernels import (
    CUDNN_FORWARD,
    cudnn_attention,
    splash_attention,
)
from jaxformer.ops.masks import Causal, Mask
from jaxformer.parallel.mesh import BATCH, batch_sharding, make_mesh, on_each_shard
from jaxformer.plan.roofline import _jaxprs, without_dead_code
from jaxformer.train import kernels
from jaxformer.train.kernels import (
    FusedAttention,
    cpu_attention,
    cpu_blockwise_attention,
    make_attention,
    trial,
    unfused_attention,
)
from tests.arrays import normal, plain_decoder
from tests.helpers import ROOT
from tests.ops.attending import SCALE, assert_all_close, qkv, value_and_gradients


@pytest.fixture
def kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels' programs without their devices."""
    for name, attend in (
        ("splash", partial(splash_attention, interpret=True)),
        ("cudnn", partial(cudnn_attention, implementation="xla")),
    ):
        monkeypatch.setitem(kernels.KERNELS, name, kernels.KERNELS[name]._replace(attend=attend))


def like(T: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, T, 16), dtype)


@pytest.mark.parametrize(
    ("name", "platform", "q", "mask", "function", "line"),
    [
        ("auto", "cpu", like(255), Causal(), cpu_attention, "attention: xla (cpu has no fused kernel)"),
        ("auto", "cpu", like(256), Causal(), cpu_attention, "attention: blockwise (cpu has no fused kernel)"),
        ("auto", "gpu", like(128), Causal(), FusedAttention("cudnn"), "attention: cudnn"),
        ("auto", "tpu", like(128), Causal(), FusedAttention("splash"), "attention: splash"),
        ("cudnn", "gpu", like(128), Causal(3), FusedAttention("cudnn"), "attention: cudnn"),
        ("splash", "tpu", like(128), None, FusedAttention("splash"), "attention: splash"),
        ("auto", "gpu", like(128, jnp.float32), Causal(), unfused_attention,
         "attention: xla (not cudnn: cuDNN attention needs bfloat16 or float16, not float32)"),
        ("auto", "tpu", like(64), Causal(), unfused_attention,
         "attention: xla (not splash: splash attention needs at least 128 positions, but there are 64)"),
        ("xla", "tpu", like(128), Causal(), attention, "attention: xla, as configured"),
        ("blockwise", "gpu", like(128), Causal(), blockwise_attention, "attention: blockwise, as configured"),
        ("blockwise", "cpu", like(128), Causal(), cpu_blockwise_attention, "attention: blockwise, as configured"),
    ],
)  # fmt: skip
def test_attention_is_chosen_by_platform_shape_and_option(name, platform, q, mask: Mask, function, line: str) -> None:
    assert make_attention(name, platform, q, q, mask, try_first=False) == (function, line)


@pytest.mark.slow
def test_a_kernel_that_passes_its_trial_is_chosen(kernels_run_here) -> None:
    assert make_attention("auto", "gpu", like(128), like(128), Causal())[0] == FusedAttention("cudnn")


def test_values_wider_than_keys_and_soft_caps_are_for_attention_without_a_kernel() -> None:
    q, v = jnp.ones((2, 128, 16), jnp.bfloat16), jnp.ones((2, 128, 24), jnp.bfloat16)
    chosen = make_attention("auto", "tpu", like(128), like(128), Causal(), value_dim=24)
    assert chosen == (
        unfused_attention, "attention: xla (not splash: it needs values as wide as keys, 16, not 24)",
    )  # fmt: skip
    assert (FusedAttention("splash")(q, q, v) == unfused_attention(q, q, v)).all()
    assert (FusedAttention("splash")(q, q, q, soft_cap=0.1) == attention(q, q, q, soft_cap=0.1)).all()


@pytest.mark.parametrize(
    ("name", "platform", "dtype", "message"),
    [
        ("splash", "cpu", jnp.bfloat16, "'splash', which cannot be used .cpu has no fused kernel.; set it to auto"),
        ("cudnn", "tpu", jnp.bfloat16, "'cudnn', which cannot be used .tpu has splash.; set it to auto"),
        (
            "cudnn",
            "gpu",
            jnp.float32,
            "'cudnn', which cannot be used .not cudnn: cuDNN attention needs bfloat16 .* set it to auto",
        ),
        (
            "cudnn",
            "gpu",
            jnp.bfloat16,
            r"'cudnn', which cannot be used .not cudnn: \w+Error: .* set it to auto",
        ),  # there is no GPU here; XLA's compiler for them, which may be, says so in another way
    ],
)
def test_unavailable_kernel_by_name_is_a_user_error(name, platform, dtype, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_attention(name, platform, like(128, dtype), like(128, dtype), Causal())


def test_kernel_that_fails_its_trial_is_not_chosen() -> None:
    function, line = make_attention("auto", "gpu", like(128), like(128), Causal())
    assert function is unfused_attention
    assert re.match(r"attention: xla \(not cudnn: \w+Error: ", line)
    untried = make_attention("auto", "gpu", like(128), like(128), Causal(), try_first=False)
    assert untried == (FusedAttention("cudnn"), "attention: cudnn")


def kernel_calls(jaxpr: Any, forward: str) -> int:
    """Calls of the forward pass of a kernel, of a primitive or a `pallas_call` of that name."""
    found = 0
    for eqn in jaxpr.eqns:
        if str(eqn.params.get("name", eqn.primitive.name)).startswith(forward):
            found += 1
        elif eqn.primitive.name != "pallas_call":
            found += sum(kernel_calls(inner, forward) for inner in _jaxprs(eqn.params))
    return found


@pytest.mark.parametrize(
    ("kernel", "forward", "scan", "remat"),
    [
        ("cudnn", CUDNN_FORWARD, False, "block"),
        ("cudnn", CUDNN_FORWARD, True, "dots"),
        ("splash", "splash_mha_fwd", True, "block"),
    ],
)
def test_rematerialised_blocks_attend_once(monkeypatch, kernel: str, forward: str, scan: bool, remat: Remat) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    config = plain_decoder(vocab_size=9, context_length=128, d_model=32, n_blocks=2, n_heads=2, d_ff=(8,))
    model, tokens_BT = config.build(Execution(FusedAttention(kernel), remat, scan)), jnp.zeros((2, 128), jnp.int32)
    params = jax.eval_shape(config.build().init, jax.random.key(0), tokens_BT[0])["params"]

    def loss(params: Params) -> jax.Array:
        halves = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        return jax.vmap(lambda tokens_T: model.apply({"params": halves}, tokens_T).astype(jnp.float32).sum())(
            tokens_BT
        ).sum()

    gradient = jax.make_jaxpr(jax.value_and_grad(loss))(params)
    assert kernel_calls(without_dead_code(gradient), forward) == (1 if scan else 2)


def wrong(change):
    """An attention with something wrong."""
    return lambda q, k, v, mask, scale: change(attention(q, k, v, mask, scale))


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (attention, None),
        (wrong(lambda y: y.at[0, 0, 0].set(jnp.nan)), "its output is off by nan"),
        (lambda q, k, v, mask, scale: attention(q, k, v, None, scale), "its output is off"),
        (lambda q, *rest: attention(jax.lax.stop_gradient(q), *rest), "its gradient to q is off by 1."),
        (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)  # fmt: skip
def test_trial_returns_the_reason_of_a_failure(attend, reason: str | None) -> None:
    trial_reason = trial(attend, like(150), jax.ShapeDtypeStruct((1, 150, 16), jnp.bfloat16), Causal())
    assert trial_reason is None if reason is None else reason in trial_reason


@pytest.mark.parametrize(
    ("unfused", "length", "mask"),
    [(unfused_attention, 600, None), (unfused_attention, 600, "array"), (cpu_attention, 300, Causal(50))],
    ids=["all", "array", "window"],
)
def test_unfused_attention_is_attention(unfused: Any, length: int, mask: Mask | str) -> None:
    arrays = qkv(2, 1, length, length, 8)
    given = Causal(70).array(length, length) if isinstance(mask, str) else mask
    assert_all_close(*(value_and_gradients(f, *arrays, given) for f in (unfused, attention)))


@pytest.mark.slow
def test_unsupported_calls_use_unfused_attention() -> None:
    # No kernel could run here, had it been called.
    arrays, mask = qkv(2, 1, 130, 130, 8), Causal().array(130, 130)
    assert_all_close(*(value_and_gradients(f, *arrays, mask) for f in (FusedAttention("cudnn"), attention)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "H", "G"),
    [
        ("cudnn", 4, 2),  # a head a device would not be enough: two heads and their group
        ("cudnn", 4, 1),  # both devices share the group
        ("cudnn", 3, 1),  # heads do not divide: every device attends for all
    ],
)
def test_on_a_mesh_each_device_attends_for_its_examples_and_heads(kernels_run_here, kernel, H: int, G: int) -> None:
    mesh, split = make_mesh("fsdp=2,tensor=2", jax.devices()[:4]), PartitionSpec(BATCH)
    arrays = [normal(2, h, 128, 16, seed=i).astype(jnp.bfloat16) for i, h in enumerate((H, G, G))]

    def gradients(attend):
        # float32 inside, as a test of where things are; bfloat16 outside, as cuDNN wants it.
        one = lambda q, k, v: (attend(q, k, v, Causal(), SCALE).astype(jnp.float32) ** 2).sum()  # noqa: E731
        return jax.grad(lambda q, k, v: jax.vmap(one)(q, k, v).sum(), argnums=(0, 1, 2))

    placed = [jax.device_put(x, batch_sharding(mesh)) for x in arrays]
    sharded = jax.jit(on_each_shard(gradients(FusedAttention(kernel, 2)), mesh, 3 * (split,), 3 * (split,)))
    for actual, expected in zip(sharded(*placed), jax.jit(gradients(FusedAttention(kernel)))(*arrays), strict=True):
        assert actual.sharding.shard_shape(actual.shape)[0] == 1  # of two examples
        # The same roundings, but for sums over heads that share a group on two devices: 2^-8 once more.
        assert jnp.linalg.norm((actual - expected).astype(jnp.float32)) <= 2**-7 * jnp.linalg.norm(
            expected.astype(jnp.float32)
        )
    if (H, G) == (4, 2):  # nothing has to travel
        assert not any(
            f"{move}(" in sharded.lower(*placed).compile().as_text() for move in ("all-gather", "all-reduce")
        )


COMPILE = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxformer.ops.masks import Causal
from jaxformer.parallel.mesh import AXES, BATCH, on_each_shard, sum_over_batch
from jaxformer.train.kernels import make_attention

devices = np.array(get_topology_desc(platform="tpu", topology_name="v5e:16x16").devices)
for tensor in (1, 4):
    mesh = Mesh(devices.reshape(-1, 1, 1, tensor), AXES, axis_types=(AxisType.Auto,) * 4)
    for T in (65_536, 131_072):
        B, H, G, K, D = mesh.shape["data"], 32, 8, 64, 2048
        like = lambda h: jax.ShapeDtypeStruct((h, T, K), jnp.bfloat16)
        attend, _ = make_attention("auto", "tpu", like(H), like(G), Causal(), tensor, try_first=False)

        def layer(W, x_TD):
            q, k, v = (jnp.einsum("td,dnk->ntk", x_TD, W[name]) for name in "QKV")
            return x_TD + jnp.einsum("ntk,nkd->td", attend(q, k, v, Causal(), K**-0.5), W["O"])

        def loss(W, x_BTD):
            y_BTD = jax.vmap(lambda x_TD: layer(W, x_TD))(x_BTD)
            return jnp.mean(y_BTD.astype(jnp.float32) ** 2)

        def gradient(W, x_BTD):
            return sum_over_batch(jax.grad(loss)(W, x_BTD))

        def array(spec, *shape):
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

        heads = P(None, "tensor")
        W = {"Q": array(heads, D, H, K), "K": array(heads, D, G, K), "V": array(heads, D, G, K)}
        W["O"] = array(P("tensor"), H, K, D)
        everywhere = on_each_shard(gradient, mesh, ({name: P() for name in W}, P(BATCH)), {name: P() for name in W})
        compiled = jax.jit(everywhere).lower(W, array(P("data"), B, T, D)).compile()
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3  # forward, dq, dk and dv
        print(compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
def test_131072_positions_compile_for_a_tpu_with_memory_linear_in_the_length() -> None:
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    short, long, short_split, long_split = map(int, done.stdout.split())
    assert long < 2.3 * short
    assert long_split < 2.3 * short_split
    assert long < 8 * 2**30  # half of what a v5e has
    assert long_split < long / 2

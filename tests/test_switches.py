"""Process-wide switches of JAX: ops, models, gradients and a training step work under each, and give the same numbers.

conftest.py sets `jax_numpy_rank_promotion` to raise for the default run; test_x64.py has `jax_enable_x64`."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig, next_token_batch
from jaxformer.inspect import intervene
from jaxformer.models.objective import mean_loss, objective_of
from jaxformer.nn.execution import Execution
from jaxformer.ops import blockwise, cache, quantized
from jaxformer.ops.linear_cross_entropy import Unembedding, linear_cross_entropy
from jaxformer.parallel.mesh import make_mesh
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step
from tests.arrays import assert_close, build, normal, random_tokens
from tests.helpers import slow
from tests.test_x64 import MODELS, OPS, PARTS, WIDE_OPS, V, arguments

STRICT = partial(jax.numpy_dtype_promotion, "strict")
SWITCHES: dict[str, Callable[[], Any]] = {
    "strict": STRICT,
    "leaks": jax.checking_leaks,
    "nans": partial(jax.debug_nans, True),
}
TOKENS = random_tokens(13, 4, 7)


@pytest.mark.parametrize("name", OPS | WIDE_OPS)
def test_an_op_and_its_gradient_need_no_implicit_dtype_promotion(name: str) -> None:
    op, *shapes = (OPS | WIDE_OPS)[name]
    args = arguments(jnp.bfloat16, tuple(shapes))
    floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
    with STRICT():
        jax.eval_shape(op, *args)
        if name != "quantized product":  # which is rounded, and has no gradient
            jax.eval_shape(jax.grad(lambda *xs: op(*xs).sum().astype(jnp.float32), argnums=floats), *args)


def test_caches_and_quantized_rows_need_no_implicit_dtype_promotion() -> None:
    def decode(q_H1K: jax.Array, k_GSK: jax.Array, W_DV: jax.Array) -> Any:
        (layer,) = cache.init_cache(1, 2, 6, 8, jnp.int8).layers
        layer = cache.write_layer(layer, k_GSK, k_GSK, 0)
        own_G1K = k_GSK[:, :1]
        step = cache.decode_step(q_H1K, own_G1K, own_G1K, layer, jnp.int32(2), jnp.ones((1, 6), bool), 0.3)
        return step, cache.read_layer(layer, q_H1K.dtype), quantized.quantize(W_DV, (1,))[jnp.array([0, 1])]

    with STRICT():
        jax.eval_shape(decode, normal(4, 1, 8), normal(2, 6, 8), normal(5, 7))


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("decoder", "strict"),
        *(slow(name, "strict") for name in MODELS if name not in ("decoder", *PARTS)),
        slow("lstm", "leaks"),
    ],
)
def test_a_model_and_its_gradient_are_traced(name: str, switch: str) -> None:
    config = MODELS[name]
    example = config.example()
    model = config.build(Execution(partial(blockwise.blockwise_attention, block=4), "block", scan=True))

    def total(params: Any, *example: Any) -> jax.Array:
        return sum(jnp.sum(x) for x in jax.tree.leaves(model.apply({"params": params}, *example)))

    with SWITCHES[switch]():
        params = jax.eval_shape(lambda *xs: model.init(jax.random.key(0), *xs)["params"], *example)
        jax.eval_shape(jax.grad(total), params, *example)


def trained(model: Any, optimizer: str = "adamw") -> Any:
    """Return parameters and loss after two steps."""
    config = Config(
        "small", model, data=TextConfig(), steps=3, optimizer=OptimizerConfig(optimizer, 0.01, warmup_steps=1),
        train=TrainConfig(batch_size=4, label_smoothing=0.1),
    )  # fmt: skip
    setup = TrainSetup(config, make_mesh("", jax.devices()[:1]))
    step, state = make_train_step(setup), setup.init_state()
    batch = jax.tree.map(jnp.asarray, next_token_batch(np.asarray(TOKENS), model.n_predicted))
    for i in range(2):
        state, metrics = step(state, batch, np.int32(i))
    return state.params, metrics.loss


@pytest.mark.slow
def test_training_steps_are_those_without_a_switch() -> None:
    """Of a decoder with experts, with all switches at once."""
    with ExitStack() as stack:
        for switch in SWITCHES.values():
            stack.enter_context(switch())
        measured = trained(MODELS["experts"])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), measured, trained(MODELS["experts"]))


@pytest.mark.slow
def test_an_intervention_holds_no_traced_value_of_a_model() -> None:
    """Not even that a model sows within `jax.vmap`, while the context is open."""
    model = MODELS["experts"].build()
    batch = next_token_batch(np.asarray(TOKENS), model.config.n_predicted)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), batch.inputs[0][0])["params"])
    with jax.checking_leaks(), intervene("blocks.0.attn_out", lambda _, value: value):
        jax.eval_shape(partial(mean_loss, model), params, batch)


def on_axes(function: Callable, kind: AxisType, params: Any, *arrays: Any, with_context: bool = True) -> Any:
    """Return the results with parameters on both of two devices, and other arrays split over them."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    with jax.set_mesh(mesh) if with_context else nullcontext():
        return jax.jit(function)(jax.device_put(params, whole), *jax.device_put(arrays, split))


@pytest.mark.parametrize(("max_logits", "with_context"), [(10**6, True), slow(3 * V, False)])
def test_linear_cross_entropy_on_explicit_axes(max_logits: int, with_context: bool) -> None:
    def sums(W_DV: jax.Array, x_ND: jax.Array, targets_N: jax.Array) -> Any:
        weights_N = jnp.full(len(x_ND), 1 / len(x_ND))
        loss = lambda W_DV, x_ND: linear_cross_entropy(x_ND, Unembedding(W_DV), targets_N, weights_N, max_logits)[0]  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(W_DV, x_ND)

    arrays = normal(5, V), normal(8, 5), random_tokens(V, 8)
    ours, expected = (
        on_axes(sums, kind, *arrays, with_context=with_context) for kind in (AxisType.Explicit, AxisType.Auto)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    assert jax.typeof(ours[0]).sharding.spec == PartitionSpec()


@pytest.mark.parametrize("sequential", [False, slow(True)])
def test_blockwise_attention_is_differentiated_on_explicit_axes_without_a_context(sequential: bool) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    split = NamedSharding(mesh, PartitionSpec("data"))
    x_BHTK = jax.ShapeDtypeStruct((4, 2, 6, 4), jnp.float32, sharding=split)
    attend = partial(blockwise.blockwise_attention, block=4, sequential=sequential)
    grad = jax.jit(jax.grad(lambda *x_BHTK: jax.vmap(attend)(*x_BHTK).sum()))
    assert jax.typeof(grad.trace(*[x_BHTK] * 3).out_info).sharding.spec[0] == "data"


@pytest.mark.slow
def test_gradients_of_a_decoder_on_explicit_axes_are_those_on_automatic_ones() -> None:
    """That of the batch, and the mean of those of its examples."""
    model, params = build(MODELS["decoder"])
    batch = jax.tree.map(np.asarray, next_token_batch(np.asarray(TOKENS)))

    def gradients(params: Any, batch: Any) -> Any:
        each = jax.vmap(jax.grad(partial(objective_of(model).example_loss, model)), (None, 0))(params, batch)
        return jax.grad(partial(mean_loss, model))(params, batch), jax.tree.map(lambda g_B: g_B.mean(axis=0), each)

    ours, expected = (on_axes(gradients, kind, params, batch) for kind in (AxisType.Explicit, AxisType.Auto))
    jax.tree.map(assert_close, ours, expected)

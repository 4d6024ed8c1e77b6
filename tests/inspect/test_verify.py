"""Property checks hold for every model, and name planted faults."""

import importlib
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect.verify import attention_mask, causality, gradients, padding, random_inputs, verify
from jaxformer.nn import attention as nn_attention
from jaxformer.nn.block import Block
from jaxformer.ops import masks
from tests.helpers import exhaustive
from tests.inspect.test_capture import MODELS, T, random_model

ops_attention = importlib.import_module("jaxformer.ops.attention")  # in the package, its name is the function's

NAMES = [
    "finite", "causality", "attention mask", "attention rows", "padding", "decoding", "batching", "no dropout",
    "gradients",
]  # fmt: skip


def checks(name: str, **changes) -> dict:
    config = replace(MODELS[name], **changes)
    model, params, _ = random_model(config)
    inputs = random_inputs(config, 3)
    example = [x[0] for x in inputs]
    outputs = jax.tree.leaves(jax.eval_shape(lambda: model.apply({"params": params}, *example)))[0]
    result = list(verify(model, params, inputs, jnp.zeros((3, *outputs.shape[:-1]), jnp.int32)))
    assert [check.name for check in result] == NAMES
    return {check.name: check for check in result}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_all_checks_hold_for_every_model(name):
    layers = ("n_blocks", "n_encoder_blocks", "n_decoder_blocks", "n_layers")
    result = checks(name, **{field: 1 for field in layers if hasattr(MODELS[name], field)})
    assert all(check.holds for check in result.values()), result
    deviation = {name for name, check in result.items() if check.deviation is not None}
    assert {"batching", "gradients"} <= deviation
    if name in ("grouped", "attending", "encoder-decoder"):
        assert {"causality", "padding", "decoding"} <= deviation


def attend_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "causal", lambda query_T, key_S: query_T[:, None] + 1 >= key_S)


def hide_the_own_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "causal", lambda query_T, key_S: query_T[:, None] > key_S)


def write_the_cache_late(monkeypatch: pytest.MonkeyPatch) -> None:
    step = nn_attention.decode_step
    monkeypatch.setattr(nn_attention, "decode_step", lambda q, k, v, cache, slot, *rest: step(
        q, k, v, cache, jnp.minimum(slot + 1, cache.k_GKS.values.shape[-1] - 1), *rest
    ))  # fmt: skip


def mask_after_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def softmax(scores_HTS: jax.Array, mask: masks.Mask = None) -> jax.Array:
        mask_TS = mask.array(*scores_HTS.shape[1:]) if isinstance(mask, masks.Causal) else mask
        return jnp.where(mask_TS, jax.nn.softmax(scores_HTS), 0)

    monkeypatch.setattr(ops_attention, "softmax", softmax)


def drop_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    step = nn_attention.decode_step
    monkeypatch.setattr(nn_attention, "decode_step", lambda *args: step(*args[:-1], 1.0))


def always_drop_out(monkeypatch: pytest.MonkeyPatch) -> None:
    after: Callable = Block._after
    key = jax.random.key(0)
    monkeypatch.setattr(Block, "_after", lambda self, x, y, part, _: after(self, x, y, part, key))


@pytest.mark.parametrize(
    ("plant", "broken"),
    [
        (attend_to_the_next, {"causality", "attention mask"}),
        exhaustive(hide_the_own_position, {"attention mask", "attention rows"}),  # the first sees nothing
        (write_the_cache_late, {"decoding"}),
        exhaustive(mask_after_softmax, {"attention rows", "causality"}),  # the sum below it knows all
        (drop_the_scale, {"decoding", "padding"}),
        (always_drop_out, {"no dropout"}),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.slow
def test_planted_fault_fails_its_check(plant, broken, monkeypatch):
    plant(monkeypatch)
    result = checks("decoder", n_blocks=1, dropout=0.3 if plant is always_drop_out else 0.0)
    failed = {name for name, check in result.items() if not check.holds}
    assert failed >= broken
    assert failed <= broken | {"decoding", "padding"}  # which also part where they are masked or dropped otherwise
    if plant is drop_the_scale:
        assert result["decoding"].detail.endswith("differ from token 3 on")  # the first that comes alone


@pytest.mark.slow
def test_wrong_derivative_fails_the_gradient_check():
    """Of a loss whose gradient is doubled on its way through one op."""

    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    with pytest.MonkeyPatch.context() as patch:
        mix = ops_attention.mix
        patch.setattr(ops_attention, "mix", lambda weights, v: doubled(mix(weights, v)))
        result = checks("decoder", n_blocks=1)
    assert not result["gradients"].holds and result["gradients"].deviation > 1e-2
    assert all(check.holds for name, check in result.items() if name != "gradients")


@pytest.mark.slow
def test_attention_mask_check_covers_the_window(monkeypatch):
    """A window that hides nothing fails, as the inputs are longer than it."""
    monkeypatch.setattr(
        masks, "sliding_window", lambda query_T, key_S, width: jnp.ones((len(query_T), len(key_S)), bool)
    )
    config = replace(MODELS["decoder"], window=70, context_length=100)
    model, params, _ = random_model(config)
    inputs = random_inputs(config, 2)
    assert inputs[0].shape == (2, 78)
    result = attention_mask(model, params, (inputs[0][0],))
    assert not result.holds and "78 tokens" in result.detail
    short = attention_mask(model, params, (inputs[0][0][:70],))
    assert short.holds and short.detail.endswith("a window of 70 untested")


@pytest.mark.slow
def test_attention_mask_check_covers_the_window_of_each_block(monkeypatch):
    config = replace(MODELS["decoder"], window=3, global_blocks=(1,))
    model, params, (tokens,) = random_model(config)
    assert config.contract.layer_windows == (3, T)
    assert attention_mask(model, params, (tokens,)).holds
    monkeypatch.setattr(type(config), "block_windows", (3, 3))  # for the mask and for the contract
    narrow = attention_mask(model, params, (tokens,))
    assert narrow.holds
    monkeypatch.setattr(type(config), "contract", replace(config.contract, layer_windows=(3, T)))
    assert not attention_mask(model, params, (tokens,)).holds


@pytest.mark.slow
def test_clip_scale_at_its_limit_passes_the_gradient_check():
    model, params, _ = random_model(MODELS["clip"])
    inputs = [x[0] for x in random_inputs(MODELS["clip"], 2)]
    result = gradients(model, params | {"t": jnp.float32(5)}, Batch(tuple(inputs), jnp.int32(0)))
    assert result.holds, result


@pytest.mark.slow
def test_infinite_slope_fails_the_gradient_check():
    model, params, inputs = random_model(MODELS["decoder"])
    steep = params | {"W_out": np.full(params["W_out"].shape, 1e300)}
    result = gradients(model, steep, Batch(inputs, jnp.zeros(T, jnp.int32)))
    assert not result.holds and np.isnan(result.deviation)


@pytest.mark.slow
def test_causality_does_not_apply_to_constant_logits():
    model, params, inputs = random_model(MODELS["decoder"])
    result = causality(model, params | {"W_out": jnp.zeros_like(params["W_out"])}, inputs)
    assert result.deviation is None and "no logit depends" in result.detail


def test_padding_does_not_apply_without_padding():
    model, params, inputs = random_model(MODELS["masked"])
    unpadded = (inputs[0][None], jnp.ones((1, T), bool))
    assert padding(model, params, unpadded).deviation is None


def test_random_inputs_have_the_shapes_of_examples():
    for config in MODELS.values():
        inputs, example = random_inputs(config, 3, max_tokens=5), config.example()
        assert [(x.dtype, x.ndim - 1) for x in inputs] == [(x.dtype, x.ndim) for x in example]
        assert all(len(x) == 3 for x in inputs)
    source, valid, target = random_inputs(MODELS["encoder-decoder"], 4, max_tokens=5)
    assert source.shape == target.shape == (4, 5) and np.asarray(valid)[0].all() and valid.any(axis=1).all()
    assert not valid[1:].all(axis=1).any()
    assert random_inputs(MODELS["concatenated"], 2, max_tokens=5)[0].shape == (2, 7)

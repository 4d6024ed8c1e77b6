"""Property checks hold for every model, and name planted faults."""

import importlib
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect import property_checks
from jaxformer.inspect.difference_quotients import Slope
from jaxformer.inspect.property_checks import (
    attention_mask,
    attention_rows,
    batching,
    bits,
    causality,
    decoding,
    dropout_keys,
    gradients,
    no_dropout,
    padding,
    random_inputs,
    relative_error,
    without_rounding,
)
from jaxformer.models import encoder
from jaxformer.models.decoder import BlockAttention, ExpertsConfig
from jaxformer.nn import attention as nn_attention
from jaxformer.nn.block import Block
from jaxformer.ops import masks, norms
from tests.inspect.test_activations import DECODER, MODELS, T, random_model

linear = importlib.import_module("jaxformer.ops.linear_cross_entropy")
ops_attention = importlib.import_module("jaxformer.ops.attention")  # in the package, its name is the function's


@pytest.mark.slow
def test_checks_hold_for_a_model_that_reads_a_source():
    """Those of a decoder are run by `verify`."""
    config = replace(MODELS["encoder-decoder"], n_encoder_blocks=1, n_decoder_blocks=1)
    model, params, _ = random_model(config)
    inputs = random_inputs(config, 3)
    first = tuple(x[0] for x in inputs)
    for result in (
        causality(model, params, first), padding(model, params, inputs), decoding(model, params, first),
        batching(model, params, inputs),
    ):  # fmt: skip
        assert result.holds and result.deviation is not None, result


def attend_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "causal", lambda query_T, key_S: query_T[:, None] + 1 >= key_S[None])


def hide_the_own_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "causal", lambda query_T, key_S: query_T[:, None] > key_S[None])


def write_the_cache_late(monkeypatch: pytest.MonkeyPatch) -> None:
    step = nn_attention.decode_step
    monkeypatch.setattr(nn_attention, "decode_step", lambda q, k, v, cache, slot, *rest: step(
        q, k, v, cache, jnp.minimum(slot + 1, cache.k_GKS.values.shape[-1] - 1), *rest
    ))  # fmt: skip


def mask_after_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def softmax(scores_HTS: jax.Array, mask: masks.Mask = None, _: None = None) -> jax.Array:
        mask_TS = mask.array(*scores_HTS.shape[1:]) if isinstance(mask, masks.Causal) else mask
        return jnp.where(mask_TS, jax.nn.softmax(scores_HTS), 0)

    monkeypatch.setattr(ops_attention, "softmax", softmax)


def drop_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    step = nn_attention.decode_step
    monkeypatch.setattr(nn_attention, "decode_step", lambda *args: step(*args[:-1], 1.0))


def always_drop_out(monkeypatch: pytest.MonkeyPatch) -> None:
    add: Callable = Block._add
    key = jax.random.key(0)
    monkeypatch.setattr(Block, "_add", lambda self, *inputs: add(self, *inputs[:-1], key))


def small_decoder(**changes) -> tuple:
    return random_model(replace(DECODER, n_blocks=1, **changes))


def test_mask_that_hides_the_own_position_or_shows_the_next_fails_the_check_of_masks(monkeypatch):
    """Of a model with sinks, which both checks leave out."""
    model, params, inputs = small_decoder(sinks=True)
    assert attention_mask(model, params, inputs).holds and attention_rows(model, params, inputs).holds
    hide_the_own_position(monkeypatch)
    assert not attention_mask(model, params, inputs).holds
    assert not attention_rows(model, params, inputs).holds  # the first sees nothing
    attend_to_the_next(monkeypatch)
    assert not attention_mask(model, params, inputs).holds


@pytest.mark.slow
def test_attention_to_the_next_token_fails_the_checks_of_causality_and_bits(monkeypatch):
    """Of constant logits nothing can be said."""
    model, params, inputs = small_decoder()
    batch = tuple(jnp.stack([x, x]) for x in inputs)
    assert causality(model, params, inputs).holds and bits(model, params, batch).holds
    constant = causality(model, params | {"W_out": jnp.zeros_like(params["W_out"])}, inputs)
    assert constant.deviation is None and "no logit depends" in constant.detail
    attend_to_the_next(monkeypatch)
    assert not causality(model, params, inputs).holds
    assert not bits(model, params, batch).holds


@pytest.mark.slow
def test_mask_after_softmax_fails_the_checks_of_rows_and_causality(monkeypatch):
    """The sum below it knows all."""
    mask_after_softmax(monkeypatch)
    model, params, inputs = small_decoder()
    assert not attention_rows(model, params, inputs).holds
    assert not causality(model, params, inputs).holds


@pytest.mark.slow
def test_missing_scale_of_the_cached_step_fails_the_check_of_decoding(monkeypatch):
    drop_the_scale(monkeypatch)
    model, params, inputs = small_decoder()
    result = decoding(model, params, inputs)
    assert not result.holds and result.detail.endswith("differ from token 3 on")  # the first that comes alone


@pytest.mark.slow
def test_dropout_in_evaluation_fails_its_check(monkeypatch):
    model, params, inputs = small_decoder(dropout=0.3)
    assert no_dropout(model, params, inputs).holds
    always_drop_out(monkeypatch)
    assert not no_dropout(model, params, inputs).holds


def scale_the_gradient_of_the_unembedding(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = linear._chunk
    monkeypatch.setattr(linear, "_chunk", lambda shape, needed, *rest: (result := chunk(shape, needed, *rest))._replace(
        to_W_DV=1.001 * result.to_W_DV if needed[1] else None
    ))  # fmt: skip


@pytest.mark.slow
def test_wrong_derivative_fails_the_gradient_check(monkeypatch) -> None:
    """Of a single parameter, and wrong by a thousandth; no other is named."""
    scale_the_gradient_of_the_unembedding(monkeypatch)
    config = replace(DECODER, n_blocks=1, experts=ExpertsConfig(2, balance_weight=0.1))
    model, params, inputs = random_model(config)
    result = gradients(model, params, Batch((inputs[0][None],), jnp.zeros((1, T), jnp.int32)))
    assert not result.holds and result.deviation > 1e-4 and result.detail.endswith("wrong: W_out"), result


@pytest.mark.slow
def test_attention_mask_check_covers_the_window(monkeypatch):
    """A window that hides nothing fails, as the inputs are longer than it."""
    monkeypatch.setattr(
        masks, "sliding_window", lambda query_T, key_S, width: jnp.ones((len(query_T), len(key_S)), bool)
    )
    config = replace(MODELS["decoder"], attention=BlockAttention(70), context_length=100)
    model, params, _ = random_model(config)
    inputs = random_inputs(config, 2)
    assert inputs[0].shape == (2, 78)
    result = attention_mask(model, params, (inputs[0][0],))
    assert not result.holds and "78 tokens" in result.detail
    short = attention_mask(model, params, (inputs[0][0][:70],))
    assert short.holds and short.detail.endswith("a window of 70 untested")


@pytest.mark.slow
def test_attention_mask_check_covers_the_window_of_each_block(monkeypatch):
    config = replace(MODELS["decoder"], attention=(BlockAttention(3), BlockAttention()))
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
    batch = Batch(random_inputs(MODELS["clip"], 2), jnp.arange(2))
    result = gradients(model, params | {"t": jnp.float32(5)}, batch)
    assert result.holds, result


def test_infinite_slope_fails_the_gradient_check(monkeypatch):
    """Such a slope is NaN, which is also the largest of several."""
    slopes = {"W": Slope(0.0, 0.0), "b": Slope(np.nan, np.nan)}
    monkeypatch.setattr(property_checks, "compare_slopes", lambda *_: slopes)
    result = gradients(DECODER.build(), {}, Batch((), jnp.zeros(1, jnp.int32)))
    assert not result.holds and np.isnan(result.deviation) and result.detail.endswith("wrong: b")


@pytest.mark.slow
def test_reused_dropout_key_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(MODELS["masked"], dropout=0.3)
    model, params, inputs = random_model(config)
    result = dropout_keys(model, params, inputs)
    assert result.holds and result.deviation == 0 and result.detail == "equal pairs among 10 masks"
    draw: Callable = encoder.input_dropout

    def draw_once(module, dropout, x, n_blocks):
        x_TD, keys = draw(module, dropout, x, n_blocks)
        return x_TD, jnp.broadcast_to(keys[:1], keys.shape)

    monkeypatch.setattr(encoder, "input_dropout", draw_once)
    assert not dropout_keys(model, params, inputs).holds


@pytest.mark.slow
def test_rounding_errors_do_not_fail_a_check_but_a_fault_beside_them_does(monkeypatch) -> None:
    """A norm that subtracts a mean of 10,000 leaves about a thousandth of float32's digits."""
    config = replace(DECODER, n_blocks=1, norm="layernorm", final_norm=True)
    model, params, inputs = random_model(config)
    params["embedding"]["W_E"] += 1e4
    assert not decoding(model, params, inputs).holds
    result = without_rounding(decoding, model, params, inputs)
    assert result.holds and result.deviation < 1e-9 and "in float64; in float32 " in result.detail
    write_the_cache_late(monkeypatch)
    result = without_rounding(decoding, model, params, inputs)
    assert not result.holds and result.detail.endswith("differ from token 3 on")


def test_error_is_relative_to_small_values_too() -> None:
    """Logits of a new model may be small, and an error in them must not be less of one."""
    small = jnp.array([1e-4, -2e-4])
    assert relative_error(small * 1.001, small) == pytest.approx(1e-3, rel=1e-2)
    assert relative_error(small, small * 0) == pytest.approx(2e-4)
    assert relative_error(small * 1.001, small, least=1.0) == pytest.approx(2e-7, rel=1e-2)
    assert np.isnan(relative_error(small * jnp.nan, small))


@pytest.mark.slow
def test_padding_that_leaks_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params, _ = random_model(replace(MODELS["masked"], n_blocks=1))
    inputs = random_inputs(MODELS["masked"], 3)
    assert padding(model, params, inputs).holds
    monkeypatch.setattr(ops_attention, "softmax", lambda scores, *_: jax.nn.softmax(scores))
    assert not without_rounding(padding, model, params, inputs).holds
    monkeypatch.setattr(ops_attention, "zero_hidden", lambda x, *_: x)
    monkeypatch.setattr(masks, "zero_padding", lambda x_TD, valid_T: x_TD)
    result = padding(model, params, inputs)
    assert not result.holds and result.detail == "the content of padding changes an output"


def test_example_that_sees_its_batch_fails_the_batching_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params, _ = random_model(replace(DECODER, n_blocks=1))
    rms_norm = norms.rms_norm

    @jax.custom_batching.custom_vmap
    def mixed(x_TD: jax.Array) -> jax.Array:
        return x_TD

    mixed.def_vmap(lambda n, is_batched, x_BTD: (x_BTD + 1e-3 * x_BTD.mean(0, keepdims=True), True))
    monkeypatch.setattr(norms, "rms_norm", lambda x, *rest: rms_norm(mixed(x), *rest))
    assert not batching(model, params, random_inputs(DECODER, 3)).holds


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

"""Head statistics by hand, and head ablation by changed weights."""

from collections import OrderedDict
from dataclasses import astuple, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect.activations import capture, intervene
from jaxformer.inspect.attention import attention_entropy, attention_maps
from jaxformer.inspect.heads import (
    Ablation,
    HeadStatistics,
    ablate_heads,
    ablation_loss,
    head_statistics,
    layer_statistics,
    target_mask,
)
from jaxformer.inspect.pages.model_sections import ABOUT_HEADS
from jaxformer.inspect.softmax_saturation import saturation
from jaxformer.models.objective import objective_of
from jaxformer.nn.execution import Execution
from jaxformer.ops import RoPE
from tests.arrays import plain_decoder
from tests.inspect.test_activations import MODELS, T, V, random_model

statistics_of = jax.jit(layer_statistics)


def test_layer_statistics_by_hand():
    tokens_T = np.array([5, 7, 5, 7])
    uniform = np.tri(4) / np.arange(1, 5)[:, None]
    previous = np.eye(4, k=-1) + np.diag([1, 0, 0, 0])
    induction = np.array([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])  # after 5 came 7 (position 1)
    result = statistics_of(np.stack([uniform, previous, induction]), np.tri(4, dtype=bool), tokens_T)
    np.testing.assert_allclose(result.entropy, [np.log([1, 2, 3, 4]).mean(), 0, 0], rtol=1e-6)
    np.testing.assert_allclose(result.normalized_entropy, [1, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(result.distance, [(0 + 0.5 + 1 + 1.5) / 4, 0.75, (0 + 1 + 1 + 1) / 4], rtol=1e-6)
    np.testing.assert_allclose(result.first, [(1 / 2 + 1 / 3 + 1 / 4) / 3, 1 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(result.previous, [(1 / 2 + 1 / 3 + 1 / 4) / 3, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(result.duplicate, [(1 / 3 + 1 / 4) / 2, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(result.induction, [(1 / 3 + 1 / 4) / 2, 1, 1], rtol=1e-6)
    rows = "distance to the attended positions, over all rows;", "on the previous one, over all rows but the first;"
    assert all(part in ABOUT_HEADS for part in rows)  # the caption of the page


@pytest.mark.slow
def test_rows_of_padding_do_not_count():
    weights = jax.nn.softmax(jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 5))))
    valid = jnp.array([True, True, True, False, False])
    tokens = jnp.array([1, 2, 1, 1, 2])
    visible = jnp.ones((5, 5), bool)
    padded = statistics_of(weights, visible, tokens, valid)
    other = statistics_of(weights.at[:, 3:].set(1 / 5), visible, tokens.at[3:].set(9), valid)
    jax.tree.map(np.testing.assert_array_equal, padded, other)


@pytest.mark.slow
def test_head_statistics_are_means_over_examples():
    model, params, (tokens,) = random_model(MODELS["decoder"])
    tokens_BT = jnp.stack([tokens, (tokens * 3) % 7])
    result = head_statistics(model, params, tokens_BT)
    assert list(result) == ["blocks.0.attention", "blocks.1.attention"]
    visible, maps_of = jnp.tril(jnp.ones((T, T), bool)), jax.jit(attention_maps, static_argnums=0)
    one = [statistics_of(maps_of(model, params, tokens_T)[1], visible, tokens_T) for tokens_T in tokens_BT]
    for name in ("entropy", "normalized_entropy", "distance", "previous", "duplicate"):
        expected = np.nanmean([getattr(x, name) for x in one], axis=0)
        np.testing.assert_allclose(getattr(result["blocks.1.attention"], name), expected, rtol=1e-4, atol=1e-6)
    with jax.debug_nans(True):  # which takes no statistic without rows for a fault
        assert np.isnan(head_statistics(model, params, jnp.arange(5)[None])["blocks.0.attention"].induction).all()


def test_results_for_many_heads_fit_on_a_screen():
    """The heads with the largest effect come first."""
    rises = OrderedDict((f"blocks.{i}.attention", np.arange(9.0) + 9 * i) for i in range(6))
    shown = repr(Ablation(2.0, rises, rises, rises, rises)).splitlines()
    assert shown[0].startswith("rise of the loss of 2.0000  ") and shown[-1] == "… 34 more" and len(shown) == 22
    assert shown[1].split("  ")[0] == "blocks.5.attention, head 8"
    values_H = np.linspace(0, 1, 64)
    shown = repr(HeadStatistics(*[values_H] * 7)).strip().splitlines()
    assert shown[0].split()[:2] == ["head", "entropy"] and shown[2].split()[:2] == ["1", "0.016"]
    assert shown[-1] == "… 44 more" and max(map(len, shown)) <= 100
    shown = []
    jax.make_jaxpr(lambda x: shown.append(repr(HeadStatistics(*[x] * 7))))(values_H)  # within a transformation
    assert "HeadStatistics object" in shown[0]


@pytest.mark.slow
def test_padding_of_source_and_target_changes_no_statistic():
    """Of positions of two sequences there are none."""
    model, params, (tokens, _, target) = random_model(replace(MODELS["encoder-decoder"], n_decoder_blocks=1))
    n, valid = len(target) - 3, jnp.arange(T) < 4
    tokens, target = tokens % 3, target % 3  # so that tokens repeat
    result = []
    for filling in (1, 2):
        source, padded = jnp.where(valid, tokens, filling), target.at[n:].set(filling)
        inputs, mask_BT = (x[None] for x in (source, valid, padded)), (jnp.arange(len(target)) < n)[None]
        result.append(head_statistics(model, params, *inputs, target_mask_BT=mask_BT))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *result)
    for layer, of in result[0].items():
        assert np.isfinite(of.entropy).all()
        for values in (of.distance, of.first, of.previous, of.duplicate):
            assert np.isnan(values).all() == ("cross" in layer)


@pytest.mark.slow
def test_padding_of_a_row_of_text_changes_no_measurement():
    """Statistics, ablation, saturation and entropy are those of its tokens alone. The first tokens are no targets, but
    count."""
    model, params, (tokens_T,) = random_model(
        replace(MODELS["decoder"], n_blocks=1, positions="none", rope=RoPE(), head_dim=4)
    )
    n, result = T - 3, []
    for stop in (n, T):
        is_real = np.arange(stop) < n
        tokens_BT = jnp.where(is_real, tokens_T[:stop], 0)[None]
        inputs = tokens_BT, None, jnp.asarray(is_real, jnp.int32)[None]
        batch = Batch(inputs, tokens_BT, jnp.asarray(is_real & (np.arange(stop) > 1), jnp.float32)[None])
        mask_BT = target_mask(batch)
        result.append((
            head_statistics(model, params, *inputs, target_mask_BT=mask_BT), ablate_heads(model, params, batch).mean,
            attention_entropy(model, params, *inputs, target_mask_BT=mask_BT),
            [astuple(row) for row in saturation(model, params, batch, [0.3])],
        ))  # fmt: skip
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *result)


def batch_of_decoder():
    model, params, _ = random_model(MODELS["decoder"])
    rng = np.random.default_rng(3)
    tokens_BT = jnp.asarray(rng.integers(0, V, (2, T + 1)), jnp.int32)
    return model, params, Batch((tokens_BT[:, :-1],), tokens_BT[:, 1:])


@pytest.mark.slow
def test_ablation_of_clip_uses_the_contrastive_loss():
    model, params, inputs = random_model(MODELS["clip"])
    rng = np.random.default_rng(0)
    image_B = jnp.asarray(rng.integers(0, 256, (3, *inputs[0].shape)), jnp.uint8)
    tokens_BT = jnp.asarray(rng.integers(0, V, (3, T)), jnp.int32)
    batch = Batch((image_B, tokens_BT, jnp.ones((3, T), bool)), jnp.arange(3))
    statistics = head_statistics(model, params, *batch.inputs)["vision_blocks.0.attention"]
    assert np.isfinite(statistics.distance).all() and np.isnan(statistics.duplicate).all()  # patches are no tokens
    result = ablate_heads(model, params, batch)
    loss = jax.jit(lambda params: objective_of(model).loss(model, params, batch)[0])
    np.testing.assert_allclose(result.loss, loss(params), rtol=1e-5)
    W_O = params["text_blocks_0"]["attention"]["W_O"]
    params["text_blocks_0"]["attention"]["W_O"] = W_O.at[1].set(0)
    rise = loss(params) - result.loss
    np.testing.assert_allclose(result.zero["text_blocks.0.attention"][1], rise, rtol=1e-3, atol=1e-5)


def test_zero_ablation_equals_zero_output_weights():
    """The block of the head is computed anew: its MLP reads what the head wrote."""
    model, params, _ = random_model(plain_decoder(V, 3, 4, n_blocks=1, n_heads=2, d_ff=(4,), norm="rmsnorm"))
    batch = Batch((jnp.array([[1, 5, 2]]),), jnp.array([[5, 2, 6]]))
    result = ablate_heads(model, params, batch)

    @jax.jit
    def loss(params):
        return objective_of(model).example_loss(model, params, jax.tree.map(lambda x: x[0], batch))

    np.testing.assert_allclose(result.loss, loss(params), rtol=1e-6)
    attention = params["blocks_0"]["attention"]
    for head in range(2):
        silent = attention | {"W_O": np.where(np.arange(2)[:, None, None] == head, 0, attention["W_O"])}
        rise = loss(params | {"blocks_0": params["blocks_0"] | {"attention": silent}}) - loss(params)
        np.testing.assert_allclose(result.zero["blocks.0.attention"][head], rise, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_estimates_approach_ablation_for_small_heads():
    model, params, batch = batch_of_decoder()
    for block in ("blocks_0", "blocks_1"):
        params[block]["attention"]["W_O"] *= 1e-2
    result = ablate_heads(model, params, batch)
    for kind in ("zero", "mean"):
        for layer, rise in getattr(result, kind).items():
            np.testing.assert_allclose(getattr(result, f"{kind}_estimate")[layer], rise, rtol=0.2, atol=2e-5)
    assert max(abs(x).max() for x in result.zero.values()) > 1e-4


@pytest.mark.slow
def test_ablation_loss_of_no_one_and_all_heads():
    """Without heads it is the loss, with one that of `ablate_heads`, with a block's all that of mean outputs."""
    model, params, batch = batch_of_decoder()
    result = ablate_heads(model, params, batch)
    np.testing.assert_allclose(ablation_loss(model, params, batch, []), result.loss, rtol=1e-6)
    one = ablation_loss(model, params, batch, [("blocks.0.attention", 1)])
    np.testing.assert_allclose(one - result.loss, result.mean["blocks.0.attention"][1], rtol=1e-4, atol=1e-6)
    name = "blocks.1.attention.z"
    means = np.mean([capture(model, params, x)[name].mean(1) for x in batch.inputs[0]], axis=0)

    @jax.jit
    def loss(example):
        with intervene(name, lambda _, x: jnp.broadcast_to(means[:, None], x.shape)):
            return objective_of(model).example_loss(model, params, example)

    losses = [loss(jax.tree.map(lambda x, i=i: x[i], batch)) for i in range(2)]
    all_of_it = [("blocks.1.attention", head) for head in range(3)]
    np.testing.assert_allclose(ablation_loss(model, params, batch, all_of_it), np.mean(losses), rtol=1e-5)


@pytest.mark.slow
def test_losses_are_normalised_by_the_weights():
    """Losses are nats per weighted target, whatever the sum of the weights."""
    model, params, batch = batch_of_decoder()
    plain = ablate_heads(model, params, batch)
    for each in (1.0, 1 / batch.targets.size):
        weighted = ablate_heads(model, params, batch._replace(weights=np.full(batch.targets.shape, each, np.float32)))
        np.testing.assert_allclose(weighted.loss, plain.loss, rtol=1e-5)
        for layer, rise in plain.zero.items():
            np.testing.assert_allclose(weighted.zero[layer], rise, rtol=1e-3, atol=1e-5)
    first = batch._replace(weights=jnp.zeros(batch.targets.shape).at[:, 0].set(1))
    logits_BV = jax.jit(jax.vmap(lambda tokens_T: model.apply({"params": params}, tokens_T)[0]))(batch.inputs[0])
    expected = -np.mean(
        [jax.nn.log_softmax(row)[target] for row, target in zip(logits_BV, batch.targets[:, 0], strict=True)]
    )
    np.testing.assert_allclose(ablate_heads(model, params, first).loss, expected, rtol=1e-5)


@pytest.mark.slow
def test_layers_are_in_the_order_of_the_computation():
    config = replace(MODELS["decoder"], n_blocks=11)
    _, params, (tokens,) = random_model(config)
    model = config.build(Execution(scan=True))
    expected = [f"blocks.{i}.attention" for i in range(11)]
    assert list(head_statistics(model, params, tokens[None])) == expected

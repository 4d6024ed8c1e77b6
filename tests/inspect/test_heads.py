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
from tests.helpers import slow
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
def test_padding_of_source_and_target_changes_neither_statistics_nor_ablation():
    model, params, (tokens, _, target) = random_model(MODELS["encoder-decoder"])
    n, valid = len(target) - 3, jnp.arange(T) < 4
    result = []
    for filling in (1, 2):
        source, padded = jnp.where(valid, tokens, filling), target.at[n:].set(filling)
        weights = jnp.where(jnp.arange(len(target)) < n, 1.0, 0.0)
        batch = Batch(tuple(x[None] for x in (source, valid, padded)), jnp.roll(padded, -1)[None] % n, weights[None])
        batch = batch._replace(targets=batch.targets.at[:, n - 1 :].set(0))
        statistics = head_statistics(model, params, *batch.inputs, target_mask_BT=target_mask(batch))
        entropy = attention_entropy(model, params, *batch.inputs, target_mask_BT=target_mask(batch))
        for heads, of_log in zip(statistics.values(), entropy, strict=True):
            np.testing.assert_allclose(heads.entropy, of_log, rtol=1e-5)
        result.append((statistics, ablate_heads(model, params, batch)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), result[0][0], result[1][0])
    for name in result[0][1].mean:
        np.testing.assert_allclose(result[0][1].mean[name], result[1][1].mean[name], rtol=1e-4, atol=1e-5)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder-decoder", "clip"])
def test_every_model_with_attention_has_head_statistics(name):
    model, params, inputs = random_model(MODELS[name])
    inputs = [x % 3 if x.dtype == jnp.int32 else x for x in inputs]  # so that tokens repeat
    result = head_statistics(model, params, *(x[None] for x in inputs))
    assert result
    for layer, of in result.items():
        has_tokens = not layer.startswith("vision") and "cross" not in layer
        assert np.isfinite(of.entropy).all()
        for of_places in (of.distance, of.first, of.previous):  # positions of two sequences are not comparable
            assert np.isnan(of_places).all() if "cross" in layer else np.isfinite(of_places).all()
        assert not np.isnan(of.duplicate).all() if has_tokens else np.isnan(of.duplicate).all()


def batch_of(name: str):
    config = replace(MODELS["decoder"], attention_bias=True) if name == "biased" else MODELS[name]
    model, params, _ = random_model(config)
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
    result = ablate_heads(model, params, batch)
    loss = jax.jit(lambda params: objective_of(model).loss(model, params, batch)[0])
    np.testing.assert_allclose(result.loss, loss(params), rtol=1e-5)
    W_O = params["text_blocks_0"]["attention"]["W_O"]
    params["text_blocks_0"]["attention"]["W_O"] = W_O.at[1].set(0)
    rise = loss(params) - result.loss
    np.testing.assert_allclose(result.zero["text_blocks.0.attention"][1], rise, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("n_blocks", [1, slow(2)])
def test_zero_ablation_equals_zero_output_weights(n_blocks):
    """The block of the head is computed anew: its MLP reads what the head wrote."""
    model, params, _ = random_model(plain_decoder(V, 3, 4, n_blocks=n_blocks, n_heads=2, d_ff=(4,), norm="rmsnorm"))
    batch = Batch((jnp.array([[1, 5, 2]]),), jnp.array([[5, 2, 6]]))
    result = ablate_heads(model, params, batch)

    @jax.jit
    def loss(params):
        return objective_of(model).example_loss(model, params, jax.tree.map(lambda x: x[0], batch))

    np.testing.assert_allclose(result.loss, loss(params), rtol=1e-6)
    for block in range(n_blocks):
        attention = params[f"blocks_{block}"]["attention"]
        for head in range(2):
            silent = attention | {"W_O": np.where(np.arange(2)[:, None, None] == head, 0, attention["W_O"])}
            without = params | {f"blocks_{block}": params[f"blocks_{block}"] | {"attention": silent}}
            np.testing.assert_allclose(
                result.zero[f"blocks.{block}.attention"][head], loss(without) - loss(params), rtol=1e-3, atol=2e-5
            )


@pytest.mark.slow
def test_ablation_without_jit_is_that_with_it():
    """Without jit, blocks that are skipped are not traced, and have no activations to replace."""
    model, params, _ = random_model(plain_decoder(V, 3, 4, n_blocks=2, n_heads=2, d_ff=(4,), norm="rmsnorm"))
    batch = Batch((jnp.array([[1, 5, 2]]),), jnp.array([[5, 2, 6]]))
    with jax.disable_jit():
        result = ablate_heads(model, params, batch)
    for layer, rises_H in ablate_heads(model, params, batch).mean.items():
        np.testing.assert_allclose(result.mean[layer], rises_H, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_estimates_approach_ablation_for_small_heads():
    model, params, batch = batch_of("decoder")
    for block in ("blocks_0", "blocks_1"):
        params[block]["attention"]["W_O"] *= 1e-2
    result = ablate_heads(model, params, batch)
    for kind in ("zero", "mean"):
        for layer, rise in getattr(result, kind).items():
            np.testing.assert_allclose(getattr(result, f"{kind}_estimate")[layer], rise, rtol=0.2, atol=2e-5)
    assert max(abs(x).max() for x in result.zero.values()) > 1e-4


@pytest.mark.slow
def test_mean_ablation_of_a_constant_head_changes_nothing():
    """Values that are a bias alone equal their mean at every position; zero ablation changes them."""
    model, params, batch = batch_of("biased")
    attention = params["blocks_1"]["attention"]
    params["blocks_1"]["attention"] = attention | {"W_V": attention["W_V"].at[:, 2].set(0)}
    result = ablate_heads(model, params, batch)
    assert abs(result.mean["blocks.1.attention"][2]) < 1e-5 < 1e-2 < abs(result.zero["blocks.1.attention"][2])
    assert abs(result.mean["blocks.1.attention"][0]) > 1e-4


@pytest.mark.slow
def test_ablation_loss_of_no_one_and_all_heads():
    """Without heads it is the loss, with one that of `ablate_heads`, with a block's all that of mean outputs."""
    model, params, batch = batch_of("decoder")
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
    model, params, batch = batch_of("decoder")
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

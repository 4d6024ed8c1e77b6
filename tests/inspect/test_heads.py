"""What heads look at, by hand, and what silencing them does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect.heads import ablate_heads, gaze, gazes, loss_without
from jaxformer.inspect.trace import editing, trace
from jaxformer.models.objective import objective_of
from tests.inspect.test_trace import MODELS, T, V, made


def test_a_gaze_by_hand():
    tokens_T = jnp.array([5, 7, 5, 7])
    uniform = jnp.tril(jnp.ones((4, 4))) / jnp.arange(1, 5)[:, None]
    previous = jnp.eye(4, k=-1).at[0, 0].set(1)
    induction = jnp.array([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])  # 5 after 5 came 7 (place 1)
    found = gaze(jnp.stack([uniform, previous, induction]), tokens_T)
    np.testing.assert_allclose(found.entropy, [np.log([1, 2, 3, 4]).mean(), 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.share, [1, np.nan, np.nan], rtol=1e-6)  # one visible place has no entropy to share
    np.testing.assert_allclose(found.distance, [(0 + 0.5 + 1 + 1.5) / 4, 0.75, (0 + 1 + 1 + 1) / 4], rtol=1e-6)
    np.testing.assert_allclose(found.first, [(1 / 2 + 1 / 3 + 1 / 4) / 3, 1 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(found.previous, [(1 / 2 + 1 / 3 + 1 / 4) / 3, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(found.duplicate, [(1 / 3 + 1 / 4) / 2, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.induction, [(1 / 3 + 1 / 4) / 2, 1, 1], rtol=1e-6)


def test_rows_of_padding_do_not_count():
    weights = jax.nn.softmax(jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 5))))
    valid = jnp.array([True, True, True, False, False])
    tokens = jnp.array([1, 2, 1, 1, 2])
    padded = gaze(weights, tokens, valid)
    other = gaze(weights.at[:, 3:].set(1 / 5), tokens.at[3:].set(9), valid)
    jax.tree.map(np.testing.assert_array_equal, padded, other)


def test_gazes_are_the_mean_over_examples():
    model, params, (tokens,) = made(MODELS["decoder"])
    tokens_BT = jnp.stack([tokens, (tokens * 3) % 7])
    found = gazes(model, params, tokens_BT)
    assert list(found) == ["blocks.0.attention", "blocks.1.attention"]
    from jaxformer.inspect import attention_maps

    one = [gaze(attention_maps(model, params, tokens_T)[1], tokens_T) for tokens_T in tokens_BT]
    for name in ("entropy", "distance", "previous", "duplicate"):
        wanted = np.nanmean([getattr(x, name) for x in one], axis=0)
        np.testing.assert_allclose(getattr(found["blocks.1.attention"], name), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["encoder-decoder", "masked", "clip", "vit"])
def test_every_model_with_heads_has_gazes(name):
    model, params, inputs = made(MODELS[name])
    few = [x % 3 if x.dtype == jnp.int32 else x for x in inputs]  # so that tokens come again
    found = gazes(model, params, *(x[None] for x in few))
    assert found
    for layer, of in found.items():
        has_tokens = name != "vit" and not layer.startswith("vision") and "cross" not in layer
        assert np.isfinite(of.entropy).all() and np.isfinite(of.distance).all()
        assert not np.isnan(of.duplicate).all() if has_tokens else np.isnan(of.duplicate).all()


def batch_of(name: str):
    model, params, _ = made(MODELS[name])
    rng = np.random.default_rng(3)
    tokens_BT = jnp.asarray(rng.integers(0, V, (2, T + 1)), jnp.int32)
    return model, params, Batch((tokens_BT[:, :-1],), tokens_BT[:, 1:])


def test_a_silent_head_is_a_head_without_its_output_weights():
    model, params, batch = batch_of("decoder")
    found = ablate_heads(model, params, batch)

    def loss(params) -> float:
        return float(jnp.mean(jax.vmap(lambda x: objective_of(model).example_loss(model, params, x))(batch)))

    np.testing.assert_allclose(found.loss, loss(params), rtol=1e-6)
    for block in range(2):
        attention = params[f"blocks_{block}"]["attention"]
        for head in range(3):
            silent = attention | {"W_O": attention["W_O"].at[head].set(0)}
            without = params | {f"blocks_{block}": params[f"blocks_{block}"] | {"attention": silent}}
            np.testing.assert_allclose(
                found.zero[f"blocks.{block}.attention"][head], loss(without) - loss(params), rtol=1e-3, atol=2e-5
            )


def test_estimates_are_exact_for_heads_that_matter_little():
    """The first order is all there is where what a head gives is small."""
    model, params, batch = batch_of("decoder")
    for block in ("blocks_0", "blocks_1"):
        params[block]["attention"]["W_O"] *= 1e-2
    found = ablate_heads(model, params, batch)
    for kind in ("zero", "mean"):
        for layer, rise in getattr(found, kind).items():
            np.testing.assert_allclose(getattr(found, f"{kind}_estimate")[layer], rise, rtol=0.2, atol=2e-5)
    assert max(abs(x).max() for x in found.zero.values()) > 1e-4


def test_a_head_that_gives_the_same_everywhere_is_not_missed_by_its_mean():
    model, params, batch = batch_of("decoder")
    attention = params["blocks_1"]["attention"]
    # Values that do not depend on the text: of a residual stream that is normalised there is no such thing but 0.
    params["blocks_1"]["attention"] = attention | {"W_V": attention["W_V"].at[:, 2].set(0)}
    found = ablate_heads(model, params, batch)
    assert abs(found.mean["blocks.1.attention"][2]) < 1e-6 and abs(found.zero["blocks.1.attention"][2]) < 1e-6
    assert abs(found.mean["blocks.1.attention"][0]) > 1e-4


def test_heads_are_missed_together():
    """None is the loss, one alone is what `ablate_heads` has, and a block's all are its output's mean, by hand."""
    model, params, batch = batch_of("decoder")
    found = ablate_heads(model, params, batch)
    np.testing.assert_allclose(loss_without(model, params, batch, []), found.loss, rtol=1e-6)
    one = loss_without(model, params, batch, [("blocks.0.attention", 1)])
    np.testing.assert_allclose(one - found.loss, found.mean["blocks.0.attention"][1], rtol=1e-4, atol=1e-6)
    at = "blocks.1.attention.heads"
    means = np.mean([trace(model, params, x)[at].mean(1) for x in batch.inputs[0]], axis=0)
    losses = []
    for i in range(2):
        example = jax.tree.map(lambda x, i=i: x[i], batch)
        with editing(lambda name, x: jnp.broadcast_to(means[:, None], x.shape) if name == at else x):
            losses.append(objective_of(model).example_loss(model, params, example))
    all_of_it = [("blocks.1.attention", head) for head in range(3)]
    np.testing.assert_allclose(loss_without(model, params, batch, all_of_it), np.mean(losses), rtol=1e-5)


def test_a_batch_with_weights_is_silenced_alike():
    model, params, batch = batch_of("decoder")
    weights = jnp.full(batch.targets.shape, 1 / T)
    weighted, plain = (ablate_heads(model, params, x) for x in (replace_weights(batch, weights), batch))
    np.testing.assert_allclose(weighted.loss, plain.loss, rtol=1e-5)


def replace_weights(batch: Batch, weights: jax.Array) -> Batch:
    return batch._replace(weights=weights)

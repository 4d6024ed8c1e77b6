"""What is seen on the way is what the model computes, and what is changed there is what it goes on from."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import ModelConfig
from jaxformer.data.dataset import Batch
from jaxformer.inspect import attention_entropy, attention_maps, trace, trace_gradients, trace_names
from jaxformer.inspect.trace import editing
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig, TextTowerConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.encoder import ClassifierConfig, EncoderConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.mlp import MLPConfig
from jaxformer.models.objective import objective_of
from jaxformer.models.recurrent import RecurrentConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.models.vivit import ViViTConfig
from tests.helpers import exhaustive, slow

V, T = 30, 7
SMALL: dict[str, Any] = {"d_model": 12, "n_heads": 3, "d_ff": (16,)}
BLOCKS = SMALL | {"n_blocks": 2}
PIXELS: dict[str, Any] = {"image_size": (4, 6), "channels": 1, "n_classes": 3, "patch_size": (2, 3)}
DECODER = DecoderConfig(V, T, **BLOCKS, norm="rmsnorm", output_projection=True)
MODELS: dict[str, ModelConfig] = {
    "decoder": DECODER,
    "unscaled": DecoderConfig(V, T, d_model=12, d_ff=(16,), residual=False, scaled=False, unembedding="mlp"),
    "grouped": DecoderConfig(
        V, T, 12, 2, 4, n_kv_heads=2, head_dim=4, output_projection=True, qk_norm=True, positions="rope", window=3,
        d_ff=(16,), activation="swiglu", norm="layernorm", norm_placement="post", unembedding="tied",
    ),
    "prefix": DecoderConfig(V, T, **BLOCKS, prefix=True),
    "experts": DecoderConfig(V, T, **BLOCKS, n_experts=4, shared_expert=True),
    "rowwise": MLPConfig(V, T, 12, (16, 17)),
    "concatenated": MLPConfig(V, T, 12, (16, 17), concatenate=True),
    "masked": EncoderConfig(V, T, **BLOCKS),
    "classifier": ClassifierConfig(V, T, **BLOCKS, n_classes=3),
    "encoder-decoder": EncoderDecoderConfig(V, T, **SMALL, n_encoder_blocks=1, n_decoder_blocks=2),
    "fixed": RecurrentConfig(V, T, d_embedding=6, d_model=5, attention="none", tied=True),
    "attending": RecurrentConfig(V, T, cell="lstm", d_embedding=6, d_model=5, n_layers=2),
    "vit": ViTConfig(**BLOCKS, **PIXELS),
    "vivit": ViViTConfig(**BLOCKS, **PIXELS, n_frames=4),
    "factorised": ViViTConfig(**BLOCKS, **PIXELS, n_frames=4, attention="factorised", n_temporal_blocks=1),
    "clip": CLIPConfig(
        ImageTowerConfig(image_size=4, patch_size=2, d_model=8, n_heads=2, n_blocks=1, d_ff=(12,)),
        TextTowerConfig(V, T, d_model=8, n_heads=2, n_blocks=1, d_ff=(12,)),
    ),
}  # fmt: skip

QUICK, MORE = ("decoder", "rowwise", "masked"), ("unscaled", "fixed", "encoder-decoder", "vit")


def random_inputs(config: ModelConfig) -> tuple[jax.Array, ...]:
    """An example of the largest size; flags, where something stands, are true but for the last."""
    rng = np.random.default_rng(0)

    def fill(x: np.ndarray) -> np.ndarray:
        if x.dtype == bool:
            return np.arange(len(x)) < len(x) - 1
        return rng.integers(0, 256 if x.dtype == np.uint8 else V if x.shape else 4, x.shape).astype(x.dtype)

    return tuple(jnp.asarray(fill(x)) for x in config.example())


def made(config: ModelConfig) -> tuple[nn.Module, Any, tuple[jax.Array, ...]]:
    """A model with parameters that are all random, and an example."""
    model, inputs = config.build(), random_inputs(config)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"]
    rng = np.random.default_rng(1)
    return model, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), shapes), inputs


def outputs(found: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(value for name, value in found.items() if name == "logits" or name.startswith("output."))


@pytest.mark.parametrize(
    "name", [slow(name) if name in MORE else name if name in QUICK else exhaustive(name) for name in MODELS]
)
def test_what_is_seen_is_what_the_model_computes_bit_for_bit(name):
    model, params, inputs = made(MODELS[name])
    apply = lambda params, *inputs: model.apply({"params": params}, *inputs)  # noqa: E731
    seen = lambda params, *inputs: outputs(trace(model, params, *inputs))  # noqa: E731
    for of_model, traced in ((apply, seen), (jax.jit(apply), jax.jit(seen))):
        found, expected = traced(params, *inputs), of_model(params, *inputs)
        jax.tree.map(np.testing.assert_array_equal, found, expected if isinstance(expected, tuple) else (expected,))

    found = jax.jit(lambda params, *inputs: trace(model, params, *inputs))(params, *inputs)
    for key, value in found.items():
        assert jnp.isfinite(value.astype(jnp.float32)).all(), key
        if key.endswith(".weights"):
            sums = value.sum(-1)
            np.testing.assert_allclose(sums, np.ones(sums.shape), rtol=1e-5, err_msg=key)


def test_a_block_is_the_sum_of_what_is_seen_in_it():
    """By hand, from what is seen before: the definitions of pre-norm and of attention."""
    model, params, inputs = made(DECODER)
    found = trace(model, params, *inputs)
    x = found["embedding"]
    for i, block in enumerate(("blocks.0.", "blocks.1.")):
        own = {key.removeprefix(block): value for key, value in found.items() if key.startswith(block)}
        attention = params[f"blocks_{i}"]["attention"]
        np.testing.assert_array_equal(own["before"], x)
        np.testing.assert_allclose(
            own["attention.queries"], np.einsum("td,dhk->htk", own["attention_norm"], attention["W_Q"]), rtol=1e-4
        )
        scores = np.einsum("htk,hsk->hts", own["attention.queries"], own["attention.keys"]) / 2  # √4
        np.testing.assert_allclose(own["attention.scores"], scores, rtol=1e-4, atol=1e-5)
        seen = np.tril(np.ones((T, T), bool))
        weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(own["attention.weights"], weights, rtol=1e-4, atol=1e-6)
        mixed = np.einsum("hts,hsk->htk", weights, own["attention.values"])
        np.testing.assert_allclose(own["attention.heads"], mixed, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            own["attention"], np.einsum("htk,hkd->td", mixed, attention["W_O"]), rtol=1e-3, atol=1e-4
        )
        assert own["mlp.hidden.1"].shape == (T, 16) and (own["mlp.hidden.1"] >= 0).all()
        x = own["after"]
        np.testing.assert_allclose(x, own["before"] + own["attention"] + own["mlp"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["logits"], x @ params["W_out"], rtol=1e-4, atol=1e-4)


def test_a_filter_takes_patterns():
    model, params, inputs = made(DECODER)
    assert list(trace(model, params, *inputs, names="blocks.1.*.weights")) == ["blocks.1.attention.weights"]
    assert list(trace(model, params, *inputs, names=["logits", "embedding"])) == ["embedding", "logits"]
    assert trace(model, params, *inputs, names="block") == {}


def test_what_a_model_has_of_its_own_is_there():
    def names(kind: str) -> set[str]:
        model, params, inputs = made(MODELS[kind])
        return set(trace_names(model, params, *inputs))

    assert {"reader.weights", "encoder_0", "backward_encoder_1", "decoder_0"} <= names("attending")
    assert {"encoder_blocks.0.attention.weights", "decoder_blocks.1.cross_attention.weights"} <= names(
        "encoder-decoder"
    )
    assert {"blocks.0.mlp.experts", "blocks.0.mlp.shared.hidden.1"} <= names("experts")
    assert {"vision_blocks.0.after", "text_blocks.0.after", "output.2"} <= names("clip")
    assert {"hidden.1", "hidden.2"} == {name.rpartition("mlp.")[2] for name in names("rowwise") if ".hidden" in name}


@pytest.mark.parametrize("name", ["decoder", *map(slow, ("grouped", "encoder-decoder", "vit", "experts", "attending"))])
def test_gradients_are_those_of_a_small_change(name):
    """A small step in any direction changes the loss by what the gradient says."""
    model, params, inputs = made(MODELS[name])
    example = Batch(inputs, jnp.int32(1) if name == "vit" else jnp.arange(T) % V)
    loss = lambda: objective_of(model).example_loss(model, params, example)  # noqa: E731
    values, grads = jax.jit(lambda: trace_gradients(loss))()
    assert set(values) >= set(grads) and len(grads) > 5

    @jax.jit
    def moved(steps: dict[str, jax.Array]) -> jax.Array:
        with editing(lambda at, value: value + steps[at] if at in steps else value):
            return loss()

    still = {at: jnp.zeros_like(g) for at, g in grads.items()}
    rng = np.random.default_rng(2)
    for at, g in grads.items():
        way = np.asarray(g) + rng.normal(size=g.shape) * np.sqrt(np.mean(np.square(g)))  # not at right angles to it
        size = 2e-3 / np.linalg.norm(way)
        ahead, back = (moved(still | {at: jnp.asarray(sign * size * way, g.dtype)}) for sign in (1, -1))
        np.testing.assert_allclose((ahead - back) / (2 * size), np.vdot(way, g), rtol=0.05, atol=1e-3, err_msg=at)


def test_the_model_goes_on_from_what_is_put_in_place():
    """A stream that is taken from another text, before the last block, makes this text's logits those of that one."""
    model, params, (tokens,) = made(DECODER)
    other = (tokens + 3) % V
    theirs = trace(model, params, other)

    def put(name: str, value: jax.Array) -> jax.Array:
        return theirs[name] if name == "blocks.1.before" else value

    with editing(put):
        patched = model.apply({"params": params}, tokens)
    np.testing.assert_array_equal(patched, theirs["logits"])
    assert not np.allclose(theirs["logits"], model.apply({"params": params}, tokens))


@pytest.mark.slow
def test_weights_that_are_put_in_place_are_those_that_mix():
    """Every query looks at the first place alone, in one head: its output is the first value everywhere."""
    model, params, (tokens,) = made(MODELS["grouped"])
    found = {}

    def put(name: str, value: jax.Array) -> jax.Array:
        if name == "blocks.0.attention.weights":
            return value.at[1].set(jnp.zeros((T, T)).at[:, 0].set(1))
        found[name] = value
        return value

    with editing(put):
        model.apply({"params": params}, tokens)
    values = found["blocks.0.attention.values"]
    np.testing.assert_allclose(found["blocks.0.attention.heads"][1], jnp.broadcast_to(values[0, 0], (T, 4)), rtol=1e-6)
    before = trace(model, params, tokens)["blocks.0.attention.heads"]
    np.testing.assert_allclose(found["blocks.0.attention.heads"][0], before[0], rtol=1e-5, atol=1e-6)


def test_maps_and_entropy_are_those_of_scores_by_hand():
    """Of the queries and keys that are traced, in float64."""
    model, params, inputs = made(DECODER)
    found = trace(model, params, *inputs, names=("*.queries", "*.keys"))
    maps = attention_maps(model, params, *inputs)
    entropy = attention_entropy(model, params, *(x[None] for x in inputs))
    for i, (weights, of_heads) in enumerate(zip(maps, entropy, strict=True)):
        q_HTK, k_HTK = (np.asarray(found[f"blocks.{i}.attention.{name}"], np.float64) for name in ("queries", "keys"))
        scores = q_HTK @ k_HTK.swapaxes(-1, -2) / np.sqrt(q_HTK.shape[-1])
        w = np.where(np.tri(T, dtype=bool), np.exp(scores), 0)
        w /= w.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(weights, w, rtol=1e-4, atol=1e-6)
        by_hand = -np.sum(w * np.log(np.where(w > 0, w, 1)), axis=-1).mean(axis=-1)
        np.testing.assert_allclose(of_heads, by_hand, rtol=1e-4)

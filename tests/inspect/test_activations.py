"""Captures are what the model computes, and interventions what it computes the rest from."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import ModelConfig
from jaxformer.inspect import (
    attention_entropy,
    attention_maps,
    capture,
    capture_gradients,
    capture_shapes,
    gradient_of,
    gradient_report,
    intervene,
    run_from,
)
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig, TextTowerConfig
from jaxformer.models.decoder import BlockAttention, ExpertsConfig
from jaxformer.models.encoder import ClassifierConfig, EncoderConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.recurrent import RecurrentConfig
from jaxformer.models.recurrent_lm import RecurrentLMConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.models.vivit import ViViTConfig
from jaxformer.nn.capture import capture_point
from jaxformer.ops import RoPE
from tests.arrays import apply, as_array, plain_decoder, plain_rung

V, T = 30, 7
SMALL: dict[str, Any] = {"d_model": 12, "n_heads": 3, "d_ff": (16,)}
BLOCKS = SMALL | {"n_blocks": 2}
PIXELS: dict[str, Any] = {"image_size": (4, 6), "channels": 1, "n_classes": 3, "patch_size": (2, 3)}
DECODER = plain_decoder(V, T, **BLOCKS, norm="rmsnorm")
MODELS: dict[str, ModelConfig] = {
    "decoder": DECODER,
    "unscaled": plain_rung(V, T, d_model=12, d_ff=(16,), residual=False, scaled=False, mlp_logits=True),
    "grouped": plain_decoder(
        V, T, 12, n_blocks=2, n_heads=4, n_kv_heads=2, head_dim=4, qk_norm=True, positions="none", rope=RoPE(),
        attention=BlockAttention(3),
        d_ff=(16,), activation="swiglu", norm="layernorm", norm_placement="post", unembedding="tied",
    ),
    "prefix": plain_decoder(V, T, **BLOCKS, prefix=True),
    "experts": plain_rung(V, T, **BLOCKS, experts=ExpertsConfig(4, shared_expert=True)),
    "rowwise": MLPConfig(V, T, 12, (16, 17)),
    "concatenated": MLPConfig(V, T, 12, (16, 17), mixing="concatenate"),
    "mixed": MLPConfig(V, T, 12, (16, 17), mixing="qkv"),
    "recurrent": RecurrentLMConfig(V, T, "tanh", d_model=8, n_layers=2),
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


def random_inputs(config: ModelConfig) -> tuple[jax.Array, ...]:
    """Return an example of the largest size, whose last position is padding where it has a mask."""
    rng = np.random.default_rng(0)

    def fill(x: np.ndarray) -> np.ndarray:
        if x.dtype == bool:
            return np.arange(len(x)) < len(x) - 1
        return rng.integers(0, 256 if x.dtype == np.uint8 else V if x.shape else 4, x.shape).astype(x.dtype)

    return tuple(jnp.asarray(fill(x)) for x in config.example())


def random_model(config: ModelConfig) -> tuple[nn.Module, Any, tuple[jax.Array, ...]]:
    """Return a model, parameters that are all random, and an example."""
    model, inputs = config.build(), random_inputs(config)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"]
    rng = np.random.default_rng(1)
    return model, jax.tree.map(lambda x: as_array(rng.normal(0, 0.5, x.shape), x.dtype), shapes), inputs


def outputs(captured: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(value for name, value in captured.items() if name == "logits" or name.startswith("output."))


def test_captured_outputs_are_bit_identical_to_the_models():
    model, params, inputs = random_model(MODELS["rowwise"])

    # Not in one program, where XLA may fuse the two differently and so round them differently.
    expected, result = model.apply({"params": params}, *inputs), capture(model, params, *inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    jax.tree.map(np.testing.assert_array_equal, outputs(result), expected)
    for key, value in result.items():
        value = np.asarray(value)
        assert np.isfinite(value).all(), key
        if key.endswith(".pattern"):
            np.testing.assert_allclose(value.sum(-1), np.ones(value.shape[:-1]), rtol=1e-5, err_msg=key)


def test_captures_of_a_block_satisfy_its_equations():
    """The definitions of pre-norm and of attention, by hand."""
    model, params, inputs = random_model(DECODER)
    result = jax.device_get(jax.jit(partial(capture, model))(params, *inputs))
    x = result["embed"] + result["pos_embed"]
    for i, block in enumerate(("blocks.0.", "blocks.1.")):
        own = {key.removeprefix(block): value for key, value in result.items() if key.startswith(block)}
        attention = params[f"blocks_{i}"]["attention"]
        np.testing.assert_array_equal(own["resid_pre"], x)
        np.testing.assert_allclose(
            own["attention.q"], np.einsum("td,dhk->htk", own["attention_norm"], attention["W_Q"]), rtol=1e-4
        )
        scores = np.einsum("htk,hsk->hts", own["attention.q"], own["attention.k"]) / 2  # √4
        np.testing.assert_allclose(own["attention.attn_scores"], scores, rtol=1e-4, atol=1e-5)
        visible = np.tril(np.ones((T, T), bool))
        weights = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(own["attention.pattern"], weights, rtol=1e-4, atol=1e-6)
        mixed = np.einsum("hts,hsk->htk", weights, own["attention.v"])
        np.testing.assert_allclose(own["attention.z"], mixed, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            own["attention"], np.einsum("htk,hkd->td", mixed, attention["W_O"]), rtol=1e-3, atol=1e-4
        )
        np.testing.assert_array_equal(own["attn_out"], own["attention"])
        np.testing.assert_allclose(own["resid_mid"], own["resid_pre"] + own["attn_out"], rtol=1e-4, atol=1e-5)
        mlp = params[f"blocks_{i}"]["mlp"]
        np.testing.assert_allclose(
            own["mlp.pre"], own["mlp_norm"] @ mlp["W_1"] + mlp["b_1"][None], rtol=1e-4, atol=1e-5
        )
        np.testing.assert_array_equal(own["mlp.post"], np.maximum(own["mlp.pre"], 0))
        x = own["resid_post"]
        np.testing.assert_allclose(x, own["resid_mid"] + own["mlp_out"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result["logits"], x @ params["W_out"], rtol=1e-4, atol=1e-4)


def test_names_select_by_pattern():
    model, params, inputs = random_model(DECODER)
    assert list(capture(model, params, *inputs, names="blocks.1.*.pattern")) == ["blocks.1.attention.pattern"]
    assert list(capture(model, params, *inputs, names=["logits", "embed"])) == ["embed", "logits"]


@pytest.mark.parametrize("probe", [capture, capture_shapes])
def test_name_that_matches_nothing_is_an_error_with_the_nearest(probe):
    model, params, inputs = random_model(DECODER)
    near = r"is named 'blocks\.0\.atention\.\*'; of \d+, the nearest are blocks\.0\.attention"
    with pytest.raises(KeyError, match=near):
        probe(model, params, *inputs, names=["logits", "blocks.0.atention.*"])
    assert list(probe(model, params, *inputs, names=["logits", "block"], missing_ok=True)) == ["logits"]


def test_intervention_that_matches_nothing_is_an_error():
    model, params, (tokens,) = random_model(DECODER)
    call = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    with pytest.raises(KeyError, match=r"named 'blocks\.7\.mlp'; of \d+, the nearest are blocks\.\d\.mlp"):  # noqa: SIM117
        with intervene("blocks.7.mlp", lambda _, x: 0 * x):
            call(tokens)
    compiled = call.lower(tokens).compile()
    with pytest.raises(KeyError, match=r"no model was called; .* without a program that was compiled ahead of time"):  # noqa: SIM117
        with intervene("blocks.1.mlp", lambda _, x: 0 * x):
            compiled(tokens)


@pytest.mark.parametrize(
    ("edit", "got"),
    [
        (lambda x: x[:1], r"float32 \(1, 7, 7\)"),  # which would broadcast over the heads
        (lambda x: x.astype(jnp.float16), r"float16 \(3, 7, 7\)"),
        (lambda x: 0.0, r"float \(\)"),
    ],
)
def test_edit_must_keep_shape_and_dtype(edit, got):
    model, params, (tokens,) = random_model(DECODER)
    wrong = (
        rf"preserve shape and dtype: blocks\.0\.attention\.pattern is float32 \(3, 7, 7\), and its replacement is {got}"
    )
    with (
        pytest.raises(ValueError, match=wrong),
        intervene("blocks.0.attention.pattern", lambda _, x: edit(x)),
    ):
        model.apply({"params": params}, tokens)


@pytest.mark.slow
def test_batch_in_place_of_an_example_is_an_error():
    model, params, (tokens,) = random_model(DECODER)
    tokens_BT = jnp.stack([tokens, tokens])
    batch = r"expected an input of shape \(T,\), got \(2, 7\); use jax\.vmap"
    with pytest.raises(ValueError, match=batch):
        capture(model, params, tokens_BT)
    with pytest.raises(ValueError, match=batch), intervene("logits", lambda _, x: x):
        model.apply({"params": params}, tokens_BT)
    logits = jax.jit(jax.vmap(lambda tokens: capture(model, params, tokens, names="logits")["logits"]))(tokens_BT)
    assert logits.shape == (2, T, V)


@pytest.mark.slow
def test_every_kind_of_model_has_its_own_names():
    def names(kind: str) -> set[str]:
        model, params, inputs = random_model(MODELS[kind])
        return set(capture_shapes(model, params, *inputs))

    assert {"reader.pattern", "encoder_0", "backward_encoder_1", "decoder_0"} <= names("attending")
    assert {"encoder_blocks.0.attention.pattern", "decoder_blocks.1.cross_attention.pattern"} <= names(
        "encoder-decoder"
    )
    assert {"blocks.0.mlp.experts", "blocks.0.mlp.shared.post"} <= names("experts")
    assert {"vision_blocks.0.resid_post", "text_blocks.0.resid_post", "output.2"} <= names("clip")


def test_model_continues_from_a_replaced_stream():
    """The stream of another text before the last block gives the logits of that text."""
    model, params, (tokens,) = random_model(DECODER)
    other = (tokens + 3) % V
    source = capture(model, params, other)
    np.testing.assert_array_equal(model.apply({"params": params}, other), source["logits"])

    with intervene("blocks.1.resid_pre", lambda name, _: source[name]):
        patched = model.apply({"params": params}, tokens)
    np.testing.assert_array_equal(patched, source["logits"])
    assert not np.allclose(source["logits"], model.apply({"params": params}, tokens))


def test_maps_and_entropy_agree_with_captured_queries_and_keys():
    model, params, inputs = random_model(DECODER)
    result = capture(model, params, *inputs, names=("*.q", "*.k"))
    maps = attention_maps(model, params, *inputs)
    entropy = attention_entropy(model, params, *(x[None] for x in inputs))
    for i, (weights, of_heads) in enumerate(zip(maps, entropy, strict=True)):
        q_HTK, k_HTK = (np.asarray(result[f"blocks.{i}.attention.{name}"], np.float64) for name in "qk")
        scores = q_HTK @ k_HTK.swapaxes(-1, -2) / np.sqrt(q_HTK.shape[-1])
        w = np.where(np.tri(T, dtype=bool), np.exp(scores), 0)
        w /= w.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(weights, w, rtol=1e-4, atol=1e-6)
        by_hand = -np.sum(w * np.log(np.where(w > 0, w, 1)), axis=-1).mean(axis=-1)
        np.testing.assert_allclose(of_heads, by_hand, rtol=1e-4)


class TwoDense(nn.Module):
    """A Linen module of someone else, with two points and, on request, an inner transformation."""

    rematerialised: bool = False

    @nn.compact
    def __call__(self, x_D: jax.Array) -> jax.Array:
        layer = (nn.remat(PointedDense) if self.rematerialised else PointedDense)(3, name="layer")
        return capture_point(self, "logits", layer(x_D) + layer(2 * x_D))


class PointedDense(nn.Module):
    """A dense layer that offers its input."""

    width: int

    @nn.compact
    def __call__(self, x_D: jax.Array) -> jax.Array:
        return nn.Dense(self.width)(capture_point(self, "input", x_D))


@pytest.mark.slow
def test_module_of_someone_else_offers_its_own_points():
    x_D = jnp.arange(1.0, 4)
    model = TwoDense()
    params = model.init(jax.random.key(0), x_D)["params"]
    result = capture(model, params, x_D)
    assert list(result) == ["layer.input", "layer.input (call 2)", "logits"]
    np.testing.assert_array_equal(result["layer.input (call 2)"], 2 * x_D)
    _, grads = capture_gradients(lambda: model.apply({"params": params}, x_D).sum())
    np.testing.assert_allclose(grads["layer.input"], params["layer"]["Dense_0"]["kernel"].sum(-1), rtol=1e-6)


def test_value_of_an_inner_transformation_can_be_replaced_and_not_captured():
    x_D = jnp.arange(1.0, 4)
    model = TwoDense(rematerialised=True)
    params = model.init(jax.random.key(0), x_D)["params"]
    with intervene("layer.input*", lambda _, x: 0 * x):
        np.testing.assert_array_equal(model.apply({"params": params}, x_D), np.zeros(3))
    assert list(capture(model, params, x_D, names="logits")) == ["logits"]
    with pytest.raises(ValueError, match=r"layer\.input is computed within a transformation, such as jax\.vmap"):
        capture(model, params, x_D)
    with pytest.raises(ValueError, match=r"logits is computed within a transformation"):
        capture_gradients(
            lambda: jax.vmap(lambda x: model.apply({"params": params}, x).sum())(x_D[None])[0], names="logits"
        )


@pytest.mark.slow
def test_intervention_covers_every_call_of_a_model():
    model, params, (tokens,) = random_model(DECODER)
    other = (tokens + 3) % V
    zero = lambda _, x: 0 * x  # noqa: E731
    with intervene("blocks.1.mlp", zero):
        together = [model.apply({"params": params}, x) for x in (tokens, other)]
    for x, result in zip((tokens, other), together, strict=True):
        with intervene("blocks.1.mlp", zero):
            np.testing.assert_array_equal(result, model.apply({"params": params}, x))
    with pytest.raises(ValueError, match=r"logits is computed in two calls of a model"):
        capture_gradients(
            lambda: sum(model.apply({"params": params}, x).sum() for x in (tokens, other)), names="logits"
        )


def test_capture_within_an_intervention_returns_replaced_values():
    model, params, inputs = random_model(DECODER)
    plain = capture(model, params, *inputs)
    with intervene("blocks.0.attention.pattern", lambda _, x: x[:, ::-1]):
        result = capture(model, params, *inputs)
    np.testing.assert_array_equal(result["blocks.0.attention.pattern"], plain["blocks.0.attention.pattern"][:, ::-1])
    np.testing.assert_array_equal(result["blocks.0.attention.attn_scores"], plain["blocks.0.attention.attn_scores"])
    mixed = np.einsum("hts,hsk->htk", result["blocks.0.attention.pattern"], plain["blocks.0.attention.v"])
    np.testing.assert_allclose(result["blocks.0.attention.z"], mixed, rtol=1e-5, atol=1e-6)


def test_shapes_need_no_arrays_of_parameters():
    model, params, inputs = random_model(DECODER)
    abstract = jax.eval_shape(lambda: params)
    assert capture_shapes(model, abstract, *inputs) == capture_shapes(model, params, *inputs)


@pytest.mark.slow
def test_running_from_every_activation_gives_the_output():
    model, params, inputs = random_model(MODELS["clip"])
    values = jax.jit(partial(capture, model))(params, *inputs)
    got = jax.jit(partial(run_from, model, params, inputs))(values)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(apply(model, params, *inputs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_of_anything_by_anything_are_difference_quotients():
    model, params, (tokens_T,) = random_model(DECODER)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        grads = gradient_of(
            model, params, tokens_T, of="blocks.1.attention.attn_scores.2", at=(5,),
            wrt=["embed", "blocks.0.attention.z", "blocks.0.attention.W_[QK]"],
        )  # fmt: skip
        names = ["blocks.0.attention.W_K", "blocks.0.attention.W_Q", "embed", "blocks.0.attention.z"]
        assert list(grads) == names

        @jax.jit
        def scores(params, values):
            with intervene(tuple(values), lambda name, _: values[name], missing_ok=True):
                return capture(model, params, tokens_T)["blocks.1.attention.attn_scores"][2, 5].sum()

        stream = jax.jit(partial(capture, model, names=names[2:]))(params, tokens_T)
        for name in names:
            step = 1e-5 * jax.random.normal(jax.random.key(1), grads[name].shape, jnp.float64)
            if name in stream:
                high, low = (scores(params, {name: stream[name] + sign * step}) for sign in (1, -1))
            else:
                attention = params["blocks_0"]["attention"]
                matrix = name.rpartition(".")[2]
                changed = [
                    params | {"blocks_0": params["blocks_0"] | {"attention": attention | {matrix: value}}}
                    for value in (attention[matrix] + step, attention[matrix] - step)
                ]
                high, low = (scores(p, {}) for p in changed)
            np.testing.assert_allclose((high - low) / 2, jnp.vdot(grads[name], step), rtol=1e-5)


@pytest.mark.slow
def test_gradients_of_activations_are_reported_by_head():
    model, params, (tokens_T,) = random_model(DECODER)
    grads = gradient_of(model, params, tokens_T, of=_first_logit, wrt="blocks.*.attention.z")
    values = jax.jit(partial(capture, model, names="blocks.*.attention.z"))(params, tokens_T)
    report = gradient_report(values, grads, lr=0.1)
    row = next(row for row in report.rows if row.name == "blocks.1.attention.z.2")
    g, w = (float(jnp.linalg.norm(x["blocks.1.attention.z"][2])) for x in (grads, values))
    np.testing.assert_allclose([row.grad_norm, row.param_norm, row.sgd_ratio], [g, w, 0.1 * g / w], rtol=1e-5)
    with pytest.raises(KeyError, match="nothing"):
        gradient_of(model, params, tokens_T, of=_first_logit, wrt="nothing")


def _first_logit(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[-1, 0]

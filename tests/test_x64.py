"""With `jax_enable_x64`, what is float32 stays float32, what is float64 is computed in it, and nothing is refused.

All but one test only trace: dtypes need no numbers.
"""

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxformer.config import ModelConfig
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig, TextTowerConfig
from jaxformer.models.decoder import ExpertsConfig
from jaxformer.models.encoder import ClassifierConfig, EncoderConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.recurrent import RecurrentConfig
from jaxformer.models.recurrent_lm import RecurrentLMConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.models.vivit import ViViTConfig
from jaxformer.nn.execution import Execution
from jaxformer.ops import (
    RoPE,
    alignment,
    blockwise,
    cache,
    experts,
    losses,
    norms,
    patches,
    positions,
    quantized,
    recurrent,
)
from jaxformer.ops.linear_cross_entropy import Unembedding, linear_cross_entropy
from jaxformer.ops.masks import Causal
from tests.arrays import assert_close, normal, plain_decoder, plain_rung

attention = importlib.import_module("jaxformer.ops.attention")  # in the package, its name is the function's
H, G, T, K, D, V, E = 4, 2, 6, 8, 8, 11, 3
DTYPES = [jnp.float32, jnp.float64]
"""What x64 could widen, and what it is for."""


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def shaped(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


Q, KV, X, TOKENS = (H, T, K), (G, T, K), (T, D), ((T,), jnp.int32)
OPS: dict[str, tuple[Any, ...]] = {
    "attention": (attention.attention, Q, KV, KV),
    "causal attention": (lambda q, k, v: attention.attention(q, k, v, Causal(3), 0.3), Q, KV, KV),
    "blockwise": (lambda q, k, v: blockwise.blockwise_attention(q, k, v, Causal(), 0.3, block=4), Q, KV, KV),
    "segments": (attention.in_segments(2), Q, KV, KV),
    "multi-head": (attention.multi_head_attention, X, X, (D, H, K), (D, G, K), (D, G, K), (H, K, D)),
    "rms_norm": (norms.rms_norm, X, (D,)),
    "layer_norm": (norms.layer_norm, X, (D,), (D,)),
    "l2_normalize": (norms.l2_normalize, X),
    "rope": (lambda x, t: positions.rope(x, t, scaling=2.0), Q, TOKENS),
    "dispatch": (lambda x, j: experts.dispatch(x, experts.assign(j[:, None], E, T), E, T), X, TOKENS),
    "combine": (lambda y, j, w: experts.combine(y, j[:, None], w), (E, T, D), TOKENS, (T, 1)),
    "additive_scores": (alignment.additive_scores, (D,), X, (D,)),
    "dot_scores": (alignment.dot_scores, (D,), X),
    "gru_step": (lambda h, x, u, b: recurrent.gru_step((h,), x, u, b)[0], (D,), (3, D), (3, D), (D,)),
    "lstm_step": (lambda h, c, x, u: recurrent.lstm_step((h, c), x, u)[1], (D,), (D,), (4, D), (4, D)),
    "quantized product": (lambda x, w: x @ quantized.quantize(w, (0,)), X, (D, V)),
}
"""Ops whose result has the dtype of their first argument; shapes, or a shape and a dtype."""

WIDE_OPS: dict[str, tuple[Any, ...]] = {
    "attention_weights": (attention.attention_weights, Q, KV),
    "row_entropy": (lambda q, k: attention.row_entropy(attention.attention_weights(q, k, Causal())), Q, KV),
    "alignment_weights": (lambda s: alignment.alignment_weights(s, s > 0), (T,)),
    "negative_log_likelihood": (losses.negative_log_likelihood, (T, V), TOKENS),
    "uniform_cross_entropy": (losses.uniform_cross_entropy, (T, V)),
    "cross_entropy": (losses.cross_entropy, (T, V), TOKENS),
    "linear_cross_entropy": (
        lambda x, W, b, w, t: linear_cross_entropy(x, Unembedding(W, b), t, w, 2 * V)[0], X, (D, V), (V,), (T,), TOKENS,
    ),
    "pair_nll": (losses.pair_nll, (D,), (D,), X, X, ()),
    "statistics": (
        lambda x, j: experts.balance_loss(experts.router_statistics(x, j[:, None], j[:, None], 2)), (T, V), TOKENS,
    ),
}  # fmt: skip
"""Ops whose result is float32, or float64 of float64."""


def arguments(dtype: Any, shapes: tuple) -> list[jax.ShapeDtypeStruct]:
    return [shaped(s[1], *s[0]) if s and isinstance(s[0], tuple) else shaped(dtype, *s) for s in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS | WIDE_OPS)
def test_an_op_gives_the_dtype_it_promises_and_so_does_its_gradient(name: str, dtype: Any) -> None:
    op, *shapes = (OPS | WIDE_OPS)[name]
    args = arguments(dtype, tuple(shapes))
    promised = dtype if name in OPS else jnp.promote_types(dtype, jnp.float32)
    assert jax.eval_shape(op, *args).dtype == promised
    floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
    if name != "quantized product":  # which is rounded, and has no gradient
        grads = jax.eval_shape(jax.grad(lambda *xs: op(*xs).sum(), argnums=floats), *args)
        assert {g.dtype for g in grads} == {jnp.dtype(dtype)}


def test_indices_and_fixed_tables_are_of_32_bits() -> None:
    tokens = shaped(jnp.int32, T)
    assert jax.eval_shape(partial(positions.sinusoidal, d_model=D), tokens).dtype == jnp.float32
    assert jax.eval_shape(lambda j: experts.assign(j[:, None], E, T), tokens).dtype == jnp.int32
    pixels = shaped(jnp.uint8, 4, 4, 3)
    assert jax.eval_shape(lambda x: patches.standardize(x, (0.5,), (0.5,)), pixels).dtype == jnp.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_decoding_with_a_cache_gives_the_dtype_of_the_queries(dtype: Any, stored: Any) -> None:
    def decode(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        (layer,) = cache.init_cache(1, G, T, K, stored).layers
        layer = cache.write_layer(layer, k, v, 0)
        mask = jnp.ones((1, T), bool)
        return cache.decode_step(q[:, :1], k[:, :1], v[:, :1], layer, jnp.int32(2), mask, 0.3)

    y, layer = jax.eval_shape(decode, *arguments(dtype, (Q, KV, KV)))
    assert y.dtype == dtype and layer.v_GSK.values.dtype == stored


@pytest.mark.slow
def test_blockwise_attention_is_as_exact_as_attention_in_float64() -> None:
    q, k, v = (jnp.float64(normal(*shape, seed=i)) for i, shape in enumerate((Q, KV, KV)))
    for mask in (Causal(), None):
        tiled = partial(blockwise.blockwise_attention, mask=mask, scale=0.3, block=4)
        whole = partial(attention.attention, mask=mask, scale=0.3)
        both = (jax.jit(jax.value_and_grad(lambda q, f=f: jnp.sum(f(q, k, v) ** 2)))(q) for f in (tiled, whole))
        for ours, theirs in zip(*both, strict=True):
            assert ours.dtype == jnp.float64
            assert_close(ours, theirs, 1e-12)


TEXT = {"vocab_size": 13, "context_length": 6}
BLOCKS = {"d_model": 8, "n_heads": 2, "d_ff": (12,)}
MODELS: dict[str, ModelConfig] = {
    "decoder": plain_decoder(**TEXT, **BLOCKS, n_blocks=2, norm="rmsnorm", qk_norm=True, positions="none", rope=RoPE(),
                             final_norm=True, attention_bias=True, activation="swiglu"),
    "experts": plain_rung(**TEXT, **BLOCKS, experts=ExpertsConfig(3, capacity_factor=1.0), norm="layernorm",
                             positions="sinusoidal", unembedding="tied"),
    "mlp": MLPConfig(**TEXT, d_model=8, d_ff=(12,)),
    "mixing": MLPConfig(**TEXT, d_model=8, d_ff=(12,), mixing="qkv"),
    "recurrent LM": RecurrentLMConfig(**TEXT, cell="tanh", d_model=8),
    "encoder": EncoderConfig(**TEXT, **BLOCKS, n_blocks=1, n_segments=2),
    "classifier": ClassifierConfig(**TEXT, **BLOCKS, n_blocks=1, pooling="mean"),
    "encoder-decoder": EncoderDecoderConfig(**TEXT, **BLOCKS, n_encoder_blocks=1, n_decoder_blocks=1),
    "gru": RecurrentConfig(**TEXT, d_embedding=8, d_model=8),
    "lstm": RecurrentConfig(**TEXT, d_embedding=8, d_model=8, cell="lstm", attention="none", n_layers=2),
    "dot": RecurrentConfig(**TEXT, d_embedding=8, d_model=8, attention="dot", tied=True),
    "vit": ViTConfig(**BLOCKS, image_size=(4, 4), patch_size=(2, 2), n_classes=3, n_blocks=1),
    "vivit": ViViTConfig(**BLOCKS, image_size=(4, 4), patch_size=(2, 2), n_classes=3, n_blocks=1, n_frames=2,
                         tubelet_frames=1, n_temporal_blocks=1, attention="factorised"),
    "clip": CLIPConfig(ImageTowerConfig(**BLOCKS, image_size=4, patch_size=2, n_blocks=1),
                       TextTowerConfig(**TEXT, **BLOCKS, n_blocks=1), d_joint=4),
}  # fmt: skip
PARTS = ("encoder", "classifier", "vit")
"""Models whose layers are those of others: of the encoder-decoder, the video model and CLIP."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*PARTS, "dot", "recurrent LM")])
def test_a_model_computes_in_the_dtype_of_its_parameters(name: str) -> None:
    config = MODELS[name]
    execution = Execution(partial(blockwise.blockwise_attention, block=4), "block", scan=True)
    params = jax.eval_shape(lambda *xs: config.build().init(jax.random.key(0), *xs)["params"], *config.example())
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float64)}  # jax's default float here
    for model, dtype in ((config.build(), jnp.float64), (config.build(execution), jnp.float32)):
        params = jax.tree.map(lambda x: x.update(dtype=dtype), params)  # noqa: B023

        def total(params: Any, *example: jax.Array) -> tuple[jax.Array, Any]:
            out = jax.tree.leaves(model.apply({"params": params}, *example))  # noqa: B023
            return sum(jnp.sum(x) for x in out).astype(jnp.float32), out

        grads, out = jax.eval_shape(jax.grad(total, has_aux=True), params, *config.example())
        assert {x.dtype for x in out} == {jnp.dtype(dtype)}
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}

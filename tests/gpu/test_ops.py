"""Norms, losses, experts, int8 matmuls and the cache."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.experts import Experts
from jaxformer.nn.mlp import MLP
from jaxformer.ops.attention import attention
from jaxformer.ops.cache import decode_step, init_cache, write_layer
from jaxformer.ops.linear_cross_entropy import Unembedding, linear_cross_entropy
from jaxformer.ops.losses import cross_entropy, pair_nll
from jaxformer.ops.norms import l2_normalize, layer_norm, rms_norm
from jaxformer.ops.quantized import LARGEST, Quantized
from tests.gpu.beside_float64 import Comparison, beside

__all__ = ["beside"]

DTYPES = ["bfloat16", "float32"]
N, D, V = 192, 768, 5003
draw = np.random.default_rng(0).normal
TARGETS = np.random.default_rng(1).integers(V, size=N)
WEIGHTS = (np.random.default_rng(2).random(N) < 0.8).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [rms_norm, layer_norm, l2_normalize], ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [1, N])
def test_norms_are_those_of_float64(beside: Comparison, norm: Any, dtype: str, n: int) -> None:
    vectors = {"rms_norm": 1, "layer_norm": 2, "l2_normalize": 0}[norm.__name__]
    beside.agree(norm, norm, dtype, 3 + draw(size=(n, D)), *draw(size=(vectors, D)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_is_that_of_float64(beside: Comparison, dtype: str) -> None:
    loss = lambda logits_NV: cross_entropy(logits_NV, jnp.asarray(TARGETS), jnp.asarray(WEIGHTS))  # noqa: E731
    beside.agree(loss, loss, dtype, 3 * draw(size=(N, V)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("max_logits", "soft_cap", "smoothing"), [(10**9, None, 0.0), (128 * V, None, 0.0), (128 * V, 5.0, 0.1)]
)
def test_linear_cross_entropy_is_that_of_float64(
    beside: Comparison, dtype: str, max_logits: int, soft_cap: float | None, smoothing: float
) -> None:
    def chunked(x_ND: jax.Array, W_DV: jax.Array) -> jax.Array:
        weights = jnp.asarray(WEIGHTS, jnp.float32)
        unembedding = Unembedding(W_DV, soft_cap=soft_cap)
        return linear_cross_entropy(x_ND, unembedding, jnp.asarray(TARGETS), weights, max_logits, smoothing)[0]

    def whole(x_ND: jax.Array, W_DV: jax.Array) -> jax.Array:
        logits = x_ND @ W_DV
        logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
        log_NV = jax.nn.log_softmax(logits)
        is_target_NV = jnp.asarray(TARGETS[:, None] == np.arange(V))
        nll_N = -(1 - smoothing) * jnp.sum(log_NV * is_target_NV, -1) - smoothing * log_NV.mean(-1)
        return jnp.sum(nll_N * WEIGHTS)

    beside.agree(chunked, whole, dtype, draw(size=(N, D)), draw(size=(D, V)) * D**-0.5)


def test_the_loss_of_pairs_is_that_of_float64(beside: Comparison) -> None:
    images, texts = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in draw(size=(2, 64, 256)))

    def loss(images_NE: jax.Array, texts_NE: jax.Array, log_scale: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(lambda i, t: pair_nll(i, t, images_NE, texts_NE, log_scale))(images_NE, texts_NE))

    beside.agree(loss, loss, "float32", images, texts, np.array(3.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("per_token", "factor"), [(1, None), (2, 0.75)])
def test_experts_are_those_of_float64(beside: Comparison, dtype: str, per_token: int, factor: float | None) -> None:
    E, F, d = 8, 256, 128
    module = Experts(partial(MLP, (F,), d, "gelu"), E, per_token, factor)
    x_TD = draw(size=(N, d))
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((N, d)))["params"])
    leaves, tree = jax.tree.flatten(shapes)
    weights = [draw(size=leaf.shape) * (leaf.shape[-2] if leaf.ndim > 1 else 9) ** -0.5 for leaf in leaves]

    def layer(x_TD: jax.Array, *leaves: jax.Array) -> jax.Array:
        params = jax.tree.unflatten(tree, leaves)
        params = params | {"W_router": 4 * params["W_router"]}  # no near ties
        return module.apply({"params": params}, x_TD, rngs={"dropout": jax.random.key(0)})

    beside.agree(layer, layer, dtype, x_TD, *weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(D, 512), (D, 12, 64)], ids=str)
@pytest.mark.parametrize("n", [1, 8, N])
def test_products_with_int8_matrices_are_those_of_float64(
    beside: Comparison, dtype: str, shape: tuple[int, ...], n: int
) -> None:
    values = np.random.default_rng(3).integers(-LARGEST, LARGEST + 1, shape).astype(np.int8)
    scale = np.random.default_rng(4).uniform(0.001, 0.002, (1, *shape[1:])).astype(np.float32)

    def product(x_ND: jax.Array) -> jax.Array:
        return x_ND @ Quantized(jnp.asarray(values), jnp.asarray(scale), x_ND.dtype)

    def exact(x_ND: jax.Array) -> jax.Array:
        return jnp.tensordot(x_ND, jnp.asarray(values * np.float64(scale)), 1)

    beside.agree(product, exact, dtype, draw(size=(n, D)), n_differentiated=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", ["own", "bfloat16", "int8"])
def test_a_query_reads_the_cache_as_attention_in_float64_does(beside: Comparison, dtype: str, stored: str) -> None:
    heads, G, K, n_slots, n = 8, 2, 64, 256, 200
    q, k, v = (draw(size=shape) for shape in ((heads, 1, K), (G, n, K), (G, n, K)))

    def cached(q_H1K: jax.Array, k_GTK: jax.Array, v_GTK: jax.Array) -> jax.Array:
        cache = init_cache(1, G, n_slots, K, q_H1K.dtype if stored == "own" else stored)
        layer = write_layer(cache.layers[0], k_GTK[:, :-1], v_GTK[:, :-1], 0)
        mask_1S = (jnp.arange(n_slots) < n)[None]
        return decode_step(q_H1K, k_GTK[:, -1:], v_GTK[:, -1:], layer, n - 1, mask_1S, K**-0.5)[0]

    limit = None if stored == "own" else 2**-5
    beside.agree(cached, lambda q, k, v: attention(q, k, v), dtype, q, k, v, limit=limit, n_differentiated=0)

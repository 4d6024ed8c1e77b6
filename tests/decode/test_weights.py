"""Parameters in fewer bytes: every matrix is rounded, and the logits move little."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.contract import ParameterAxes
from jaxformer.decode.generation import generate_tokens
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.weights import (
    SELF_ATTENTION,
    Transposed,
    as_declared,
    for_matmul,
    lay_out,
    restored,
    store,
    summed_axes,
)
from jaxformer.models.decoder import ExpertsConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.nn.parameters import cast, parameter_axes
from jaxformer.ops import RoPE
from jaxformer.ops.attention import project_heads
from jaxformer.ops.quantized import Quantized
from jaxformer.ops.workarounds import Heads
from jaxformer.parallel.mesh import make_mesh, shardings
from tests.arrays import plain_decoder, random_params

MODELS = {
    "rope, tied": plain_decoder(
        40, 16, 32, n_blocks=1, n_heads=4, n_kv_heads=2, d_ff=(48,), activation="swiglu",
        norm="rmsnorm", final_norm=True, positions="none", rope=RoPE(), unembedding="tied", embedding_std=0.2,
    ),
    "experts": plain_decoder(
        40, 16, 32, n_blocks=1, n_heads=4, d_ff=(24,), activation="swiglu", norm="rmsnorm",
        experts=ExpertsConfig(4, shared_expert=True),
    ),
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 40, 16).astype(np.int32)


one_model = pytest.mark.parametrize("built", ["experts"], indirect=True, scope="module")


@pytest.fixture(params=MODELS, scope="module")
def built(request):
    model = MODELS[request.param].build()
    return model, random_params(model, TOKENS)


@partial(jax.jit, static_argnums=0)
def logits(model, params, tokens_T):
    """As of a batch of one: a product of two bfloat16 matrices that gives float32 is not there on CPUs."""
    return jax.vmap(lambda tokens_T: model.apply({"params": params}, tokens_T))(tokens_T[None])[0]


def n_bytes(params):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_the_correction_of_a_router_is_never_rounded():
    """Values that bfloat16 cannot tell apart: rounded, other experts would be chosen."""
    experts = ExpertsConfig(4, router="sigmoid")
    model = plain_decoder(8, 4, 8, n_blocks=1, n_heads=1, d_ff=(8,), norm="rmsnorm", experts=experts).build()
    params = random_params(model, np.arange(4))
    corrections = params["blocks_0"]["mlp"]["b_correction"] = jnp.array([5.0, 5.01, 5.005, 4.99])
    stored = (store(params, weights, model, device) for weights in ("bfloat16", "int8") for device in ("cpu", "gpu"))
    for other in (cast(params, jnp.bfloat16), *stored):
        assert other["blocks_0"]["mlp"]["b_correction"].tolist() == corrections.tolist()


@pytest.mark.slow
def test_int8_quarters_every_matrix_and_moves_logits_within_a_bound(built):
    model, params = built
    small = store(params, "int8", model)
    flat = jax.tree_util.tree_leaves_with_path(small, is_leaf=lambda x: isinstance(x, Quantized))
    for path, leaf in flat:
        name = path[-1].key
        assert isinstance(leaf, Quantized) == (name.startswith("W_") and name not in ("W_pos", "W_router")), name
    assert n_bytes(small) < 0.4 * n_bytes(params)
    exact, rounded = (logits(model, p, TOKENS) for p in (params, small))
    off = jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact)
    assert 1e-4 < off < 0.03  # a step is 1/127 of a channel's largest, and errors average out


@pytest.mark.slow
def test_int8_products_equal_those_of_the_restored_weights(built):
    """So nothing but the rounding of weights makes a difference: not the layout, not the scales."""
    model, params = built
    small = store(params, "int8", model)
    exact = restored(small)
    a, b = (logits(model, p, TOKENS) for p in (exact, small))
    np.testing.assert_allclose(a, b, atol=2e-3 * float(jnp.abs(a).max()))


@pytest.mark.slow
@one_model
def test_bfloat16_halves_the_bytes_but_on_a_cpu_and_moves_logits_within_a_bound(built):
    model, params = built
    small, held = (store(params, "bfloat16", model, platform) for platform in ("gpu", "cpu"))
    assert n_bytes(small) == n_bytes(params) / 2
    jax.tree.map(np.testing.assert_array_equal, held, restored(small))
    exact, *rounded = (logits(model, p, TOKENS) for p in (params, small, held))
    for values in rounded:
        assert 1e-4 < jnp.linalg.norm(values - exact) / jnp.linalg.norm(exact) < 0.03


@pytest.mark.slow
@one_model
def test_on_other_devices_than_a_cpu_all_but_int8_matrices_is_bfloat16(built):
    """So that activations are: decoding then reads and writes half of their bytes."""
    model, params = built
    small = store(params, "int8", model, platform="gpu")
    dtypes = {jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(small, is_leaf=lambda x: isinstance(x, Quantized))}
    assert dtypes == {"bfloat16"}  # of a quantised matrix, that of its rows
    rounded = logits(model, small, TOKENS)
    exact = logits(model, restored(small), TOKENS)
    assert rounded.dtype == jnp.bfloat16
    assert jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact) < 0.03


@pytest.mark.slow
def test_the_layout_for_a_gpu_has_last_what_products_sum_over_and_is_undone_exactly(built):
    model, params = built
    params = store(params, "int8", model)
    laid_out = lay_out(params, model, platform="gpu")
    leaves = jax.tree_util.tree_leaves_with_path(laid_out, is_leaf=lambda x: isinstance(x, Transposed))
    transposed = {jax.tree_util.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Transposed)}
    d_ff = model.config.d_ff[0]
    down = next(
        leaf for path, leaf in transposed.items() if "blocks_0" in path and "W_2" in path and leaf.values.ndim == 2
    )
    assert down.values.shape[-1] == d_ff
    assert not any("W_E" in path or "W_pos" in path for path in transposed)  # read row by row
    jax.tree.map(np.testing.assert_array_equal, as_declared(laid_out), params)
    jax.tree.map(np.testing.assert_array_equal, restored(laid_out), restored(params))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_queries_keys_and_values_of_one_row_are_one_matmul_on_a_gpu(weights):
    model = MODELS["rope, tied"].build()
    params = store(random_params(model, TOKENS), weights, model)
    x_1D = jax.random.normal(jax.random.key(0), (1, 32))

    def project(params):
        attention = params["blocks_0"]["attention"]
        return [project_heads(x_1D, attention[name]) for name in SELF_ATTENTION]

    joined = jax.jit(lambda params: project(for_matmul(params))).lower(lay_out(params, model, "gpu")).compile()
    assert len(re.findall(r" dot\(", joined.as_text())) == 1
    for given, expected in zip(joined(lay_out(params, model, "gpu")), project(params), strict=True):
        np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_matrices_with_other_inputs_or_on_several_devices_are_multiplied_with_apart():
    config = EncoderDecoderConfig(11, 7, 8, n_heads=2, d_ff=(16,), n_encoder_blocks=1, n_decoder_blocks=1)
    model = config.build()
    block = for_matmul(lay_out(random_params(model, *config.example()), model, "gpu"))["decoder_blocks_0"]
    assert isinstance(block["attention"]["W_Q"], Heads) and not isinstance(block["cross_attention"]["W_Q"], Heads)
    model = MODELS["rope, tied"].build()
    mesh = make_mesh("tensor=2", jax.devices()[:2])
    params = random_params(model, TOKENS)
    split = jax.device_put(params, shardings(params, parameter_axes(model), mesh))
    assert not isinstance(for_matmul(lay_out(split, model, "gpu"))["blocks_0"]["attention"]["W_Q"], Heads)


def orders(laid_out):
    """Of the int8 matrices that are transposed."""
    leaves = jax.tree.leaves(laid_out, is_leaf=lambda x: isinstance(x, Transposed))
    return [leaf.order for leaf in leaves if isinstance(leaf, Transposed) and leaf.values.dtype == jnp.int8]


@pytest.mark.slow
def test_the_layout_for_a_cpu_transposes_the_last_layer_of_mlps_or_int8_and_is_undone_exactly(built):
    model, params = built
    laid_out = lay_out(params, model)
    leaves = jax.tree_util.tree_leaves_with_path(laid_out, is_leaf=lambda x: isinstance(x, Transposed))
    transposed = {path[-1].key for path, leaf in leaves if isinstance(leaf, Transposed)}
    assert transposed <= {"W_2"}
    assert bool(transposed) == (model.config.d_ff[-1] > model.config.d_model)
    jax.tree.map(np.testing.assert_array_equal, as_declared(laid_out), params)
    jax.tree.map(np.testing.assert_array_equal, restored(laid_out), restored(params))
    small = store(params, "int8", model)
    on_cpu, on_gpu = (lay_out(small, model, platform) for platform in ("cpu", "gpu"))
    assert orders(on_cpu) == orders(on_gpu) != []
    jax.tree.map(np.testing.assert_array_equal, as_declared(on_cpu), small)


@pytest.mark.parametrize(
    ("axes", "summed"),
    [
        ("vocab -> embed", (1,)),  # a row is a token's channel, for the embedding and for the logits
        ("patches -> embed", (0,)),
        ("heads head_dim -> embed", (0, 1)),
        ("experts embed -> hidden", (1,)),
        ("embed -> vocab", (0,)),
        ("positions -> embed", ()),
        ("embed -> choices", ()),
        ("embed -> alignment", ()),
        ("gates embed -> hidden", ()),
        ("embed", ()),
    ],
)
def test_int8_scales_reach_over_the_axes_that_products_sum_over(axes, summed):
    assert summed_axes(ParameterAxes.parse(axes)) == summed


@pytest.mark.slow
def test_texts_are_those_of_full_passes_also_from_rounded_weights_laid_out():
    model = MODELS["rope, tied"].build()
    small = store(random_params(model, TOKENS), "int8", model)
    for params in (lay_out(small, model), lay_out(small, model, "gpu")):
        pieces = generate_tokens(
            model, params, [[1, 2, 3], [4]], Sampling(temperature=0), [0, 0], max_new_tokens=6, context_length=16
        )
        text = [1, 2, 3, *np.concatenate([piece.tokens for piece in pieces], axis=1)[0].tolist()]
        for logits_V, token in zip(logits(model, small, np.array(text[:-1]))[2:], text[3:], strict=True):
            assert logits_V[token] >= logits_V.max() - 0.05 * jnp.ptp(logits_V)  # but for ties in rounding

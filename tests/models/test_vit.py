"""The Vision Transformer: against Hugging Face's, and by its properties.

Their side is stored; `tests/fixtures/make_vision_hf.py` made it.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.errors import UserError
from jaxformer.inspect import attention_maps
from jaxformer.models.vit import ViTConfig
from jaxformer.nn.parameters import parameter_axes
from jaxformer.parallel.mesh import make_mesh, shardings
from jaxformer.runs.run import abstract_params, count_parameters
from tests.arrays import apply, assert_close, random_params
from tests.helpers import ROOT, slow

CLASS = ViTConfig(
    image_size=(12, 8), channels=1, n_classes=5, patch_size=(4, 2), d_model=12, n_heads=3, d_ff=(17,), n_blocks=2,
    dropout=0.3,
)  # fmt: skip
MEAN = replace(CLASS, pooling="mean", norm_placement="post", norm="rmsnorm", attention_bias=False)
CONFIGS = {"class": CLASS, "mean": MEAN}
PIXELS = np.random.default_rng(0).integers(256, size=(3, 12, 8, 1)).astype(np.uint8)


def build(config: ViTConfig) -> tuple:
    return config.build(), random_params(config.build(), *config.example())


@pytest.fixture(scope="module", params=["class", slow("mean")])
def case(request: pytest.FixtureRequest) -> tuple:
    return build(CONFIGS[request.param])


@pytest.mark.slow
def test_logits_are_those_of_hugging_face() -> None:
    """Two images, 1e-5 of the largest number; before the head, too."""
    with np.load(ROOT / "tests/fixtures/vit_hf.npz") as stored:
        theirs = dict(stored)
    weights = {name.removeprefix("weights."): w.astype(np.float32) for name, w in theirs.items() if "weights." in name}
    config = ViTConfig(
        image_size=(12, 8), n_classes=5, patch_size=(4, 2), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), d_model=24,
        n_heads=3, d_ff=(40,), n_blocks=2, activation="gelu_exact",
    )  # fmt: skip
    model, params = config.build(), unflatten_dict(weights, sep=".")
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, abstract_params(model))
    for name, method in (("logits", "__call__"), ("features", "encode")):
        call = jax.jit(jax.vmap(partial(model.apply, {"params": params}, method=method)))
        assert_close(call(theirs["pixels"]), theirs[name])


def test_base_has_as_many_parameters_as_its_release() -> None:
    """86,567,656 in `vit-base-patch16-224`, where the class token has its own 768 beside its position."""
    config = ViTConfig()
    assert count_parameters(abstract_params(config.build())) == 86_567_656 - 768


def test_bytes_and_floats_of_one_image_give_the_same(case: tuple) -> None:
    model, params = case
    logits = apply(model, params, PIXELS[0])
    assert logits.shape == (5,)
    assert_close(apply(model, params, (PIXELS[0] / 255).astype(np.float32)), logits)


@pytest.mark.slow
def test_every_pixel_is_felt(case: tuple) -> None:
    model, params = case
    pixels = (PIXELS[0] / 255).astype(np.float32)
    felt = np.asarray(jax.jit(jax.grad(lambda x: model.apply({"params": params}, x)[0]))(pixels))
    assert np.isfinite(felt).all() and (felt != 0).all()


def test_without_positions_the_order_of_patches_means_nothing() -> None:
    """Positions are all that tells patches apart: with those of all patches alike, an image with its two halves
    exchanged, 6 rows of 4 x 2 patches being 3 x 4, is the same."""
    model, params = build(CLASS)
    halves = np.roll(PIXELS[0], 4, axis=1)
    there = lambda params: [apply(model, params, pixels) for pixels in (PIXELS[0], halves)]  # noqa: E731
    a, b = there(params)
    assert np.abs(np.subtract(a, b)).max() > 0.1
    W_pos = np.array(params["position_embedding"]["W_pos"])
    W_pos[1:] = 0.5
    params["position_embedding"]["W_pos"] = W_pos
    assert_close(*there(params))


def test_a_batch_equals_its_examples_computed_separately(case: tuple) -> None:
    model, params = case
    together = np.asarray(jax.jit(jax.vmap(partial(model.apply, {"params": params})))(PIXELS))
    for row, pixels in zip(together, PIXELS, strict=True):
        assert_close(row, apply(model, params, pixels))


def test_pooling_is_the_first_token_or_the_mean_of_all() -> None:
    x = np.arange(12.0).reshape(2, 3, 2)
    assert_close(CLASS.pool(x), [[0, 1], [6, 7]])
    assert_close(MEAN.pool(x), [[2, 3], [8, 9]])


def test_attention_can_be_looked_at(case: tuple) -> None:
    """12 patches; with a class token, 13 places."""
    model, params = case
    n = 13 if model.config.pooling == "class" else 12
    maps = jax.device_get(jax.jit(attention_maps, static_argnums=0)(model, params, PIXELS[0]))
    assert [weights.shape for weights in maps] == [(3, n, n)] * 2
    for weights_HTT in maps:
        assert (weights_HTT > 0).all()
        assert_close(weights_HTT.sum(-1), np.ones((3, n)))


def test_every_parameter_has_a_sharding() -> None:
    """A patch's pixels over `tensor`, the model's width over `fsdp`."""
    params, axes = abstract_params(CLASS.build()), parameter_axes(CLASS.build())
    placed = flatten_dict(shardings(params, axes, make_mesh("data=2,fsdp=2,tensor=2")), sep=".")
    assert placed.keys() == flatten_dict(params, sep=".").keys()
    assert tuple(placed["patch_embedding.W_patch"].spec) == ("tensor", "fsdp")
    assert tuple(placed["patch_embedding.b_patch"].spec) == ()


@pytest.mark.slow
def test_heads_read_features_of_the_class_token_the_mean_or_a_distillation_token() -> None:
    """Registers are no patches: those after the class token change the mean by attention only."""
    both = replace(CLASS, pooling="class_and_mean", n_registers=2)
    x_TD = np.random.default_rng(0).normal(size=(15, 12))
    assert_close(both.pool(x_TD), np.concatenate([x_TD[0], x_TD[3:].mean(0)]))
    model, params = build(replace(CLASS, pooling="distilled"))
    x_F = apply(model, params, PIXELS[0], method="encode")
    heads = [x_F[:12] @ params["W_out"] + params["b_out"], x_F[12:] @ params["W_distilled"] + params["b_distilled"]]
    assert_close(apply(model, params, PIXELS[0]), np.mean(heads, axis=0))
    assert count_parameters(params) == count_parameters(abstract_params(CLASS.build())) + 12 + 12 * 5 + 5


def test_without_classes_the_output_is_the_features() -> None:
    config = replace(CLASS, n_classes=0)
    model, params = build(config)
    assert_close(apply(model, params, PIXELS[0]), apply(model, params, PIXELS[0], method="encode"))
    assert "W_out" not in params and config.contract.n_classes is None
    assert config.with_head(CLASS) == CLASS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gate_bias": True}, "gate_bias is true, but with bias True and activation 'gelu' no gate has one"),
        ({"n_blocks": 0}, "n_blocks is 0"),
        ({"patch_size": (4, 2, 1)}, "patch_size is"),
        ({"patch_size": (0, 2)}, "patch_size is"),
        ({"patch_size": (5, 2)}, r"patch_size \(5, 2\) does not divide image_size \(12, 8\)"),
        ({"pooling": "max"}, "pooling is 'max'"),
        ({"mean": (0.1, 0.2)}, r"mean is \(0.1, 0.2\); give 1 number"),
        ({"std": (0.0,)}, r"std is 0\.0; it must be above 0"),
        ({"std": (float("nan"),)}, r"std is nan; it must be a finite number"),
    ],
)
def test_an_invalid_config_is_refused_with_its_value(changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(CLASS, **changes)

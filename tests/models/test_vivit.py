"""The Video Vision Transformer: against Hugging Face's where attention is joint, and by its properties.

Their side is stored; `tests/fixtures/make_vision_hf.py` made it.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxformer.errors import UserError
from jaxformer.inspect import attention_maps
from jaxformer.models.blocks import make_block
from jaxformer.models.vivit import FactorisedViViT, ViViTConfig
from jaxformer.nn.execution import Execution
from jaxformer.runs.run import abstract_params
from tests.arrays import apply, assert_close, random_params
from tests.helpers import ROOT

JOINT = ViViTConfig(
    image_size=(8, 6), channels=1, n_classes=5, patch_size=(4, 2), d_model=12, n_heads=3, d_ff=(17,), n_blocks=2,
    dropout=0.3, n_frames=6, n_temporal_blocks=1,
)  # fmt: skip
FACTORISED = replace(JOINT, attention="factorised")
PIXELS = np.random.default_rng(0).integers(256, size=(3, 6, 8, 6, 1)).astype(np.uint8)
N_TIMES, N_PATCHES = 3, 6
"""Tubelets of 2 frames of 6; patches of 4 x 2 of 8 x 6."""


def build(config: ViViTConfig) -> tuple:
    return config.build(), random_params(config.build(), *config.example())


@pytest.fixture(scope="module")
def case() -> tuple:
    return build(FACTORISED)


@pytest.mark.slow
def test_logits_are_those_of_hugging_face() -> None:
    """Two videos, 1e-5 of the largest logit."""
    with np.load(ROOT / "tests/fixtures/vivit_hf.npz") as stored:
        theirs = dict(stored)
    weights = {name.removeprefix("weights."): w.astype(np.float32) for name, w in theirs.items() if "weights." in name}
    config = ViViTConfig(
        image_size=(12, 8), n_classes=5, patch_size=(4, 2), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), d_model=24,
        n_heads=3, d_ff=(40,), n_blocks=2, n_frames=6,
    )  # fmt: skip
    model, params = config.build(), unflatten_dict(weights, sep=".")
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, abstract_params(model))
    assert_close(jax.jit(jax.vmap(partial(model.apply, {"params": params})))(theirs["pixels"]), theirs["logits"])


@pytest.mark.slow
def test_the_factorised_encoder_is_a_loop_over_times() -> None:
    """The same modules called for one time after the other, without a mask, and then for what came out."""
    model, params = build(FACTORISED)

    def loop(model: FactorisedViViT, pixels: jax.Array) -> jax.Array:
        plain = make_block(FACTORISED, Execution())
        frames = ((pixels / 255 - 0.5) / 0.5).astype(np.float32)
        said = []
        for time in range(N_TIMES):
            tubelets = [
                frames[2 * time : 2 * time + 2, 4 * y : 4 * y + 4, 2 * x : 2 * x + 2].reshape(-1)
                for y in range(2)
                for x in range(3)
            ]
            x_TD = model.spatial_position_embedding(model.patch_embedding(jnp.stack(tubelets)))
            for i in range(2):
                x_TD, _ = plain.apply({"params": params[f"spatial_blocks_{i}"]}, x_TD)
            x_TD = model.spatial_norm(x_TD)
            said.append(x_TD[0])
        x_TD = model.temporal_position_embedding(jnp.stack(said))
        x_TD, _ = model.temporal_blocks[0](x_TD)
        x_TD = model.temporal_norm(x_TD)
        return x_TD[0]

    wanted = jax.jit(lambda pixels: model.apply({"params": params}, pixels, method=loop))(PIXELS[0])
    assert_close(apply(model, params, PIXELS[0], method="encode"), wanted)


@pytest.mark.slow
def test_attention_can_be_looked_at_and_knows_the_times_apart() -> None:
    model, params = build(FACTORISED)
    *spatial, temporal = jax.device_get(jax.jit(attention_maps, static_argnums=0)(model, params, PIXELS[0]))
    n = N_TIMES * (1 + N_PATCHES)
    seen = np.kron(np.eye(N_TIMES), np.ones((1 + N_PATCHES, 1 + N_PATCHES))) > 0
    assert len(spatial) == 2
    for weights_HTT in spatial:
        np.testing.assert_array_equal(weights_HTT > 0, np.broadcast_to(seen, (3, n, n)))
        assert_close(weights_HTT.sum(-1), np.ones((3, n)))
    assert temporal.shape == (3, 1 + N_TIMES, 1 + N_TIMES)
    joint, params = build(JOINT)
    n = 1 + N_TIMES * N_PATCHES
    maps = jax.jit(attention_maps, static_argnums=0)(joint, params, PIXELS[0])
    assert [weights.shape for weights in maps] == [(3, n, n)] * 2


@pytest.mark.slow
def test_every_pixel_of_every_frame_is_felt(case: tuple) -> None:
    model, params = case
    pixels = (PIXELS[0] / 255).astype(np.float32)
    felt = np.asarray(jax.jit(jax.grad(lambda x: model.apply({"params": params}, x)[0]))(pixels))
    assert np.isfinite(felt).all() and (felt != 0).all()


def test_time_has_a_direction(case: tuple) -> None:
    """A video played backwards is another one."""
    model, params = case
    forward, backward = (apply(model, params, pixels) for pixels in (PIXELS[0], PIXELS[0, ::-1]))
    assert np.abs(np.subtract(forward, backward)).max() > 0.05


@pytest.mark.slow
def test_a_batch_equals_its_examples_computed_separately(case: tuple) -> None:
    model, params = case
    together = np.asarray(jax.jit(jax.vmap(partial(model.apply, {"params": params})))(PIXELS))
    assert together.shape == (3, 5)
    for row, pixels in zip(together, PIXELS, strict=True):
        assert_close(row, apply(model, params, pixels))


@pytest.mark.slow
def test_execution_changes_neither_output_nor_gradient(case: tuple) -> None:
    model, params = case

    @partial(jax.jit, static_argnums=0)
    def value_and_grad(model: FactorisedViViT) -> tuple:
        rngs = {"dropout": jax.random.key(0)}
        return jax.value_and_grad(lambda params: model.apply({"params": params}, PIXELS[0], rngs=rngs)[1])(params)

    wanted = value_and_grad(model)
    got = value_and_grad(model.config.build(Execution(remat="block", scan=True)))
    for (path, ours), theirs in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        # The bias of all keys alike shifts all scores of a query, which changes no weight.
        assert np.abs(theirs).max() > (-1 if "b_K" in str(path) else 0), path
        assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tubelet_frames": 4}, "tubelet_frames 4 does not divide n_frames 6"),
        ({"attention": "axial"}, "attention is 'axial'"),
        ({"n_temporal_blocks": 0}, "n_temporal_blocks is 0"),
    ],
)
def test_an_invalid_config_is_refused_with_its_value(changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(JOINT, **changes)

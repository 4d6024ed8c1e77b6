"""CLIP: against Hugging Face's, and by its properties.

Their side is stored; `tests/fixtures/make_clip_hf.py` made it.
"""

from dataclasses import replace
from functools import partial
from math import exp, log

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxformer.config.fields import from_dict, to_dict
from jaxformer.errors import UserError
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig, TextTowerConfig
from jaxformer.ops import RoPE
from jaxformer.runs.run import abstract_params, count_parameters
from tests.arrays import apply, assert_close, random_params, random_tokens
from tests.helpers import ROOT

V, T, E = 23, 6, 10
VISION = ImageTowerConfig(
    image_size=8, patch_size=4, mean=(0.5,), std=(0.2,), d_model=12, n_heads=3, d_ff=(17,), n_blocks=2
)
TEXT = TextTowerConfig(V, T, d_model=8, n_heads=2, d_ff=(13,), n_blocks=2)
CONFIG = CLIPConfig(vision=VISION, text=TEXT, d_joint=E)
OTHER = replace(
    CONFIG,
    vision=replace(VISION, positions="sinusoidal", norm="rmsnorm", activation="gelu"),
    text=replace(TEXT, positions="none", rope=RoPE(), norm_placement="post", attention_bias=False),
)
IMAGE = np.random.default_rng(0).integers(256, size=(8, 8, 1)).astype(np.uint8)
TOKENS_T, VALID_T = np.asarray(random_tokens(V, T)), np.arange(T) < 4


def build(config: CLIPConfig) -> tuple:
    model = config.build()
    return model, random_params(model, *config.example())


@pytest.fixture(scope="module")
def case() -> tuple:
    return build(CONFIG)


@pytest.mark.slow
def test_embeddings_logits_and_loss_are_those_of_hugging_face() -> None:
    """Five pairs, texts of several lengths: 1e-5 of the largest number."""
    with np.load(ROOT / "tests/fixtures/clip_hf.npz") as stored:
        theirs = dict(stored)
    weights = {name.removeprefix("weights."): w.astype(np.float32) for name, w in theirs.items() if "weights." in name}
    config = CLIPConfig(
        vision=ImageTowerConfig(
            image_size=12, patch_size=4, mean=(0.5, 0.4, 0.3), std=(0.25, 0.3, 0.2), d_model=24, n_heads=3, d_ff=(40,),
            n_blocks=2,
        ),
        text=TextTowerConfig(43, 9, d_model=16, n_heads=2, d_ff=(28,), n_blocks=3),
        d_joint=20,
    )  # fmt: skip
    model, params = config.build(), unflatten_dict(weights, sep=".")
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, abstract_params(model))
    assert len(set(theirs["valid"].sum(1))) == 5
    inputs = (theirs["images"], theirs["tokens"], theirs["valid"])
    call = jax.jit(jax.vmap(partial(model.apply, {"params": params}), out_axes=(0, 0, None)))
    image_BE, text_BE, log_scale = call(*inputs)
    assert_close(image_BE, theirs["image"])
    assert_close(text_BE, theirs["text"])
    logits_BB = jnp.exp(log_scale) * image_BE @ text_BE.T
    assert_close(logits_BB, theirs["logits"])
    own = [np.diag(jax.nn.log_softmax(logits_BB, axis)).mean() for axis in (0, 1)]  # what `Contrastive` minimises
    assert_close(-np.mean(own), theirs["loss"])


@pytest.mark.slow
def test_the_defaults_have_as_many_parameters_as_the_release() -> None:
    """151,277,313: `openai/clip-vit-base-patch32`."""
    assert count_parameters(abstract_params(CLIPConfig().build())) == 151_277_313


@pytest.mark.slow
def test_embeddings_have_length_1_and_are_float32_whatever_is_computed_in(case: tuple) -> None:
    model, params = case
    narrow = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), params)
    image_E, text_E, _ = apply(model, narrow, IMAGE, TOKENS_T, VALID_T)
    for found in (image_E, text_E):
        assert found.shape == (E,) and found.dtype == jnp.float32
        assert_close(np.linalg.norm(found), 1.0, 1e-6)


@pytest.mark.slow
def test_the_content_of_padding_changes_no_bit_and_padding_is_as_if_it_were_not_there(case: tuple) -> None:
    model, params = case
    encode = partial(apply, model, params, method="encode_text")
    padded = encode(TOKENS_T, VALID_T)
    np.testing.assert_array_equal(padded, encode(np.where(VALID_T, TOKENS_T, (TOKENS_T + 1) % V), VALID_T))
    assert_close(padded, encode(TOKENS_T[:4]))
    assert np.abs(padded - encode(TOKENS_T, np.ones(T, bool))).max() > 0.1


@pytest.mark.slow
def test_text_attention_is_causal_and_the_last_token_attends_to_all() -> None:
    """What a token can change is the place of every text that ends with it or after it."""
    model, params = build(CONFIG)

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None))
    @partial(jax.vmap, in_axes=(None, 0))
    def encode(tokens_T, n):
        return model.apply({"params": params}, tokens_T, jnp.arange(T) < n, method="encode_text")

    lengths = np.arange(1, T + 1)
    changed_TT = np.where(np.eye(T, dtype=bool), (TOKENS_T + 1) % V, TOKENS_T)
    texts_TT = np.broadcast_to(TOKENS_T, (T, T))
    differ_TN = np.abs(np.asarray(encode(changed_TT, lengths)) - encode(texts_TT, lengths)).max(-1)
    np.testing.assert_array_equal(differ_TN > 1e-4, np.arange(T)[:, None] < lengths)
    assert differ_TN[np.arange(T)[:, None] >= lengths].max() < 1e-6


@pytest.mark.slow
def test_every_patch_matters_where_it_is(case: tuple) -> None:
    model, params = case
    encode = partial(apply, model, params, method="encode_image")
    whole = np.asarray(encode(IMAGE))
    for y, x in ((0, 0), (0, 4), (4, 0), (4, 4)):
        part = IMAGE.copy()
        part[y : y + 4, x : x + 4] = 0
        assert np.abs(encode(part) - whole).max() > 1e-3
    moved = np.concatenate([IMAGE[4:], IMAGE[:4]])  # the same patches elsewhere
    assert np.abs(encode(moved) - whole).max() > 1e-3


@pytest.mark.slow
def test_a_batch_equals_its_pairs_computed_separately(case: tuple) -> None:
    model, params = case
    images = np.stack([IMAGE, IMAGE[::-1], IMAGE[:, ::-1]])
    tokens_BT, valid_BT = np.asarray(random_tokens(V, 3, T, seed=2)), np.arange(T) < np.array([[6], [1], [3]])
    together = jax.jit(jax.vmap(partial(model.apply, {"params": params})))(images, tokens_BT, valid_BT)
    for i in range(3):
        alone = apply(model, params, images[i], tokens_BT[i], valid_BT[i])
        for ours, wanted in zip(together, alone, strict=True):
            assert_close(ours[i], wanted)


def test_the_scale_stops_at_100_and_its_gradient_does_not() -> None:
    model, params = build(CONFIG)
    scale = lambda t: jnp.exp(model.apply({"params": {**params, "t": t}}, method="log_scale"))  # noqa: E731
    value_and_grad = jax.jit(jax.value_and_grad(scale))
    for t, wanted in ((2.0, exp(2.0)), (log(100), 100.0), (5.0, 100.0)):
        value, grad = value_and_grad(np.float32(t))
        assert_close(value, wanted)
        assert_close(grad, wanted)  # of exp


def test_the_first_scale_is_that_of_the_paper() -> None:
    """Cosines are divided by 0.07 (section 2.5)."""
    log_scale, _ = CONFIG.build().init_with_output(jax.random.key(0), method="log_scale")
    assert_close(jnp.exp(log_scale), 1 / 0.07)


def test_both_towers_come_back_from_json() -> None:
    """Though they are configs of models, they have one class each, and no `kind`."""
    assert from_dict(CLIPConfig, to_dict(OTHER)) == OTHER


def test_more_tokens_than_positions_are_refused() -> None:
    model, params = build(CONFIG)
    with pytest.raises(ValueError, match="7 tokens, but the model has 6 learned positions"):
        model.apply({"params": params}, random_tokens(V, T + 1), method="encode_text")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: replace(VISION, patch_size=3), r"patch_size \(3, 3\) does not divide image_size \(8, 8\)"),
        (lambda: replace(VISION, patch_size=0), "patch_size is 0"),
        (lambda: replace(VISION, std=(0.0,)), r"std is 0\.0; it must be above 0"),
        (lambda: replace(VISION, mean=(0.5, 0.5)), r"mean is \(0.5, 0.5\)"),
        (lambda: replace(CONFIG, temperature=0.001), "temperature is 0.001; it must be at least 0.01"),
    ],
)
def test_an_invalid_config_is_refused_with_its_value(change, said) -> None:
    with pytest.raises(UserError, match=said):
        change()

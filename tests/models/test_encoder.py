"""The encoder: against Hugging Face's BERT, and by its properties.

Their side is stored; `tests/fixtures/make_encoders_torch.py` made it.
"""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxformer.errors import UserError
from jaxformer.inspect import attention_maps
from jaxformer.models.decoder import BlockAttention
from jaxformer.models.encoder import ClassifierConfig, EncoderConfig
from jaxformer.nn.embedding import Embedding
from jaxformer.nn.execution import Execution
from jaxformer.ops import RoPE
from jaxformer.runs.run import abstract_params, count_parameters
from tests.arrays import apply, assert_close, build, normal, random_tokens
from tests.helpers import ROOT, slow

V, T, D, C = 23, 7, 12, 3
MASKED = EncoderConfig(V, T, D, n_heads=3, head_dim=5, d_ff=(17,), n_blocks=2, n_segments=2)
PRE = replace(
    MASKED, norm_placement="pre", norm="rmsnorm", embedding_norm=False, positions="none", rope=RoPE(), head_dim=4
)
FIRST = ClassifierConfig(V, T, D, n_heads=3, d_ff=(17,), n_blocks=1, n_classes=C)
CONFIGS = {"masked": MASKED, "pre": PRE, "first": FIRST}
TOKENS_T, VALID_T = np.asarray(random_tokens(V, T)), np.arange(T) < 4


@pytest.fixture(scope="module", params=["masked", slow("pre")])
def case(request: pytest.FixtureRequest) -> tuple:
    return build(CONFIGS[request.param])


@pytest.mark.slow
@pytest.mark.parametrize("logits", ["logits", "classes"])
def test_logits_are_those_of_bert(logits: str) -> None:
    """Two texts of two segments, one padded: at every token, 1e-5 of the largest logit."""
    with np.load(ROOT / "tests/fixtures/bert_hf.npz") as stored:
        theirs = dict(stored)
    weights = {name.removeprefix("weights."): w.astype(np.float32) for name, w in theirs.items() if "weights." in name}
    shape = {"d_model": 24, "n_heads": 3, "d_ff": (40,), "n_blocks": 2, "n_segments": 2, "activation": "gelu_exact"}
    if logits == "classes":  # the same encoder, another head
        config = ClassifierConfig(41, 16, **shape, n_classes=5)
        weights = {name: w for name, w in weights.items() if not name.startswith(("head", "b_out"))}
        weights = {name.replace("classifier.", "head."): w for name, w in weights.items()}
    else:
        config = EncoderConfig(41, 16, **shape)
        weights = {name: w for name, w in weights.items() if not name.startswith("classifier.")}
    model, params = config.build(), unflatten_dict(weights, sep=".")
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, abstract_params(model))
    ours = jax.jit(jax.vmap(partial(model.apply, {"params": params})))(
        theirs["source"], theirs["valid"], theirs["segments"]
    )
    assert not theirs["valid"].all()
    at = theirs["valid"] if logits == "logits" else ...
    assert_close(np.asarray(ours)[at], theirs[logits][at])


@pytest.mark.slow
def test_every_token_feels_every_token_and_none_feels_padding() -> None:
    """By the gradient of each feature with respect to each embedding."""
    model, params = build(replace(MASKED, n_blocks=1))
    weights_TD = normal(T, D)

    def mixed(nudge_TD: jax.Array) -> jax.Array:
        def add(call, args, kwargs, context):
            out = call(*args, **kwargs)
            is_embedding = isinstance(context.module, Embedding) and context.method_name == "__call__"
            return out + nudge_TD if is_embedding else out

        with nn.intercept_methods(add):
            return (weights_TD * model.apply({"params": params}, TOKENS_T, VALID_T, method="features")).sum(-1)

    felt_TS = (np.asarray(jax.jit(jax.jacrev(mixed))(np.zeros((T, D), np.float32))) != 0).any(-1)
    np.testing.assert_array_equal(felt_TS, np.outer(VALID_T, VALID_T))


def test_the_content_of_padding_changes_no_bit(case: tuple) -> None:
    """Of no number that comes out, also at padded places."""
    model, params = case
    other_T = np.where(VALID_T, TOKENS_T, (TOKENS_T + 1) % V)
    np.testing.assert_array_equal(apply(model, params, TOKENS_T, VALID_T), apply(model, params, other_T, VALID_T))


def test_padding_is_as_if_it_were_not_there(case: tuple) -> None:
    model, params = case
    padded, alone = apply(model, params, TOKENS_T, VALID_T), apply(model, params, TOKENS_T[:4])
    assert_close(padded if padded.shape == (C,) else np.asarray(padded)[:4], alone)


def test_a_batch_equals_its_examples_computed_separately(case: tuple) -> None:
    model, params = case
    tokens_BT, valid_BT = np.asarray(random_tokens(V, 3, T, seed=2)), np.arange(T) < np.array([[7], [1], [4]])
    together = np.asarray(jax.jit(jax.vmap(partial(model.apply, {"params": params})))(tokens_BT, valid_BT))
    for row in zip(together, tokens_BT, valid_BT, strict=True):
        assert_close(row[0], apply(model, params, *row[1:]))


@pytest.mark.slow
def test_chosen_places_have_the_logits_they_have_among_all() -> None:
    """So that a loss over masked tokens needs no others."""
    model, params = build(MASKED)
    at = [1, 3]
    x_TD = np.asarray(apply(model, params, TOKENS_T, VALID_T, method="features"))
    chosen = apply(model, params, x_TD[at], method="unembed")
    assert_close(chosen, np.asarray(apply(model, params, TOKENS_T, VALID_T))[at])


@pytest.mark.slow
def test_segments_matter_and_are_the_first_where_none_are_given() -> None:
    model, params = build(MASKED)
    without = apply(model, params, TOKENS_T)
    np.testing.assert_array_equal(apply(model, params, TOKENS_T, None, np.zeros(T, np.int32)), without)
    second = apply(model, params, TOKENS_T, None, np.arange(T, dtype=np.int32) // 4)
    assert np.abs(np.subtract(second, without)).max() > 0.1


@pytest.mark.slow
def test_bert_base_has_as_many_parameters_as_its_release() -> None:
    """109,514,298: `bert-base-uncased` with its head for masked tokens, without the pooler and next sentences."""
    config = EncoderConfig(30_522, 512, 768, n_blocks=12, n_heads=12, d_ff=(3072,), n_segments=2)
    assert count_parameters(abstract_params(config.build())) == 109_514_298


def test_what_a_model_does_not_have_is_refused() -> None:
    model, params = build(FIRST)
    call = partial(model.apply, {"params": params})
    with pytest.raises(ValueError, match="8 tokens, but the model has 7 learned positions"):
        jax.eval_shape(call, random_tokens(V, T + 1))
    with pytest.raises(ValueError, match="segments for a model whose n_segments is 0"):
        jax.eval_shape(call, TOKENS_T, None, TOKENS_T)


@pytest.mark.parametrize(
    ("name", "value"),
    [("n_blocks", 0), ("n_segments", -1), ("embedding_std", -1.0), ("n_classes", 0), ("pooling", "last")],
)
def test_an_invalid_config_is_refused_with_its_value(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{name} is {value!r}"):
        replace(FIRST, **{name: value})


LOCAL = BlockAttention(2, RoPE(10.0))
MODERN = replace(
    PRE, norm="layernorm_no_bias", embedding_norm=True, first_norm=False, attention=(BlockAttention(), LOCAL, LOCAL),
    n_blocks=4, activation="geglu_exact", bias=False, attention_bias=False, head_bias=False, embedding_dim=8,
)  # fmt: skip


@pytest.mark.slow
def test_blocks_that_differ_are_scanned_in_groups_and_local_ones_see_their_window() -> None:
    model, params = build(MODERN)
    assert "attention_norm" not in params["blocks_0"] and "attention_norm" in params["blocks_1"]
    assert params["embedding"]["W_E"].shape == (V, 8) and params["embedding_projection"]["W_1"].shape == (8, D)
    scanned = MODERN.build(Execution(scan=True))
    assert_close(apply(scanned, params, TOKENS_T, VALID_T), apply(model, params, TOKENS_T, VALID_T))
    maps = jax.device_get(jax.jit(attention_maps, static_argnums=0)(model, params, TOKENS_T))
    far_TT = abs(np.arange(T)[:, None] - np.arange(T)) > 1
    assert [bool((pattern[:, far_TT] == 0).all()) for pattern in maps] == [False, True, True, False]


def test_parts_of_an_encoder_that_do_not_fit_are_refused() -> None:
    for changes, said in (
        ({"first_norm": False}, "first_norm is False, but norm_placement is post; set it to pre"),
        ({"attention": ()}, "attention has 0 values; give at least one, and at most n_blocks, 2"),
        ({"attention": (BlockAttention(),) * 3}, "attention has 3 values"),
    ):
        with pytest.raises(UserError, match=said):
            replace(MASKED, **changes)
    with pytest.raises(UserError, match="head_bias is False, but head is mlp; set it to mlp_norm"):
        replace(FIRST, head_bias=False)

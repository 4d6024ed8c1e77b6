"""The encoder-decoder: against torch and Hugging Face's Marian, and by its properties.

Their side is stored; `tests/fixtures/make_encoders_torch.py` made it.
"""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from jaxformer.errors import UserError
from jaxformer.inspect import named_attention_maps
from jaxformer.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from jaxformer.models.objective import Params
from jaxformer.nn.embedding import Embedding
from jaxformer.nn.parameters import parameter_axes
from jaxformer.ops import RoPE
from jaxformer.ops.masks import EMPTY
from jaxformer.parallel.mesh import make_mesh, shardings
from jaxformer.runs.run import count_parameters
from tests.arrays import apply, assert_close, assert_same_however_computed, normal, random_params, random_tokens
from tests.helpers import ROOT

V, S, T, D = 23, 7, 5, 12
POST = EncoderDecoderConfig(V, 11, D, n_heads=3, head_dim=5, d_ff=(17,), n_encoder_blocks=1, n_decoder_blocks=2)
CONFIGS = {
    "post": POST,
    "rope": replace(
        POST, positions="none", rope=RoPE(10.0), head_dim=4, attention_bias=True, local_heads=3, diagonal_heads=2,
        norm="rmsnorm", norm_placement="pre", activation="swiglu", n_decoder_blocks=1,
    ),
    "learned": replace(POST, positions="learned", n_decoder_blocks=1),
}  # fmt: skip
SOURCE_S, TARGET_T = np.asarray(random_tokens(V, S)), np.asarray(random_tokens(V, T, seed=1))
VALID_S = np.arange(S) < 4
INPUTS = (SOURCE_S, VALID_S, TARGET_T)


def build(config: EncoderDecoderConfig) -> tuple[EncoderDecoder, Params]:
    model = config.build()
    return model, random_params(model, *INPUTS)


def fixture(file: str, part: str = "") -> tuple[Params, dict[str, np.ndarray]]:
    """Parameters, and what else is stored."""
    with np.load(ROOT / "tests/fixtures" / file) as stored:
        arrays = {name.removeprefix(part): stored[name] for name in stored.files if name.startswith(part)}
    weights = {name.removeprefix("weights."): w for name, w in arrays.items() if name.startswith("weights.")}
    return unflatten_dict({name: w.astype(np.float32) for name, w in weights.items()}, sep="."), arrays


@pytest.mark.slow
@pytest.mark.parametrize(("file", "placement"), [("transformer_torch.npz", "pre"), ("marian_hf.npz", "")])
def test_logits_are_those_of_torch_and_of_marian(file: str, placement: str) -> None:
    """All norms, biases and masks of two sources, the second padded; 1e-5 of the largest logit."""
    params, theirs = fixture(file, f"{placement}." if placement else "")
    config = EncoderDecoderConfig(
        41, 16, 24, n_heads=3, attention_bias=True, d_ff=(40,), norm_placement=placement or "post",
        n_encoder_blocks=2, n_decoder_blocks=2,
    )  # fmt: skip
    assert not theirs["valid"].all()
    model, inputs = config.build(), [theirs[name] for name in ("source", "valid", "target")]
    shapes = jax.tree.map(jnp.shape, random_params(model, *(x[0] for x in inputs)))
    assert jax.tree.map(jnp.shape, params) == shapes
    ours = jax.jit(jax.vmap(partial(model.apply, {"params": params})))(*inputs)
    assert_close(ours, theirs["logits"])


@pytest.fixture(scope="module")
def case() -> tuple[EncoderDecoder, Params]:
    return build(CONFIGS["rope"])


@pytest.mark.slow
def test_no_logit_depends_on_a_later_target_token_or_source_padding(case: tuple) -> None:
    """By the gradient with respect to what is embedded: nothing from there, something from everywhere else."""
    model, params = case
    weights_TV = normal(T, V)

    def mixed_logits(nudge_SD: jax.Array, nudge_TD: jax.Array) -> jax.Array:
        nudges = iter((nudge_SD, nudge_TD))  # the source is embedded first

        def add(call, args, kwargs, context):
            out = call(*args, **kwargs)
            is_embedding = isinstance(context.module, Embedding) and context.method_name == "__call__"
            return out + next(nudges) if is_embedding else out

        with nn.intercept_methods(add):
            return (weights_TV * model.apply({"params": params}, *INPUTS)).sum(-1)

    nudges = np.zeros((S, D), np.float32), np.zeros((T, D), np.float32)
    source, target = jax.device_get(jax.jit(jax.jacrev(mixed_logits, argnums=(0, 1)))(*nudges))
    np.testing.assert_array_equal((source != 0).any(-1), np.broadcast_to(VALID_S, (T, S)))
    np.testing.assert_array_equal((target != 0).any(-1), np.tri(T, dtype=bool))


@pytest.mark.slow
def test_the_content_of_padding_changes_no_bit_and_padding_is_as_if_it_were_not_there(case: tuple) -> None:
    model, params = case
    logits_TV, other_S = apply(model, params, *INPUTS), np.where(VALID_S, SOURCE_S, (SOURCE_S + 1) % V)
    np.testing.assert_array_equal(logits_TV, apply(model, params, other_S, VALID_S, TARGET_T))
    assert_close(apply(model, params, SOURCE_S[:4], None, TARGET_T), logits_TV)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["post", "rope"])
def test_decoding_with_a_cache_equals_the_full_pass(name: str) -> None:
    """Two tokens at once, the second place of three being padding, then one at a time."""
    model, params = build(CONFIGS[name])
    n = 2

    @jax.jit
    def decode(params: Params) -> list[jax.Array]:
        call = partial(model.apply, {"params": params})
        cache = call(SOURCE_S, VALID_S, T + 1, method="start")
        padded_T, positions_T = jnp.append(TARGET_T[:n], 0), jnp.array([0, 1, EMPTY])
        x_TD, cache = call(padded_T, positions_T, cache, 0, method="extend")
        features = [x_TD[:n]]
        for t in range(n, T):
            x_1D, cache = call(TARGET_T[t : t + 1], jnp.array([t]), cache, t + 1, method="extend")
            features.append(x_1D)
        return call(jnp.concatenate(features), method="unembed")

    assert_close(decode(params), apply(model, params, *INPUTS))


@pytest.mark.slow
def test_a_batch_equals_its_examples_computed_separately(case: tuple) -> None:
    model, params = case
    source_BS, target_BT = (np.asarray(random_tokens(V, 3, n, seed=seed)) for n, seed in ((S, 2), (T, 3)))
    valid_BS = np.arange(S) < np.array([[7], [1], [4]])
    together = np.asarray(jax.jit(jax.vmap(partial(model.apply, {"params": params})))(source_BS, valid_BS, target_BT))
    for row in zip(together, source_BS, valid_BS, target_BT, strict=True):
        assert_close(row[0], apply(model, params, *row[1:]))


@pytest.mark.slow
def test_execution_changes_neither_loss_nor_gradient() -> None:
    config = replace(POST, norm_placement="pre", dropout=0.3)
    params = random_params(config.build(), *INPUTS)

    assert_same_however_computed(config, params, *INPUTS)


@pytest.mark.slow
def test_dropout_falls_on_the_embedding() -> None:
    """Where parts add nothing, as their last matrices are 0, the stream that the encoder's norm reads is the embedding,
    times √D, of which half is 0 and the rest twice as large."""
    model, params = build(replace(POST, norm_placement="pre", dropout=0.5, positions="none", n_decoder_blocks=1))
    flat = flatten_dict(params, sep=".")
    last = (".W_O", ".mlp.W_2", ".mlp.b_2")
    params = unflatten_dict({name: np.asarray(w) * (not name.endswith(last)) for name, w in flat.items()}, sep=".")

    @jax.jit
    def stream() -> jax.Array:
        streams: list[jax.Array] = []

        def listen(call, args, kwargs, context):
            if context.module.name == "encoder_norm":
                streams.append(args[0])
            return call(*args, **kwargs)

        with nn.intercept_methods(listen):
            model.apply({"params": params}, *INPUTS, rngs={"dropout": jax.random.key(0)})
        return streams[0]

    embedded_SD = np.sqrt(D) * np.asarray(params["embedding"]["W_E"])[SOURCE_S]
    dropped = np.asarray(stream()) == 0
    assert_close(stream(), np.where(dropped, 0, 2 * embedded_SD))
    # 84 draws: the share is known to √(0.25/84) = 0.055; this is four of those.
    assert dropped.mean() == pytest.approx(0.5, abs=0.22)


def test_source_and_target_caches_have_the_given_dtype() -> None:
    """Both that of the target and what is kept of the source."""
    model, params = build(POST)
    cache = jax.eval_shape(lambda: model.apply({"params": params}, SOURCE_S, VALID_S, T, jnp.bfloat16, method="start"))
    assert cache.source[0].k_GKS.values.shape == (3, 5, S)
    assert {leaf.dtype for leaf in jax.tree.leaves((cache.source, cache.target.layers))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_maps_name_their_layers_and_padding_has_no_weight() -> None:
    model, params = build(POST)
    maps = jax.jit(named_attention_maps, static_argnums=0)(model, params, *INPUTS)
    assert set(maps) == {
        "encoder_blocks.0.attention", "decoder_blocks.0.attention", "decoder_blocks.0.cross_attention",
        "decoder_blocks.1.attention", "decoder_blocks.1.cross_attention",
    }  # fmt: skip
    crossing = maps["decoder_blocks.1.cross_attention"]
    assert crossing.shape == (3, T, S)
    assert_close(crossing.sum(-1), np.ones((3, T)))
    np.testing.assert_array_equal(np.asarray(crossing) > 0, np.broadcast_to(VALID_S, (3, T, S)))


@pytest.mark.slow
def test_base_has_as_many_parameters_as_counted_by_hand() -> None:
    """The paper's 65 million, table 3: 18.9 million in the table of 37,000 tokens, and 44 million in the blocks."""
    V, D, F = 37_000, 512, 2048
    mlp, norm = 2 * D * F + F + D, 2 * D
    encoder, decoder = 4 * D * D + mlp + 2 * norm, 8 * D * D + mlp + 3 * norm
    config = EncoderDecoderConfig(vocab_size=V)
    model = config.build()
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), *INPUTS)["params"])
    assert count_parameters(params) == V * D + 6 * (encoder + decoder) == 63_045_632


def test_every_parameter_has_a_sharding() -> None:
    model = replace(POST, positions="learned").build()
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), *INPUTS)["params"])
    placed = flatten_dict(shardings(params, parameter_axes(model), make_mesh("data=2,fsdp=2,tensor=2")), sep=".")
    assert placed.keys() == flatten_dict(params, sep=".").keys()
    crossing = placed["decoder_blocks_0.cross_attention.W_Q"].spec
    assert crossing == placed["decoder_blocks_0.attention.W_Q"].spec == PartitionSpec("fsdp", None, None)  # 3 heads


def test_more_tokens_than_learned_positions_are_refused() -> None:
    model, params = build(CONFIGS["learned"])
    for source, target in ((random_tokens(V, 12), TARGET_T), (SOURCE_S, random_tokens(V, 12))):
        with pytest.raises(ValueError, match="12 tokens, but the model has 11 learned positions"):
            jax.eval_shape(partial(model.apply, {"params": params}), source, None, target)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"d_model": 13, "n_heads": 5, "head_dim": None}, ["13", "5", "head_dim"]),
        ({"positions": "none", "rope": RoPE(), "head_dim": 5}, ["5", "even"]),
        ({"n_decoder_blocks": 0}, ["n_decoder_blocks", "0"]),
        ({"norm": "batchnorm"}, ["norm", "batchnorm"]),
        ({"local_heads": 4}, ["local_heads is 4", "n_heads is 3"]),
        (
            {"local_heads": 1, "positions": "none", "rope": RoPE(), "head_dim": 4},
            ["local_heads is 1", "set attention_bias"],
        ),
        ({"diagonal_heads": 1, "attention_bias": True}, ["diagonal_heads is 1", "set rope"]),
        (
            {"diagonal_heads": 1, "attention_bias": True, "positions": "none", "rope": RoPE(), "head_dim": 4},
            ["no frequency from 0.05 to 0.35 in heads of width 4", "smaller"],
        ),
        ({"fairseq_sinusoids": True, "positions": "learned"}, ["fairseq_sinusoids is true", "positions are learned"]),
    ],
    ids=str,
)
def test_an_invalid_config_is_refused_with_its_value(fields: dict, said: list[str]) -> None:
    with pytest.raises(UserError) as error:
        replace(POST, **fields)
    assert all(word in str(error.value) for word in said)

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.errors import UserError
from jaxformer.models.decoder import BlockAttention, Decoder, DecoderConfig, ExpertsConfig, LatentsConfig
from jaxformer.models.objective import Params
from jaxformer.nn.embedding import Embedding
from jaxformer.nn.execution import ROUTER, Execution
from jaxformer.nn.experts import routers
from jaxformer.ops import RoPE
from jaxformer.ops.masks import EMPTY
from jaxformer.ops.positions import Llama3Scaling, LongRoPE, Yarn
from jaxformer.runs.run import abstract_params, count_parameters
from tests.arrays import apply, assert_close, build, normal, plain_decoder, random_tokens, rung, rung_like
from tests.helpers import ROOT, slow

V, T, D = 23, 7, 13
TOKENS_T = random_tokens(V, T)
# `two_blocks` and `four_blocks` differ from these in their number of blocks alone.
RUNGS = ("attention_unscaled", "attention_scaled", "residual", "multihead_full", "multihead", "rmsnorm")


def small(name: str) -> DecoderConfig:
    """A rung with prime sizes: width 13, three heads of 13 or 5, and no more than two blocks."""
    config = rung(name)
    assert isinstance(config, DecoderConfig)
    heads = {} if config.n_heads == 1 else {"n_heads": 3, "head_dim": D if name == "multihead_full" else 5}
    n_blocks = min(config.n_blocks, 2)
    return replace(config, vocab_size=V, context_length=T, d_model=D, d_ff=(17, 19), n_blocks=n_blocks, **heads)


PLAIN = plain_decoder(V, T, D, n_blocks=2, n_heads=3, head_dim=5, d_ff=(17,), norm="rmsnorm")
MODERN = replace(
    PLAIN, n_heads=6, n_kv_heads=2, head_dim=10, qk_norm=True, activation="swiglu", bias=False, final_norm=True,
    positions="none", rope=RoPE(), embedding_std=0.5, unembedding="tied", sinks=True,
)  # fmt: skip
LOCAL = BlockAttention(3, RoPE(100.0))
CONFIGS = {name: small(name) for name in RUNGS} | {
    "modern": MODERN,
    "window": rung_like(
        PLAIN,
        attention=BlockAttention(3),
        positions="none",
        rope=RoPE(),
        head_dim=4,
        value_dim=7,
        value_embedding=True,
    ),
    "experts": replace(
        MODERN,
        experts=ExpertsConfig(4, capacity_factor=1.0, shared_expert=True, bias=True),
        activation="clamped_swiglu",
        rope=RoPE(100.0, Yarn(4.0, 8), fraction=0.4, interleaved=True),
    ),
    "no_positions": replace(PLAIN, positions="none", activation="squared_relu"),
    "local and global": rung_like(
        MODERN,
        n_blocks=3,
        attention=(LOCAL, BlockAttention(), LOCAL),
        norm_placement="both",
        activation="geglu",
        embedding_scale=3.0,
        score_scale=0.4,
        logit_soft_cap=2.0,
        attention_bias=True,
        output_bias=False,
        value_embedding=True,
    ),
    "latents": replace(
        MODERN,
        n_kv_heads=None,
        qk_norm=False,
        latents=LatentsConfig(9, 11, rope_width=4, value_width=7),
        experts=ExpertsConfig(4, router="sigmoid", n_groups=2, dense_blocks=1, dense_width=19, shared_expert=True),
    ),
}

CASES = ["modern", slow("experts"), slow("latents")]


def extend(model: Decoder, params: Params, *args: object) -> tuple:
    """Logits in place of features."""
    x_TD, cache = model.apply({"params": params}, *args, method="extend")
    return model.apply({"params": params}, x_TD, method="unembed"), cache


@dataclass(frozen=True)
class Small:
    """A small model and the programs that the tests share."""

    config: DecoderConfig
    model: Decoder
    params: Params

    @cached_property
    def forward(self) -> Callable:
        return jax.jit(partial(self.model.apply, {"params": self.params}))

    @cached_property
    def prefill(self) -> Callable:
        """`(tokens_T, length)`, padded on the right, to logits and a cache with T free slots."""

        def prefill(tokens_T: jax.Array, length: jax.Array) -> tuple:
            positions_T = jnp.where(jnp.arange(T) < length, jnp.arange(T), EMPTY)
            return self._extend(tokens_T, positions_T, self.model.init_cache(2 * T), 0)

        return jax.jit(jax.vmap(prefill))

    @cached_property
    def decode(self) -> Callable:
        """`(tokens_T, length, cache)`: feed the tokens from `length` on, one at a time, from slot T on."""

        def decode(tokens_T: jax.Array, length: jax.Array, cache: tuple) -> jax.Array:
            def step(cache: tuple, i: jax.Array) -> tuple:
                token = jax.lax.dynamic_slice_in_dim(tokens_T, length + i, 1)
                logits_1V, cache = self._extend(token, length[None] + i, cache, T + i)
                return cache, logits_1V[0]

            return jax.lax.scan(step, cache, jnp.arange(T))[1]

        return jax.jit(jax.vmap(decode))

    def _extend(self, *args: object) -> tuple:
        return extend(self.model, self.params, *args)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Small:
    return Small(CONFIGS[request.param], *build(CONFIGS[request.param]))


@contextmanager
def nudged_embeddings(nudge_TD: jax.Array) -> Iterator[None]:
    """Add to each token's row of the embedding, and the first number to all of its row of the value embedding."""

    def add(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> jax.Array:
        out = call(*args, **kwargs)
        if not isinstance(context.module, Embedding) or context.method_name != "__call__":
            return out
        return out + (nudge_TD if context.module.name == "embedding" else nudge_TD[:, :1])

    with nn.intercept_methods(add):
        yield


@pytest.mark.slow
def test_no_output_depends_on_a_later_input() -> None:
    """Nor on whether a later token finds room at an expert."""
    case, weights_TV = Small(CONFIGS["experts"], *build(CONFIGS["experts"])), normal(T, V)

    def mixed_logits(nudge_TD: jax.Array) -> jax.Array:
        with nudged_embeddings(nudge_TD):
            logits_TV = case.model.apply({"params": case.params}, TOKENS_T)
        return (weights_TV * logits_TV).sum(-1)

    gradient_TSD = jax.jit(jax.jacrev(mixed_logits))(jnp.zeros((T, case.config.d_model)))
    felt_TS = (np.asarray(gradient_TSD) != 0).any(-1)
    assert not felt_TS[np.triu_indices(T, 1)].any()
    assert felt_TS.any(axis=1).all()
    if case.config.contract.has_residual_stream:
        assert felt_TS.diagonal().all()
        attention_window = T if (w := case.config.block_windows[0]) == T else case.config.n_blocks * (w - 1)
        distance_TS = np.subtract.outer(np.arange(T), np.arange(T))
        np.testing.assert_array_equal(felt_TS, (distance_TS >= 0) & (distance_TS <= attention_window))


@pytest.mark.slow
def test_prefill_and_decode_at_every_split_equal_the_full_forward(case: Small) -> None:
    full_TV = case.forward(TOKENS_T)
    lengths_B = np.arange(1, T + 1)  # one row a split: a ragged batch
    tokens_BT = np.stack([TOKENS_T] * T)
    prefilled_BTV, cache = case.prefill(tokens_BT, lengths_B)
    decoded_BTV = case.decode(tokens_BT, lengths_B, cache)
    for n, prefilled_TV, decoded_TV in zip(lengths_B, *map(np.asarray, (prefilled_BTV, decoded_BTV)), strict=True):
        assert_close(np.concatenate([prefilled_TV[:n], decoded_TV[: T - n]]), full_TV)


@pytest.mark.slow
def test_the_content_of_padding_changes_no_bit(case: Small) -> None:
    lengths_B = np.minimum(np.arange(1, T + 1), T - 1)  # as many rows as for the splits, whose programs these are
    tokens_BT = np.stack([TOKENS_T] * T)
    other_BT = np.where(np.arange(T) < lengths_B[:, None], tokens_BT, random_tokens(V, T, T, seed=9))
    assert (tokens_BT != other_BT).any(axis=1).all()
    prefilled, other = case.prefill(tokens_BT, lengths_B), case.prefill(other_BT, lengths_B)
    for i, n in enumerate(lengths_B.tolist()):
        np.testing.assert_array_equal(np.asarray(prefilled[0])[i, :n], np.asarray(other[0])[i, :n])
    decoded, other_decoded = (case.decode(tokens_BT, lengths_B, cache) for _, cache in (prefilled, other))
    np.testing.assert_array_equal(np.asarray(decoded)[:, :1], np.asarray(other_decoded)[:, :1])


def test_a_batch_equals_its_examples_computed_separately(case: Small) -> None:
    tokens_BT = random_tokens(V, 5, T, seed=1)
    together = jax.jit(jax.vmap(case.forward))(tokens_BT)
    assert_close(together, np.stack([case.forward(tokens_T) for tokens_T in np.asarray(tokens_BT)]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("modern", "float32", 1e-5),
        ("latents", "float32", 1e-5),
        ("latents", "bfloat16", 0.03),
        ("latents", "int8", 0.03),
    ],
)
def test_a_prompt_without_padding_can_be_split(name: str, dtype: str, tolerance: float) -> None:
    """Into two parts and a step; narrow caches round."""
    model, params = build(CONFIGS[name])
    tokens_T = random_tokens(V, T)
    full_TV = apply(model, params, tokens_T)
    cache, out = model.init_cache(T, dtype), []
    for part in (slice(0, 3), slice(3, T - 1), slice(T - 1, T)):
        positions = jnp.arange(T)[part]
        logits, cache = jax.jit(extend, static_argnums=0)(model, params, tokens_T[part], positions, cache, part.start)
        out.append(logits)
    assert_close(jnp.concatenate(out), full_TV, tolerance)
    np.testing.assert_array_equal(cache.position_S, jnp.arange(T))


@pytest.mark.parametrize("name", ["window"])
def test_a_prefix_is_visible_to_all_and_the_rest_is_causal(name: str) -> None:
    """By the gradient of each output with respect to each embedding. A window bounds it all."""
    config, n = replace(CONFIGS[name], n_blocks=1), 3
    model, params = build(config)
    weights_TV = normal(T, V)

    def mixed_logits(nudge_TD: jax.Array, prefix: jax.Array) -> jax.Array:
        with nudged_embeddings(nudge_TD):
            return (weights_TV * model.apply({"params": params}, TOKENS_T, prefix)).sum(-1)

    felt_TS = (jax.jit(jax.jacrev(mixed_logits))(jnp.zeros((T, D)), jnp.int32(n)) != 0).any(-1)
    wanted = [[(s < n or s <= t) and t - s < config.block_windows[0] for s in range(T)] for t in range(T)]
    np.testing.assert_array_equal(felt_TS, wanted)


def test_a_prefix_language_model_is_called_with_the_length_of_a_prefix() -> None:
    config = replace(PLAIN, prefix=True)
    assert [(x.shape, x.dtype) for x in config.example()] == [((T,), jnp.int32), ((), jnp.int32)]
    assert len(PLAIN.example()) == 1
    assert config.contract.has_prefix and not PLAIN.contract.has_prefix


@pytest.mark.parametrize(("name", "count"), [("residual", 6_500_608), ("rmsnorm", 23_096_320)])
def test_rungs_have_as_many_parameters_as_counted_by_hand(name: str, count: int) -> None:
    # V·D embedding, T·D positions, a block's 3·D² (4·D² with W_O) + MLP 256·2048 + 2048² + 2048·256 with
    # biases 2048 + 2048 + 256 (+ 2·D gains), D·V unembedding; V = 2048, T = 32, D = 256.
    V, T, D, F = 2048, 32, 256, 2048
    blocks, square, gains = (1, 3, 0) if name == "residual" else (4, 4, 2)
    mlp = D * F + F * F + F * D + F + F + D
    assert 2 * V * D + T * D + blocks * (square * D * D + mlp + gains * D) == count
    config = rung(name)
    assert count_parameters(abstract_params(config.build())) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2_124m", 124_439_808),
        ("llama_1b", 1_235_814_400),
    ],
)
def test_published_shapes_have_the_published_number_of_parameters(name: str, count: int) -> None:
    """Of the released weights: GPT-2 small, Llama 3.2 1B."""
    config = load_config(f"{ROOT}/configs/gpt.py:{name}").model
    assert count_parameters(abstract_params(config.build())) == count


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"d_model": 13, "n_heads": 5, "head_dim": None}, ["13", "5"]),
        ({"n_heads": 6, "n_kv_heads": 4}, ["6", "4"]),
        ({"n_kv_heads": 0}, ["n_kv_heads", "0"]),
        ({"local_heads": 1}, ["local_heads is 1", "set rope and attention_bias"]),
        ({"positions": "none", "rope": RoPE(), "head_dim": 5}, ["5", "even"]),
        ({"mlp_logits": True, "residual": True}, ["mlp_logits", "residual"]),
        ({"output_projection": False, "n_heads": 3, "head_dim": 5}, ["15", "13", "head_dim to 13"]),
        ({"output_projection": False, "n_heads": 3, "value_dim": 7}, ["21", "13", "value_dim to 13"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"n_blocks": 0}, ["n_blocks", "0"]),
        ({"attention": {"window": 0}}, ["window", "0"]),
        ({"attention": ()}, ["attention is empty", "at least one"]),
        ({"attention": BlockAttention(3, RoPE(0.5)), "head_dim": 4}, ["rope.base is 0.5", "at least 1"]),
        ({"attention": 8}, ["attention is 8; it must be a BlockAttention"]),
        ({"attention": (BlockAttention(),) * 9 + (BlockAttention(3),)}, ["10 values", "no block has", "window=3"]),
        ({"max_context": 6}, ["max_context", "6", "context_length", "7"]),
        ({"score_scale": 0.0}, ["score_scale", "0.0"]),
        ({"rope": 5e5}, ["rope is 500000.0; it must be a RoPE"]),
        ({"rope": RoPE("a")}, ["rope.base is 'a'; it must be a number"]),
        ({"rope": RoPE(scaling=0.5), "head_dim": 4}, ["rope.scaling is 0.5; it must be at least 1"]),
        ({"rope": RoPE(scaling=Llama3Scaling(8.0, 1.0, 4.0, 0)), "head_dim": 4}, ["original_context is 0"]),
        ({"rope": RoPE(scaling=Llama3Scaling(8.0, 4.0, 4.0, 9)), "head_dim": 4}, ["rope.scaling.low is 4.0", "below"]),
        ({"rope": RoPE(scaling=Yarn(0.5, 9)), "head_dim": 4}, ["rope.scaling.factor is 0.5; it must be at least 1"]),
        ({"rope": RoPE(scaling=LongRoPE((1.0,), (2.0,), 9, 2.0)), "head_dim": 4}, ["rope.scaling", "2 frequencies"]),
        ({"rope": RoPE(fraction=0.8), "head_dim": 4}, ["head_dim is 4 and rope.fraction 0.8", "even"]),
        ({"rope": RoPE(1.0, Yarn(2.0, 9)), "head_dim": 4}, ["rope.base is 1.0; it must be above 1"]),
        ({"rope": RoPE(scaling=Yarn(2.0, 9, beta_fast=-1.0)), "head_dim": 4}, ["beta_fast is -1.0"]),
        ({"rope": RoPE(scaling=Yarn(2.0, 9, beta_fast=0.5)), "head_dim": 4}, ["beta_slow is 1.0; it must be below"]),
        ({"rope": RoPE(scaling=LongRoPE((1.0, 1.0), (2.0, 0.0), 9, 2.0)), "head_dim": 4}, ["rope.scaling.long is 0.0"]),
        ({"rope": RoPE(scaling=LongRoPE((1.0, 1.0), (2.0, 2.0), 1, 2.0)), "head_dim": 4}, ["original_context is 1"]),
        ({"rope": RoPE(fraction=1.5), "head_dim": 4}, ["rope.fraction is 1.5; it must be above 0 and at most 1"]),
        ({"rope": RoPE(fraction=0.5), "local_heads": 1, "attention_bias": True, "head_dim": 4}, ["all features"]),
        ({"attention": BlockAttention(5), "prefix": True}, ["window", "5", "prefix"]),
        ({"norm": "none", "final_norm": True}, ["norm is none, but final_norm is True"]),
        ({"experts": {"n_experts": 4, "per_token": 5}}, ["per_token", "5", "4"]),
        ({"experts": {"capacity_factor": 0.0}}, ["capacity_factor", "0.0", "1.25"]),
        ({"experts": ExpertsConfig(), "mlp_logits": True, "residual": False}, ["mlp_logits", "experts"]),
        ({"experts": {"n_groups": 2}}, ["n_groups is 2, but router is softmax"]),
        ({"experts": {"router": "sigmoid", "n_groups": 3}}, ["1 of 3 groups of 8 experts"]),
        ({"experts": {"router": "sigmoid", "n_groups": 8}}, ["per_token is 2, of 1 of 8 groups"]),
        ({"experts": {"dense_blocks": 2}}, ["dense_blocks is 2, but n_blocks is 2"]),
        ({"experts": {"dense_width": 8}}, ["dense_width is 8, but dense_blocks is 0"]),
        ({"latents": LatentsConfig(rope_width=5)}, ["latents.rope_width is 5; it must be below head_dim, 5"]),
        ({"latents": LatentsConfig(rope_width=4), "qk_norm": True}, ["qk_norm is True, but with latents"]),
        ({"latents": LatentsConfig(rope_width=3), "positions": "none", "rope": RoPE()}, ["rope_width is 3", "even"]),
        ({"latents": LatentsConfig(rope_width=4), "n_heads": 2, "n_kv_heads": 1}, ["n_kv_heads is 1", "omit it"]),
        ({"latents": LatentsConfig(rope_width=4)}, ["a decoder of the ladder does not have; use DecoderConfig"]),
        ({"unembedding_std": -1.0}, ["unembedding_std", "-1.0"]),
        ({"unembedding_std": 0.1, "unembedding": "tied"}, ["unembedding_std", "0.1", "no W_out"]),
    ],
    ids=str,
)
def test_an_invalid_config_is_refused_with_its_value(fields: dict, said: list[str]) -> None:
    with pytest.raises(UserError) as error:
        rung_like(PLAIN, **fields)
    assert all(word in str(error.value) for word in said)


@pytest.mark.slow
def test_blocks_attend_within_their_own_windows() -> None:
    """Without a residual stream, an output depends on what its block attends to, and on nothing else."""
    config = rung_like(PLAIN, n_blocks=1, positions="none", rope=RoPE(), head_dim=4, residual=False,
                       context_length=T, norm="none")  # fmt: skip
    for window, reach in ((3, 3), (None, T)):
        model, params = build(replace(config, attention=BlockAttention(window)))
        embed = params["embedding"]["W_E"]

        def last(table: jax.Array, model: Decoder = model, params: Params = params) -> jax.Array:
            return apply(model, {**params, "embedding": {"W_E": table}}, jnp.arange(T))[-1].sum()

        depends_T = np.abs(jax.grad(last)(embed)[:T]).max(-1) > 0
        np.testing.assert_array_equal(depends_T, np.arange(T) >= T - reach)


def test_groups_of_blocks_are_consecutive_and_alike() -> None:
    local, full = BlockAttention(3), BlockAttention()
    config = replace(PLAIN, n_blocks=6, attention=(local, local, full), max_context=11)
    assert config.block_windows == (3, 3, 11, 3, 3, 11) and config.attention_window == 11
    assert config.block_groups == ((3, slice(0, 2)), (11, slice(2, 3)), (3, slice(3, 5)), (11, slice(5, 6)))
    assert replace(config, attention=local).block_groups == ((3, slice(0, 6)),)
    dense = replace(config, attention=local, experts=ExpertsConfig(4, dense_blocks=2))
    assert dense.block_groups == ((3, slice(0, 2)), (3, slice(2, 6)))
    rotary = replace(
        config, positions="none", rope=RoPE(), head_dim=4, attention=(full, BlockAttention(use_rope=False))
    )
    assert [rotary.block_rope(i) for i in range(3)] == [RoPE(), None, RoPE()] and len(rotary.block_groups) == 6


@pytest.mark.slow
def test_scanned_groups_equal_the_loop_and_so_do_their_gradients() -> None:
    """Logits, and what routers tell, whose statistics are differentiated, too."""
    config = replace(
        CONFIGS["experts"], n_blocks=3, attention=(LOCAL, LOCAL, BlockAttention()), dropout=0.2, norm_placement="both"
    )
    params = build(config)[1]

    def loss(params: Params, execution: Execution) -> tuple:
        model, rngs = config.build(execution), {"dropout": jax.random.key(0)}
        logits_TV, sown = model.apply({"params": params}, TOKENS_T, rngs=rngs, mutable=[ROUTER])
        told = routers(sown[ROUTER])
        return jnp.sum(jnp.sin(logits_TV)) + sum(jnp.sum(s.probability_E**2) + s.z for s in told.values()), told

    scanned, looped = (
        jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)(params, execution)
        for execution in (Execution(remat="block", scan=True), Execution())
    )
    jax.tree.map(partial(assert_close, tolerance=1e-4), scanned, looped)
    told = looped[0][1]
    assert list(told) == [f"blocks_{i}.mlp" for i in range(3)]
    assert told["blocks_0.mlp"].dropped > 0  # capacity was limited


@pytest.mark.slow
def test_scanned_latents_after_a_dense_block_equal_the_loop() -> None:
    config = replace(CONFIGS["latents"], n_blocks=3)
    params, scanned, looped = build(config)[1], config.build(Execution(scan=True)), config.build()
    assert_close(apply(scanned, params, TOKENS_T), apply(looped, params, TOKENS_T))


@pytest.mark.slow
def test_a_text_longer_than_training_sequences_is_attended_to_in_full() -> None:
    config = replace(CONFIGS["modern"], context_length=3, max_context=T)
    model, params = build(config)
    assert_close(apply(model, params, TOKENS_T), apply(CONFIGS["modern"].build(), params, TOKENS_T), 0)
    learned = replace(PLAIN, context_length=3, max_context=T)
    assert build(learned)[1]["embedding"]["W_pos"].shape == (T, D)
    with pytest.raises(ValueError, match="8 tokens, but the model has 7 learned positions"):
        apply(*build(learned), random_tokens(V, T + 1))


@pytest.mark.slow
def test_soft_caps_and_scales_act_as_their_formulas_say() -> None:
    model, params = build(MODERN)
    logits_TV = apply(model, params, TOKENS_T)
    capped_TV = apply(replace(MODERN, logit_soft_cap=0.5).build(), params, TOKENS_T)
    assert_close(capped_TV, 0.5 * np.tanh(np.asarray(logits_TV) / 0.5))
    untied = replace(MODERN, unembedding="linear")
    params = build(untied)[1]
    tripled = {**params, "embedding": {"W_E": 3 * params["embedding"]["W_E"]}}
    scaled = replace(untied, embedding_scale=3.0).build()
    assert_close(apply(scaled, params, TOKENS_T), apply(untied.build(), tripled, TOKENS_T))


def test_the_gradient_of_tied_weights_includes_that_of_the_unembedding() -> None:
    model, x_TD = replace(PLAIN, norm="none", positions="none", unembedding="tied").build(), normal(T, D)
    logit = lambda W_E: model.apply({"params": {"embedding": {"W_E": W_E}}}, x_TD, method="unembed")[2, 5]  # noqa: E731
    assert_close(jax.grad(logit)(jnp.zeros((V, D))), jnp.zeros((V, D)).at[5].set(x_TD[2]))


def test_a_mask_in_the_place_of_the_prefix_and_segments_that_would_broadcast_are_refused() -> None:
    """Hugging Face's second argument is a mask."""
    model, tokens_T = PLAIN.build(), random_tokens(V, T)
    given = (
        ((jnp.ones(T, bool),), TypeError, r"the prefix is bool of shape \(7,\); give its length in tokens"),
        ((None, jnp.zeros(1, int)), ValueError, r"segments of shape \(1,\) for 7 tokens; give one per token"),
        ((2, jnp.zeros(T, int)), ValueError, "segments and a prefix cannot be combined"),
    )
    for arguments, error, message in given:
        with pytest.raises(error, match=message):
            jax.eval_shape(model.init, jax.random.key(0), tokens_T, *arguments)


@pytest.mark.slow
def test_dropout_acts_only_with_a_key() -> None:
    model, params = build(replace(PLAIN, n_blocks=1, dropout=0.3))
    tokens_T = random_tokens(V, T)
    with_key = apply(model, params, tokens_T, rngs={"dropout": jax.random.key(0)})
    assert jnp.abs(with_key - apply(model, params, tokens_T)).max() > 0.1

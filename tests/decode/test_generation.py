import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import ModelConfig
from jaxformer.contract import Contract, Task, contract_of
from jaxformer.decode import Generation, Samples, Sampling, generate_tokens, programs
from jaxformer.decode.batches import length_bucket, row_mesh, spread_rows
from jaxformer.decode.engine import Engine
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.decoder import BlockAttention, DecoderConfig
from jaxformer.models.objective import Params
from jaxformer.models.recurrent_lm import RecurrentLMConfig
from jaxformer.nn.parameters import parameter_axes
from jaxformer.ops import RoPE
from jaxformer.ops.masks import EMPTY
from jaxformer.parallel.mesh import make_mesh, replicated, shardings
from tests.arrays import apply, assert_close, build, plain_decoder, random_tokens, rung_like
from tests.helpers import compilations

V, CONTEXT = 23, 11
GREEDY, RANDOM = Sampling(0), Sampling(1.5)
ALL = Sampling(1.0, top_logprobs=V)
"""Sampling that returns the log-probability of every token."""
ROPE = plain_decoder(
    V, CONTEXT, d_model=12, n_blocks=1, n_heads=3, n_kv_heads=1, d_ff=(17,), norm="rmsnorm",
    positions="none", rope=RoPE(), attention=BlockAttention(7),
)  # fmt: skip
LEARNED = replace(ROPE, positions="learned", rope=None, attention=BlockAttention())
CONFIGS = {
    "rope, window, one key head": ROPE,
    "alibi, window, parallel": replace(
        ROPE,
        positions="alibi",
        rope=None,
        norm="layernorm_no_bias",
        norm_placement="parallel",
        embedding_norm=True,
        unembedding_bias=True,
    ),
    "mlp logits, two key heads": rung_like(
        LEARNED,
        n_heads=4,
        n_kv_heads=2,
        output_projection=False,
        residual=False,
        mlp_logits=True,
    ),
}
MLP = MLPConfig(V, CONTEXT, d_model=5, d_ff=(13,), mixing="concatenate")
PROMPTS = [[3], [5, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7]]
BEYOND = 23
"""Number of new tokens that exceeds the context more than once."""

Model = tuple[nn.Module, Params]


@pytest.mark.parametrize(("chunk", "ring"), [(384, 1536), (512, 1024), (1000, 2000)])
def test_a_layer_with_a_window_is_a_ring_whatever_the_chunk(chunk: int, ring: int) -> None:
    """Of the smallest double of the chunk that holds the window and a chunk."""
    shape = {"d_model": 8, "n_blocks": 2, "n_heads": 1, "positions": "none", "rope": RoPE()}
    config = DecoderConfig(V, 32_768, **shape, attention=(BlockAttention(512), BlockAttention()))
    engine = Engine(config.build(), {}, 32_768, jnp.float32, chunk, None, False)
    _, n_slots = engine.plan(100, 30_000)
    assert engine.rings(n_slots) == (ring, 0)


@pytest.fixture(scope="module")
def decoder() -> Model:
    return build(ROPE)


def begin(
    model: Model, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling = GREEDY, **kwargs: Any
) -> Generation:
    """Call `generate_tokens` with seeds 0, 1, …, and no more slots than the prompt needs."""
    seeds = range(len(prompts) * kwargs.get("n_samples", 1))
    given = {"seeds": seeds, "max_new_tokens": n, "context_length": CONTEXT, "prefill_chunk": 16} | kwargs
    return generate_tokens(*model, prompts, sampling, **given)


def concatenate(pieces: Sequence[Samples]) -> Samples:
    return Samples(*(np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True)))


def run(model: Model, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling = GREEDY, **kwargs: Any) -> list:
    """Return all new tokens, a list per row."""
    return concatenate(list(begin(model, prompts, n, sampling, **kwargs))).tokens.tolist()


def distributions(piece: Samples) -> np.ndarray:
    """Return the log-probabilities `(B, N, V)` of a sampling that reports all."""
    results = np.full(piece.top_logprobs.shape, np.nan)
    np.put_along_axis(results, piece.top_tokens, piece.top_logprobs, axis=-1)
    return results


@partial(jax.jit, static_argnums=0)
def full_passes(module: nn.Module, params: Params, *inputs_B: jax.Array) -> jax.Array:
    """Return the logits `(B, T, V)` of whole texts."""
    return jax.vmap(partial(module.apply, {"params": params}))(*inputs_B)


def assert_equals_full_passes(
    model: Model, prompts: Sequence[Sequence[int]], n: int, padded: int = 0, **kwargs: Any
) -> None:
    """Check the distribution of each token against a full pass over the text before it."""
    piece = concatenate(list(begin(model, prompts, n, ALL, **kwargs)))
    texts = [[*prompt, *row[:-1]] for prompt, row in zip(prompts, piece.tokens.tolist(), strict=True)]
    longest = max(padded, *map(len, texts))
    tokens_BT = jnp.array([text + [0] * (longest - len(text)) for text in texts])
    prefixes = [jnp.array([len(prompt) for prompt in prompts])] if contract_of(model[0]).has_prefix else []
    logits_BTV = np.asarray(full_passes(*model, tokens_BT, *prefixes), np.float64)
    wanted_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
    expected = np.stack([w[len(p) - 1 : len(p) - 1 + n] for w, p in zip(wanted_BTV, prompts, strict=True)])
    assert_close(distributions(piece), expected, 1e-5 * max(1, np.abs(logits_BTV).max() / np.abs(expected).max()))
    chosen = np.take_along_axis(expected, piece.tokens[..., None], axis=-1)[..., 0]
    assert_close(piece.logprobs, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_ragged_batch_equals_full_passes_past_the_context_too(name: str) -> None:
    """Lengths 1 to the context in one batch. Learned positions end with the context."""
    config = CONFIGS[name]
    ends = not config.contract.extrapolates
    lengths = range(1, CONTEXT if ends else CONTEXT + 1)
    prompts = [random_tokens(V, length, seed=length).tolist() for length in lengths]
    assert_equals_full_passes(build(config), prompts, 2 if ends else BEYOND)


@pytest.mark.slow
def test_a_prefix_prompt_is_prefilled_in_one_chunk() -> None:
    """Seen in both directions, as in training; what follows it is not. Past the context, its beginning is out of
    sight."""
    model = build(replace(ROPE, attention=BlockAttention(), prefix=True))
    assert_equals_full_passes(model, [[3], [5, 1, 4, 1, 5], [2, 7]], CONTEXT + 3, prefill_chunk=2)


@pytest.mark.slow
def test_a_prefill_longer_than_the_ring_of_slots_equals_full_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 3 and chunks of 4 have 8 slots, for a prompt of 29; a block without a window has 32, which 49 tokens
    go round, too."""
    sizes, decode = set(), programs.decode

    def spy(*args: Any, **kwargs: Any) -> Any:
        sizes.add(tuple(layer.v_GSK.values.shape[2] for layer in args[3].cache.layers))
        return decode(*args, **kwargs)

    monkeypatch.setattr(programs, "decode", spy)
    model = build(
        replace(
            CONFIGS["alibi, window, parallel"],
            n_blocks=2,
            attention=(BlockAttention(3), BlockAttention()),
            context_length=31,
        )
    )
    prompts = [random_tokens(V, length).tolist() for length in (29, 6)]
    assert_equals_full_passes(model, prompts, 20, context_length=31, prefill_chunk=4)
    assert sizes == {(8, 32)}


@pytest.mark.slow
def test_an_ended_row_does_not_hold_the_others_at_the_end_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token beside the other's 11, then 10 up to 12, one past the context, and then 7 from the last 5 each time."""
    starts, start = [], programs.start
    monkeypatch.setattr(programs, "start", lambda *args, **kwargs: starts.append(args) or start(*args, **kwargs))
    model = build(LEARNED)
    generation = begin(model, [[3], [1] * CONTEXT], 32)
    generation.end(1)
    generated = concatenate(list(generation)).tokens
    assert len(starts) == 5
    assert generated[0].tolist() == run(model, [[3]], 32)[0]


@pytest.mark.slow
def test_learned_positions_continue_from_the_last_half_of_the_context() -> None:
    model, params = build(LEARNED)
    forward = jax.jit(lambda tokens_T: model.apply({"params": params}, tokens_T))
    expected = []
    for prompt in PROMPTS:
        row, generated = list(prompt), []
        for _ in range(BEYOND):
            if len(row) > CONTEXT:
                row = row[-(CONTEXT // 2) :]
            generated.append(int(forward(jnp.array(row + [0] * (CONTEXT - len(row))))[len(row) - 1].argmax()))
            row.append(generated[-1])
        expected.append(generated)
    assert run((model, params), PROMPTS, BEYOND) == expected
    assert len({tuple(row) for row in expected}) > 1


@pytest.mark.slow
def test_eight_devices_equal_one() -> None:
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("JAX_NUM_CPU_DEVICES asks for fewer than eight devices")
    model, params = build(replace(ROPE, n_heads=2, n_kv_heads=2))
    prompts = PROMPTS * 2
    split = jax.device_put(
        params, shardings(params, parameter_axes(model), make_mesh("data=2,fsdp=2,tensor=2", devices[:8]))
    )
    one, eight = (concatenate(list(begin((model, p), prompts, 9, ALL))) for p in (params, split))
    np.testing.assert_array_equal(one.tokens, eight.tokens)
    assert_close(distributions(eight), distributions(one))


@pytest.fixture(scope="module")
def two_devices(decoder: Model) -> Model:
    """The decoder with its parameters on two data-parallel devices."""
    model, params = decoder
    return model, jax.device_put(params, replicated(make_mesh("data=2", jax.devices("cpu")[:2])))


@pytest.mark.slow
def test_data_parallel_decoding_compiles_once_and_equals_one_device(
    decoder: Model, two_devices: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples that stop, with a history, an int8 cache and a prefill in chunks."""
    monkeypatch.setattr("jaxformer.decode.generation.MAX_TOKENS_PER_CALL", 4)  # several calls
    prompts, sampling = PROMPTS, replace(RANDOM, stop_tokens=(0, 1, 2), repetition_penalty=1.3)
    options = {"n_samples": 2, "cache_dtype": jnp.int8, "prefill_chunk": 4}
    expected = run(decoder, prompts, CONTEXT, sampling, **options)
    assert len({row.count(EMPTY) for row in expected}) > 1
    decode: Any = programs.decode
    before = decode._cache_size()
    generation = begin(two_devices, prompts, CONTEXT, sampling, **options)
    assert row_mesh(two_devices[1], len(generation.rows)) is not None
    assert concatenate(list(generation)).tokens.tolist() == expected
    assert decode._cache_size() == before + 1


def test_rows_that_divide_evenly_are_spread_over_the_devices_of_a_cpu(decoder: Model) -> None:
    params, n = decoder[1], jax.local_device_count()
    if n == 1:
        pytest.skip("JAX_NUM_CPU_DEVICES asks for one device")
    assert spread_rows(params, 8 * n - n) is params  # fewer than 8 each
    assert spread_rows(params, 8 * n + 1) is params
    spread = spread_rows(params, 8 * n)
    assert all(len(leaf.devices()) == n and leaf.is_fully_replicated for leaf in jax.tree.leaves(spread))
    assert spread_rows(spread, 8 * n) is spread


@pytest.mark.slow
def test_a_rounded_cache_moves_logits_within_a_bound() -> None:
    """Next to logits of up to about 5; keys and values are off by 1/254 of their largest."""
    model = build(replace(ROPE, n_kv_heads=3))
    full = concatenate(list(begin(model, PROMPTS, 1 + 12, ALL)))
    small = concatenate(list(begin(model, PROMPTS, 1 + 12, ALL, cache_dtype=jnp.int8)))
    same = (full.tokens == small.tokens).cumprod(axis=1).astype(bool)  # of one text until a draw differs
    assert same[:, :3].all()
    moved = np.abs(distributions(small) - distributions(full))[same]
    assert 0 < moved.max() < 0.06


class Counter(nn.Module):
    """A model whose most likely next token is the position that follows, modulo V."""

    contract = Contract(Task.CAUSAL_LM, vocab_size=V, has_cache=True, attention_window=1, extrapolates=True)

    def init_cache(self, n_slots: int, dtype: Any) -> jax.Array:
        return jnp.zeros(1)

    def extend(self, tokens_T: jax.Array, positions_T: jax.Array, state: jax.Array, slot: Any) -> tuple:
        return positions_T[:, None] + 1, state

    def unembed(self, next_1: jax.Array) -> jax.Array:
        return 1.0 * (jnp.arange(V) == next_1 % V)


def test_positions_of_a_row_do_not_count_its_padding() -> None:
    """In chunks of 4, of which the shortest prompt has padding alone in all but the last."""
    generated = run((Counter(), {"none": jnp.zeros(1)}), PROMPTS, 20, prefill_chunk=4)
    assert generated == [[(len(prompt) + i) % V for i in range(20)] for prompt in PROMPTS]


@pytest.mark.slow
def test_samples_equal_a_repeated_prompt_with_one_prefill(decoder: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    read, prefill = [], programs.prefill
    monkeypatch.setattr(
        programs, "prefill", lambda *args, **kwargs: read.append(len(args[3])) or prefill(*args, **kwargs)
    )
    samples = run(decoder, PROMPTS[:2], 5, RANDOM, n_samples=2)
    assert read == [2]
    assert samples == run(decoder, [p for p in PROMPTS[:2] for _ in range(2)], 5, RANDOM)
    assert samples[0] != samples[1]


@pytest.mark.slow
def test_a_row_depends_on_its_seed_alone(decoder: Model) -> None:
    same, seeds = [PROMPTS[1]] * 4, [0, 1, 2, 2**32 - 1]
    first, turned = (run(decoder, same, 17, RANDOM, seeds=s) for s in (seeds, [seeds[-1], *seeds[:-1]]))
    assert first == [*turned[1:], turned[0]]
    assert first[0] != first[1] != first[2]


@pytest.mark.parametrize("n", [1, 10])  # one token of the prefill, a call of 8, and one more
def test_rows_have_max_new_tokens(decoder: Model, n: int) -> None:
    generated = run(decoder, PROMPTS, n, RANDOM)
    assert [len(row) for row in generated] == [n] * 4
    assert all(0 <= token < V for row in generated for token in row)


@pytest.mark.parametrize(
    ("config", "seconds", "sizes"),
    [(ROPE, 1e9, [1, 8, 8, 13]), (ROPE, 0.0, [1, 8, 8, 8, 5]), (MLP, 1e9, [1, 8, 8, 13])],
    ids=["fast", "slow", "window"],
)
def test_the_first_piece_has_one_token_and_the_others_several(
    config: ModelConfig, seconds: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["jaxformer.decode.generation"], "MAX_CALL_SECONDS", seconds)
    pieces = list(begin(build(config), PROMPTS, 30, RANDOM))
    assert [piece.tokens.shape for piece in pieces] == [(4, n) for n in sizes]
    assert pieces[1].tokens.dtype == np.int32
    assert pieces[1].logprobs.shape == (4, 8)
    assert pieces[1].top_tokens.shape == pieces[1].top_logprobs.shape == (4, 8, 0)


def test_the_first_token_is_delivered_before_the_decode_loop_is_called(
    decoder: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling the loop takes longer than the prefill, and a text that has ended does not need it."""
    calls, decode = [], programs.decode
    monkeypatch.setattr(programs, "decode", lambda *args, **kwargs: calls.append(args) or decode(*args, **kwargs))
    generation = begin(decoder, PROMPTS, 9, RANDOM)
    assert next(generation).tokens.shape == (4, 1) and not calls
    assert next(generation).tokens.shape == (4, 8) and len(calls) == 1
    ended = begin(decoder, PROMPTS, 9, RANDOM)
    assert next(ended).tokens.shape == (4, 1)
    for row in range(4):
        ended.end(row)
    assert list(ended) == [] and len(calls) == 1


def test_another_temperature_compiles_nothing(decoder: Model) -> None:
    texts = [run(decoder, PROMPTS, 9, Sampling(0.1))]
    with compilations() as compiled:
        texts += [run(decoder, PROMPTS, 9, Sampling(t)) for t in (0.3, 0.5, 0.7, 0.9, 1, 1.5, 2, 4, 1e6)]
    assert not compiled and len(set(map(str, texts))) > 5


@pytest.mark.slow
def test_programs_compiled_for_shapes_give_the_first_piece(decoder: Model) -> None:
    """Of a prompt in chunks, and of two samples."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = jax.device_put(decoder[1], sharding)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params)
    given = {"n_samples": 2, "prefill_chunk": 4, "sampling": Sampling(3.25, top_logprobs=2)}
    begin((decoder[0], shapes), PROMPTS, 3, **given).compile()
    with compilations() as compiled:
        first = next(begin((decoder[0], params), PROMPTS, 3, **given))
    assert first.tokens.shape == (8, 1) and not compiled


@pytest.mark.slow
def test_programs_that_are_not_kept_are_compiled_again() -> None:
    model, given = build(replace(LEARNED, context_length=256)), {"context_length": 256}
    tokens = run(model, PROMPTS, 150, **given)  # beyond 128 slots
    for keeps, recompiled in ((True, False), (False, True)):
        generation = begin(model, PROMPTS, 150, keep_programs=keeps, **given)
        assert concatenate(list(generation)).tokens.tolist() == tokens
        with compilations() as compiled:
            next(begin(model, PROMPTS, 150, **given))
        assert bool(compiled) == recompiled


def test_a_call_is_no_longer_than_its_limit() -> None:
    """0.1 s are 25 tokens of 4 ms."""
    generation, sizes = begin((Counter(), {"none": jnp.zeros(1)}), [[1]], 120), []
    for piece in generation:
        sizes.append(piece.tokens.shape[1])
        generation.pace.seconds_per_token = 0.004  # whatever this call took
    assert sizes[0] == 1 and max(sizes) == 25


@pytest.mark.slow
def test_a_stop_token_is_delivered_and_ends_only_its_row() -> None:
    model = build(ROPE)
    free = run(model, PROMPTS, BEYOND, RANDOM)
    stop = free[1][4]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    generated = run(model, PROMPTS, BEYOND, replace(RANDOM, stop_tokens=(stop,)))
    assert any(len(row) < BEYOND for row in expected)
    n = max(map(len, expected))
    assert generated == [row + [EMPTY] * (n - len(row)) for row in expected]


@pytest.mark.slow
def test_decoding_stops_when_all_rows_are_done(decoder: Model) -> None:
    stop_always = replace(RANDOM, stop_tokens=tuple(range(V)))
    assert [piece.tokens.shape for piece in begin(decoder, PROMPTS, BEYOND, stop_always)] == [(4, 1)]


def test_a_row_can_be_ended_by_the_caller(decoder: Model) -> None:
    model = decoder
    free = run(model, PROMPTS, 40, RANDOM)
    generation = begin(model, PROMPTS, 40, RANDOM)
    generation.end(3)
    pieces = [next(generation), next(generation)]
    n = sum(piece.tokens.shape[1] for piece in pieces)
    generation.end(0)
    pieces += generation
    generated = concatenate(pieces).tokens.tolist()
    assert generated == [free[0][:n] + [EMPTY] * (40 - n), free[1], free[2], [EMPTY] * 40]
    for row in range(4):
        generation.end(row)
    assert list(generation) == []


def test_a_model_without_a_cache_equals_passes_over_a_sliding_window() -> None:
    (model, params), n = build(MLP), BEYOND
    forward = jax.jit(lambda tokens_T: model.apply({"params": params}, tokens_T)[-1])
    expected = []
    for prompt in PROMPTS:
        row = [0] * CONTEXT + list(prompt)
        for _ in range(n):
            row.append(int(forward(jnp.array(row[-CONTEXT:])).argmax()))
        expected.append(row[-n:])
    assert run((model, params), PROMPTS, n) == expected
    assert run((model, params), PROMPTS[:2], n, n_samples=2) == [row for row in expected[:2] for _ in range(2)]


@pytest.mark.slow
def test_a_recurrent_model_equals_full_passes() -> None:
    """Whose cache is a state without slots."""
    model = build(RecurrentLMConfig(V, CONTEXT, "tanh", d_model=5))
    assert_equals_full_passes(model, PROMPTS[:2], 4, prefill_chunk=4)


class WindowSum(nn.Module):
    """A model whose most likely next token is the sum of the last `window` tokens and their number, modulo V."""

    window: int

    @property
    def contract(self) -> Contract:
        return Contract(Task.CAUSAL_LM, vocab_size=V, has_cache=True, attention_window=self.window, extrapolates=True)

    def init_cache(self, n_slots: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(n_slots, jnp.int32), jnp.full(n_slots, EMPTY, jnp.int32)

    def extend(self, tokens_T: jax.Array, positions_T: jax.Array, cache: Any, slot: Any) -> tuple:
        cache = tokens_S, positions_S = jax.tree.map(
            lambda x_S, new_T: jax.lax.dynamic_update_slice(x_S, new_T, (slot,)), cache, (tokens_T, positions_T)
        )
        distance_TS = positions_T[:, None] - positions_S[None]
        visible_TS = (positions_S != EMPTY)[None] & (distance_TS >= 0) & (distance_TS < self.window)
        return jnp.sum(visible_TS * (tokens_S + 1)[None], axis=1)[:, None] % V, cache

    def unembed(self, sum_1: jax.Array) -> jax.Array:
        return 1.0 * (jnp.arange(V) == sum_1)


def test_a_ring_with_no_more_slots_than_the_window_holds_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 8 tokens, in 8 slots, which decoding fills and goes round twice."""
    expected = []
    for prompt in ([3, 1, 4, 1, 5], [9, 2]):
        row = list(prompt)
        for _ in range(17):
            row.append(sum(token + 1 for token in row[-8:]) % V)
        expected.append(row[len(prompt) :])
    sizes, decode = set(), programs.decode

    def spy(*args: Any, **kwargs: Any) -> Any:
        sizes.add(args[3].cache[0].shape[1])
        return decode(*args, **kwargs)

    monkeypatch.setattr(programs, "decode", spy)
    model = WindowSum(8), {"none": jnp.zeros(1)}
    assert run(model, [[3, 1, 4, 1, 5], [9, 2]], 17, context_length=8, prefill_chunk=8) == expected
    assert sizes == {8}


@pytest.mark.parametrize(
    ("prompts", "given", "error", "message"),
    [
        ([[]], {}, ValueError, "the prompt has 0 tokens"),
        ([[1], [0] * 12], {}, ValueError, "prompt 2 has 12 tokens.*11"),
        ([[1], [2, V]], {}, ValueError, "prompt 2 has a token 23; it must be from 0 to 22"),
        ([[-1]], {}, ValueError, "the prompt has a token -1"),
        ([[True, False]], {}, TypeError, r"the prompt is bool of shape \(2,\); it must be a sequence of integers"),
        ([[1]], {"max_new_tokens": 0}, ValueError, "max_new_tokens is 0; it must be at least 1"),
        ([[1]], {"max_new_tokens": 2**31}, ValueError, "max_new_tokens is 2147483648; .* below 2..31"),
        ([[1]], {"n_samples": 0, "seeds": []}, ValueError, "n_samples is 0"),
        ([[1]], {"prefill_chunk": -1}, ValueError, "prefill_chunk is -1"),
        ([[1]], {"seeds": [2**32]}, OverflowError, "4294967296"),
        ([[1]], {"seeds": [-1]}, OverflowError, "-1"),
        ([[1]], {"seeds": [0.7]}, TypeError, "float"),
        ([[1]] * 2, {"n_samples": 2, "seeds": [1, 2, 3]}, ValueError, "3 seeds for 2 prompts of 2 rows"),
        ([1, 2], {}, TypeError, r"prompt 1 is int64 of shape \(\); it must be a sequence"),
        ([[1.7]], {}, TypeError, "float64"),
        (["ab"], {}, TypeError, "U2"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(prompts: list, given: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        begin(build(ROPE), prompts, 3, **given)


@pytest.mark.parametrize(
    ("config", "prompts", "n", "chunk", "n_slots"),
    [
        (ROPE, PROMPTS, BEYOND, 2**31 - 1, 16),  # the longest prompt's 11, which is more than the window's 7
        (replace(ROPE, context_length=500, attention=BlockAttention(128)), [[3]], 400, 512, 128),
        (replace(LEARNED, context_length=500), [[3]], 400, 512, 128),  # enlarged as the text grows
        (replace(LEARNED, context_length=9000), [[3] * 200], 1, 512, 256),
    ],
    ids=["chunk beyond the context", "window", "short prompt", "long prompt"],
)
def test_the_cache_has_no_unused_slots(
    config: DecoderConfig, prompts: list, n: int, chunk: int, n_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        pass

    def prefill(*args: Any, **kwargs: Any) -> None:
        assert kwargs["n_slots"] == n_slots
        raise Started

    monkeypatch.setattr(programs, "prefill", prefill)
    with pytest.raises(Started):
        next(begin(build(config), prompts, n, context_length=config.context_length, prefill_chunk=chunk))


def test_a_context_beyond_the_learned_positions_is_refused() -> None:
    """JAX would repeat the last position."""
    with pytest.raises(ValueError, match="context_length is 12, but the model has 11 learned positions"):
        begin(build(LEARNED), PROMPTS, 3, context_length=12)


def test_length_buckets() -> None:
    assert [length_bucket(n) for n in (1, 8, 9, 128, 129, 192, 193, 257, 385, 512)] == [
        8, 8, 16, 128, 192, 192, 256, 384, 512, 512
    ]  # fmt: skip


@pytest.mark.slow
def test_a_mixed_workload_compiles_a_program_for_each_bucket_of_lengths() -> None:
    """40 prompts of 1 to 140 tokens in batches of 8, counting everything that is compiled."""
    config = replace(LEARNED, context_length=256, d_model=6, n_heads=1, head_dim=6)
    model = build(config)
    model[0].init_cache(8)  # what is compiled by making the first array
    given = {"context_length": 256, "prefill_chunk": 512}
    with compilations() as compiled:
        for longest in (12, 14, 16, 120, 140):
            generated = run(model, [[1] * n for n in range(longest - 7, longest + 1)], 20, **given)
            assert np.shape(generated) == (8, 20)
    # Prompts are read in 16, 128 or 192 slots; decoding looks at a cache of 128 or 192 slots, and enlarges it once. The
    # first token has a program of its own.
    assert len(compiled) == 3 + 2 + 1 + 1


@pytest.mark.slow
def test_the_decode_loop_updates_the_cache_in_place() -> None:
    """No scatter, and no copy of anything with as many slots as the cache, of int8."""
    model, params = build(ROPE)
    n_slots, history = 128, programs.init_history(GREEDY, V, jnp.zeros(4), 4)
    numbers = (jnp.zeros((), kind) for kind in (jnp.int32, jnp.int32, jnp.uint32, bool))
    row = programs.DecodeState(model.init_cache(n_slots, jnp.int8), history, *numbers)
    state, eight = jax.tree.map(lambda x: jnp.stack([x] * 3), row), np.int32(8)
    lowered = programs.decode.lower(model, GREEDY, params, state, state.done_B, eight, eight, eight, mesh=None)
    hlo = lowered.compile().as_text()
    assert " dynamic-update-slice(" in hlo
    assert " scatter(" not in hlo
    copies = [line.split(" copy(")[0] for line in hlo.splitlines() if " copy(" in line]
    assert not [shape for shape in copies if (f",{n_slots}" in shape and "f32" in shape) or "s8" in shape]


@pytest.mark.slow
def test_a_cache_that_is_enlarged_in_prefill_and_decoding_equals_full_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 tokens in chunks of 16, in caches of 16 and 32 slots, and 14 more, in 32 and 64."""
    monkeypatch.setattr("jaxformer.decode.batches.MIN_SLOTS_READ", 8)
    sizes, enlarge = [], programs.enlarge
    monkeypatch.setattr(
        programs, "enlarge", lambda *args, **kwargs: sizes.append(kwargs["n_slots"]) or enlarge(*args, **kwargs)
    )
    prompts = [random_tokens(V, length, seed=length).tolist() for length in (20, 3)]
    model = build(replace(LEARNED, context_length=64))
    assert_equals_full_passes(model, prompts, 14, context_length=64, prefill_chunk=16)
    assert sizes == [32, 64]


@pytest.mark.slow
def test_logits_past_the_context_attend_to_a_window_of_the_context() -> None:
    free = replace(ROPE, attention=BlockAttention())
    tokens_T = random_tokens(V, 3 * CONTEXT)
    params = build(free)[1]
    past, windowed, full = (
        apply(c.build(), params, tokens_T)
        for c in (free, replace(free, attention=BlockAttention(CONTEXT)), replace(free, context_length=len(tokens_T)))
    )
    assert_close(past, windowed)
    assert_close(past[:CONTEXT], full[:CONTEXT])
    assert jnp.abs(past - full)[CONTEXT:].max() > 0.01


CHAT = plain_decoder(V, 64, d_model=8, n_heads=2, d_ff=(16,), n_blocks=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "n_kept"),
    [
        (CHAT, [17, 20, 12]),
        # 18 tokens were written, of which a ring of 16 slots has the window of token 16.
        (replace(CHAT, n_blocks=2, attention=(BlockAttention(3), BlockAttention())), [16, 0, 0]),
    ],
    ids=["causal", "window"],
)
def test_a_continued_conversation_equals_one_from_scratch(
    config: ModelConfig, n_kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that replace the last token and go on, and that share only the first tokens with the text so far."""
    starts, prefill = [], programs.prefill

    def spy(*args: Any, **kwargs: Any) -> Any:
        starts.append(int(args[4][0, 0]))  # position of the chunk's first token
        return prefill(*args, **kwargs)

    monkeypatch.setattr(programs, "prefill", spy)
    kept = []
    model, prompt, after = build(config), [3, 1, 4, 1, 5, 9, 2, 6], None
    changes = (lambda row: [*row[:-2], 7, 8], lambda row: [*row[:20], 7], lambda row: [*row[:12], (row[12] + 1) % V, 5])
    for change in (*changes, None):
        options = {"context_length": 64, "prefill_chunk": 8}
        after = begin(model, [prompt], 11, after=after, **options)
        starts.clear()
        continued = concatenate(list(after))
        kept.append(starts[0])
        scratch = concatenate(list(begin(model, [prompt], 11, **options)))
        np.testing.assert_array_equal(continued.tokens, scratch.tokens)
        assert_close(continued.logprobs, scratch.logprobs)
        prompt = change([*prompt, *continued.tokens[0].tolist()]) if change else prompt
    assert kept == [0, *n_kept]

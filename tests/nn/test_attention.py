from collections.abc import Callable
from math import sqrt
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ladder.rungs import ConcatenatedHeads, SummedHeads
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.capture import handled_by
from jaxformer.nn.local_heads import LocalHeads
from jaxformer.ops import masks
from jaxformer.ops.attention import attention, multi_head_attention
from jaxformer.ops.bias import ALiBi, alibi_slopes
from jaxformer.ops.cache import init_cache, write_layer
from jaxformer.ops.norms import rms_norm
from jaxformer.ops.positions import RoPE, rope
from tests.arrays import apply, assert_close, first_params, normal, random_params

T, D, H, K = 7, 13, 6, 10
X_TD, POSITIONS_T = normal(T, D), jnp.arange(T)
CAUSAL_TT = masks.causal(POSITIONS_T, POSITIONS_T)
INPUTS = (X_TD, POSITIONS_T, CAUSAL_TT)


@jax.jit
def explicit(params: dict, scale: float) -> jax.Array:
    """Heads side by side, `(T, H, K)`, by products of the parameters."""
    q, k, v = (jnp.einsum("td,dhk->htk", X_TD, params[name]) for name in ("W_Q", "W_K", "W_V"))
    return attention(q, k, v, CAUSAL_TT, scale).transpose(1, 0, 2)


def test_agrees_with_flax_for_the_same_weights() -> None:
    module = MultiHeadAttention(H, K, H)
    params = random_params(module, *INPUTS)
    flax = nn.MultiHeadDotProductAttention(H, qkv_features=H * K, out_features=D, use_bias=False)
    names = {"query": "W_Q", "key": "W_K", "value": "W_V", "out": "W_O"}
    same = {theirs: {"kernel": params[ours]} for theirs, ours in names.items()}
    assert_close(apply(module, params, *INPUTS)[0], apply(flax, same, X_TD, mask=CAUSAL_TT[None]))


@pytest.mark.slow
def test_biases_are_added_to_queries_keys_values_and_the_output() -> None:
    G = 2
    """As in flax, whose biases are `(heads, width)`; shared key and value heads have shared biases."""
    module = MultiHeadAttention(H, K, G, bias=True)
    params = random_params(module, *INPUTS)
    shapes = {name: (n, 1, K) for name, n in (("b_Q", H), ("b_K", G), ("b_V", G))} | {"b_O": (D,)}
    assert {name: leaf.shape for name, leaf in params.items() if name.startswith("b_")} == shapes
    assert all((leaf == 0).all() for name, leaf in first_params(module, *INPUTS).items() if name in shapes)
    flax = nn.MultiHeadDotProductAttention(H, qkv_features=H * K, out_features=D, use_bias=True)
    same = {"out": {"kernel": params["W_O"], "bias": params["b_O"]}}
    for theirs, ours, n in (("query", "Q", H), ("key", "K", G), ("value", "V", G)):
        kernel, bias = params[f"W_{ours}"], params[f"b_{ours}"][:, 0]
        same[theirs] = {"kernel": jnp.repeat(kernel, H // n, axis=1), "bias": jnp.repeat(bias, H // n, axis=0)}
    assert_close(apply(module, params, *INPUTS)[0], apply(flax, same, X_TD, mask=CAUSAL_TT[None]))


@pytest.mark.slow
def test_the_output_may_lack_the_bias_that_queries_keys_and_values_have() -> None:
    module, whole = (MultiHeadAttention(H, K, 2, bias=True, output_bias=bias) for bias in (False, None))
    params = random_params(whole, *INPUTS)
    without = {name: leaf for name, leaf in params.items() if name != "b_O"}
    assert set(first_params(module, *INPUTS)) == set(without)
    assert_close(apply(module, without, *INPUTS)[0] + params["b_O"], apply(whole, params, *INPUTS)[0])


def test_a_factor_of_the_scores_replaces_the_root_of_the_width() -> None:
    module, scaled = MultiHeadAttention(H, K, H), MultiHeadAttention(H, K, H, scale=0.2)
    params = random_params(module, *INPUTS)
    larger = {**params, "W_Q": params["W_Q"] * 0.2 * K**0.5}
    assert_close(apply(scaled, params, *INPUTS)[0], apply(module, larger, *INPUTS)[0])


def test_without_output_projection_there_is_no_bias_of_the_output() -> None:
    module = ConcatenatedHeads(H, K, H, bias=True)
    assert set(first_params(module, *INPUTS)) == {f"{kind}_{name}" for kind in "Wb" for name in "QKV"}


@pytest.mark.parametrize("G", [1, 2, 3])
def test_shared_key_value_heads_equal_repeated_ones(G: int) -> None:
    params = random_params(MultiHeadAttention(H, K, G), *INPUTS)
    assert params["W_K"].shape == params["W_V"].shape == (D, G, K)
    repeated = {**params, **{name: jnp.repeat(params[name], H // G, axis=1) for name in ("W_K", "W_V")}}
    shared = apply(MultiHeadAttention(H, K, G), params, *INPUTS)[0]
    assert_close(shared, apply(MultiHeadAttention(H, K, H), repeated, *INPUTS)[0])


def test_without_output_projection_the_output_is_the_heads_side_by_side() -> None:
    module = ConcatenatedHeads(H, K, H)
    params = random_params(module, *INPUTS)
    assert "W_O" not in params
    assert_close(apply(module, params, *INPUTS)[0], explicit(params, 1 / sqrt(K)).reshape(T, H * K))


def test_heads_may_be_summed() -> None:
    params = random_params(ConcatenatedHeads(H, K, H), *INPUTS)
    module = SummedHeads(H, K, H)
    assert_close(apply(module, params, *INPUTS)[0], explicit(params, 1 / sqrt(K)).sum(axis=1))


@pytest.mark.slow
def test_summed_heads_of_full_width_are_the_same_functions_as_concatenated_ones() -> None:
    """W_V^h W_O^h is one (D, D) matrix, which a summed head may have as its W_V."""
    concatenated = random_params(MultiHeadAttention(H, D), *INPUTS)
    summed = {name: concatenated[name] for name in ("W_Q", "W_K")}
    summed["W_V"] = jnp.einsum("dhk,hke->dhe", concatenated["W_V"], concatenated["W_O"])
    wanted = apply(MultiHeadAttention(H, D), concatenated, *INPUTS)[0]
    assert_close(apply(SummedHeads(H, D), summed, *INPUTS)[0], wanted)


def test_values_may_be_of_another_width_than_keys() -> None:
    module = ConcatenatedHeads(H, K, H, bias=True, value_dim=3)
    params = random_params(module, *INPUTS)
    assert {name: leaf.shape for name, leaf in params.items() if name.endswith("V")} == {
        "W_V": (D, H, 3), "b_V": (H, 1, 3),
    }  # fmt: skip
    unbiased = {**params, **{f"b_{name}": jnp.zeros_like(params[f"b_{name}"]) for name in "QKV"}}
    assert_close(apply(module, unbiased, *INPUTS)[0], explicit(params, 1 / sqrt(K)).reshape(T, H * 3))


def test_unscaled_scores_are_not_divided() -> None:
    module = ConcatenatedHeads(H, K, H, scale=1.0)
    params = random_params(module, *INPUTS)
    assert_close(apply(module, params, *INPUTS)[0], explicit(params, 1.0).reshape(T, H * K))


def over_width(x_HTK: jax.Array, gamma_HK: jax.Array) -> jax.Array:
    rms_T1 = jnp.sqrt(jnp.square(x_HTK).mean((0, 2)) + 1e-6)[:, None]
    return x_HTK / rms_T1 * gamma_HK[:, None]


def standardized(x_HTK: jax.Array, gamma_HK: jax.Array) -> jax.Array:
    mean, variance = x_HTK.mean(-1, keepdims=True), x_HTK.var(-1, keepdims=True)
    return (x_HTK - mean) / jnp.sqrt(variance + 1e-6) * gamma_HK[:, None]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "norm"), [("head", rms_norm), ("width", over_width), ("layernorm", standardized)])
def test_qk_norm_then_rotation(kind: Any, norm: Callable) -> None:
    module = ConcatenatedHeads(H, K, 2, qk_norm=True, qk_norm_kind=kind, rope=RoPE(100.0))
    params = random_params(module, *INPUTS)

    def heads(matrix: str, gain: str) -> jax.Array:
        return rope(norm(jnp.einsum("td,dhk->htk", X_TD, params[matrix]), params[gain]), POSITIONS_T, 100.0)

    v = jnp.einsum("td,dhk->htk", X_TD, params["W_V"])
    wanted = attention(heads("W_Q", "gamma_Q"), heads("W_K", "gamma_K"), v, CAUSAL_TT, 1 / sqrt(K))
    assert_close(apply(module, params, *INPUTS)[0], wanted.transpose(1, 0, 2).reshape(T, H * K))


@pytest.mark.slow
def test_heads_with_distances_begin_by_attending_there() -> None:
    """The first three attend to the positions one and two before, and one after; the last, to no distance."""
    n, width = 24, 128
    module = LocalHeads(4, 64, 2, bias=True, rope=RoPE(), distances=(1, 2, -1))
    x_TD, positions_T = normal(n, width), jnp.arange(n)
    params = first_params(module, x_TD, positions_T, None)
    assert not params["b_V"].any() and not params["b_Q"][3].any() and params["b_K"].any()
    weights = []

    def kept(q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, mask: Any, scale: float) -> jax.Array:
        k_HSK = jnp.repeat(k_GSK, 4 // len(k_GSK), axis=0)
        weights.append(jax.nn.softmax(scale * q_HTK @ k_HSK.swapaxes(1, 2)))
        return q_HTK

    module.clone(attention=kept).apply({"params": params}, x_TD, positions_T, None)
    at = [[np.diagonal(w_TT, -d).mean() for d in range(-4, 5)] for w_TT in weights[0]]
    assert [np.argmax(row) - 4 for row in at[:3]] == [1, 2, -1]
    assert min(max(row) for row in at[:3]) > 0.3 > 0.2 > max(at[3])


@pytest.mark.slow
def test_wide_heads_begin_by_attending_around_their_own_position() -> None:
    """More to every position within 4 than to any that is 8 away or more."""
    n, width = 24, 64
    module = LocalHeads(1, 64, bias=True, rope=RoPE(), distances=(0,), is_wide=True)
    params = first_params(module, normal(n, width), jnp.arange(n), None)
    b_Q, b_K = (rope(jnp.tile(params[f"b_{name}"], (1, n, 1)), jnp.arange(n), 10_000.0)[0] for name in "QK")
    scores = np.asarray(b_Q @ b_K.T)[12] / sqrt(64)
    assert scores[12] == pytest.approx(3.0, rel=1e-5)
    assert scores[8:17].min() > 1.5 > 0.9 > max(scores[:5].max(), scores[20:].max())


def elsewhere(*args: Any) -> jax.Array:
    """An attention that is not the plain one, by what it gives."""
    return 2 * attention(*args)


@pytest.mark.parametrize("attend", [attention, elsewhere])
def test_with_a_cache_it_reads_what_it_wrote(attend: Callable[..., jax.Array]) -> None:
    module = MultiHeadAttention(H, K, 2, attention=attend)
    params = random_params(module, *INPUTS)
    layer = init_cache(1, 2, T, K, jnp.float32).layers[0]
    out = []
    for t in range(T):
        step = slice(t, t + 1)
        y, layer = apply(module, params, X_TD[step], POSITIONS_T[step], CAUSAL_TT[step], layer, t)
        out.append(y)
    assert_close(jnp.concatenate(out), apply(module, params, *INPUTS)[0])


@pytest.mark.slow
def test_terms_of_scores_are_passed_on_in_one_pass_and_step_by_step() -> None:
    """A soft cap, sinks and a bias by distance, also when the pattern is captured."""
    module, bias = MultiHeadAttention(H, K, 2, soft_cap=1.5, sinks=True), ALiBi(alibi_slopes(H))
    params = random_params(module, *INPUTS)
    assert not first_params(module, *INPUTS)["sinks"].any()

    @jax.jit
    def explicitly(params: dict) -> jax.Array:
        q, k, v = (jnp.einsum("td,dhk->htk", X_TD, params[f"W_{name}"]) for name in "QKV")
        y_HTK = attention(q, k, v, CAUSAL_TT, bias=bias, soft_cap=1.5, sinks=params["sinks"])
        return jnp.einsum("htk,hkd->td", y_HTK, params["W_O"])

    wanted, bias_HTT = explicitly(params), np.asarray(bias(POSITIONS_T, POSITIONS_T))
    assert_close(apply(module, params, *INPUTS, score_bias=bias)[0], wanted)
    copied = lambda root, path, x: x + 0 if path[-1] == "attn_scores" else x  # noqa: E731
    with handled_by(copied):  # from the scores on, the output is that of a replaced pattern
        assert_close(jax.jit(lambda: module.apply({"params": params}, *INPUTS, score_bias=bias)[0])(), wanted)
    layer = init_cache(1, 2, T, K, jnp.float32).layers[0]
    for n in (1, T):  # a step, and a whole text
        with pytest.raises(TypeError, match="a cache's slots are in any order; give bias"):
            module.apply({"params": params}, X_TD[:n], POSITIONS_T[:n], CAUSAL_TT[:n], layer, 0, score_bias=bias)
    for t in range(T):
        step = slice(t, t + 1)
        inputs = X_TD[step], POSITIONS_T[step], CAUSAL_TT[step], layer, t
        y, layer = apply(module, params, *inputs, score_bias=bias_HTT[:, step])
        assert_close(y, wanted[step])


@pytest.mark.parametrize("options", [{}, {"bias": True, "qk_norm": True, "rope": RoPE(100.0)}], ids=["plain", "all"])
def test_a_source_that_is_the_sequence_itself_is_self_attention(options: dict) -> None:
    module = MultiHeadAttention(H, K, 2, **options)
    params = random_params(module, *INPUTS)
    assert_close(apply(module, params, *INPUTS, source=X_TD)[0], apply(module, params, *INPUTS)[0])


@pytest.mark.slow
def test_cross_attention_is_four_products_and_reads_keys_and_values_made_before() -> None:
    S = 5
    module, source_SD, mask = MultiHeadAttention(H, K, 2), normal(S, D, seed=1), normal(T, S, seed=2) > 0
    params = random_params(module, *INPUTS)
    wanted = multi_head_attention(X_TD, source_SD, *(params[f"W_{name}"] for name in "QKVO"), mask)
    assert_close(apply(module, params, X_TD, POSITIONS_T, mask, source=source_SD)[0], wanted)
    k_GSK, v_GSK = apply(module, params, source_SD, jnp.arange(S), method="keys_values")
    layer = write_layer(init_cache(1, 2, S, K, jnp.float32).layers[0], k_GSK, v_GSK, 0)
    for t in (slice(0, T), slice(2, 3)):  # also of one query, as in a decode step
        y_TD, cache = apply(module, params, X_TD[t], POSITIONS_T[t], mask[t], source=layer)
        assert_close(y_TD, wanted[t])
        assert cache is None


@pytest.mark.slow
@pytest.mark.parametrize(("std", "wanted"), [(None, 1 / sqrt(101)), (0.3, 0.3)])
def test_projections_are_drawn_with_the_standard_deviation_asked_for(std: float | None, wanted: float) -> None:
    params = first_params(MultiHeadAttention(2, 53, 1, init_std=std), normal(T, 101), POSITIONS_T, None)
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        # At least 101·53 draws: the standard deviation is known to 1/√(2·5353) = 1 %; this is five of those.
        assert np.std(params[name]) == pytest.approx(wanted, rel=0.05)


@pytest.mark.slow
def test_defaults_attend_everywhere_and_a_batch_is_refused():
    module = MultiHeadAttention(n_heads=2, head_dim=3)
    x_TD = normal(5, 4)
    params = first_params(module, x_TD)
    wanted = apply(MultiHeadAttention(2, 3, 2), params, x_TD, jnp.arange(5), None)[0]
    np.testing.assert_array_equal(apply(module, params, x_TD)[0], wanted)
    with pytest.raises(ValueError, match=r"expected a sequence of shape \(T, D\), got \(8, 5, 4\); use jax.vmap"):
        apply(module, params, normal(8, 5, 4))


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ((X_TD, X_TD), ValueError, r"expected positions of shape \(7,\), one per token, got \(7, 13\)"),  # Flax's order
        ((X_TD, CAUSAL_TT), ValueError, r"expected positions of shape \(7,\), one per token, got \(7, 7\)"),
        ((X_TD, np.ones(T, bool)), TypeError, "positions are bool"),
        ((X_TD, None, np.zeros((T, T))), TypeError, "the mask is float64; give a bool array"),
        ((X_TD, None, None, None, 0, X_TD[None]), ValueError, "use jax.vmap for a batch"),
    ],
)
def test_inputs_in_another_librarys_order_are_refused(inputs: tuple, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        MultiHeadAttention(H, K).init(jax.random.key(0), *inputs)

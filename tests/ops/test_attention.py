import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import log
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops import masks
from jaxformer.ops.bias import Bias, RelativePositionBias
from jaxformer.ops.blockwise import blockwise_attention, blockwise_attention_with_lse
from jaxformer.ops.kernels import cudnn_attention, splash_attention
from jaxformer.train.kernels import FusedAttention
from tests.arrays import assert_close, normal
from tests.helpers import slow

ops = importlib.import_module("jaxformer.ops.attention")  # in the package, its name is the function's
# One compiled program a call instead of one a primitive.
attention, attention_weights, row_entropy = map(jax.jit, (ops.attention, ops.attention_weights, ops.row_entropy))

# Prime lengths and width; H is a multiple of G, so it cannot be prime for all G.
H, T, S, K = 6, 5, 7, 11
CAUSAL_TT = masks.causal(jnp.arange(T), jnp.arange(T))


def qkv(G: int = H, S: int = S) -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(H, T, K, seed=1), normal(G, S, K, seed=2), normal(G, S, K, seed=3)


@partial(jax.jit, static_argnames="is_causal")
def by_jax(q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, scale: float, is_causal: bool) -> jax.Array:
    arrays = map(length_first, (q_HTK, k_GSK, v_GSK))
    return length_first(jax.nn.dot_product_attention(*arrays, is_causal=is_causal, scale=scale))


def length_first(x_HTK: jax.Array) -> jax.Array:
    """Axes as jax.nn and Flax have them, `(T, H, K)`."""
    return x_HTK.transpose(1, 0, 2)


@pytest.mark.parametrize(
    ("G", "scale", "causal"), [(1, 1.0, True), (2, K**-0.5, True), (3, 1.0, False), (6, 0.2, True)]
)
def test_agrees_with_jax_nn(G: int, scale: float, causal: bool) -> None:
    q, k, v = qkv(G, S=T if causal else S)
    wanted = by_jax(q, k, v, scale, is_causal=causal)
    assert_close(attention(q, k, v, CAUSAL_TT if causal else None, scale), wanted)


@pytest.mark.parametrize("G", [2, 6])
def test_segments_apart_are_what_their_mask_says(G: int) -> None:
    """Three segments of four; output and gradients."""
    q, k, v = (normal(heads, 12, K, seed=seed) for heads, seed in ((H, 1), (G, 2), (G, 3)))
    mask = masks.segment(jnp.arange(12) // 4, jnp.arange(12) // 4)

    def both(attend: Callable) -> tuple:
        loss = lambda q, k, v: (attend(q, k, v, mask, 0.3) * normal(H, 12, K, seed=4)).sum()  # noqa: E731
        return attend(q, k, v, mask, 0.3), *jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    apart, masked = jax.jit(lambda: (both(ops.in_segments(3)), both(ops.attention)))()
    for ours, wanted in zip(apart, masked, strict=True):
        assert_close(ours, wanted)


@pytest.mark.slow
def test_layers_by_name_are_their_formulas() -> None:
    """In NumPy and float64, a head at a time: queries given; queries of the data; and four products with weights."""
    D = 13
    x_TD, source_SD, given_HTK = normal(T, D, seed=4), normal(S, D, seed=5), normal(H, T, K, seed=6)
    W_Q, W_K, W_V = (np.asarray(normal(D, H, K, seed=seed)) / np.float32(D**0.5) for seed in (7, 8, 9))
    W_O, mask = normal(H, K, D, seed=10), np.asarray(normal(T, S, seed=11)) > -1
    x, source, given, to_q, to_k, to_v, out = (
        np.asarray(a, np.float64) for a in (x_TD, source_SD, given_HTK, W_Q, W_K, W_V, W_O)
    )

    def head(q_TK: np.ndarray, data: np.ndarray, h: int, seen: np.ndarray, scale: float) -> np.ndarray:
        weights = np.where(seen, np.exp(scale * q_TK @ (data @ to_k[:, h]).T), 0)
        return weights / weights.sum(-1, keepdims=True) @ (data @ to_v[:, h])

    wanted = [head(given[h], source, h, np.asarray(mask), 0.2) for h in range(H)]
    cross_attention, multi_head_attention = map(jax.jit, (ops.cross_attention, ops.multi_head_attention))
    assert_close(cross_attention(given_HTK, source_SD, W_K, W_V, mask, 0.2), wanted)
    wanted = [head(x @ to_q[:, h], x, h, np.ones((T, T), bool), 1.0) for h in range(H)]
    assert_close(cross_attention(jax.jit(ops.project_heads)(x_TD, W_Q), x_TD, W_K, W_V, None, 1.0), wanted)
    wanted = sum(head(x @ to_q[:, h], source, h, np.asarray(mask), K**-0.5) @ out[h] for h in range(H))
    assert_close(multi_head_attention(x_TD, source_SD, W_Q, W_K, W_V, W_O, mask), wanted)


def test_is_causal_is_the_causal_mask_and_excludes_another() -> None:
    q, k, v = normal(4, 5, 3), normal(2, 7, 3, seed=1), normal(2, 7, 3, seed=2)
    assert_close(ops.attention(q, k, v, is_causal=True), ops.attention(q, k, v, masks.Causal()))
    with pytest.raises(ValueError, match="is_causal is set, and there is a mask; give one of them"):
        ops.attention(q, k, v, jnp.ones((5, 7), bool), is_causal=True)


def test_weights_of_three_scores_by_hand() -> None:
    # e^1.2, e^0.5, e^1.1 = 3.320, 1.649, 3.004; their sum 7.973.
    weights = attention_weights(jnp.ones((1, 1, 1)), jnp.array([1.2, 0.5, 1.1]).reshape(1, 3, 1))
    np.testing.assert_allclose(weights[0, 0], [0.416, 0.207, 0.377], atol=5e-4)  # three decimals


@pytest.mark.parametrize("window", [None, 2])
def test_a_symbolic_mask_is_its_array(window: int | None) -> None:
    q, k, v = qkv(2)
    mask = masks.Causal(window)
    np.testing.assert_array_equal(ops.attention(q, k, v, mask), ops.attention(q, k, v, mask.array(T, S)))


def test_scores_are_divided_by_the_root_of_the_width_by_default() -> None:
    q, k, v = qkv(3, T)
    attends = (
        ops.attention,
        partial(blockwise_attention, block=4),
        ops.in_segments(1),
        lambda q, k, v, **scale: cudnn_attention(q, k, v, implementation="xla", **scale),
        lambda q, k, v, **scale: FusedAttention("cudnn")(q, k, v, **scale),
        lambda q, k, v, **scale: ops.attention_scores(q, k, **scale),
        lambda q, k, v, **scale: ops.attention_weights(q, k, **scale),
    )
    for attend in attends:
        by_default, divided = (jax.make_jaxpr(partial(attend, **scale))(q, k, v) for scale in ({}, {"scale": K**-0.5}))
        assert str(by_default) == str(divided)
    assert inspect.signature(splash_attention).parameters["scale"].default is None


def test_soft_cap_bias_and_sinks_are_their_formula_in_float64() -> None:
    """In NumPy, in this order: c tanh(s / c) + b, then the softmax with one more logit; row 3 sees no key."""
    q, k, v = qkv(2)
    bias, sinks, mask = normal(H, T, S, seed=4), normal(H, seed=5), np.arange(T)[:, None] + np.arange(S) < 7
    mask = jnp.asarray(mask & (np.arange(T)[:, None] != 3))
    terms: dict[str, Any] = {"bias": bias, "soft_cap": 1.5, "sinks": sinks}

    @jax.jit
    def results() -> tuple[tuple, jax.Array]:
        return ops.attention_with_lse(q, k, v, mask, 0.3, **terms), ops.attention_weights(q, k, mask, 0.3, **terms)

    (y, lse), got = results()
    exact_q, exact_k, exact_v, b, sink = (np.asarray(x, np.float64) for x in (q, k, v, bias, sinks))
    scores = 0.3 * np.einsum("htk,hsk->hts", exact_q, np.repeat(exact_k, H // 2, 0))
    exp = np.where(mask, np.exp(1.5 * np.tanh(scores / 1.5) + b), 0)
    total = exp.sum(-1) + np.exp(sink)[:, None]
    weights = exp / total[..., None]
    assert_close(y, weights @ np.repeat(exact_v, H // 2, 0))
    assert_close(lse, np.log(total))
    assert_close(got, weights)


def combined(attend: Callable, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple:
    parts = [slice(0, 4), slice(4, 6), slice(6, S)]
    results = [attend(q, k[:, part], v[:, part], mask[:, part], 0.3) for part in parts]
    return ops.combine_attention(*(jnp.stack(x) for x in zip(*results, strict=True)))


def test_parts_are_combined_by_the_softmax_of_their_logsumexps_by_hand() -> None:
    """Weights 1 and 3 of 4; of the second query, which sees only the first part, 1 and 0; the third sees nothing."""
    lse_NHT = np.array([[[0, log(5), -np.inf]], [[log(3), -np.inf, -np.inf]]], np.float32)
    y_NHTK = np.array([[[[2.0], [7.0], [0.0]]], [[[6.0], [0.0], [0.0]]]], np.float32)
    y, lse = map(np.asarray, jax.jit(ops.combine_attention)(y_NHTK, lse_NHT))
    np.testing.assert_allclose(y[0, :, 0], [5, 7, 0], rtol=1e-6)
    np.testing.assert_allclose(lse[0], [log(4), log(5), -np.inf], rtol=1e-6)


@pytest.mark.slow
def test_attention_to_parts_of_the_keys_combines_to_that_to_all() -> None:
    """Output, logsumexp and gradients; row 2 sees no key at all, row 1 none of the first part."""
    attend = partial(blockwise_attention_with_lse, block=3, sequential=True)
    q, k, v = qkv(2)
    row_T1, key_S = np.arange(T)[:, None], np.arange(S)
    mask = jnp.asarray((row_T1 != 2) & ((row_T1 != 1) | (key_S > 3)))

    def run(attend: Callable) -> tuple:
        (y, lse), pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
        return y, lse, pull((normal(H, T, K, seed=4), normal(H, T, seed=5)))

    whole = partial(ops.attention_with_lse, scale=0.3)
    results = jax.device_get(jax.jit(lambda: (run(partial(combined, attend)), run(whole)))())
    (y, lse, got), (wanted_y, wanted_lse, wanted) = results
    np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to(np.arange(T) == 2, (H, T)))
    assert_close(np.delete(lse, 2, axis=1), np.delete(wanted_lse, 2, axis=1))
    for ours, theirs in zip((y, *got), (wanted_y, *wanted), strict=True):
        assert_close(ours, theirs)
    assert not y[:, 2].any() and not got[0][:, 2].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bias", "soft_cap", "sinks", "mask", "sequential"),
    [
        (normal(H, S, S, seed=6), None, None, masks.Packed(jnp.arange(S) // 3, masks.Causal(3)), False),
        (RelativePositionBias(normal(6, H, seed=6), False, 5), 0.8, normal(H, seed=7), masks.Causal(), True),
    ],
    ids=["array", "buckets, cap and sinks"],
)
def test_gradients_with_terms_of_scores_are_those_of_torch(
    bias: Bias, soft_cap: float | None, sinks: jax.Array | None, mask: masks.Mask, sequential: bool
) -> None:
    """To queries, keys, values and what is learned, in blocks, too; and second derivatives."""
    torch = pytest.importorskip("torch")
    q, k, v, dy, tangent = normal(H, S, K, seed=1), *qkv(2)[1:], normal(H, S, K, seed=8), normal(H, S, K, seed=9)
    to_torch = lambda x: torch.tensor(np.array(x), dtype=torch.float64, requires_grad=True)  # noqa: E731
    tensors = [to_torch(x) for x in (q, k, v, *jax.tree.leaves((bias, sinks)))]
    scale_of_lse = 0.7

    def by_torch(q: Any, k: Any, v: Any, *learned: Any) -> Any:
        scores = 0.3 * torch.einsum("htk,hsk->hts", q, k.repeat_interleave(H // 2, 0))
        scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
        if isinstance(bias, RelativePositionBias):
            in_bucket = replace(bias, table_NH=jnp.eye(6))(jnp.arange(S), jnp.arange(S))  # (N, S, S)
            scores = scores + torch.einsum("nh,nts->hts", learned[0], to_torch(in_bucket))
        else:
            scores = scores + (learned[0] if learned else to_torch(bias(jnp.arange(S), jnp.arange(S))))
        scores = scores.masked_fill(~torch.tensor(np.array(mask.array(S, S))), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, learned[1][:, None, None].expand(H, S, 1)], -1)
        y = scores.softmax(-1)[..., :S] @ v.repeat_interleave(H // 2, 0)
        return (y * to_torch(dy)).sum() + scale_of_lse * (scores.logsumexp(-1) ** 2).sum()

    def loss(attend: Callable, q: Any, k: Any, v: Any, bias: Bias, sinks: Any) -> jax.Array:
        y, lse = attend(q, k, v, mask, 0.3, bias=bias, sinks=sinks, soft_cap=soft_cap)
        return (y * dy).sum() + scale_of_lse * (lse**2).sum()

    first = torch.autograd.grad(by_torch(*tensors), tensors, create_graph=True)
    second = torch.autograd.grad(first[0], tensors, to_torch(tangent))
    tiled = partial(blockwise_attention_with_lse, block=3, sequential=sequential)
    for attend in (ops.attention_with_lse, tiled):
        got = jax.jit(jax.grad(partial(loss, attend), argnums=range(5)))(q, k, v, bias, sinks)
        for ours, theirs in zip(jax.tree.leaves(got), first, strict=True):
            assert_close(ours, theirs.detach())
    gradient = jax.grad(partial(loss, ops.attention_with_lse))
    got = jax.jit(lambda *x: jax.vjp(gradient, *x)[1](tangent))(q, k, v, bias, sinks)
    for ours, theirs in zip(jax.tree.leaves(got), second, strict=True):
        assert_close(ours, theirs)


@pytest.mark.slow
def test_blocks_map_terms_of_scores_over_examples() -> None:
    """Per-example gradients, also to terms that all examples share or that each has of its own."""
    q, k, v = (jnp.stack([x, 2 * x]) for x in (normal(H, S, K, seed=1), *qkv(2)[1:]))
    table_NH, sinks_BH = normal(6, H, seed=6), normal(2, H, seed=7)

    def gradients(attend: Callable) -> Any:
        def loss(q: Any, k: Any, v: Any, table_NH: Any, sinks: Any) -> jax.Array:
            bias = RelativePositionBias(table_NH, max_distance=5)
            return (attend(q, k, v, masks.Causal(), 0.3, bias=bias, sinks=sinks, soft_cap=2.0) ** 2).sum()

        each = jax.vmap(jax.grad(loss, argnums=(0, 1, 2, 3, 4)), (0, 0, 0, None, 0))
        return jax.jit(each)(q, k, v, table_NH, sinks_BH)

    tiled = partial(blockwise_attention, block=3, sequential=True)
    for ours, theirs in zip(gradients(tiled), gradients(ops.attention), strict=True):
        assert_close(ours, theirs)


ADDED_TS = np.where(np.arange(S) < 3, 0, -np.inf) * np.ones((T, 1))
WRONG_MASKS: dict[str, tuple[Any, type, str]] = {
    "added": (ADDED_TS, TypeError, "the mask is float64; give a bool array, True where a query may attend: mask == 0"),
    "ones and zeros": (np.ones((T, S), int), TypeError, "the mask is int64; .* mask == 1 if it is 1 and 0"),
    "a class": (masks.Causal, TypeError, r"the mask is the class Causal; give an instance, such as Causal\(\)"),
    "a flag": (True, TypeError, "the mask is bool; give a bool array"),
    "of keys": (np.ones(S, bool), ValueError, r"expected a mask of shape \(5, 7\) or \(6, 5, 7\), got \(7,\)"),
    "of a batch": (np.ones((1, T, S), bool), ValueError, r"got \(1, 5, 7\)"),
    "of other segments": (masks.Packed(jnp.zeros(T, int)), ValueError, "expected one segment per position"),
}


@pytest.mark.parametrize("name", WRONG_MASKS)
@pytest.mark.parametrize("attend", [ops.attention, blockwise_attention], ids=["whole", "tiled"])
def test_a_mask_that_would_be_misread_is_refused(name: str, attend: Callable) -> None:
    mask, error, message = WRONG_MASKS[name]
    with pytest.raises(error, match=message):
        attend(*qkv(), mask)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            ((1, H, T, K), (1, H, S, K), (1, H, S, K)),
            r"expected queries of shape \(H, T, K\), .*; use jax.vmap for a batch",
        ),
        (((T, K), (S, K), (S, K)), r"expected queries of shape \(H, T, K\), got \(5, 11\)$"),
        (((T, H, K), (S, H, K), (S, H, K)), "both are heads first"),
        (((H, T, K), (4, S, K), (4, S, K)), "H is a multiple of G"),
        (((H, T, K), (3, S, K), (2, S, K)), "expected values for 3 heads and 7 keys"),
        (((H, T, K), (3, S, K), (3, T, K)), "expected values for 3 heads and 7 keys"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple, message: str) -> None:
    for attend in (ops.attention, blockwise_attention):
        with pytest.raises(ValueError, match=message):
            attend(*(np.zeros(shape, np.float32) for shape in shapes))
    with pytest.raises(TypeError, match="queries are int64"):
        ops.attention(*[np.ones((H, T, K), int)] * 3)
    with pytest.raises(ValueError, match="a projection of shape"):
        ops.multi_head_attention(np.ones((T, K)), np.ones((T, K)), *[np.ones((K, K))] * 4)
    with pytest.raises(ValueError, match=r"use jax.vmap for a batch"):
        ops.cross_attention(np.ones((H, T, K)), np.ones((1, S, K)), *[np.ones((K, H, K))] * 2)


def test_checks_leave_no_trace_in_a_compiled_program() -> None:
    """The program is that of the functions without checks."""
    q, k, _ = qkv()
    unchecked = lambda q, k: jnp.einsum(  # noqa: E731
        "grtk,gsk->grts", q.reshape(H, 1, T, K) * 0.3, k, preferred_element_type=jnp.float32
    ).reshape(H, T, S)
    checked = lambda q, k: ops.attention_scores(q, k, 0.3)  # noqa: E731
    assert str(jax.make_jaxpr(checked)(q, k)) == str(jax.make_jaxpr(unchecked)(q, k))


@pytest.mark.parametrize("size", [1e4, -1e4, 1e31, -1e31])
def test_huge_scores_stay_finite_and_masked_keys_unseen(size: float) -> None:
    root = abs(size) ** 0.5
    q = jnp.full((1, 3, 1), root)
    k = jnp.array([1.0, 0.5, 2.0]).reshape(1, 3, 1) * root * np.sign(size)
    mask = masks.causal(jnp.arange(3), jnp.arange(3))
    weights, pull = jax.vjp(lambda q, k: attention_weights(q, k, mask), q, k)
    best = [0, 0, 2] if size > 0 else [0, 1, 1]  # the largest visible score of each row takes all
    np.testing.assert_allclose(weights[0], np.eye(3)[best], atol=1e-6)
    assert all(jnp.isfinite(g).all() for g in pull(jnp.ones_like(weights)))


def test_order_of_keys_does_not_matter_and_order_of_queries_carries_over() -> None:
    q, k, v = qkv(3)
    y = attention(q, k, v)
    keys, queries = np.random.default_rng(0).permutation(S), np.random.default_rng(0).permutation(T)
    assert_close(attention(q, k[:, keys], v[:, keys]), y)
    assert_close(attention(q[:, queries], k, v), y[:, queries])


def test_bfloat16_in_bfloat16_out_with_float32_weights() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(2))
    weights = attention_weights(q, k)
    assert weights.dtype == jnp.float32
    assert_close(weights.sum(-1), np.ones((H, T)))  # bfloat16 sums would be off by 2^-9
    y = attention(q, k, v)
    assert y.dtype == jnp.bfloat16
    # Weights and outputs are rounded to 8 bits: 2^-8 each, relative.
    assert_close(y, attention(*(x.astype(jnp.float32) for x in (q, k, v))), 2**-7)


@pytest.mark.parametrize(
    ("row", "entropy"),
    [
        (np.full(7, 1 / 7), log(7)),
        (np.eye(7)[2], 0.0),
        (np.zeros(7), 0.0),
        ([0.5, 0.25, 0.25, 0.0], 1.5 * log(2)),
    ],
    ids=["uniform", "one-hot", "zero", "mixed"],
)
def test_entropy_by_hand_and_its_gradient_is_finite(row: np.ndarray, entropy: float) -> None:
    row = jnp.asarray(row, jnp.float32)
    assert_close(row_entropy(row), entropy, 1e-6)
    assert jnp.isfinite(jax.grad(row_entropy)(row)).all()


@pytest.mark.slow
def test_masks_may_differ_per_head() -> None:
    """A key that one head sees counts, whatever the others see; what stands at one that none sees does not."""
    q, k, v = qkv(H)
    mask_HTS = (normal(H, T, S, seed=4) > 0).at[:, :, 2].set(False)
    k, v = (x.at[:, 2].set(jnp.nan) for x in (k, v))
    apart = [attention(q[h : h + 1], k[h : h + 1], v[h : h + 1], mask_HTS[h])[0] for h in range(H)]
    assert_close(attention(q, k, v, mask_HTS), apart)


HIDDEN_S = jnp.arange(S) % 3 == 1


@pytest.mark.parametrize(
    ("attend", "mask"),
    [
        (ops.attention, "padding"),
        (ops.attention, "causal"),
        (partial(blockwise_attention, block=3), "padding"),
        slow(partial(blockwise_attention, block=3), "causal"),
    ],
    ids=["whole-padding", "whole-causal", "tiled-padding", "tiled-causal"],
)
def test_a_fully_masked_key_changes_no_bit(attend: Callable, mask: str) -> None:
    """Output and gradients, some of the other keys hidden from some queries."""
    q, k, v = qkv(G=2)
    seen_TS = (
        ~HIDDEN_S[None] & (jnp.arange(S)[None] != jnp.arange(T)[:, None]) if mask == "padding" else masks.Causal(3)
    )
    hidden_S = HIDDEN_S if mask == "padding" else jnp.arange(S) >= T
    run = jax.jit(
        lambda q, k, v: jax.value_and_grad(lambda *x: (attend(*x, seen_TS, 0.3) ** 2).sum(), (0, 1, 2))(q, k, v)
    )
    put = lambda x, value: jnp.where(hidden_S[:, None], value, x)  # noqa: E731
    clean = jax.tree.leaves(run(q, put(k, 0), put(v, 0)))
    for value in (np.nan, np.inf):
        for ours, wanted in zip(jax.tree.leaves(run(q, put(k, value), put(v, value))), clean, strict=True):
            np.testing.assert_array_equal(ours, wanted)
            assert np.isfinite(ours).all()

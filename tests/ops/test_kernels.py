from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from jaxformer.ops import kernels
from jaxformer.ops.attention import attention
from jaxformer.ops.bias import ALiBi
from jaxformer.ops.kernels import (
    block,
    cudnn_attention,
    cudnn_refuses,
    padded,
    splash_attention,
    splash_kernel,
    splash_refuses,
)
from jaxformer.ops.masks import Causal, Mask, Packed
from tests.arrays import normal
from tests.helpers import slow
from tests.ops.attending import SCALE, assert_all_close, qkv, value_and_gradients

# The kernels themselves need their devices: these run the same programs on any.
HERE = {
    "splash": partial(splash_attention, interpret=True),
    "cudnn": partial(cudnn_attention, implementation="xla"),
}


@pytest.mark.slow
def test_agrees_with_the_reference_forward_and_backward() -> None:
    """Padded to 384; a window shorter than a block."""
    arrays, mask = qkv(3, 1, 300, 300, 11), Causal(70)
    wanted = value_and_gradients(attention, *arrays, mask)
    for attend in HERE.values():
        assert_all_close(value_and_gradients(attend, *arrays, mask), wanted)


@pytest.mark.slow
def test_packed_documents_are_attended_to_apart_in_each_example_of_a_batch() -> None:
    T = 131  # a prime: padded
    segments_BT = jnp.stack([jnp.arange(T) // 50, jnp.where(jnp.arange(T) < 129, 1, 0)])  # numbers need no order
    arrays = [jnp.stack([x, 2 * x]) for x in qkv(2, 1, T, T, 16)]
    each = lambda f: jax.vmap(lambda *of_one: value_and_gradients(f, *of_one[:3], Packed(of_one[3], Causal(70))))  # noqa: E731
    assert_all_close(*(each(f)(*arrays, segments_BT) for f in (HERE["splash"], attention)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fits", "many", "again"])
def test_packed_documents_are_given_to_cudnn_by_offset_and_length(name: str, monkeypatch) -> None:
    """Two rows with other documents, one with padding, and keys with fewer heads; and rows that cuDNN does not take."""
    T, t = 24, np.arange(24)
    rows = {
        "fits": [np.where(t < 5, 2, np.where(t < 6, 9, 4)), np.where(t < 20, 1 + t // 10, 0)],
        "many": [t // 4, np.zeros(T, int)],
        "again": [t // 8 % 2, t // 12],
    }
    monkeypatch.setattr(kernels, "MAX_DOCUMENTS", 4)
    arrays = [jnp.stack([x, 2 * x]) for x in qkv(4, 2, T, T, 8)]
    each = lambda f: jax.vmap(lambda *of_one: value_and_gradients(f, *of_one[:3], Packed(of_one[3], Causal(7))))  # noqa: E731
    segments_BT = jnp.asarray(np.stack(rows[name]), jnp.int32)
    used = []
    monkeypatch.setattr(kernels, "_attend_by_offsets", lambda *a, f=kernels._attend_by_offsets: used.append(f) or f(*a))
    assert_all_close(*(each(f)(*arrays, segments_BT) for f in (HERE["cudnn"], attention)))
    assert used


@pytest.mark.parametrize(
    ("row", "fits"), [([2, 2, 9, 4, 4, 0], True), ([1, 2, 3, 4, 5, 5], False), ([1, 1, 2, 2, 1, 1], False)]
)
def test_cudnn_takes_rows_of_few_documents_each_in_one_run(row, fits, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "MAX_DOCUMENTS", 4)
    segments_BT = np.array([[7] * 6, row], np.int32)
    assert jax.jit(lambda x: kernels._packed_ways(kernels.PackedCall(1.0, None), x)[0])(segments_BT) == fits


@pytest.mark.parametrize("name", ["cudnn", slow("splash")])
def test_more_keys_than_queries_and_no_mask(name: str) -> None:
    arrays = qkv(2, 1, 128, 256, 8)
    assert_all_close(*(value_and_gradients(f, *arrays) for f in (HERE[name], attention)))


@pytest.mark.slow
def test_bfloat16() -> None:
    arrays = [x.astype(jnp.bfloat16) for x in qkv(4, 2, 131, 131, 16)]
    exact = value_and_gradients(attention, *(x.astype(jnp.float32) for x in arrays), Causal())
    for got, want in zip(value_and_gradients(HERE["splash"], *arrays, Causal()), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        # q·scale, the weights, what goes back to the scores, and the result are rounded to 8 bits: 2^-8 each.
        assert np.linalg.norm(got.astype(jnp.float32) - want) <= 2**-6 * np.linalg.norm(want)


@pytest.mark.slow
def test_vmap_of_the_gradient_and_gradient_of_the_vmap() -> None:
    q, k, v = (jnp.stack([x, 2 * x]) for x in qkv(2, 1, 128, 128, 8))
    loss = lambda f: lambda q, k, v: (f(q, k, v, Causal(), SCALE) ** 2).sum()  # noqa: E731
    wanted = jax.jit(jax.vmap(jax.grad(loss(attention), argnums=(0, 1, 2))))(q, k, v)
    splashed = loss(HERE["splash"])
    each = jax.jit(jax.vmap(jax.grad(splashed, argnums=(0, 1, 2))))(q, k, v)
    whole = jax.jit(jax.grad(lambda *qkv: jax.vmap(splashed)(*qkv).sum(), argnums=(0, 1, 2)))(q, k, v)
    assert_all_close(each, wanted)
    assert_all_close(whole, wanted)


@pytest.mark.parametrize("window", [None, 1, 128, 129, 700])
def test_splash_visits_the_blocks_that_its_own_masks_name(window: int | None) -> None:
    T = 1152  # three blocks of 384
    whole = splash.CausalMask((T, T)) if window is None else splash.LocalMask((T, T), (window - 1, 0), 0)
    b = block(T)
    sizes = splash.BlockSizes(block_q=b, block_kv=b, block_q_dkv=b, block_kv_dkv=b, block_q_dq=b, block_kv_dq=b)
    wanted = splash.make_splash_mha(splash.MultiHeadMask([whole]), block_sizes=sizes, head_shards=1, q_seq_shards=1)
    got = splash_kernel(1, T, T, Causal(window), False)
    for tables in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
        for g, w in zip(jax.tree.leaves(getattr(got, tables)), jax.tree.leaves(getattr(wanted, tables)), strict=True):
            np.testing.assert_array_equal(g, w)


def like(H: int, T: int, K: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((H, T, K), dtype)


FULL = jnp.ones((256, 256), bool)
PACKED = Packed(jnp.zeros(256, jnp.int32))


@pytest.mark.parametrize(
    ("refuses", "q", "k", "mask", "reason"),
    [
        (cudnn_refuses, like(4, 256, 64), like(2, 256, 64), Causal(), None),
        (cudnn_refuses, like(4, 255, 64), like(2, 7, 64), None, None),
        (cudnn_refuses, like(4, 256, 64, jnp.float32), like(2, 256, 64, jnp.float32), None, "float32"),
        (cudnn_refuses, like(4, 256, 60), like(2, 256, 60), None, "multiple of 8 up to 256, not 60"),
        (cudnn_refuses, like(4, 256, 264), like(2, 256, 264), None, "not 264"),
        (cudnn_refuses, like(4, 256, 64), like(2, 256, 64), FULL, "array"),
        (cudnn_refuses, like(4, 256, 64), like(2, 256, 64), PACKED, "packed documents on GPUs from Hopper on"),
        (cudnn_refuses, like(4, 1, 64), like(2, 256, 64), Causal(), "1 queries and 256 keys"),
        (splash_refuses, like(4, 256, 64), like(2, 256, 64), Causal(), None),
        (splash_refuses, like(4, 257, 11, jnp.float32), like(2, 257, 11, jnp.float32), Causal(3), None),
        (splash_refuses, like(4, 256, 64), like(2, 384, 64), None, None),
        (splash_refuses, like(4, 127, 64), like(2, 127, 64), Causal(), "there are 127"),
        (splash_refuses, like(4, 257, 64), like(2, 257, 64), None, "not multiples of 128"),
        (splash_refuses, like(4, 4224, 64), like(2, 4224, 64), None, "not multiples of 512"),
        (splash_refuses, like(4, 256, 64), like(2, 256, 64), FULL, "array"),
        (splash_refuses, like(4, 256, 64), like(2, 256, 64), replace(PACKED, causal=Causal(9)), None),
        (splash_refuses, like(4, 128, 64), like(2, 256, 64), Causal(), "128 queries and 256 keys"),
    ],
)  # fmt: skip
def test_kernels_refuse_unsupported_inputs_with_a_reason(refuses, q, k, mask: Mask, reason: str | None) -> None:
    said = refuses(q, k, mask)
    assert said is None if reason is None else reason in said


def test_packed_documents_are_refused_where_cudnn_or_jax_has_no_kernel_for_them(monkeypatch) -> None:
    arrays = [x.astype(jnp.bfloat16) for x in qkv(1, 1, 256, 256, 8)]
    with pytest.raises(ValueError, match="on GPUs from Hopper on"):  # jax itself raises NotImplementedError
        cudnn_attention(*arrays, PACKED)
    for name in ("check_compute_capability", "dot_product_attention"):
        with monkeypatch.context() as patch:
            patch.delattr(fused_attention_stablehlo, name)
            assert "this jax has no cuDNN attention" in str(cudnn_refuses(arrays[0], arrays[1], PACKED))


@pytest.mark.parametrize("name", HERE)
def test_an_array_mask_is_an_error_and_not_ignored(name: str) -> None:
    with pytest.raises(ValueError, match="do not support array masks"):
        HERE[name](*qkv(1, 1, 256, 256, 8), FULL)


@pytest.mark.slow
def test_kernels_take_the_terms_of_scores_that_they_support() -> None:
    q, k, v = qkv(2, 1, 128, 128, 8)
    sinks, bias = normal(2, seed=5), ALiBi((0.5, 0.25))
    for attend, terms in ((HERE["splash"], {"soft_cap": 1.5, "sinks": sinks}), (HERE["cudnn"], {"bias": bias})):
        results = (value_and_gradients(partial(f, **terms), q, k, v, Causal()) for f in (attend, attention))
        assert_all_close(*results)
    loss = lambda f: lambda sinks: (f(q, k, v, Causal(), SCALE, sinks=sinks) ** 2).sum()  # noqa: E731
    assert_all_close(*(jax.jit(jax.grad(loss(f)))(sinks)[None] for f in (HERE["splash"], attention)))


@pytest.mark.parametrize(
    ("name", "term", "reason"),
    [
        ("cudnn", "soft_cap", "cuDNN attention has no soft cap; use blockwise_attention"),
        ("cudnn", "sinks", "cuDNN attention has no sinks"),
        ("splash", "bias", "splash attention has no bias"),
    ],
)
def test_kernels_refuse_terms_of_scores_that_they_do_not_have(name: str, term: str, reason: str) -> None:
    value = {"soft_cap": 2.0, "sinks": np.zeros(1, np.float32), "bias": ALiBi((1.0,))}[term]
    with pytest.raises(ValueError, match=reason):
        HERE[name](*qkv(1, 1, 256, 256, 8), **{term: value})


@pytest.mark.parametrize(
    ("T", "rounded", "cut"),
    [(128, 128, 128), (129, 256, 256), (384, 384, 384), (512, 512, 512), (640, 640, 128), (2048, 2048, 512),
     (2049, 2560, 512), (131_072, 131_072, 512), (131_073, 131_584, 512)],
)  # fmt: skip
def test_splash_blocks_divide_the_padded_length(T: int, rounded: int, cut: int) -> None:
    assert (padded(T), block(padded(T))) == (rounded, cut)

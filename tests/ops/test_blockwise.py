from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_policies

from jaxformer.ops.attention import attention
from jaxformer.ops.bias import ALiBi
from jaxformer.ops.blockwise import SAVED, Tiles, blockwise_attention, loops
from jaxformer.ops.masks import Causal, Mask, Packed
from tests.arrays import normal
from tests.ops.attending import SCALE, assert_all_close, qkv, value_and_gradients

ORDERS = pytest.mark.parametrize("sequential", [False, True], ids=["at_once", "sequential"])


def random_mask(T: int, S: int) -> jax.Array:
    """Nearly a third visible; with few keys, some rows see nothing."""
    return jnp.asarray(np.random.default_rng(5).random((T, S)) < 0.3)


SHAPES = [
    (6, 2, 13, 13, 11, 4, Causal()),  # primes: no block is full
    (6, 6, 12, 12, 8, 4, Causal(6)),  # all blocks full; a window across three blocks
    (4, 4, 17, 7, 8, 3, Causal(2)),  # more queries than keys: the last ones see nothing
    (4, 4, 7, 17, 8, 3, Causal()),
    (4, 2, 13, 17, 8, 100, random_mask(13, 17)),  # a block longer than the sequence
    (4, 2, 13, 13, 8, 4, Packed(jnp.arange(13) // 6, Causal(3))),  # documents across blocks, one of a single token
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("H", "G", "T", "S", "K", "block", "mask", "sequential"),
    [*((*shape, i % 2 == 0) for i, shape in enumerate(SHAPES)), (*SHAPES[2], False), (*SHAPES[-1], False)],
    ids=lambda x: type(x).__name__ if isinstance(x, jax.Array | Packed) else str(x),
)
def test_agrees_with_the_reference_forward_and_backward(H, G, T, S, K, block, mask, sequential) -> None:
    q, k, v = qkv(H, G, T, S, K)
    arrays = q, k, jnp.concatenate((v, v[..., :2]), -1)  # values wider than keys
    wanted = value_and_gradients(attention, *arrays, mask)
    blockwise = partial(blockwise_attention, block=block, sequential=sequential)
    assert_all_close(value_and_gradients(blockwise, *arrays, mask), wanted)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_agrees_with_jax_nn_at_any_shape(data) -> None:
    size = partial(st.integers, 1)
    T, G, R, K, block = (data.draw(size(most)) for most in (23, 3, 3, 9, 9))
    window = data.draw(st.none() | size(25))
    length_first = partial(jnp.swapaxes, axis1=0, axis2=1)

    def wanted(q, k, v, mask: Mask, scale: float) -> jax.Array:
        local = None if window is None else (window - 1, 0)
        y = jax.nn.dot_product_attention(
            *map(length_first, (q, k, v)), scale=scale, is_causal=True, local_window_size=local
        )
        return length_first(y)

    arrays = qkv(G * R, G, T, T, K)
    blockwise = partial(blockwise_attention, block=block, sequential=data.draw(st.booleans()))
    assert_all_close(*(value_and_gradients(f, *arrays, Causal(window)) for f in (blockwise, wanted)))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.none() | st.integers(1, 45))
def test_exactly_the_tiles_with_something_visible_are_looked_at(T: int, S: int, block: int, window: int | None) -> None:
    tiles = Tiles(T, S, block, Causal(window))
    mask = np.zeros((tiles.n_q * tiles.b_q, tiles.n_k * tiles.b_k), bool)
    for t in range(len(mask)):  # the queries that fill up the last block, too: they cost nothing more
        mask[t, max(0, t - (window or T + S) + 1) : t + 1] = True
    per_tile = mask.reshape(tiles.n_q, tiles.b_q, tiles.n_k, tiles.b_k).any(axis=(1, 3))
    np.testing.assert_array_equal(np.argwhere(per_tile), np.argwhere(tiles.is_visible()))
    looped = [(i, j) for _, i, first, end in zip(*loops(1, per_tile), strict=True) for j in range(first, end)]
    np.testing.assert_array_equal(np.argwhere(per_tile).reshape(-1, 2), np.reshape(looped, (-1, 2)))


@pytest.mark.parametrize("size", [1e4, -1e4, 1e31])
def test_huge_scores_stay_finite(size: float) -> None:
    q = jnp.full((1, 6, 1), abs(size) ** 0.5)
    k = jnp.array([1.0, 0.5, 2.0, 0.1, 0.2, 0.3]).reshape(1, 6, 1) * abs(size) ** 0.5 * np.sign(size)
    v = jnp.arange(6.0).reshape(1, 6, 1)
    y, *gradients = value_and_gradients(partial(blockwise_attention, block=2), q, k, v, Causal())
    best = [0, 0, 2, 2, 2, 2] if size > 0 else [0, 1, 1, 3, 3, 3]  # the largest visible score takes all
    np.testing.assert_allclose(y[0, :, 0], best, atol=1e-6)
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.slow
def test_bfloat16_keeps_its_dtype_and_sums_in_float32() -> None:
    arrays = [x.astype(jnp.bfloat16) for x in qkv(4, 2, 67, 67, 16)]
    exact = value_and_gradients(attention, *(x.astype(jnp.float32) for x in arrays), Causal())
    blockwise = partial(blockwise_attention, block=16, sequential=True)
    rounded = value_and_gradients(blockwise, *arrays, Causal())
    for got, want in zip(rounded, exact, strict=True):
        assert got.dtype == jnp.bfloat16
        # q·scale, the weights, what goes back to the scores, and the result are rounded to 8 bits: 2^-8 each.
        assert np.linalg.norm(got.astype(jnp.float32) - want) <= 2**-6 * np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "sequential"),
    [
        ((None, 0, None, 0), False),
        ((0, 0, 0, "packed"), True),
    ],
    ids=str,
)
def test_vmap_maps_over_examples_and_their_masks(axes: tuple, sequential: bool) -> None:
    arrays: list[Any] = [normal(3, 4, 9, 8), normal(3, 2, 9, 8, seed=1), normal(3, 2, 9, 8, seed=2)]
    mask: Any = np.stack([np.tri(9, dtype=bool), random_mask(9, 9), np.ones((9, 9), bool)])
    if axes[3] == "packed":
        axes, mask = (0, 0, 0, 0), Packed(np.arange(27).reshape(3, 9) // np.array([[2], [4], [5]]))
    of_example = [
        x if axis == 0 else jax.tree.map(lambda x: x[1], x) for x, axis in zip((*arrays, mask), axes, strict=True)
    ]
    attend = partial(blockwise_attention, scale=SCALE, block=4, sequential=sequential)

    def gradients(attend: Any) -> Any:
        squared = lambda *qkvm: (attend(*qkvm) ** 2).sum()  # noqa: E731
        return jax.jit(jax.vmap(jax.grad(squared, argnums=(0, 1, 2)), axes))(*of_example)

    assert_all_close(gradients(attend), gradients(partial(attention, scale=SCALE)))


@ORDERS
def test_a_rematerialised_block_attends_once_if_it_may_save_the_result(sequential: bool) -> None:
    def passes(policy) -> int:
        attend = partial(blockwise_attention, mask=Causal(), block=4, sequential=sequential)
        block = jax.checkpoint(lambda x: attend(x, x, x), policy=policy)
        gradient = jax.grad(lambda x: (block(x) ** 2).sum())
        return str(jax.make_jaxpr(gradient)(normal(2, 9, 8))).count("custom_vmap_call[" if sequential else "scan[")

    assert passes(checkpoint_policies.save_only_these_names(SAVED)) == 2  # forward and backward
    assert passes(checkpoint_policies.nothing_saveable) == 3  # forward, once more, and backward


@pytest.mark.slow
def test_memory_is_linear_in_the_length_forward_and_backward() -> None:
    def temporary_bytes(attend, T: int) -> int:
        mask, bias = Packed(jnp.arange(T) // 100), ALiBi((0.5, 0.25, 0.125, 0.0625))
        loss = lambda q, k, v: attend(q, k, v, mask, bias=bias).sum()  # noqa: E731
        shapes = [jax.ShapeDtypeStruct((h, T, 16), jnp.float32) for h in (4, 2, 2)]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    growth = [
        temporary_bytes(attend, 4096) / temporary_bytes(attend, 2048) for attend in (blockwise_attention, attention)
    ]
    assert growth[0] < 2.3  # 2, and a little for what each block needs
    assert growth[1] > 3.5  # 4: what is measured here would show it

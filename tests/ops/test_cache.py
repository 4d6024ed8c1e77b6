from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.attention import attention
from jaxformer.ops.bias import ALiBi, Bias, RelativePositionBias, alibi_slopes
from jaxformer.ops.cache import (
    KVCache,
    LayerCache,
    decode_step,
    init_cache,
    read_layer,
    write_layer,
    write_positions,
)
from jaxformer.ops.masks import EMPTY, Causal, padding
from jaxformer.ops.workarounds import update_slice
from tests.arrays import assert_close, normal

LAYERS, G, S, K, B = 2, 3, 11, 5, 7


def cache(dtype: Any = jnp.float32) -> KVCache:
    return init_cache(LAYERS, G, S, K, dtype)


def test_an_empty_cache_has_a_layer_a_block_and_no_position() -> None:
    empty = cache()
    assert len(empty.layers) == LAYERS
    assert all(x.shape == (G, S, K) and not x.any() for layer in empty.layers for x in read_layer(layer, jnp.float32))
    np.testing.assert_array_equal(empty.position_S, np.full(S, EMPTY))


def test_writes_are_read_back_and_other_slots_are_unchanged() -> None:
    k, v = normal(G, 2, K, seed=1), normal(G, 2, K, seed=2)
    layer = write_layer(cache().layers[0], k, v, 4)
    for whole, part in zip(read_layer(layer, jnp.float32), (k, v), strict=True):
        np.testing.assert_array_equal(whole[:, 4:6], part)
        assert not whole[:, :4].any()
        assert not whole[:, 6:].any()
    positions = write_positions(cache().position_S, jnp.array([8, 9]), 4)
    np.testing.assert_array_equal(positions, [EMPTY] * 4 + [8, 9] + [EMPTY] * 5)


@pytest.mark.parametrize(
    ("dtype", "size"), [(jnp.float32, 4), (jnp.bfloat16, 2), (jnp.int8, 1 + 4 / K), ("int8", 1 + 4 / K)], ids=str
)
def test_cache_bytes_follow_the_dtype(dtype: Any, size: float) -> None:
    """int8 has one float32 scale a vector besides, also if it is given by name."""
    layer = cache(dtype).layers[0]
    assert sum(x.nbytes for x in jax.tree.leaves(layer)) == round(2 * G * S * K * size)
    written = write_layer(layer, normal(G, 1, K), normal(G, 1, K), 0)
    assert jax.tree.map(jnp.result_type, written) == jax.tree.map(jnp.result_type, layer)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "share"), [(jnp.bfloat16, 2**-8), (jnp.int8, 0.5 / 127)], ids=["bfloat16", "int8"])
def test_narrow_caches_are_close(dtype: Any, share: float) -> None:
    """bfloat16 keeps 8 bits, so it rounds by at most 2^-9 to 2^-8 of each number; int8 by half a 127th of the
    vector's largest, whatever its size."""
    k, v = normal(G, S, K, seed=1) * 1e3, normal(G, S, K, seed=2) * jnp.arange(S)[:, None]  # the first is all zeros
    read = read_layer(write_layer(cache(dtype).layers[0], k, v, 0), jnp.float32)
    for got, wanted in zip(read, (k, v), strict=True):
        assert (jnp.abs(got - wanted) <= share * jnp.abs(wanted).max(-1, keepdims=True) * (1 + 1e-5)).all()
        assert (got != wanted).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("slot", [0, 4, S - 1])
def test_a_step_attends_as_if_its_key_and_value_were_written_first(dtype: Any, slot: int) -> None:
    """With their rounding; so that it does not matter to a text where it is cut into passes."""
    layer = write_layer(cache(dtype).layers[0], normal(G, S, K, seed=1), normal(G, S, K, seed=2), 0)
    q, k, v = normal(2 * G, 1, K, seed=3), normal(G, 1, K, seed=4), normal(G, 1, K, seed=5)
    mask_1S = ((jnp.arange(S) % 3 > 0) | (jnp.arange(S) == slot))[None]
    terms: dict[str, Any] = {}
    if slot == 4:  # positions that do not follow the order of the slots
        bias = ALiBi(alibi_slopes(2 * G))(jnp.array([slot]), (jnp.arange(S) + 5) % S)
        terms = {"bias": bias, "sinks": normal(2 * G, seed=6), "soft_cap": 1.5}
    q_of_values = normal(2 * G, 1, K, seed=7) if slot == S - 1 else None
    step = jax.jit(partial(decode_step, soft_cap=terms.get("soft_cap")))
    arrays = {"bias": terms.get("bias"), "sinks": terms.get("sinks"), "q_of_values_H1K": q_of_values}
    y, got = step(q, k, v, layer, slot, mask_1S, 0.3, **arrays)
    wanted = write_layer(layer, k, v, slot)
    for a, b in zip(read_layer(got, jnp.float32), read_layer(wanted, jnp.float32), strict=True):
        assert_close(a, b)
    k, v = read_layer(wanted, jnp.float32)
    if q_of_values is not None:  # values are also a part of the keys
        q, k = jnp.concatenate([q, q_of_values], -1), jnp.concatenate([k, v], -1)
    assert_close(y, attention(q, k, v, mask_1S, 0.3, **terms))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "bias"),
    [(None, ALiBi(alibi_slopes(2 * G))), (3, RelativePositionBias(normal(8, 2 * G, seed=5), False, 5))],
    ids=["alibi", "ring, buckets"],
)
def test_steps_with_biases_by_distance_are_the_rows_of_one_pass(window: int | None, bias: Bias) -> None:
    """After 3 slots of padding, and in a ring of slots if there is a window."""
    n, H, mask = 9, 2 * G, Causal(window)
    q, k, v, sinks = normal(H, n, K, seed=1), normal(G, n, K, seed=2), normal(G, n, K, seed=3), normal(H, seed=4)
    wanted = attention(q, k, v, mask, 0.3, bias=bias, sinks=sinks)
    n_slots = n + 3 if window is None else window
    layer, position_S = init_cache(1, G, n_slots, K, jnp.float32).layers[0], jnp.full(n_slots, EMPTY)

    @jax.jit
    def step(t: Any, layer: LayerCache, position_S: jax.Array) -> tuple:
        slot, one = (t + 3) % len(position_S), jnp.array([t])
        position_S = write_positions(position_S, one, slot)
        visible_1S = mask(one, position_S) & padding(one, position_S)
        at = lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1, 1)  # noqa: E731
        terms = {"bias": bias(one, position_S), "sinks": sinks}
        return *decode_step(at(q), at(k), at(v), layer, slot, visible_1S, 0.3, **terms), position_S

    for t in range(n):
        y, layer, position_S = step(t, layer, position_S)
        assert_close(y[:, 0], wanted[:, t])


@pytest.mark.slow
def test_a_step_in_bfloat16_adds_up_in_float32() -> None:
    """So the scores, of up to about 50, are not rounded: its output is off by no more than the rounding of the weights
    and its own, 2^-9 each."""
    q, k, v = (normal(1, 1, 64, seed=seed).astype(jnp.bfloat16) for seed in (3, 1, 2))
    whole = [3 * normal(1, 128, 64, seed=seed).astype(jnp.bfloat16) for seed in (4, 5)]
    layer = write_layer(init_cache(1, 1, 128, 64, jnp.float32).layers[0], *whole, 0)
    y, got = jax.jit(decode_step)(q, k, v, layer, 7, jnp.ones((1, 128), bool), 1.0)
    assert_close(y, attention(q.astype(jnp.float32), *read_layer(got, jnp.float32), scale=1.0), 2 * 2**-9)


@pytest.mark.parametrize("dtype", ["int32", "float16"])
def test_a_cache_of_another_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"the cache's dtype is {dtype}; it must be float32, bfloat16 or int8"):
        cache(dtype)


@pytest.mark.slow
def test_a_fully_masked_decode_step_is_zero() -> None:
    layer = write_layer(cache().layers[0], normal(G, S, K), normal(G, S, K), 0)
    y, _ = decode_step(normal(G, 1, K), normal(G, 1, K), normal(G, 1, K), layer, 2, jnp.zeros((1, S), bool), 1.0)
    np.testing.assert_array_equal(y, np.zeros((G, 1, K)))


@pytest.mark.parametrize("batched", [(0, 0, None), (0, None, None), (None, 0, None), (0, 0, 0)], ids=str)
def test_writing_under_vmap_is_writing_row_by_row(batched: tuple) -> None:
    whole, part, start = normal(B, G, S), normal(B, G, 2, seed=1), jnp.arange(B)
    given = [x if axis == 0 else x[1] for x, axis in zip((whole, part, start), batched, strict=True)]
    got = jax.vmap(lambda *args: update_slice(*args, 1), batched)(*given)
    for i in range(B):
        row = [x[i] if axis == 0 else x for x, axis in zip(given, batched, strict=True)]
        np.testing.assert_array_equal(got[i], jax.lax.dynamic_update_slice_in_dim(*row, 1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
def test_a_batched_write_at_one_slot_compiles_to_a_slice_update_and_not_to_a_scatter(dtype: Any) -> None:
    layer_B = jax.tree.map(lambda x: jnp.stack([x] * B), cache(dtype).layers[0])
    new = normal(B, G, 1, K)
    put = jax.jit(jax.vmap(write_layer, in_axes=(0, 0, 0, None)))
    lowered = put.lower(layer_B, new, new, jnp.int32(4))
    assert "scatter" not in lowered.as_text()
    hlo = lowered.compile().as_text()
    assert " dynamic-update-slice(" in hlo
    assert " scatter(" not in hlo


@pytest.mark.parametrize("n_rows", [1, B])
def test_a_loop_of_steps_copies_no_cache(n_rows: int) -> None:
    def steps(layer_B: LayerCache, q_B: jax.Array, k_B: jax.Array) -> tuple:
        def step(slot: jax.Array, carry: tuple) -> tuple:
            layer_B, q_B = carry
            one = lambda layer, q, k: decode_step(q, k, k, layer, slot, (jnp.arange(64) <= slot)[None], 1.0)  # noqa: E731
            q_B, layer_B = jax.vmap(one)(layer_B, q_B, k_B)
            return layer_B, q_B

        return jax.lax.fori_loop(0, 64, step, (layer_B, q_B))

    # 64 slots, so that the cache is far larger than anything else.
    layer_B = jax.tree.map(lambda x: jnp.stack([x] * n_rows), init_cache(1, G, 64, K, jnp.float32).layers[0])
    new = normal(n_rows, G, 1, K)
    hlo = jax.jit(steps, donate_argnums=0).lower(layer_B, new, new).compile().as_text()
    copied = [line for line in hlo.splitlines() if " copy(" in line and ",64," in line.split(" copy(")[0]]
    copied += [line for line in hlo.splitlines() if " copy(" in line and ",64]" in line.split(" copy(")[0]]
    assert not copied


def test_what_would_overwrite_other_slots_is_refused() -> None:
    """An update beyond the end is moved back to fit, and a smaller one leaves the rest."""
    layer, position_S = cache().layers[0], cache().position_S
    for slot in (S - 1, np.int32(S - 1), jnp.int32(S - 1), -1):
        with pytest.raises(ValueError, match=r"the cache has slots 0 to 10, not .*; make it larger"):
            write_layer(layer, normal(G, 2, K), normal(G, 2, K), slot)
        with pytest.raises(ValueError, match="the cache has slots 0 to 10"):
            write_positions(position_S, jnp.arange(2), slot)
    for shape in ((1, 2, K), (G, 2, 1), (2, G, K), (1, G, 2, K)):
        with pytest.raises(ValueError, match=r"expected values of shape \(3, T, 5\), as in the cache"):
            write_layer(layer, normal(G, 2, K), normal(*shape), 0)

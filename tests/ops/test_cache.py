import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.ops.cache import KVCache, init_cache, write_layer, write_positions
from jaxformer.ops.masks import EMPTY
from tests.arrays import normal

LAYERS, G, S, K, B = 2, 3, 11, 5, 7


def cache() -> KVCache:
    return init_cache(LAYERS, G, S, K, jnp.float32)


def test_an_empty_cache_has_a_layer_a_block_and_no_position() -> None:
    empty = cache()
    assert len(empty.layers) == LAYERS
    assert all(x.shape == (G, S, K) for layer in empty.layers for x in layer)
    np.testing.assert_array_equal(empty.position_S, np.full(S, EMPTY))


def test_what_was_written_can_be_read_and_the_rest_is_untouched() -> None:
    k, v = normal(G, 2, K, seed=1), normal(G, 2, K, seed=2)
    layer = write_layer(cache().layers[0], k, v, 4)
    for whole, part in zip(layer, (k, v), strict=True):
        np.testing.assert_array_equal(whole[:, 4:6], part)
        assert not whole[:, :4].any()
        assert not whole[:, 6:].any()
    positions = write_positions(cache().position_S, jnp.array([8, 9]), 4)
    np.testing.assert_array_equal(positions, [EMPTY] * 4 + [8, 9] + [EMPTY] * 5)


def test_the_cache_keeps_its_dtype() -> None:
    half = init_cache(1, G, S, K, jnp.bfloat16).layers[0]
    assert write_layer(half, normal(G, 1, K), normal(G, 1, K), 0).k_GSK.dtype == jnp.bfloat16


def test_a_batched_write_at_one_slot_compiles_to_a_slice_update_and_not_to_a_scatter() -> None:
    layer_B = jax.tree.map(lambda x: jnp.stack([x] * B), cache().layers[0])
    new = normal(B, G, 1, K)
    write = jax.jit(jax.vmap(write_layer, in_axes=(0, 0, 0, None)))
    hlo = write.lower(layer_B, new, new, jnp.int32(4)).compile().as_text()
    assert " dynamic-update-slice(" in hlo
    assert " scatter(" not in hlo
    np.testing.assert_array_equal(write(layer_B, new, new, 4).k_GSK[:, :, 4:5], new)

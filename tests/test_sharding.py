"""How an axis of the mesh winds through a machine."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxformer import sharding
from jaxformer.sharding import gather, make_mesh, on_each_shard, ring_groups, rings


def line(places, platform="tpu"):
    """What `rings` sees of a mesh: the devices along `fsdp`."""
    devices = np.array([SimpleNamespace(coords=place, platform=platform) for place in places], object)
    return SimpleNamespace(devices=devices.reshape(1, -1, 1, 1))


@pytest.mark.parametrize(
    ("places", "lengths"),
    [
        ([(x, y, 0) for x in range(4) for y in range(2)], (4, 2)),
        ([(x, y, z) for z in range(2) for x in range(3) for y in range(2)], (2, 3, 2)),
        ([(x, 0, 0) for x in range(5)], (5,)),
        ([(0, 0, 0)], (1,)),
        ([(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 3, 0)], (4,)),  # no straight line
        ([(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 2, 0)], (4,)),  # lines of three and of one
        ([(0, 0, 0), (0, 0, 0)], (2,)),  # in two machines
    ],
)
def test_an_axis_falls_into_straight_lines(places, lengths):
    assert rings(line(places)) == lengths


def test_devices_elsewhere_are_one_ring():
    assert rings(line([(x, y, 0) for x in range(4) for y in range(2)], "gpu")) == (8,)
    assert rings(make_mesh("fsdp=8")) == (8,)
    assert ring_groups((8,)) == [None]


def test_groups_of_rings_differ_in_one_place():
    assert ring_groups((2, 3)) == [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]


@pytest.mark.parametrize("lengths", [(2, 4), (2, 2, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_gathering_ring_by_ring_is_gathering(monkeypatch, lengths, axis):
    monkeypatch.setattr(sharding, "rings", lambda mesh: lengths)
    mesh = make_mesh("fsdp=8")
    spec = PartitionSpec(*["fsdp" if i == axis else None for i in range(2)])
    w = jnp.arange(16 * 24, dtype=jnp.float32).reshape(16, 24)
    gathered = on_each_shard(lambda w: gather(w, spec, mesh), mesh, (spec,), PartitionSpec())
    np.testing.assert_array_equal(gathered(w), w)

    def loss(w, x):
        return (gather(w, spec, mesh) * x[0]).sum()

    x = jnp.arange(8 * w.size, dtype=jnp.float32).reshape(8, *w.shape) % 7
    grad = on_each_shard(jax.grad(loss), mesh, (spec, PartitionSpec("fsdp")), spec)(w, x)
    np.testing.assert_array_equal(grad, x.sum(0))  # whole numbers: no rounding

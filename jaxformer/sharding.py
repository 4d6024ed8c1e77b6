"""Where arrays live: a mesh of all devices, and the placements on it."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.errors import UserError


def make_mesh(batch_size: int) -> Mesh:
    """All visible devices on one axis, `data`, which splits the batch.

    Raises:
      UserError: the batch does not split evenly.
    """
    n = jax.device_count()
    if batch_size % n:
        up = -(-batch_size // n) * n
        raise UserError(f"train.batch_size {batch_size} does not split over {n} devices; use a multiple such as {up}.")
    return jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device: parameters, optimizer state, scalars."""
    return NamedSharding(mesh, PartitionSpec())


def batch_split(mesh: Mesh) -> NamedSharding:
    """The first axis over `data`."""
    return NamedSharding(mesh, PartitionSpec("data"))

"""Parallel training: the mesh, processes, memory and determinism."""

from typing import TYPE_CHECKING

from jaxformer import lazy_names

if TYPE_CHECKING:
    from jaxformer.parallel.mesh import batch_sharding, global_device_put, make_mesh, replicated, shardings

__all__ = ["batch_sharding", "global_device_put", "make_mesh", "replicated", "shardings"]

_NAMES = {"mesh": ("batch_sharding", "global_device_put", "make_mesh", "replicated", "shardings")}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

"""Meshes with explicit axes, `jax.make_mesh`'s default from jax 0.12 on: there, JAX refuses an operation whose result
could be split over devices in several ways."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax

Function = TypeVar("Function", bound=Callable[..., Any])


def with_auto_axes(function: Function) -> Function:
    """Return a function of pytrees inside which the compiler chooses shardings, also if arrays have explicit axes.

    Its results are replicated, except that `jax.vmap` over a split axis leaves them split over that axis.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        meshes = (mesh for i in at if (mesh := jax.typeof(leaves[i]).sharding.mesh).explicit_axes)
        if (mesh := next(meshes, None)) is None:
            return function(*args, **kwargs)

        def of_arrays(*arrays: jax.Array) -> Any:
            given = dict(zip(at, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
            return function(*args, **kwargs)

        replicated = jax.NamedSharding(mesh, jax.P())
        auto = jax.sharding.auto_axes(of_arrays, axes=mesh.explicit_axes, out_sharding=replicated)
        return auto(*(leaves[i] for i in at))

    return call  # type: ignore[return-value]

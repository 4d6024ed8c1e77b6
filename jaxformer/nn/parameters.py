"""Parameters with named axes, declared where they are created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike

from jaxformer.contract import ParameterAxes, contract_of
from jaxformer.nn.capture import handled_by
from jaxformer.nn.trace_context import TraceContext

Params = Any
"""Pytree of parameters, `model.init(…)["params"]`, or of their shapes and dtypes."""

_declared = TraceContext[dict[str, ParameterAxes] | None](None)


def parameter(
    module: nn.Module, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...], axes: str
) -> jax.Array:
    """Return a module's parameter, as `module.param` does, and declare its axes.

    Args:
      axes: names of the axes, separated by spaces, with `->` between the axes that a matmul with the parameter sums
        over and those of its result, as in `embed -> heads head_dim`; see `contract.ParameterAxes`. Within a module
        named `experts`, as under `nn.vmap`, all parameters have experts as an additional leading axis.

    Raises:
      ScopeParamShapeError: the module is applied to a parameter of another shape.
    """
    if (declared := _declared.get()) is not None:
        stack = ("experts",) if "experts" in module.path else ()
        declared[".".join((*module.path, name))] = ParameterAxes.parse(axes, stack)
    if not module.has_variable("params", name):
        return module.param(name, init, shape)
    value: jax.Array = module.get_variable("params", name)
    # `module.param` would find this by tracing the initialiser, which takes a third of the time to trace a model.
    array = jax.tree.leaves(value)[0]  # of a matrix that is laid out or rounded for decoding
    if jnp.shape(array) != shape:
        raise ScopeParamShapeError(name, "/".join(module.path), jnp.shape(array), shape)
    return value


def keeps_dtype(path: Sequence[Any]) -> bool:
    """Return True for a parameter, by its path in the tree, that is never rounded: a router's correction, with which
    rounding would send tokens to other experts."""
    return bool(path[-1].key == "b_correction")


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Return parameters in another dtype, but those that keep theirs."""
    return jax.tree_util.tree_map_with_path(lambda path, w: w if keeps_dtype(path) else w.astype(dtype), params)


def check_name(field: str, name: str, known: Iterable[str]) -> None:
    """Raise `ValueError` for a name that a module does not know."""
    if name not in known:
        raise ValueError(f"{field} is {name!r}; it must be one of {', '.join(known)}.")


class InitTrace(NamedTuple):
    """Shapes and names from a trace of a model's initialisation, which allocates no array."""

    output: Any
    """Shapes and dtypes of the output for an example of maximum size."""
    params: Any
    """Shapes and dtypes of the parameters."""
    axes: Mapping[str, ParameterAxes]
    """Declared axes by the parameter's dotted name, such as `blocks_0.attention.W_Q`, in the order of creation."""


@lru_cache(maxsize=4)
def trace_init(model: nn.Module) -> InitTrace:
    """Trace a model's initialisation with the inputs of its contract. The result is cached, because tracing takes as
    long as many steps of a small model. Raises `ValueError` if a parameter is not created with `parameter`, or has
    another number of axes than it declares."""
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in contract_of(model).inputs]
    declared: dict[str, ParameterAxes] = {}
    init = lambda *inputs: model.init_with_output(jax.random.key(0), *inputs)  # noqa: E731
    with _declared.set(declared), handled_by(None):  # the values are those of no call of a user's
        output, variables = jax.eval_shape(init, *inputs)
    for name, leaf in flatten_dict(variables["params"], sep=".").items():
        if name not in declared or len(declared[name].names) != leaf.ndim:
            names = f"the axes {', '.join(declared[name].names)}" if name in declared else "no axes"
            remedy = "create it with nn.parameters.parameter and name each axis"
            raise ValueError(f"parameter {name} of shape {leaf.shape} declares {names}; {remedy}.")
    return InitTrace(output, variables["params"], declared)


def parameter_axes(model: nn.Module) -> Mapping[str, ParameterAxes]:
    """Return the declared axes of each parameter by its dotted name; raises as `trace_init` does."""
    return trace_init(model).axes

"""Low-rank adaptation (LoRA, Hu et al. 2021, section 4.1): a frozen matrix W becomes W + (alpha / rank) A B.

Adapters are a separate tree with the structure of the parameters, but with `{"A": …, "B": …}` in place of each adapted
matrix, and with the parameters themselves that are trained in full, such as a new head. Here inputs multiply from the
left, x W, so A maps inputs to the rank, and B the rank to outputs; the paper writes W x, and B A. Modules are unaware
of adapters, which are merged into the parameters before `apply`.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod, sqrt

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.config import LoraConfig
from jaxformer.contract import ParameterAxes
from jaxformer.nn.parameter_norms import dotted
from jaxformer.nn.parameters import Params


def adapted_matrices(axes: Mapping[str, ParameterAxes], config: LoraConfig) -> list[str]:
    """Return the names of the matrices that `config.matrices` selects, such as `blocks_0.attention.W_Q`, from
    parameters with these `axes` (`nn.parameters.parameter_axes`). Raises `ValueError` if an entry selects no matrix."""
    matrices = {name: sides for name, sides in axes.items() if sides.inputs}
    selected: set[str] = set()
    for pattern in config.matrices:
        # A pattern is a matrix's role, its own name, or a pattern of its dotted path.
        names = {
            name
            for name, sides in matrices.items()
            if pattern in (sides.role, name.rpartition(".")[2]) or fnmatchcase(dotted(name.split(".")), pattern)
        }
        if not names:
            known = sorted({name.rpartition(".")[2] for name in matrices})
            near = [x for x in known if x.lower() == pattern.lower()] or get_close_matches(pattern, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}."
            raise ValueError(f"`lora.matrices` names {pattern!r}, which the model has no matrix of; {hint}")
        selected |= names
    whole = whole_parameters(axes, config)
    return [name for name in matrices if name in selected and name not in whole]


def whole_parameters(axes: Mapping[str, ParameterAxes], config: LoraConfig) -> list[str]:
    """Return the names of the parameters that `config.whole` selects. Raises `ValueError` if an entry selects none."""
    selects = lambda pattern, name: fnmatchcase(dotted(name.split(".")), pattern)  # noqa: E731
    for pattern in config.whole:
        if not any(selects(pattern, name) for name in axes):
            raise ValueError(f"`lora.whole` names {pattern!r}, but the model has no such parameter; omit it.")
    return [name for name in axes if any(selects(pattern, name) for pattern in config.whole)]


def adapter_axes(axes: Mapping[str, ParameterAxes], config: LoraConfig) -> dict[str, ParameterAxes]:
    """Return the axes of the adapters by name, such as `blocks_0.attention.W_Q.A`; `{}` without a rank. A is sharded
    like the inputs of its matrix, and B like the outputs, so that a device's shards of both yield its shard of their
    product."""
    by_name: dict[str, ParameterAxes] = {}
    for name in adapted_matrices(axes, config) if config.rank else ():
        stack, inputs, outputs = axes[name].stack, axes[name].inputs, axes[name].outputs
        by_name[f"{name}.A"] = ParameterAxes(stack, inputs, ("rank",))
        by_name[f"{name}.B"] = ParameterAxes(stack, ("rank",), outputs)
    return by_name


def init_adapters(key: jax.Array, params: Params, axes: Mapping[str, ParameterAxes], config: LoraConfig) -> Params:
    """Return initial float32 adapters, which have no effect, for parameters with these axes: A is sampled from
    N(0, 1 / inputs), B is 0, and parameters trained in full are those in `params`."""
    leaves: dict[str, jax.Array] = flatten_dict(params, sep=".")
    adapters = {name: leaves[name] for name in whole_parameters(axes, config)}
    for i, name in enumerate(adapted_matrices(axes, config)):
        n_stack, n_before = len(axes[name].stack), len(axes[name].names) - len(axes[name].outputs)
        shape = leaves[name].shape
        stack, inputs, outputs = shape[:n_stack], shape[n_stack:n_before], shape[n_before:]
        drawn = jax.random.normal(jax.random.fold_in(key, i), (*stack, *inputs, config.rank))
        adapters[f"{name}.A"] = drawn / sqrt(prod(inputs))
        adapters[f"{name}.B"] = jnp.zeros((*stack, config.rank, *outputs))
    return unflatten_dict(adapters, sep=".")


def merge(params: Params, adapters: Params, config: LoraConfig) -> Params:
    """Return the parameters with adapters added, W + (alpha / rank) A B, and with those that were trained in full;
    the others are unchanged."""

    def merged(weight: jax.Array, A: jax.Array, B: jax.Array) -> jax.Array:
        n_stack = A.ndim + B.ndim - 2 - weight.ndim
        stack, contracted = tuple(range(n_stack)), ((A.ndim - 1,), (n_stack,))
        product = jax.lax.dot_general(A, B, (contracted, (stack, stack)), precision=jax.lax.Precision.HIGHEST)
        return (weight + config.alpha / config.rank * product).astype(weight.dtype)

    def walk(params: Params, adapters: Params) -> Params:
        if not isinstance(params, Mapping):
            return merged(params, **adapters) if isinstance(adapters, Mapping) else adapters.astype(params.dtype)
        return {name: walk(part, adapters[name]) if name in adapters else part for name, part in params.items()}

    return walk(params, adapters)

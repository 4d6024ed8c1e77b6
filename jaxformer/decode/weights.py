"""Parameters for decoding: in a smaller format than in training, and in the memory layout that decode steps read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.contract import ParameterAxes, Role
from jaxformer.models.objective import Params
from jaxformer.nn.parameters import keeps_dtype, parameter_axes
from jaxformer.ops.quantized import Quantized, quantize
from jaxformer.ops.workarounds import FirstFactor, Heads

Format = Literal["float32", "bfloat16", "int8"]

EXACT_AXES = {"positions", "gates", "alignment", "choices", "latent"}
"""Axes of matrices that are not quantized to int8: looked up and never multiplied (positions), read in a loop or once
per source (gates, alignment), router weights, as rounding would change which experts get a token (choices), or of
latents (latent), as those from latents are multiplied along either axis."""

SELF_ATTENTION = ("W_Q", "W_K", "W_V")
"""Matrices of self-attention, which all multiply its input."""


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["order", "platform", "is_joined"])
@dataclass(frozen=True)
class Transposed:
    """A matrix stored with its axes in another order, which `as_declared` undoes.

    Attributes:
      values: the matrix with its axes in `order`.
      platform: platform for which it is transposed.
      is_joined: multiply with it and the others of `SELF_ATTENTION` in one matmul.
    """

    values: jax.Array
    order: tuple[int, ...]
    platform: str
    is_joined: bool = False


def store(params: Params, weights: Format, model: nn.Module, platform: str | None = None) -> Params:
    """Return some or all of a model's parameters with matrices in the given format, on the same devices.

    With int8 matrices, all other parameters and the activations keep their dtype on a CPU and are bfloat16 on other
    devices. On a CPU, bfloat16 matrices are rounded, but held in float32: XLA's CPU compiler would convert them to
    float32 at each use, in 1.8 times the time and more than twice the memory of float32.

    Args:
      platform: platform to decode on; None for the parameters' platform.
    """
    if weights == "float32":
        return params
    declared, is_cpu = parameter_axes(model), (platform or _platform(params)) == "cpu"
    dtype = jnp.float32 if is_cpu else jnp.bfloat16

    def convert(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        summed = summed_axes(declared[_name(path)]) if weights == "int8" else ()
        if summed:
            return _quantize(leaf, summed, dtype)
        if keeps_dtype(path):
            return leaf
        if not is_cpu:
            return leaf.astype(dtype)
        return leaf if weights == "int8" else jax.lax.reduce_precision(leaf, exponent_bits=8, mantissa_bits=7)

    return jax.tree_util.tree_map_with_path(convert, params)


_quantize = jax.jit(quantize, static_argnames=("summed", "dtype"))


def lay_out(params: Params, model: nn.Module, platform: str | None = None) -> Params:
    """Return parameters laid out for decode steps, on the same devices: matrices with their contracted axes last. On a
    GPU this applies to all matrices, on a CPU to int8 matrices and the float32 matrices of an MLP's last layer.

    On a GPU, a matmul with one row then sums over contiguous values in one kernel. In the declared order, XLA stores
    all terms and sums them in a second kernel, which took two thirds more memory traffic per token. Queries, keys and
    values are one matmul; see `ops.workarounds.Heads`. For a CPU, see `ops.quantized` and
    `ops.workarounds.FirstFactor`. The programs of `decode` accept such parameters; `restored` and `as_declared` undo
    the layout.

    Args:
      params: some or all parameters of the model, from `store` or not.
      platform: platform to decode on; None for the parameters' platform.
    """
    platform = platform or _platform(params)
    if platform not in ("cpu", "gpu"):
        return params
    declared = parameter_axes(model)

    def transpose(path: tuple[Any, ...], leaf: Any) -> Any:
        axes = declared[_name(path)]
        if platform == "cpu" and not _is_slow_on_cpu(leaf, axes):
            return leaf
        matrix, summed = leaf.values if isinstance(leaf, Quantized) else leaf, summed_axes(axes)
        order = (*(axis for axis in range(matrix.ndim) if axis not in summed), *summed)
        if order == tuple(range(matrix.ndim)):
            return leaf
        is_joined = (
            platform == "gpu" and path[-1].key in SELF_ATTENTION and axes.inputs == ("embed",)
            and "cross_attention" not in _name(path) and _is_whole(matrix)
        )  # fmt: skip
        transposed = Transposed(matrix.transpose(order), order, platform, is_joined)
        if isinstance(leaf, Quantized):
            return replace(leaf, values=transposed)  # type: ignore[arg-type]
        return transposed

    return jax.tree_util.tree_map_with_path(transpose, params, is_leaf=_is_quantized)


def _is_slow_on_cpu(leaf: Any, axes: ParameterAxes) -> bool:
    """Return whether matmuls of few rows with a matrix should use a `FirstFactor`."""
    if isinstance(leaf, Quantized):
        return True
    if axes.names != ("hidden", "embed"):
        return False
    return bool(leaf.dtype == jnp.float32 and leaf.shape[0] > leaf.shape[1])


def as_declared(params: Params) -> Params:
    """Return parameters from `lay_out` with their axes in the order that the model declares."""
    return _map_transposed(lambda matrix, _: matrix, params)


def for_matmul(params: Params) -> Params:
    """Return parameters from `lay_out` in the form that the model multiplies with."""
    if isinstance(params, Mapping):
        matrices = {name: for_matmul(each) for name, each in params.items()}
        parts = {name: matrices[name] for name in SELF_ATTENTION if _is_joined(params.get(name))}
        if len(parts) == len(SELF_ATTENTION) and len({W.shape[-1] for W in parts.values()}) == 1:
            joint, first = _side_by_side([*parts.values()]), accumulate((W.shape[1] for W in parts.values()), initial=0)
            matrices |= {name: Heads(W, joint, i) for (name, W), i in zip(parts.items(), first, strict=False)}
        return matrices
    return _map_transposed(
        lambda matrix, platform: FirstFactor(matrix) if platform == "cpu" and matrix.dtype != jnp.int8 else matrix,
        params,
    )


def _is_joined(leaf: Any) -> bool:
    return bool(getattr(leaf.values if isinstance(leaf, Quantized) else leaf, "is_joined", False))


def _side_by_side(matrices: Sequence[Any]) -> Any:
    """Return matrices `(D, H, K)` of one format as one, `(D, N · K)`, stored with the contracted axis last."""
    if isinstance(first := matrices[0], Quantized):
        values, scale = (_side_by_side([getattr(m, part) for m in matrices]) for part in ("values", "scale"))
        return replace(first, values=values, scale=scale)
    return jnp.concatenate([matrix.reshape(len(matrix), -1).T for matrix in matrices]).T


def _map_transposed(function: Callable[[jax.Array, str], Any], params: Params) -> Params:
    """Return parameters with each `Transposed` replaced by the function's result for the matrix, in its declared order,
    and the platform."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Transposed):
            return leaf
        order = [leaf.order.index(axis) for axis in range(len(leaf.order))]
        return function(leaf.values.transpose(order), leaf.platform)

    return jax.tree.map(convert, params, is_leaf=lambda leaf: isinstance(leaf, Transposed))


def summed_axes(axes: ParameterAxes) -> tuple[int, ...]:
    """Return the axes of a parameter that share an int8 scale: the contracted axes of its matmuls, or for an embedding
    the features of a token. Empty for a parameter that is not quantized to int8."""
    if axes.role is Role.VECTOR or EXACT_AXES & set(axes.names):
        return ()
    first, last = len(axes.stack), len(axes.names) - len(axes.outputs)
    return tuple(range(last, len(axes.names)) if "vocab" in axes.inputs else range(first, last))


def restored(params: Params) -> Params:
    """Return parameters from `store` and `lay_out` dequantized to float32, in their declared order."""

    def convert(leaf: Any) -> jax.Array:
        return leaf.values * leaf.scale if isinstance(leaf, Quantized) else leaf.astype(jnp.float32)

    return jax.tree.map(convert, as_declared(params), is_leaf=_is_quantized)


def _is_whole(leaf: Any) -> bool:
    """Return True unless a matrix is split over devices."""
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    return sharding is None or bool(sharding.is_fully_replicated)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, Quantized)


def _name(path: tuple[Any, ...]) -> str:
    """Return the dotted name of a parameter."""
    return ".".join(str(key.key) for key in path)


def _platform(params: Params) -> str:
    """Return the platform of the parameters' devices; the default one for shapes and traced parameters."""
    leaf = next(iter(jax.tree.leaves(params)), None)
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return jax.default_backend()
    return next(iter(leaf.devices())).platform

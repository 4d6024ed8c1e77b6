"""Attribution by path: the effect on the output that one part of a decoder has through one later part alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.inspect.activations import Activations, capture
from jaxformer.inspect.patching import check_pair
from jaxformer.inspect.residual_stream import check_stream
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params
from jaxformer.models.rungs import as_rung
from jaxformer.nn.parameter_norms import dotted


@dataclass(frozen=True)
class Edge:
    """The effect of one part through one later part."""

    source: str
    """`embedding`, a head such as `blocks.0.attention.heads.2`, or an MLP such as `blocks.0.mlp`."""
    target: str
    """The part that reads it: an attention layer, an MLP, or `logits`."""
    estimate: float
    """Change of the metric to first order: the gradient at the target's input times the difference."""
    exact: float | None = None
    """Change of the metric when the target alone reads the difference; None if it was not computed."""


def path_attribution(
    model: nn.Module,
    params: Params,
    inputs: Sequence[jax.Array],
    source: Sequence[jax.Array],
    metric: Callable[[jax.Array], jax.Array],
    n_exact: int = 10,
) -> list[Edge]:
    """Return the edges of a decoder in order of their effect, the largest first: path patching (Goldowsky-Dill et al.
    2023) to first order for all edges, from one gradient (Syed et al. 2023), and exactly for the largest.

    An edge's source writes to the residual stream, and its target reads the stream. The metric's change is that by the
    source's output for the other inputs, added to what the target reads while all other parts read the original.

    Args:
      inputs: inputs of the model, whose logits are measured.
      source: inputs of the same shapes, which provide the other outputs.
      metric: function from logits to a scalar. Pass the same function object in each call: a new one triggers
        compilation.
      n_exact: number of edges that are computed exactly, with a forward pass each.

    Raises:
      UserError: the inputs are a batch.
      ValueError: the inputs differ from the source in shape; the model has no residual stream, or normalises what its
        parts add to it.
    """
    check_stream(model)
    if model.config.norm != "none" and model.config.norm_placement != "pre":
        raise ValueError("the parts' outputs are normalised before they are added, so heads have no part of their own")
    inputs, source, _ = check_pair(model, inputs, source, ())
    model = model.clone(execution=replace(model.execution, scan=False))  # a scan has no names of blocks
    differences, estimates = _estimates(model, params, inputs, source, metric)
    parts, targets = list(differences), list(estimates)
    edges = [
        (float(estimates[target][i]), part, target)
        for target in targets
        for i, part in enumerate(parts)
        if _time(part) < _time(target)
    ]
    edges.sort(key=lambda edge: -abs(edge[0]))
    plain = float(_shifted_metric(model, params, inputs, {}, metric)) if n_exact else 0.0
    exact = [
        float(_shifted_metric(model, params, inputs, {target: differences[part]}, metric)) - plain
        for _, part, target in edges[:n_exact]
    ]
    effects: list[float | None] = [*exact, *[None] * (len(edges) - len(exact))]
    return [Edge(part, target, value, effect) for (value, part, target), effect in zip(edges, effects, strict=True)]


@partial(jax.jit, static_argnames=("model", "metric"))
def _estimates(
    model: nn.Module, params: Params, inputs: tuple, source: tuple, metric: Callable
) -> tuple[Activations, Activations]:
    """Return the differences of what each part writes, `(T, D)` by part; and the estimates by target, one per part."""
    c = as_rung(model.config)
    before, after = (_written(c, params, capture(model, params, *example)) for example in (inputs, source))
    differences = OrderedDict((part, after[part] - before[part]) for part in before)
    targets = [f"blocks.{i}.{part}" for i in range(c.n_blocks) for part in ("attention", "mlp")] + ["logits"]
    zeros = dict.fromkeys(targets, jnp.zeros_like(differences["embedding"]))
    grads = jax.grad(lambda shifts: _shifted_metric(model, params, inputs, shifts, metric))(zeros)
    stacked = jnp.stack(list(differences.values()))
    return differences, OrderedDict((target, jnp.einsum("ptd,td->p", stacked, grads[target])) for target in targets)


@partial(jax.jit, static_argnames=("model", "metric"))
def _shifted_metric(
    model: nn.Module, params: Params, inputs: tuple, shifts: dict[str, jax.Array], metric: Callable
) -> jax.Array:
    with _shifted_inputs(model.config, shifts):
        return metric(model.apply({"params": params}, *inputs))


@contextmanager
def _shifted_inputs(c: DecoderConfig, shifts: dict[str, jax.Array]) -> Iterator[None]:
    """Add a shift `(T, D)` to what a part of the models called within this context reads of the residual stream."""
    norm = "" if c.norm == "none" else "_norm"
    shift_of = {name if name == "logits" else f"{name}{norm}": shift for name, shift in shifts.items()}

    def shifted(call: Callable, args: tuple, named: dict, context: nn.module.InterceptorContext) -> Any:
        name = "logits" if context.method_name == "readout" else dotted(context.module.path)
        if context.method_name in ("readout", "__call__") and name in shift_of:
            args = (args[0] + shift_of[name], *args[1:])
        return call(*args, **named)

    with nn.intercept_methods(shifted):
        yield


def _written(c: Any, params: Params, values: Activations) -> Activations:
    """Return what each part adds to the residual stream, `(T, D)` by part."""
    parts = OrderedDict(embedding=values["embedding"])
    for i in range(c.n_blocks):
        heads_HTK = values[f"blocks.{i}.attention.heads"]
        H, _, K = heads_HTK.shape
        if c.output_projection:
            W_HKD = params[f"blocks_{i}"]["attention"]["W_O"]
        else:  # heads are concatenated, or, each as wide as the model, summed
            W_HKD = jnp.broadcast_to(jnp.eye(c.d_model).reshape(-1, K, c.d_model), (H, K, c.d_model))
        for h, written_TD in enumerate(jnp.einsum("htk,hkd->htd", heads_HTK, W_HKD)):
            parts[f"blocks.{i}.attention.heads.{h}"] = written_TD
        parts[f"blocks.{i}.mlp"] = values[f"blocks.{i}.mlp"]
    return parts


def _time(name: str) -> float:
    """Return the order in which a part writes, or, for a target, reads."""
    if "." not in name:
        return -1 if name == "embedding" else float("inf")
    _, block, part, *_ = name.split(".")
    return 2 * int(block) + (part == "mlp")

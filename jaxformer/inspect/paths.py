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
from jax.lax import stop_gradient

from jaxformer.inspect.activations import Activations, capture, capture_gradients, intervene
from jaxformer.inspect.of_run import of_run
from jaxformer.inspect.patching import check_pair
from jaxformer.inspect.residual_stream import check_stream
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params
from jaxformer.nn.block import PARALLEL
from jaxformer.nn.parameter_norms import dotted

PROJECTIONS = tuple(f"blocks.*.attention.{kind}" for kind in "qkv")


@dataclass(frozen=True)
class Edge:
    """The effect of one part through one later part."""

    source: str
    """The activation that it writes: `embed`, a head such as `blocks.0.attention.z.2`, or an MLP such as
    `blocks.0.mlp_out`."""
    target: str
    """The part that reads it: an attention layer, an MLP, or `logits`; or a head's projection, such as
    `blocks.1.attention.q.2`."""
    estimate: float
    """Change of the metric to first order: the gradient at the target's input times the difference. A difference that
    takes the target far from there may have another effect, even of the other sign; see `exact`."""
    exact: float | None = None
    """Change of the metric when the target alone reads the difference; None if it was not computed."""

    @property
    def is_linear(self) -> bool | None:
        """True if the exact effect has the sign of the estimate, and is from half to twice as large; None if it was not
        computed."""
        if self.exact is None:
            return None
        small, large = sorted((self.estimate, self.exact), key=abs)
        return small == large or small / large >= 0.5


@of_run
def path_attribution(
    model: nn.Module,
    params: Params,
    inputs: Sequence[jax.Array],
    source: Sequence[jax.Array],
    metric: Callable[[jax.Array], jax.Array],
    n_exact: int | None = 10,
    by_head: bool = False,
) -> list[Edge]:
    """Return the edges of a decoder in order of their estimated effect, the largest first: path patching
    (Goldowsky-Dill et al. 2023) to first order for all edges, from one gradient (Syed et al. 2023), and exactly for the
    largest estimates. `Edge.is_linear` says where both agree.

    An edge's source writes to the residual stream, and its target reads the stream. The metric's change is that by the
    source's output for the other inputs, added to what the target reads while all other parts read the original.

    Args:
      inputs: inputs of the model, whose logits are measured.
      source: inputs of the same shapes, which provide the other outputs.
      metric: function from logits to a scalar. Pass the same function object in each call: a new one triggers
        compilation.
      n_exact: number of edges that are computed exactly, with a forward pass each, 0 or more; None for all.
      by_head: instead of attention layers, the targets are the queries, keys and values of each of their heads, of
        which one alone reads the difference.

    Raises:
      ValueError: the inputs are a batch; `n_exact` is negative.
      ValueError: the inputs differ from the source in shape; the model has no residual stream, or normalises what its
        parts add to it.
    """
    check_stream(model)
    if n_exact is not None and n_exact < 0:
        raise ValueError(f"n_exact is {n_exact}; give 0 or more, or None for all.")
    if model.config.norm != "none" and model.config.norm_placement in ("both", "output"):
        raise ValueError("the parts' outputs are normalised before they are added, so heads have no part of their own")
    if model.config.norm != "none" and model.config.norm_placement == "parallel":
        raise ValueError("attention and MLP read the stream through one norm, so neither can read a difference alone")
    inputs, source, _ = check_pair(model, inputs, source, ())
    model = model.clone(execution=replace(model.execution, scan=False))  # a scan has no names of blocks
    differences, estimates = _estimates(model, params, inputs, source, metric, by_head)
    parts, targets = list(differences), list(estimates)
    edges = [
        (float(estimates[target][i]), part, target)
        for target in targets
        for i, part in enumerate(parts)
        if _time(model.config, part) < _time(model.config, target)
    ]
    edges.sort(key=lambda edge: -abs(edge[0]))
    plain = 0.0 if n_exact == 0 else float(_shifted_metric(model, params, inputs, {}, metric))
    exact = [
        float(_exact(model, params, inputs, target, differences[part], metric)) - plain
        for _, part, target in edges[:n_exact]
    ]
    effects: list[float | None] = [*exact, *[None] * (len(edges) - len(exact))]
    return [Edge(part, target, value, effect) for (value, part, target), effect in zip(edges, effects, strict=True)]


@partial(jax.jit, static_argnames=("model", "metric", "by_head"))
def _estimates(
    model: nn.Module, params: Params, inputs: tuple, source: tuple, metric: Callable, by_head: bool
) -> tuple[Activations, Activations]:
    """Return the differences of what each part writes, `(T, D)` by part; and the estimates by target, one per part."""
    c = model.config
    before, after = (_written(c, params, capture(model, params, *example)) for example in (inputs, source))
    differences = OrderedDict((part, after[part] - before[part]) for part in before)
    layers = [f"blocks.{i}.attention" for i in range(c.n_blocks)]
    targets = [f"blocks.{i}.mlp" for i in range(c.n_blocks)] + ["logits"] + ([] if by_head else layers)
    zeros_TD, stacked = jnp.zeros_like(differences["embed"]), jnp.stack(list(differences.values()))
    shifts = dict.fromkeys(targets, zeros_TD)
    grads = jax.grad(lambda shifts: _shifted_metric(model, params, inputs, shifts, metric))(shifts)
    estimates = OrderedDict((target, jnp.einsum("ptd,td->p", stacked, grads[target])) for target in targets)
    if not by_head:
        return differences, estimates

    def projected(shift_TD: jax.Array) -> Activations:
        """Return queries, keys and values if each layer reads a shift that earlier layers did not read."""
        with (
            _shifted_inputs(c, dict.fromkeys(layers, shift_TD)),
            intervene("*.resid_pre", lambda _, x: stop_gradient(x)),
        ):
            return capture(model, params, *inputs, names=PROJECTIONS)

    _, grads = capture_gradients(lambda: metric(model.apply({"params": params}, *inputs)), names=PROJECTIONS)
    _, change = jax.linearize(projected, zeros_TD)
    effects = jax.lax.map(
        lambda part_TD: jax.tree.map(partial(jnp.einsum, "htk,htk->h"), grads, change(part_TD)), stacked
    )
    for name, effects_PH in effects.items():
        estimates |= {f"{name}.{h}": effect_P for h, effect_P in enumerate(effects_PH.T)}
    return differences, estimates


def _exact(
    model: nn.Module, params: Params, inputs: tuple, target: str, difference_TD: jax.Array, metric: Callable
) -> jax.Array:
    """Return the metric if the target alone reads the difference."""
    if target.count(".") < 4:
        return _shifted_metric(model, params, inputs, {target: difference_TD}, metric)
    name, _, head = target.rpartition(".")
    return _head_metric(model, params, inputs, name, int(head), difference_TD, metric)


@partial(jax.jit, static_argnames=("model", "name", "metric"))
def _head_metric(
    model: nn.Module,
    params: Params,
    inputs: tuple,
    name: str,
    head: int,
    difference_TD: jax.Array,
    metric: Callable,
) -> jax.Array:
    with _shifted_inputs(model.config, {name.rpartition(".")[0]: difference_TD}):
        shifted_HTK = capture(model, params, *inputs, names=name)[name]
    with intervene(name, lambda _, x_HTK: x_HTK.at[head].set(shifted_HTK[head])):
        return metric(model.apply({"params": params}, *inputs))


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
    parts = OrderedDict(embed=values["embedding_norm" if c.embedding_norm else "embed"])
    for i in range(c.n_blocks):
        heads_HTK = values[f"blocks.{i}.attention.z"]
        H, _, K = heads_HTK.shape
        W_HKD = params[f"blocks_{i}"]["attention"].get("W_O")
        if W_HKD is None:  # heads are concatenated, or, each as wide as the model, summed
            W_HKD = jnp.broadcast_to(jnp.eye(c.d_model).reshape(-1, K, c.d_model), (H, K, c.d_model))
        for h, written_TD in enumerate(jnp.einsum("htk,hkd->htd", heads_HTK, W_HKD)):
            parts[f"blocks.{i}.attention.z.{h}"] = c.residual_scale * written_TD
        parts[f"blocks.{i}.mlp_out"] = values[f"blocks.{i}.mlp_out"]
    return parts


def _time(c: Any, name: str) -> float:
    """Return the order in which a part writes, or, for a target, reads."""
    if "." not in name:
        return -1 if name == "embed" else float("inf")
    _, block, part, *_ = name.split(".")
    return 2 * int(block) + (part.startswith("mlp") and c.norm_placement not in PARALLEL)

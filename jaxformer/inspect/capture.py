"""Captures of a model's activations by name, and interventions that replace them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.errors import UserError
from jaxformer.models.inputs import check_example
from jaxformer.models.objective import Params
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.block import Block
from jaxformer.nn.experts import Experts
from jaxformer.nn.mlp import MLP
from jaxformer.nn.recurrent import AttentiveRecurrence
from jaxformer.ops.attention import attention_scores, mix, softmax
from jaxformer.ops.masks import Causal
from jaxformer.parameters import dotted

LOGITS = "logits"

Names = str | Collection[str]
"""A pattern of names (`blocks.*.attention.weights`, as of `fnmatch`), or several."""
Activations = OrderedDict[str, jax.Array]
"""Activations, or their gradients, by name in the order of the computation, which `jax.jit` keeps."""
Edit = Callable[[str, jax.Array], jax.Array]
"""`edit(name, value)` returns the replacement of an activation, or the value itself."""


def capture(
    model: nn.Module, params: Params, *inputs: Any, names: Names = "*", missing_ok: bool = False
) -> Activations:
    """Return what a model computes for one example, by name, in the order of the computation.

    ========================================  ====================================================================
    `logits`                                  the model's output, `(T, V)` or `(n_classes,)`; a model with several
                                              outputs has `output.0`, `output.1`, …
    `blocks.0.before`, `blocks.0.after`       the residual stream around a block, `(T, D)`
    `blocks.0.attention.queries`, `.keys`     `(H, T, K)` and `(G, S, K)`, after normalisation and rotation
    `blocks.0.attention.values`               `(G, S, K)`
    `blocks.0.attention.scores`               `(H, T, S)` float32, scaled, before the mask
    `blocks.0.attention.visible`              `(T, S)` bool: the mask
    `blocks.0.attention.weights`              `(H, T, S)` float32, the attention map: rows that sum to one
    `blocks.0.attention.heads`                `(H, T, K)`: the values, mixed
    `blocks.0.mlp.hidden.1`                   a hidden layer, `(T, F)`, after its activation
    `blocks.0.attention`, `blocks.0.mlp`, …   the output of a module, for every module: embedding, norms, and so on
    ========================================  ====================================================================

    Other stacks have their own names, `encoder_blocks.0…`, and cross-attention is `cross_attention`. A recurrent
    model has `encoder_0`, …, and `reader.weights`, `(T, S)`, its attention to the source. Experts have
    `blocks.0.mlp.experts`, `(E, C, D)`. A module that is called again has ` (call 2)` after its name.

    The model is not changed: its method calls are intercepted. Under `jax.jit`, XLA removes what is not used of the
    result.

    Args:
      model: as `ModelConfig.build()` returns it, not scanned or rematerialised.
      inputs: what the model is called with, for one example.
      names: the activations to return.
      missing_ok: return fewer where a pattern matches none, instead of raising.

    Raises:
      UserError: the inputs are those of a batch, or hold token ids out of the vocabulary; or a pattern matches nothing.
    """
    check_example(model, *inputs)
    captured: Activations = OrderedDict()

    def keep(name: str, value: jax.Array) -> jax.Array:
        captured[name] = value
        return value

    with intervene(names, keep, missing_ok=missing_ok):
        model.apply({"params": params}, *inputs)
    return captured


def capture_shapes(
    model: nn.Module, params: Params, *inputs: Any, names: Names = "*", missing_ok: bool = False
) -> OrderedDict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of what `capture` would return, in the same order, without computing it."""
    shapes: Any = jax.eval_shape(lambda: capture(model, params, *inputs, names=names, missing_ok=missing_ok))
    return shapes


def capture_gradients(loss: Callable[[], jax.Array], names: Names = "*") -> tuple[Activations, Activations]:
    """Return the activations of the model that a loss calls, and the gradients of the loss with respect to them.

    Each gradient is a total one, as if the activation were an input: that of `blocks.0.attention.weights` includes
    every path from the weights to the loss.

    Args:
      loss: calls a model and returns a scalar: `lambda: objective.example_loss(model, params, example)`.
      names: the activations; those of integers and bools have no gradient.

    Raises:
      UserError: a pattern matches nothing.
    """

    def shifted(shifts: Activations) -> tuple[jax.Array, Activations]:
        captured: Activations = OrderedDict()

        def edit(name: str, value: jax.Array) -> jax.Array:
            captured[name] = value + shifts[name] if name in shifts else value
            return captured[name]

        with intervene(names, edit):
            return loss(), captured

    shapes: Any = jax.eval_shape(lambda: shifted(OrderedDict())[1])
    zeros = OrderedDict(
        (name, jnp.zeros(x.shape, x.dtype)) for name, x in shapes.items() if jnp.issubdtype(x.dtype, jnp.floating)
    )
    grads, values = jax.grad(shifted, has_aux=True)(zeros)
    return values, grads


@contextmanager
def intervene(names: Names, edit: Edit, *, missing_ok: bool = False) -> Iterator[None]:
    """Replace activations of the models called within this context by `edit(name, value)`.

    The rest of the model is computed from the replacement. A value returned as the same object leaves the computation
    as it is; where scores, weights or visibility of attention change, that layer is computed by the plain formula
    instead of its kernel. A function that was compiled outside the context is not affected.

    Args:
      names: the activations to replace, named as by `capture`.
      edit: returns an array of the value's shape and dtype.
      missing_ok: accept patterns that match nothing.

    Raises:
      UserError: a replacement has another shape or dtype; a pattern matched nothing by the end of the context; the
        inputs of a model are those of a batch.
      ValueError: blocks are scanned or rematerialised, and so have no names.
    """
    patterns = [names] if isinstance(names, str) else list(names)
    calls: dict[str, int] = {}
    in_experts = depth = 0

    def named(name: str, value: Any) -> Any:
        name = name.removeprefix(".")  # of a module that is called alone
        calls[name] = n_calls = calls.get(name, 0) + 1
        if n_calls > 1:
            name = f"{name} (call {n_calls})"
            calls[name] = 1
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            return value
        edited = edit(name, value)
        if edited is not value:
            _check_edit(name, value, edited)
        return edited

    def within(call: Callable, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            depth -= 1

    def attend(module: MultiHeadAttention, call: Callable, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> Any:
        part = lambda name, value: named(f"{dotted(module.path)}.{name}", value)  # noqa: E731
        q, k, v = part("queries", q), part("keys", k), part("values", v)
        scores = attention_scores(q, k, module.scale)
        edited_scores = part("scores", scores)
        T_S = scores.shape[1:]
        visible = mask.array(*T_S) if isinstance(mask, Causal) else jnp.ones(T_S, bool) if mask is None else mask
        edited_visible = part("visible", visible)
        weights = softmax(edited_scores, mask if edited_visible is visible else edited_visible)
        edited_weights = part("weights", weights)
        is_same = edited_scores is scores and edited_visible is visible and edited_weights is weights
        return part("heads", call(q, k, v, mask) if is_same else mix(edited_weights, v))

    def intercept(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        nonlocal in_experts
        module, method, path = context.module, context.method_name, dotted(context.module.path)
        if in_experts:
            return call(*args, **kwargs)
        if isinstance(module, Block) and not path and depth:
            raise ValueError("blocks that are scanned or rematerialised have no names; build the model plainly")
        if isinstance(module, Experts) and method == "_through_experts":
            in_experts += 1  # a `vmap`, whose inner values cannot leave it
            try:
                out = call(*args, **kwargs)
            finally:
                in_experts -= 1
            return named(f"{path}.experts", out)
        if isinstance(module, MultiHeadAttention) and method == "attend":
            return attend(module, call, *args)
        if isinstance(module, MLP) and method == "hidden_layer":
            return named(f"{path}.hidden.{args[1]}", call(*args, **kwargs))
        if method != "__call__":
            return within(call, *args, **kwargs)
        if isinstance(module, Block):
            x, cache = call(named(f"{path}.before", args[0]), *args[1:], **kwargs)
            return named(f"{path}.after", x), cache
        if not path:
            check_example(module, *args)
        out = within(call, *args, **kwargs)
        if isinstance(module, AttentiveRecurrence):
            return named(path, out[0]), named(f"{path}.weights", out[1]), out[2]
        if not path:
            if isinstance(out, tuple):
                return tuple(named(f"output.{i}", x) for i, x in enumerate(out))
            return named(LOGITS, out)
        return (named(path, out[0]), *out[1:]) if isinstance(out, tuple) else named(path, out)

    with nn.intercept_methods(intercept):
        yield
    if not missing_ok:
        _check_matched(patterns, calls)


def _check_edit(name: str, value: jax.Array, edited: Any) -> None:
    """Raise `UserError` where a replacement has another shape or dtype than the activation."""
    expected, got = ((jnp.shape(x), getattr(x, "dtype", type(x).__name__)) for x in (value, edited))
    if expected != got:
        raise UserError(
            f"an edit must keep shape and dtype: {name} is {expected[1]} {expected[0]}, and its replacement is "
            f"{got[1]} {got[0]}; return an array like the value."
        )


def _check_matched(patterns: Collection[str], names: Collection[str]) -> None:
    """Raise `UserError` where a pattern matches none of the names that models computed."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(get_close_matches(pattern, names, 3, cutoff=0.0))
            raise UserError(
                f"no activation is called {pattern!r}; near it are {near}; capture_shapes lists all."
                if names
                else f"no activation is called {pattern!r}: no model was called, or only one compiled before; call it "
                "within intervene, without a jitted function from outside."
            )

"""Everything that a model computes on the way, by name; and what becomes of the rest where some of it is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.models.inputs import check_example
from jaxformer.models.objective import Params
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.block import Block
from jaxformer.nn.experts import Experts
from jaxformer.nn.mlp import MLP
from jaxformer.nn.recurrent import Attending
from jaxformer.ops.attention import attention_scores, mix, softmax
from jaxformer.ops.masks import Causal
from jaxformer.parameters import dotted

LOGITS = "logits"

Edit = Callable[[str, jax.Array], jax.Array]
"""`edit(name, value)` gives what is to stand in the place of a value, or that value itself."""


def trace(model: nn.Module, params: Params, *inputs: Any, names: str | Collection[str] = "*") -> dict[str, jax.Array]:
    """What a model computes of one example, by name, in the order of the computation.

    ========================================  ====================================================================
    `logits`                                  what the model gives, `(T, V)` or `(n_classes,)`; a model that gives
                                              several arrays has `output.0`, `output.1`, …
    `blocks.0.before`, `blocks.0.after`       the residual stream around a block, `(T, D)`
    `blocks.0.attention.queries`, `.keys`     `(H, T, K)` and `(G, S, K)`, as they are multiplied: rotated, normalised
    `blocks.0.attention.values`               `(G, S, K)`
    `blocks.0.attention.scores`               `(H, T, S)` float32, scaled, before the mask
    `blocks.0.attention.visible`              `(T, S)` bool: what the mask shows
    `blocks.0.attention.weights`              `(H, T, S)` float32, rows that sum to one
    `blocks.0.attention.heads`                `(H, T, K)`: the values, mixed
    `blocks.0.mlp.hidden.1`                   a hidden layer, `(T, F)`, after its activation
    `blocks.0.attention`, `blocks.0.mlp`, …   what a module gives, for every module: the embedding, norms, and so on
    ========================================  ====================================================================

    Other stacks have their own names, `encoder_blocks.0…`, and cross-attention is `cross_attention`. A recurrent
    model has `encoder_0`, …, and `reader.weights`, `(T, S)`, for what it reads of its source. Of experts there is
    `blocks.0.mlp.experts`, `(E, C, D)`. A module that is called again has ` (call 2)` after its name.

    The model runs as ever: it is listened to, and nothing of this is in it. Under `jax.jit` only what is used of the
    result is computed (and a dict that is returned from there has lost its order; see `trace_names`).

    Args:
      model: as `ModelConfig.build()` makes it, not scanned or rematerialised.
      inputs: what the model is called with, of one example.
      names: a pattern (`blocks.*.attention.weights`), or several; what matches none is left out.

    Raises:
      UserError: the inputs are those of a batch, or hold token ids that are none; so do the probes built on this one.
    """
    check_example(model, *inputs)
    found: dict[str, jax.Array] = {}

    def keep(name: str, value: jax.Array) -> jax.Array:
        if matches(name, names):
            found[name] = value
        return value

    with editing(keep):
        model.apply({"params": params}, *inputs)
    return found


def trace_names(
    model: nn.Module, params: Params, *inputs: Any, names: str | Collection[str] = "*"
) -> dict[str, jax.ShapeDtypeStruct]:
    """The names that `trace` would give, in the order of the computation, with shapes; nothing is computed."""
    order: list[str] = []

    def call() -> dict[str, jax.Array]:
        found = trace(model, params, *inputs, names=names)
        order.extend(found)
        return found

    shapes = jax.eval_shape(call)
    return {name: shapes[name] for name in order}


def trace_gradients(
    loss: Callable[[], jax.Array], names: str | Collection[str] = "*"
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """What `trace` gives of the model that is called in a loss, and the gradients of the loss with respect to it, both
    by name.

    What passes through several of these is in the gradient of each: that of `blocks.0.attention.weights` is of what
    the weights do, wherever they come from.

    Args:
      loss: takes nothing, calls a model and gives a scalar: `lambda: objective.example_loss(model, params, example)`.
      names: as for `trace`.
    """
    order: list[str] = []

    def look() -> dict[str, jax.Array]:
        found = _traced(loss, names)[1]
        order.extend(found)
        return found

    shapes = jax.eval_shape(look)
    floats = {name: x for name, x in shapes.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    nothing = {name: jnp.zeros(x.shape, x.dtype) for name, x in floats.items()}

    def moved(by: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        return _traced(loss, names, lambda name, value: value + by[name] if name in by else value)

    grads, values = jax.grad(moved, has_aux=True)(nothing)
    return {name: values[name] for name in order}, {name: grads[name] for name in order if name in grads}


def _traced(
    loss: Callable[[], jax.Array], names: str | Collection[str], edit: Edit = lambda name, value: value
) -> tuple[jax.Array, dict[str, jax.Array]]:
    found: dict[str, jax.Array] = {}

    def keep(name: str, value: jax.Array) -> jax.Array:
        if not matches(name, names):
            return value
        found[name] = value = edit(name, value)
        return value

    with editing(keep):
        return loss(), found


def matches(name: str, names: str | Collection[str]) -> bool:
    """Whether a name is of a pattern, or of one of several."""
    return any(fnmatchcase(name, pattern) for pattern in ([names] if isinstance(names, str) else names))


@contextmanager
def editing(edit: Edit) -> Iterator[None]:
    """Within it, what models compute goes through `edit`, by the names of `trace`, and on from there as edited.

    What comes back as the same object leaves the model's own computation as it is. Where scores, weights or what is
    visible are changed, that layer's attention is computed by the plain formula, whatever computes it otherwise.

    Raises:
      ValueError: where a model is called whose blocks are scanned or rematerialised, which have no names.
    """
    calls: dict[str, int] = {}
    hidden = inside = 0

    def within(call: Callable, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside += 1
        try:
            return call(*args, **kwargs)
        finally:
            inside -= 1

    def named(name: str, value: Any) -> Any:
        name = name.removeprefix(".")  # of a module that is called alone
        calls[name] = again = calls.get(name, 0) + 1
        return edit(name if again == 1 else f"{name} (call {again})", value)

    def attend(module: MultiHeadAttention, call: Callable, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> Any:
        part = lambda name, value: named(f"{dotted(module.path)}.{name}", value)  # noqa: E731
        q, k, v = part("queries", q), part("keys", k), part("values", v)
        scores = attention_scores(q, k, module.scale)
        edited = part("scores", scores)
        T_S = scores.shape[1:]
        visible = mask.array(*T_S) if isinstance(mask, Causal) else jnp.ones(T_S, bool) if mask is None else mask
        shown = part("visible", visible)
        weights = softmax(edited, mask if shown is visible else shown)
        changed = part("weights", weights)
        as_ever = edited is scores and shown is visible and changed is weights
        return part("heads", call(q, k, v, mask) if as_ever else mix(changed, v))

    def listen(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        nonlocal hidden
        module, method, path = context.module, context.method_name, dotted(context.module.path)
        if hidden:
            return call(*args, **kwargs)
        if isinstance(module, Block) and not path and inside:
            raise ValueError("blocks that are scanned or rematerialised have no names; build the model plainly")
        if isinstance(module, Experts) and method == "_through_experts":
            hidden += 1  # a `vmap`, out of which nothing gets but its result
            try:
                out = call(*args, **kwargs)
            finally:
                hidden -= 1
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
        out = within(call, *args, **kwargs)
        if isinstance(module, Attending):
            return named(path, out[0]), named(f"{path}.weights", out[1]), out[2]
        if not path:
            if isinstance(out, tuple):
                return tuple(named(f"output.{i}", x) for i, x in enumerate(out))
            return named(LOGITS, out)
        return (named(path, out[0]), *out[1:]) if isinstance(out, tuple) else named(path, out)

    with nn.intercept_methods(listen):
        yield

"""Capture of a model's activations by name, and interventions that replace them."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from operator import index as as_int
from typing import TYPE_CHECKING, Any, SupportsIndex
from weakref import WeakKeyDictionary

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxformer.inspect.names import Names, Selector, activation_name, as_indices, check_indices
from jaxformer.inspect.of_run import of_run
from jaxformer.models.inputs import check_example
from jaxformer.models.objective import Params
from jaxformer.nn.capture import Captured, Path, handled_by
from jaxformer.nn.parameter_norms import dotted

if TYPE_CHECKING:
    from jaxformer.runs.run import Run

Inputs = tuple[Any, ...]
"""Inputs of a model, for one example or with a leading axis B; None for one that is omitted."""
Activations = OrderedDict[str, jax.Array]
"""Activations, or their gradients, by name in order of computation, which `jax.jit` preserves."""
Edit = Callable[[str, jax.Array], jax.Array]
"""`edit(name, value)` returns the replacement of an activation, or the value itself."""


@of_run
def capture(
    model: nn.Module, params: Params, *inputs: ArrayLike | None, names: Names = "*", missing_ok: bool = False
) -> Activations:
    """Return the activations of a model for one example, by name, in order of computation.

    The names are those of TransformerLens where it has one.

    ===========================================  =================================================================
    `embed`, `pos_embed`                         rows of the token and the position embedding, `(T, D)`
    `blocks.0.resid_pre`, `.resid_post`          the residual stream before and after a block, `(T, D)`
    `blocks.0.resid_mid`                         the stream after attention's addition, `(T, D)`, which the MLP reads
                                                 unless it is parallel to attention
    `blocks.0.attn_out`, `.mlp_out`              what attention and MLP add to the stream, `(T, D)`
    `blocks.0.attention.q`, `.k`                 `(H, T, K)` and `(G, S, K)`, after normalisation and rotation
    `blocks.0.attention.v`                       `(G, S, K)`
    `blocks.0.attention.attn_scores`             `(H, T, S)` float32, scaled, with soft cap and bias, before the
                                                 mask
    `blocks.0.attention.mask`                    `(T, S)` bool
    `blocks.0.attention.pattern`                 `(H, T, S)` float32, the attention map: rows that sum to one,
                                                 and to less with sinks
    `blocks.0.attention.z`                       `(H, T, K)`: the weighted sums of values
    `blocks.0.mlp.pre`, `.post`                  the hidden layer before and after its activation, `(T, F)`; of several
                                                 layers `pre_1`, `post_1`, …; if gated, post = act(pre) · pre_linear,
                                                 or what a clamped SwiGLU makes of both
    `blocks.0.attention`, `blocks.0.mlp_norm`    the output of a module of `jaxformer.nn`
    `logits`                                     the model's output, `(T, V)` or `(n_classes,)`; a model with several
                                                 outputs has `output.0`, `output.1`, …
    ===========================================  =================================================================

    Other stacks have their own names, such as `encoder_blocks.0…`; a block with cross-attention also has
    `cross_attention`, `cross_attn_out` and `resid_mid_cross`. A recurrent model has `encoder_0`, …, and
    `reader.pattern`, `(T, S)`, its attention to the source. Experts have `blocks.0.mlp.experts`, `(E, C, D)`. The
    second call of a module appends ` (call 2)` to its name. One head of an activation is `blocks.0.attention.z.3`; that
    of `k` and `v` is a key/value head. A negative number counts from the end.

    Modules pass these values through `nn.capture.capture_point`; any Linen module can add its own capture points. Under
    `jax.jit`, XLA removes the activations that are not used.

    Args:
      model: result of `ModelConfig.build()`, or any Linen module with capture points.
      inputs: inputs of the model, for one example.
      names: the activations to return.
      missing_ok: accept patterns that match nothing, instead of raising.

    Raises:
      ValueError: the inputs are a batch, or hold token ids outside the vocabulary; an activation is computed within a
        transformation in the model, such as `jax.vmap`, other than the scan and remat of `nn.run_blocks`.
      KeyError: a pattern matches nothing.
      IndexError: a pattern names a head that an activation does not have.
    """
    return apply_and_capture(model, params, *inputs, names=names, missing_ok=missing_ok)[1]


def apply_and_capture(
    model: nn.Module, params: Params, *inputs: ArrayLike | None, names: Names = "*", missing_ok: bool = False
) -> tuple[Any, Activations]:
    """Return the model's output for one example, and its activations; see `capture`."""
    check_example(model, *inputs)
    with capturing(names, missing_ok=missing_ok) as captured:
        output = model.apply({"params": params}, *inputs)
    return output, captured


@of_run
def capture_shapes(
    model: nn.Module, params: Params, *inputs: ArrayLike | None, names: Names = "*", missing_ok: bool = False
) -> OrderedDict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the result of `capture`, in the same order, without computing it.

    Args:
      params: parameters, or their `jax.ShapeDtypeStruct`s.
    """
    captured = partial(capture, model, names=names, missing_ok=missing_ok)
    return jax.eval_shape(lambda params: captured(params, *inputs), params)


def capture_gradients(
    loss: Callable[..., jax.Array] | Run, *arguments: Any, names: Names = "*"
) -> tuple[Activations, Activations]:
    """Return the activations of the model that a loss calls, and the gradients of the loss with respect to them.

    Gradients are total derivatives, as if the activation were an input: the gradient of `blocks.0.attention.pattern`
    includes every path from the pattern to the loss.

    Args:
      loss: function that calls a model and returns a scalar, such as `run.loss`; or a run, for its loss of a text.
      arguments: arguments of the loss, such as `run.params` and tokens.
      names: the activations; integer and bool activations have no gradient.

    Raises:
      ValueError: an activation is computed twice, or within a transformation that the loss applies, such as
        `jax.vmap`.
      KeyError, IndexError: see `capture`.
    """
    of: Any = loss
    call = partial(of.loss, of.params, *arguments) if hasattr(of, "params") else partial(of, *arguments)
    return value_and_capture_gradients(call, names)[1:]


def value_and_capture_gradients(
    loss: Callable[[], jax.Array], names: Names = "*"
) -> tuple[jax.Array, Activations, Activations]:
    """Return a loss and the results of `capture_gradients`."""

    def shifted(shifts: Activations) -> tuple[jax.Array, Activations]:
        with capturing(names, lambda name, value: value + shifts[name] if name in shifts else value) as captured:
            return loss(), captured

    shapes = jax.eval_shape(lambda: shifted(OrderedDict())[1])
    floats = ((name, x) for name, x in shapes.items() if jnp.issubdtype(x.dtype, jnp.floating))
    zeros = OrderedDict((name, jnp.zeros(x.shape, x.dtype)) for name, x in floats)
    (value, values), grads = jax.value_and_grad(shifted, has_aux=True)(zeros)
    return value, values, grads


@of_run
def run_from(model: nn.Module, params: Params, inputs: Inputs, values: Mapping[str, jax.Array]) -> Any:
    """Return the model's output for one example, computed from given activations instead of its own.

    It is a function of `values`, for `jax.grad`, `jax.vmap` and `jax.jit`, which leaves out what only the replaced
    activations needed.

    Args:
      values: activations, named as by `capture`.

    Raises:
      ValueError: the inputs are a batch; a value has another shape or dtype than the model's own.
      KeyError, IndexError: see `capture`.
    """
    check_example(model, *inputs)
    if wild := [name for name in values if re.search(r"[*?[]", name)]:
        raise KeyError(f"{wild[0]!r} is a pattern; name each activation, as its value is its own.")
    with intervene(tuple(values), lambda name, _: values[name]):
        return model.apply({"params": params}, *inputs)


@of_run
def gradient_of(
    model: nn.Module,
    params: Params,
    *inputs: ArrayLike | None,
    of: str | Callable[[Any], jax.Array],
    wrt: Names,
    at: SupportsIndex | tuple[SupportsIndex, ...] = (),
) -> Activations:
    """Return the gradients of an activation, or of a function of the output, with respect to activations and
    parameters, by name: total derivatives, as by `capture_gradients`. `jax.vmap` gives them for each example.

    Args:
      inputs: inputs of the model, for one example.
      of: the activation, such as `blocks.1.attention.attn_scores`, or that of one head,
        `blocks.1.attention.attn_scores.2`; the sum of its elements at `at` is differentiated. Or a function from the
        output to a scalar; pass the same function object in each call, as a new one triggers compilation.
      wrt: patterns of parameters, named as in `gradient_report` without heads, such as `blocks.*.attention.W_Q`; a
        pattern that matches none of them is one of activations.
      at: indices into the activation, after the head: `(5,)` for the query at position 5; from the end if negative.

    Raises:
      ValueError: the inputs are a batch; `of` names several activations.
      KeyError: a name or pattern matches nothing.
      IndexError: an index is outside its axis, or the activation has no such head.
    """
    check_example(model, *inputs)
    at = as_indices(at)
    if any(isinstance(i, bool) for i in at):  # True would share the program of 1
        raise TypeError(f"at is {at}; give integers.")
    at = tuple(map(as_int, at))
    return _gradient_of(model, params, inputs, of, (wrt,) if isinstance(wrt, str) else tuple(wrt), at)


@partial(jax.jit, static_argnames=("model", "of", "wrt", "at"))
def _gradient_of(
    model: nn.Module,
    params: Params,
    inputs: Inputs,
    of: str | Callable[[Any], jax.Array],
    wrt: tuple[str, ...],
    at: tuple[SupportsIndex, ...],
) -> Activations:
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    named = OrderedDict((dotted(path), leaf) for path, leaf in leaves)
    chosen = OrderedDict((name, x) for name, x in named.items() if any(fnmatchcase(name, p) for p in wrt))

    def scalar(chosen: Activations) -> jax.Array:
        params = jax.tree.unflatten(structure, list((named | chosen).values()))
        if not isinstance(of, str):
            return of(model.apply({"params": params}, *inputs))
        (name, value), *others = capture(model, params, *inputs, names=of).items()
        if others:
            raise ValueError(f"{of} names {1 + len(others)} activations; give one, such as {name}.")
        return jnp.sum(value[check_indices(at, value.shape, name)])

    grads = jax.grad(scalar)(chosen) if chosen else OrderedDict()
    if names := [pattern for pattern in wrt if not any(fnmatchcase(name, pattern) for name in chosen)]:
        try:
            grads |= capture_gradients(scalar, OrderedDict(), names=names)[1]
        except KeyError:
            selector = Selector(names)
            for name, x in capture_shapes(model, params, *inputs).items():
                list(selector.select(name, x.shape))
            selector.check(named, "activation or parameter")
            raise
    return grads


@contextmanager
def capturing(names: Names, edit: Edit = lambda _, value: value, *, missing_ok: bool = False) -> Iterator[Activations]:
    """Yield the activations of the model that is called within this context, by name, after replacements by `edit`;
    the arguments are those of `intervene`.

    Raises:
      KeyError, IndexError: see `intervene`.
      ValueError: an activation is computed in two calls of a model, or within a transformation.
    """
    captured = Captured()

    def keep(name: str, value: jax.Array) -> jax.Array:
        captured.keep(name, edited := edit(name, value))
        return edited

    with intervene(names, keep, missing_ok=missing_ok):
        yield captured.values


@contextmanager
def intervene(names: Names, edit: Edit, *, missing_ok: bool = False) -> Iterator[None]:
    """Replace activations of the models called within this context by `edit(name, value)`.

    The rest of the model is computed from the replacement. Returning the same object leaves the computation unchanged.
    An attention layer whose scores, mask or pattern an edit changes uses the plain formula instead of its kernel.
    A function under `jax.jit` that calls a model is traced anew in each context, once, and its other programs are not
    affected; so enter the context around a loop, or within the function. Like the context managers of JAX, it concerns
    the current thread. Under `jax.jit`, and in blocks that are scanned or rematerialised, the edit receives traced
    arrays, which it must not store; see `capturing`.

    Args:
      names: the activations to replace, named as by `capture`; for a head's name, the edit receives that head's part.
      edit: returns an array of the value's shape and dtype.
      missing_ok: accept patterns that match nothing.

    Raises:
      ValueError: a replacement has another shape or dtype.
      KeyError: a pattern matched nothing by the end of the context.
      IndexError: an activation has no such head.
    """
    selector = Selector(names)
    # A root holds traced values, which must not outlive their transformation.
    calls: WeakKeyDictionary[object, Counter[str]] = WeakKeyDictionary()

    def replaced(root: object, path: Path, value: jax.Array) -> jax.Array:
        name, counts = activation_name(path), calls.setdefault(replaced if root is None else root, Counter())
        counts[name] += 1
        name = name if counts[name] == 1 else f"{name} (call {counts[name]})"
        for selected, head in selector.select(name, value.shape):
            part = value if head is None else value[head]
            edited = edit(selected, part)
            if edited is not part:
                _check_edit(selected, part, edited)
                value = edited if head is None else value.at[head].set(edited)
        return value

    with handled_by(replaced):
        yield
    if not missing_ok:
        selector.check()


def _check_edit(name: str, value: jax.Array, edited: ArrayLike) -> None:
    """Raise `ValueError` if a replacement has another shape or dtype than the activation."""
    expected, got = (f"{getattr(x, 'dtype', type(x).__name__)} {jnp.shape(x)}" for x in (value, edited))
    if expected != got:
        problem = f"an intervention must preserve shape and dtype: {name} is {expected}, and its replacement is {got}"
        raise ValueError(f"{problem}; return an array like the value.")

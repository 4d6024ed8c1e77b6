"""Capture points: values of a module that inspection reads or replaces.

A module passes each of these values through `capture_point`, which returns it unchanged, so that capture points leave
no trace in a model's jaxpr. Only within `handled_by`, which `jaxformer.inspect` enters, does a handler receive the
values. A handler that stores values does so with `Captured.keep`, by which they also leave `lifted` transformations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import flax.linen as nn
import jax

from jaxformer.nn.trace_context import TraceContext, current_trace

OUTPUT = "output"
"""Name of a module's output. Within a model, a module's output activation has the module's name, and `output` is the
output of the model."""

Path = tuple[str, ...]
"""Names of the modules from the model down to a value, and of the value."""
Handler = Callable[[Any, Path, jax.Array], jax.Array]
"""`handler(root, path, value)` returns the replacement of a value, or the value itself. The root is the same object for
all values of one `apply` of a model."""


@dataclass(frozen=True)
class _Active:
    """What receives the values of capture points.

    Attributes:
      trace: JAX's trace of the innermost `lifted` transformation; None outside.
      leaving: values that leave this transformation as outputs, and where they are then stored.
    """

    handler: Handler
    trace: Any = None
    leaving: list[tuple[Captured, str, jax.Array]] = field(default_factory=list)


_active = TraceContext[_Active | None](None)


def capture_point(module: nn.Module, name: str, value: jax.Array) -> jax.Array:
    """Return a module's value, or, within `handled_by`, its replacement.

    Args:
      module: the bound module that computes the value.
      name: name of the value within the module, such as `pattern`; `OUTPUT` for the module's output.
    """
    active = _active.get()
    if active is None:
        return value
    path = module.path if name == OUTPUT and module.path else (*module.path, name)
    return active.handler(module.scope.root if module.scope else None, path, value)


def is_capturing() -> bool:
    """Return True if values are passed to a handler."""
    return _active.get() is not None


@contextmanager
def handled_by(handler: Handler | None) -> Iterator[None]:
    """Pass the values of all capture points to a handler; in nested contexts, the outer handler is applied first.

    Args:
      handler: None for no handler, as under `nn.vmap`, whose inner values cannot leave it.
    """
    outer = _active.get()
    if handler is None:
        active = None
    elif outer is None:
        active = _Active(handler)
    else:
        first, then = outer.handler, handler
        active = replace(outer, handler=lambda root, path, value: then(root, path, first(root, path, value)))
    with _active.set(active):
        yield


@contextmanager
def rooted_at(module: nn.Module) -> Iterator[None]:
    """Pass on the values of all capture points as those of the `apply` to which a module belongs, also if they are
    computed in one of its transformations, which have roots of their own."""
    active, root = _active.get(), module.scope.root if module.scope else None
    if active is not None:
        handler = active.handler
        active = replace(active, handler=lambda _, path, value: handler(root, path, value))
    with _active.set(active):
        yield


@dataclass(frozen=True, eq=False)
class Captured:
    """Values stored by a handler, by name, in order of computation."""

    values: OrderedDict[str, jax.Array] = field(default_factory=OrderedDict)
    trace: Any = field(default_factory=current_trace)

    def keep(self, name: str, value: jax.Array) -> None:
        """Store a value; within a `lifted` transformation, once it has left it.

        Raises:
          ValueError: the value is computed within another transformation, such as `vmap`, or its name is taken.
        """
        trace, active = current_trace(), _active.get()
        if trace == self.trace:
            if name in self.values:
                raise ValueError(f"{name} is computed in two calls of a model; capture each call separately.")
            self.values[name] = value
        elif active is not None and active.trace == trace:
            active.leaving.append((self, name, value))
        else:
            transformation = "a transformation, such as jax.vmap, jax.checkpoint or jax.lax.scan"
            problem = f"{name} is computed within {transformation}, which its value cannot leave"
            raise ValueError(f"{problem}; capture within the transformation, or omit this name.")


def lifted(transform: Callable[[Callable[..., Any]], Callable[..., Any]], f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `transform(f)`, such as `nn.checkpoint(f)`, with values captured in `f` as additional outputs of the
    transformed function, from where they are stored."""

    def call(*args: Any) -> Any:
        if (active := _active.get()) is None:
            return transform(f)(*args)
        leaving: list[tuple[Captured, str, jax.Array]] = []

        def inner(*args: Any) -> tuple[Any, list[jax.Array]]:
            leaving.clear()
            with _active.set(_Active(active.handler, current_trace(), leaving)):
                return f(*args), [value for *_, value in leaving]

        result, values = transform(inner)(*args)
        for (store, name, _), value in zip(leaving, values, strict=True):
            store.keep(name, value)
        return result

    return call

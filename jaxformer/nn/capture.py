"""Capture points: values of a module that inspection reads or replaces.

A module passes each of these values through `capture_point`, which returns it unchanged, so that capture points leave
no trace in a model's jaxpr. Only within `handled_by`, which `jaxformer.inspect` enters, does a handler receive the
values. A handler that stores values does so with `Captured.keep`, by which they also leave `lifted` transformations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
from jax.extend.core import get_opaque_trace_state

from jaxformer.nn.trace_context import TraceContext

OUTPUT = "output"
"""Name of a module's output. Within a model, a module's output activation has the module's name, and `output` is the
output of the model."""

Path = tuple[str, ...]
"""Names of the modules from the model down to a value, and of the value."""
Handler = Callable[[Any, Path, jax.Array], jax.Array]
"""`handler(root, path, value)` returns the replacement of a value, or the value itself. The root is the same object for
all values of one `apply` of a model."""

_handler = TraceContext[Handler | None](None)


def capture_point(module: nn.Module, name: str, value: jax.Array) -> jax.Array:
    """Return a module's value, or, within `handled_by`, its replacement.

    Args:
      module: the bound module that computes the value.
      name: name of the value within the module, such as `pattern`; `OUTPUT` for the module's output.
    """
    handler = _handler.get()
    if handler is None:
        return value
    path = module.path if name == OUTPUT and module.path else (*module.path, name)
    return handler(module.scope.root if module.scope else None, path, value)


def is_capturing() -> bool:
    """Return True if values are passed to a handler."""
    return _handler.get() is not None


@contextmanager
def handled_by(handler: Handler | None, *, after_outer: bool = True) -> Iterator[None]:
    """Pass the values of all capture points to a handler; in nested contexts, the outer handler is applied first.

    Args:
      handler: None for no handler, as under `nn.vmap`, whose inner values cannot leave it.
      after_outer: apply the outer handler first; else it receives nothing.
    """
    outer = _handler.get() if after_outer and handler is not None else None

    def after(root: Any, path: Path, value: jax.Array) -> jax.Array:
        assert handler is not None and outer is not None
        return handler(root, path, outer(root, path, value))

    with _handler.set(handler if outer is None else after):
        yield


@contextmanager
def rooted_at(module: nn.Module) -> Iterator[None]:
    """Pass on the values of all capture points as those of the `apply` to which a module belongs, also if they are
    computed in one of its transformations, which have roots of their own."""
    handler, root = _handler.get(), module.scope.root if module.scope else None
    same = None if handler is None else lambda _, path, value: handler(root, path, value)
    with handled_by(same, after_outer=False):
        yield


def _trace() -> Any:
    return get_opaque_trace_state(convention="flax")


@dataclass(frozen=True, eq=False)
class Captured:
    """Values stored by a handler, by name, in order of computation."""

    values: OrderedDict[str, jax.Array] = field(default_factory=OrderedDict)
    trace: Any = field(default_factory=_trace)

    def keep(self, name: str, value: jax.Array) -> None:
        """Store a value; within a `lifted` transformation, once it has left it.

        Raises:
          ValueError: the value is computed within another transformation, such as `vmap`, or its name is taken.
        """
        trace, leaving = _trace(), _leaving.get()
        if trace == self.trace:
            if name in self.values:
                raise ValueError(f"{name} is computed in two calls of a model; capture each call separately.")
            self.values[name] = value
        elif leaving is not None and leaving.trace == trace:
            leaving.values.append((self, name, value))
        else:
            transformation = "a transformation, such as jax.vmap, jax.checkpoint or jax.lax.scan"
            problem = f"{name} is computed within {transformation}, which its value cannot leave"
            raise ValueError(f"{problem}; capture within the transformation, or omit this name.")


@dataclass(frozen=True)
class _Leaving:
    """Values that leave the innermost `lifted` transformation as outputs."""

    values: list[tuple[Captured, str, jax.Array]] = field(default_factory=list)
    trace: Any = field(default_factory=_trace)


_leaving: ContextVar[_Leaving | None] = ContextVar("leaving", default=None)


def lifted(transform: Callable[[Callable[..., Any]], Callable[..., Any]], f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `transform(f)`, such as `nn.checkpoint(f)`, with values captured in `f` as additional outputs of the
    transformed function, from where they are stored."""

    def call(*args: Any) -> Any:
        slots: list[tuple[Captured, str]] = []  # where the values are stored

        def inner(*args: Any) -> tuple[Any, list[jax.Array]]:
            token = _leaving.set(leaving := _Leaving())
            try:
                result = f(*args)
            finally:
                _leaving.reset(token)
            slots[:] = [(store, name) for store, name, _ in leaving.values]
            return result, [value for *_, value in leaving.values]

        result, values = transform(inner)(*args)
        for (store, name), value in zip(slots, values, strict=True):
            store.keep(name, value)
        return result

    return call

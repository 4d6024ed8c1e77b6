"""Capture points: values of a module that inspection reads or replaces.

A module passes each of these values through `capture_point`, which returns it unchanged, so that capture points leave
no trace in a model's jaxpr. Only within `handled_by`, which `jaxformer.inspect` enters, does a handler receive the
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import flax.linen as nn
import jax

OUTPUT = "output"
"""Name of a module's output. Within a model, a module's output activation has the module's name, and `output` is the
output of the model."""

Handler = Callable[[nn.Module, str, jax.Array], jax.Array]
"""`handler(module, name, value)` returns the replacement of a value, or the value itself."""

_handler: ContextVar[Handler | None] = ContextVar("handler", default=None)


def capture_point(module: nn.Module, name: str, value: jax.Array) -> jax.Array:
    """Return a module's value, or, within `handled_by`, its replacement.

    Args:
      module: the bound module that computes the value.
      name: name of the value within the module, such as `scores`; `OUTPUT` for the module's output.
    """
    handler = _handler.get()
    return value if handler is None else handler(module, name, value)


def is_capturing() -> bool:
    """Return True if values are passed to a handler."""
    return _handler.get() is not None


@contextmanager
def handled_by(handler: Handler | None) -> Iterator[None]:
    """Pass the values of all capture points to a handler; in nested contexts, the outer handler is applied first.

    Args:
      handler: None for no handler, as under `nn.vmap`, whose inner values cannot leave it.
    """
    outer = _handler.get()

    def after_outer(module: nn.Module, name: str, value: jax.Array) -> jax.Array:
        assert handler is not None and outer is not None
        return handler(module, name, outer(module, name, value))

    token = _handler.set(handler if handler is None or outer is None else after_outer)
    try:
        yield
    finally:
        _handler.reset(token)

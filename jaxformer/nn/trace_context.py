"""Context variables on which compiled programs depend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Generic, TypeVar

import jax
from jax.extend.core import get_opaque_trace_state
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE as is_staging

T = TypeVar("T")


class TraceContext(Generic[T]):
    """Context variable of the current thread. A program that reads the variable while JAX traces it is reused only
    within the same `set`: what it read stays in it.

    JAX caches a program by the value of a user context, among others, and reuses it if that value equals the present
    one. Here the value is a key that equals all keys of its own `set`. Until a function that was called with this key
    reads the variable, the key also equals other such keys, so that programs that do not depend on the variable, such
    as those of `jnp` functions, are shared: to trace and compile them anew in each `set` would take seconds.
    """

    def __init__(self, default: T) -> None:
        self._default = default
        self._context = jax.make_user_context(None)

    def get(self) -> T:
        """Return the value."""
        key: _Key[T] | None = self._context.value
        if key is None:
            return self._default
        if not key.cell:  # of a `set` that ended before one within it, which has restored its key
            key.is_read = True
            self._context(None).__enter__()
            return self._default
        # Does a function read it that has been called with this key? Only if it is being traced to be cached.
        if (key.is_read or key.trace != current_trace()) and is_staging():
            key.is_read = True
            self._context(_Key(key.cell)).__enter__()  # of what is traced next; `set` ends it
        return key.cell[0]

    @contextmanager
    def set(self, value: T) -> Iterator[None]:
        """Set the value within this context."""
        cell = [value]
        with self._context(None if value is self._default else _Key(cell)):
            try:
                yield
            finally:
                cell.clear()  # JAX keeps the keys


def current_trace() -> Any:
    """Return JAX's innermost trace, to be compared."""
    return get_opaque_trace_state(convention="flax")


class _Key(Generic[T]):
    """Part of the keys of JAX's caches."""

    def __init__(self, cell: list[T]) -> None:
        self.cell = cell
        """The value; the same object for all keys of one `set`."""
        self.is_read = False
        self.trace = current_trace()
        """That which calls the functions whose programs have this key. What it reads itself, none of them does."""
        # Another thread that calls a function while it is traced waits for its program, before it is known what it
        # reads.
        self.thread = get_ident()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Key):
            return NotImplemented
        if self.cell is other.cell:  # a function depends on what the programs read that it calls without tracing them
            self.is_read = other.is_read = self.is_read or other.is_read
            return True
        return self.thread == other.thread and not self.is_read and not other.is_read

    def __hash__(self) -> int:
        return hash(self.thread)

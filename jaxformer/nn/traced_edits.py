"""Handlers of capture points as traced programs, by which a scan over blocks applies to each block its own
interventions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from jaxformer.nn.capture import Captured, Path, Slots, current_handler, handled_by, with_kept

Point = tuple[Path, jax.ShapeDtypeStruct]
"""Path, shape and dtype of a value."""


def points_of(f: Callable[..., Any], *args: Any) -> list[Point]:
    """Return the values that reach capture points when `f(*args)` is called, in order, without computing them."""
    points: list[Point] = []

    def record(root: Any, path: Path, value: jax.Array) -> jax.Array:
        points.append((path, jax.ShapeDtypeStruct(value.shape, value.dtype)))
        return value

    with handled_by(record, after_outer=False):
        jax.eval_shape(f, *args)
    return points


@dataclass(frozen=True)
class TracedEdit:
    """What the handler does to one value: a program, the arrays that it closes over, and what it keeps."""

    jaxpr: Any
    """Program of the replacement and the kept values."""
    slots: Slots

    @property
    def program(self) -> Any:
        """An object equal to that of an edit that differs only in the arrays that it closes over and in names."""
        return _program(self.jaxpr), [store for store, _ in self.slots]

    def replace(self, consts: Sequence[Any], value: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Return the replacement of a value, or the value itself, and the kept values."""
        jaxpr = self.jaxpr.jaxpr
        new, *kept = jaxpr_as_fun(self.jaxpr.replace(consts=list(consts)))(value)
        return value if jaxpr.outvars[0] is jaxpr.invars[0] else new, kept


def traced_edit(path: Path, value: jax.ShapeDtypeStruct) -> TracedEdit:
    """Return what the current handler does to a value."""
    slots: Slots = []

    def edit(value: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        new, slots[:], kept = with_kept(current_handler(), None, path, value)
        return new, kept

    return TracedEdit(jax.make_jaxpr(edit)(value), slots)


def alike(edits: Sequence[Sequence[TracedEdit]]) -> list[slice]:
    """Return consecutive blocks with like edits, as slices; the edits are those of each block, in order."""
    programs = [[edit.program for edit in block] for block in edits]
    ends = [i for i in range(1, len(programs) + 1) if i == len(programs) or programs[i] != programs[i - 1]]
    return [slice(*ends_of) for ends_of in pairwise([0, *ends])]


def scan_with_edits(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, edits: Sequence[Sequence[TracedEdit]]
) -> tuple[Any, Any]:
    """Return the result of `jax.lax.scan(body, carry, xs)` in which each step has its own, like edits, and store the
    values that they keep.

    Args:
      edits: of each step, one per capture point.
    """
    # An array that all edits close over is not stacked, so that its memory and its gradient are those of one.
    columns = list(zip(*([const for edit in step for const in edit.jaxpr.consts] for step in edits), strict=True))
    varying = {i: jnp.stack(column) for i, column in enumerate(columns) if any(x is not column[0] for x in column)}

    def step(carry: Any, x_and_consts: tuple[Any, dict[int, jax.Array]]) -> tuple[Any, tuple[Any, list[jax.Array]]]:
        x, varying = x_and_consts
        consts = iter([varying.get(i, column[0]) for i, column in enumerate(columns)])
        kept, names, pending = Captured(), map(str, count()), iter(edits[0])

        def replay(root: Any, path: Path, value: jax.Array) -> jax.Array:
            edit = next(pending)
            new, values = edit.replace(list(islice(consts, len(edit.jaxpr.consts))), value)
            for each in values:
                kept.keep(next(names), each)
            return new

        with handled_by(replay if edits[0] else None, after_outer=False):
            carry, y = body(carry, x)
        return carry, (y, list(kept.values.values()))

    carry, (ys, kept_L) = jax.lax.scan(step, carry, (xs, varying))
    for i, of_step in enumerate(edits):
        slots = [slot for edit in of_step for slot in edit.slots]
        for (store, name), values in zip(slots, kept_L, strict=True):
            store.keep(name, values[i])
    return carry, ys


def _program(jaxpr: Any) -> Any:
    """Return an object equal to that of another program that computes the same from its arguments and the arrays that
    it closes over."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    variables = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    number = {v: i for i, v in enumerate(variables)}
    atom = lambda a: (a.aval, np.asarray(a.val).tobytes()) if isinstance(a, Literal) else number[a]  # noqa: E731
    eqns = [(eqn.primitive, list(map(atom, eqn.invars)), _parameter(eqn.params)) for eqn in jaxpr.eqns]
    return [v.aval for v in variables], eqns, list(map(atom, jaxpr.outvars))


def _parameter(x: Any) -> Any:
    """Return an object equal to that of an equal parameter of a primitive. A function, such as a custom derivative,
    equals itself alone."""
    if hasattr(x, "eqns"):
        return _program(x), list(map(id, getattr(x, "consts", ())))
    if isinstance(x, dict):
        return [(key, _parameter(value)) for key, value in sorted(x.items())]
    if isinstance(x, tuple | list):
        return list(map(_parameter, x))
    return id(x) if isinstance(x, jax.Array | np.ndarray) else x

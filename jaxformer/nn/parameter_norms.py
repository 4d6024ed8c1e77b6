"""Dotted names of parameters, and their norms for each head."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.contract import ParameterAxes, Role
from jaxformer.nn.attention import AXES
from jaxformer.ops import workarounds

HEADS_FIRST = ("q", "k", "v", "attn_scores", "pattern", "z")
"""Activations of an attention layer whose first axis is that of the heads."""
HEAD_AXIS = {
    name: axes.names.index("heads")
    for name, axes in ((name, ParameterAxes.parse(text)) for name, text in AXES.items())
    if axes.role is Role.MATRIX
} | dict.fromkeys(HEADS_FIRST, 0)
"""Axis of the heads in matrices and activations that have one."""

MAX_STACKED_ELEMENTS = 2**14
"""Maximum size of arrays whose squares are stacked by shape and summed together: XLA sums a row of this length in one
kernel, and longer rows in two."""

ROW_KEYS = ("name", "g", "w", "u", "update")
"""Keys of a `Row` in metrics.jsonl, in the order of its fields."""

Norms = dict[str, jax.Array]


@dataclass(frozen=True)
class Row:
    """Norms of one parameter, or of one head's part of it."""

    name: str
    """Dotted path, such as `blocks.2.attention.heads.1.W_K`."""
    grad_norm: float
    """Norm of the gradient."""
    param_norm: float
    """Norm of the weights."""
    sgd_ratio: float
    """Learning rate · `grad_norm` / `param_norm`, the update ratio of a plain gradient step."""
    update_ratio: float | None
    """Norm of the optimizer's actual update / `param_norm`; None if updates were not given."""


def dotted(path: Iterable[object]) -> str:
    """Return `blocks.2.attention.W_Q` for `('blocks_2', 'attention', 'W_Q')` or a path of JAX's key objects."""
    parts = [str(getattr(key, "key", key)) for key in path]
    return ".".join(re.sub(r"^(\w*blocks)_(\d+)$", r"\1.\2", part) for part in parts)


def in_order(rows: Sequence[Row], order: Sequence[str]) -> list[Row]:
    """Return rows sorted by the order of their parameters' names; heads keep their order, and unlisted parameters come
    last."""
    position = {name: i for i, name in enumerate(order)}
    return sorted(rows, key=lambda row: position.get(parameter_name(row.name), len(order)))


def parameter_name(row_name: str) -> str:
    """Return the name of a row's parameter: `blocks.2.attention.W_K` for `blocks.2.attention.heads.1.W_K`."""
    return re.sub(r"\.heads\.\d+", "", row_name)


@jax.jit
def parameter_norms(tree: Any) -> Norms:
    """Return the norm of each parameter by its dotted name: a float32 scalar, or `(H,)` for a matrix with heads. A norm
    is infinite if its sum of squares exceeds float32."""
    return {name: jnp.sqrt(squares) for name, squares in _squares(tree).items()}


@jax.jit
def row_norms(tree: Any) -> jax.Array:
    """Return the norms of `parameter_norms` as one float32 array, `(R,)`, in the order of `row_names`."""
    squares = _squares(tree)
    return jnp.sqrt(jnp.concatenate([jnp.atleast_1d(squares[name]) for name in sorted(squares)]))


def global_norm(norms_R: jax.Array) -> jax.Array:
    """Return the global norm, a float32 scalar, from the norms of all rows."""
    return jnp.sqrt(jnp.sum(jnp.square(norms_R)))


def _squares(tree: Any) -> Norms:
    """Return the float32 sum of squares of each parameter by its dotted name: a scalar, or `(H,)` with heads.

    The rows of a large array are summed where it is computed. These sums, and small arrays, are then stacked by shape
    and summed at once: a GPU needs as many kernels for three values as for three hundred. Keeping their shapes also
    preserves how they are split over devices.
    """
    stacks: dict[tuple[int | None, bool, tuple[int, ...]], Norms] = defaultdict(dict)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = dotted(path)
        head = HEAD_AXIS.get(name.rpartition(".")[2]) if leaf.ndim == 3 else None
        is_small = leaf.size <= MAX_STACKED_ELEMENTS
        squares = jnp.square((workarounds.materialized(leaf) if is_small else leaf).astype(jnp.float32))
        sums = squares if is_small else jnp.sum(squares, axis=-1)
        stacks[head, is_small, sums.shape][name] = sums
    totals: Norms = {}
    for (head, _, shape), stack in stacks.items():
        others = tuple(axis + 1 for axis in range(len(shape)) if axis != head)
        totals |= zip(stack, jnp.sum(jnp.stack(list(stack.values())), axis=others), strict=True)
    return totals


def row_names(shapes: Any) -> list[str]:
    """Return the dotted name of each row of `row_norms`, such as `blocks.2.attention.heads.1.W_K`, from the parameters
    or their shapes and dtypes; `blocks.2.attention.z.1` for a head of an activation."""
    names = []
    for name, norm in sorted(jax.eval_shape(parameter_norms, shapes).items()):
        parent, _, last = name.rpartition(".")
        of_head = f"{name}.{{}}" if last in HEADS_FIRST else f"{parent}.heads.{{}}.{last}"
        names += list(map(of_head.format, range(len(norm)))) if norm.ndim else [name]
    return names


def norm_rows(
    names: Sequence[str],
    learning_rate: float,
    g: Sequence[float],
    w: Sequence[float],
    update: Sequence[float] | None = None,
) -> list[Row]:
    """Return one row per name from the norms of gradients, weights and, if given, updates."""
    updates = [None] * len(names) if update is None else map(_ratio, update, w)
    rows = zip(names, g, w, updates, strict=True)
    return [Row(name, g, w, learning_rate * _ratio(g, w), ratio) for name, g, w, ratio in rows]


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("inf") if a else 0.0

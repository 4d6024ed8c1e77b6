"""The gradient table of the sources: a row a parameter, attention heads apart."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jaxformer.inspect.names import dotted
from jaxformer.models.objective import Params

HEAD_AXIS = {"W_Q": 1, "W_K": 1, "W_V": 1, "W_O": 0}
"""Where the heads lie in the parameters that have them."""


@dataclass(frozen=True)
class Row:
    """Norms of one parameter, or of one head's part of it."""

    name: str
    """Dotted path, `blocks.2.attention.heads.1.W_K`."""
    g: float
    """Norm of the gradient."""
    w: float
    """Norm of the weights."""
    u: float
    """lr · g / w: the relative size of a plain gradient step."""
    update: float | None
    """Norm of the optimizer's true update over w, if updates were given."""


@dataclass(frozen=True)
class GradientReport:
    """Rows in the order of the parameters; `str` of it is the table."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{'parameter':<{width}}  {'g':>9}  {'w':>9}  {'u = lr·g/w':>10}  {'update/w':>9}"]
        for row in self.rows:
            update = "" if row.update is None else f"{row.update:9.2e}"
            lines.append(f"{row.name:<{width}}  {row.g:9.2e}  {row.w:9.2e}  {row.u:10.2e}  {update:>9}")
        return "\n".join(lines)


def gradient_report(params: Params, grads: Params, lr: float, updates: Params | None = None) -> GradientReport:
    """Compare gradients with weights, parameter by parameter.

    Args:
      params: the parameters.
      grads: the gradient with respect to them, of the same structure.
      lr: learning rate, for `u`.
      updates: what the optimizer is about to add to the parameters, of the same structure.
    """
    norms = [_norms(tree) for tree in (params, grads, updates if updates is not None else {})]
    rows = []
    for name, w in norms[0].items():
        g = norms[1][name]
        update = None if updates is None else _ratio(norms[2][name], w)
        rows.append(Row(name, g, w, lr * _ratio(g, w), update))
    return GradientReport(tuple(rows))


def _norms(tree: Params) -> dict[str, float]:
    """Norm by dotted name, heads apart."""
    norms: dict[str, float] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree)):
        where, _, name = dotted(path).rpartition(".")
        axis = HEAD_AXIS.get(name)
        if axis is None or np.ndim(leaf) != 3:
            norms[f"{where}.{name}".lstrip(".")] = float(np.linalg.norm(leaf))
            continue
        for head, part in enumerate(np.moveaxis(leaf, axis, 0)):
            norms[f"{where}.heads.{head}.{name}"] = float(np.linalg.norm(part))
    return norms


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("inf") if a else 0.0

"""The gradient table of the sources: a row a parameter, attention heads apart."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.inspect.names import dotted
from jaxformer.models.objective import Params

HEAD_AXIS = {"W_Q": 1, "W_K": 1, "W_V": 1, "W_O": 0}
"""Where the heads lie in the parameters that have them."""

Norms = dict[str, jax.Array]


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
    return report_of_norms(parameter_norms(params), parameter_norms(grads), lr, updates and parameter_norms(updates))


def report_of_norms(w: Norms, g: Norms, lr: float, update: Norms | None = None) -> GradientReport:
    """The report from norms of weights, gradients and updates."""
    rows = []
    for name, w_heads in jax.device_get(w).items():
        where, _, last = name.rpartition(".")
        for head, of_w in enumerate(np.atleast_1d(w_heads).tolist()):
            of_g = np.atleast_1d(g[name])[head].item()
            of_update = None if update is None else _ratio(np.atleast_1d(update[name])[head].item(), of_w)
            row = f"{where}.heads.{head}.{last}" if np.ndim(w_heads) else name
            rows.append(Row(row, of_g, of_w, lr * _ratio(of_g, of_w), of_update))
    return GradientReport(tuple(rows))


@jax.jit
def parameter_norms(tree: Params) -> Norms:
    """Norm of each parameter by its dotted name, a float32 scalar, or `(H,)` where heads lie apart."""
    norms = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = dotted(path)
        head = HEAD_AXIS.get(name.rpartition(".")[2])
        of_head = None if head is None or leaf.ndim != 3 else tuple(a for a in range(3) if a != head)
        norms[name] = jnp.sqrt(jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=of_head))
    return norms


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("inf") if a else 0.0

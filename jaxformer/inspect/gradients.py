"""Gradients: the table of the sources, a row a parameter with attention heads apart; and each example's own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot, isfinite

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.dataset import Batch
from jaxformer.models.objective import Params, objective_of
from jaxformer.parameters import Norms, Row, norm_rows, parameter_norms, row_names, row_norms
from jaxformer.terminal import WIDTH, wrap_columns

EXAMPLES_AT_ONCE = 8
"""As many gradients of all parameters are held."""
IN_BLOCK = re.compile(r"(?P<stack>(?:.+\.)?\w*blocks)\.(?P<block>\d+)\.(?P<part>.+)")
"""Names of parameters in a stack of blocks."""


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
    norms = [row_norms(tree).tolist() for tree in (grads, params, *([] if updates is None else [updates]))]
    return GradientReport(tuple(norm_rows(row_names(params), lr, *norms)))


def update_grid(rows: Sequence[Row], order: Sequence[str], learning_rate: float) -> str:
    """Return the update ratios for a terminal: the norm of each parameter's update over that of its weights, in
    thousandths, a line per block and a column per parameter of a block.

    Args:
      rows: norms of all parameters. Heads are taken together; without an update, `u` is shown.
      order: the names of the parameters, in the order in which they are to be shown.
      learning_rate: that of the updates, for the title.
    """
    ratios = {name: _thousandths(_together([row for row in rows if _whole(row.name) == name])) for name in order}
    title = f"update ratios at learning rate {learning_rate:.3g}: norm of update / norm of weights, in thousandths"
    lines, outside = [title], list[str]()
    shown: set[str] = set()
    for name in order:
        if (found := IN_BLOCK.fullmatch(name)) is None:
            outside.append(f"{name} {ratios[name]}")
        elif found["stack"] not in shown:
            lines += _listed(outside) + _grid(found["stack"], ratios)
            shown.add(found["stack"])
            outside = []
    return "\n".join(lines + _listed(outside))


def _grid(stack: str, ratios: Mapping[str, str]) -> list[str]:
    """Return a heading and a line per block of a stack."""
    cells = {(m["block"], m["part"]): ratio for name, ratio in ratios.items() if (m := _in(stack, name))}
    blocks, parts = (list(dict.fromkeys(axis)) for axis in zip(*cells, strict=True))
    last = [part.rpartition(".")[2] for part in parts]
    # A gain is called like its norm; what several layers have, like its layer, too.
    labels = [
        part.removesuffix(".gamma") if name in ("gamma", "beta") or last.count(name) > 1 else name
        for part, name in zip(parts, last, strict=True)
    ]
    table = [[f"  {stack}", *labels]] + [[block, *(cells.get((block, part), "") for part in parts)] for block in blocks]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    groups, used = [[0]], widths[0]
    for i, width in enumerate(widths[1:], start=1):
        if used + 2 + width > WIDTH:  # the rest of the columns stands below
            groups.append([0])
            used = widths[0]
        groups[-1].append(i)
        used += 2 + width
    return ["  ".join(f"{row[i]:>{widths[i]}}" for i in group) for group in groups for row in table]


def _in(stack: str, name: str) -> re.Match[str] | None:
    found = IN_BLOCK.fullmatch(name)
    return found if found and found["stack"] == stack else None


def _listed(parts: Sequence[str]) -> list[str]:
    return wrap_columns([f"  {parts[0]}", *parts[1:]], indent=2) if parts else []


def _whole(name: str) -> str:
    """Return the name of the parameter that a row is of, or that a head's row is a part of."""
    return re.sub(r"\.heads\.\d+", "", name)


def _together(rows: Sequence[Row]) -> float:
    """Return the ratio of several rows' norms together."""
    moved = [(row.u if row.update is None else row.update) * row.w for row in rows]
    weights = hypot(*(row.w for row in rows))
    return hypot(*moved) / weights if weights else rows[0].u if rows[0].update is None else rows[0].update


def _thousandths(ratio: float) -> str:
    """Return 1,000 times a ratio, in three digits and without an exponent."""
    value = 1e3 * ratio
    if not isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value >= 999.5 else "<0.001" if 0 < value < 0.001 else f"{value:#.3g}".rstrip(".")


@dataclass(frozen=True)
class ExampleGradients:
    """The gradient of each example's own loss, and how these agree."""

    loss_B: np.ndarray
    """Nats, of each the mean over its targets as weighted."""
    norm_B: np.ndarray
    """Of each gradient."""
    cosine_B: np.ndarray
    """Of each gradient with the mean of all."""
    parameters: dict[str, np.ndarray]
    """Norms of each parameter's part, `(B,)` by its dotted name, or `(B, H)` where heads lie apart."""
    mean_norm: float
    """Of the mean of all gradients."""

    @property
    def noise_scale(self) -> float:
        """In examples; see `noise_scale`."""
        return noise_scale(self.norm_B, self.mean_norm)


def example_gradients(model: nn.Module, params: Params, batch: Batch) -> ExampleGradients:
    """Look at the gradient of each example by itself, without dropout.

    An example counts as much as any other here, however many targets it has.

    Args:
      batch: examples side by side, each with a target of some weight.
    """
    loss_B, norms, along_B, mean_norms = jax.device_get(_own(model, params, jax.tree.map(jnp.asarray, batch)))
    whole = lambda norms: np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in norms.values()))  # noqa: E731
    norm_B = np.array([whole({name: x[b] for name, x in norms.items()}) for b in range(len(loss_B))])
    mean_norm = float(whole(mean_norms))
    with np.errstate(invalid="ignore", divide="ignore"):  # of a gradient that is 0
        return ExampleGradients(loss_B, norm_B, along_B / (norm_B * mean_norm), norms, mean_norm)


def noise_scale(norm_B: np.ndarray, mean_norm: float) -> float:
    """How many examples make a batch whose gradient is as much signal as noise: tr(Σ) / |G|², of the covariance Σ of
    examples' gradients and their true mean G (McCandlish et al. 2018, equation 2.9).

    Both are estimated without bias, by their appendix A.1 with batches of 1 and B. Infinite where no signal shows among
    so few.

    Args:
      norm_B: of each example's gradient.
      mean_norm: of their mean.
    """
    B, mean_square = len(norm_B), mean_norm**2
    if B < 2:
        return float("nan")
    noise = max(0.0, (float(np.mean(np.square(norm_B))) - mean_square) * B / (B - 1))
    signal = mean_square - noise / B
    return noise / signal if signal > 0 else float("inf")


@partial(jax.jit, static_argnames="model")
def _own(model: nn.Module, params: Params, batch: Batch) -> tuple[jax.Array, Norms, jax.Array, Norms]:
    """Of each example the loss, its gradient's norms, and that gradient times the mean one; the mean one's norms."""

    def loss(params: Params, example: Batch) -> jax.Array:
        nats = objective_of(model).example_loss(model, params, example)
        return nats if example.weights is None else nats / jnp.sum(example.weights)

    mean = jax.grad(lambda params: jnp.mean(jax.vmap(partial(loss, params))(batch)))(params)

    def one(example: Batch) -> tuple[jax.Array, Norms, jax.Array]:
        nats, grads = jax.value_and_grad(loss)(params, example)
        along = sum(jnp.vdot(g, m) for g, m in zip(*map(jax.tree.leaves, (grads, mean)), strict=True))
        return nats, parameter_norms(grads), jnp.asarray(along)

    return *jax.lax.map(one, batch, batch_size=EXAMPLES_AT_ONCE), parameter_norms(mean)

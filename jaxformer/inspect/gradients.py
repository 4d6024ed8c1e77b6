"""Gradient reports with one row per parameter and attention head; update ratios; per-example gradients."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot, isfinite

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.dataset import Batch
from jaxformer.inspect.activations import Activations, capture_gradients
from jaxformer.inspect.names import position_axis
from jaxformer.inspect.of_run import of_run
from jaxformer.models.objective import Params, objective_of
from jaxformer.nn.parameter_norms import Row, dotted, norm_rows, parameter_name, parameter_norms, row_names, row_norms
from jaxformer.terminal import WIDTH, align, first_rows, wrap_columns

EXAMPLES_PER_CHUNK, MAX_GRADIENT_BYTES = 8, 1_200_000_000
"""Maximum number of examples whose full gradients are in memory at the same time, and their maximum size if there are
several: the gradients of a few examples of a large model, which are then computed once."""
IN_BLOCK = re.compile(r"(?P<stack>(?:.+\.)?\w*blocks)\.(?P<block>\d+)\.(?P<part>.+)")
"""Name of a parameter in a stack of blocks."""


@dataclass(frozen=True)
class GradientReport:
    """Norms per parameter and head, shown as a table: the first rows by `repr`, all by `str`."""

    rows: tuple[Row, ...]
    lr: float | None = None
    """Learning rate in `sgd_ratio`; None for the ratio g / w alone."""

    def __str__(self) -> str:
        return "\n".join(align(self._table(), "<>>>>"))

    def __repr__(self) -> str:
        heading, *rows = self._table()
        return first_rows(heading, rows, "<>>>>")

    def _table(self) -> list[tuple[str, ...]]:
        has_updates = any(row.update_ratio is not None for row in self.rows)
        heading = ("parameter", "g", "w", "g/w" if self.lr is None else "u = lr·g/w", *["update/w"] * has_updates)
        table: list[tuple[str, ...]] = [heading]
        for row in self.rows:
            update = "" if row.update_ratio is None else f"{row.update_ratio:9.2e}"
            values = (row.name, f"{row.grad_norm:9.2e}", f"{row.param_norm:9.2e}", f"{row.sgd_ratio:.2e}", update)
            table.append(values[: len(heading)])
        return table


def gradient_report(
    params: Params, grads: Params, lr: float | None = None, updates: Params | None = None
) -> GradientReport:
    """Return the norms of each parameter's gradient, weights and update; or those of activations by name and of their
    gradients, as from `capture_gradients`.

    Args:
      params: the parameters, or activations by name.
      grads: gradients, with the same structure.
      lr: learning rate, for `sgd_ratio`; None for a learning rate of 1.
      updates: the optimizer's updates, with the same structure.
    """
    norms = [row_norms(tree).tolist() for tree in (grads, params, *([] if updates is None else [updates]))]
    return GradientReport(tuple(norm_rows(row_names(params), 1.0 if lr is None else lr, *norms)), lr)


def update_grid(rows: Sequence[Row], order: Sequence[str], learning_rate: float) -> str:
    """Return update ratios for a terminal: the norm of each parameter's update divided by the norm of its weights, in
    thousandths, with one line per block and one column per parameter of a block, in the given order. Rows of heads are
    combined; rows without an update show `sgd_ratio`. The title has the learning rate."""
    by_parameter: dict[str, list[Row]] = {name: [] for name in order}
    for row in rows:  # of a parameter or of a head
        by_parameter.setdefault(parameter_name(row.name), []).append(row)
    ratios = {name: _thousandths(_combined(by_parameter[name])) for name in order}
    title = f"update ratios at learning rate {learning_rate:.3g}: norm of update / norm of weights, in thousandths"
    lines, single, stacks = [title], list[str](), set[str]()
    for name in order:
        if (match := IN_BLOCK.fullmatch(name)) is None:
            single.append(f"{name} {ratios[name]}")
        elif match["stack"] not in stacks:
            lines += _wrapped(single) + _grid(match["stack"], ratios)
            stacks.add(match["stack"])
            single = []
    return "\n".join(lines + _wrapped(single))


def _grid(stack: str, ratios: Mapping[str, str]) -> list[str]:
    """Return a heading and one line per block of a stack, with columns wrapped to `WIDTH`."""
    matches = {name: match for name in ratios if (match := IN_BLOCK.fullmatch(name)) and match["stack"] == stack}
    cells = {(match["block"], match["part"]): ratios[name] for name, match in matches.items()}
    blocks, parts = (list(dict.fromkeys(axis)) for axis in zip(*cells, strict=True))
    last = [part.rpartition(".")[2] for part in parts]
    # Label a gain by its norm, and add the layer to a name that several layers share.
    labels = [
        part.removesuffix(".gamma") if name in ("gamma", "beta") or last.count(name) > 1 else name
        for part, name in zip(parts, last, strict=True)
    ]
    table = [[f"  {stack}", *labels]] + [[block, *(cells.get((block, part), "") for part in parts)] for block in blocks]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    groups, used = [[0]], widths[0]
    for i, width in enumerate(widths[1:], start=1):
        if used + 2 + width > WIDTH:
            groups.append([0])
            used = widths[0]
        groups[-1].append(i)
        used += 2 + width
    return ["  ".join(f"{row[i]:>{widths[i]}}" for i in group) for group in groups for row in table]


def _wrapped(parts: Sequence[str]) -> list[str]:
    return wrap_columns([f"  {parts[0]}", *parts[1:]], indent=2) if parts else []


def _combined(rows: Sequence[Row]) -> float:
    """Return the combined update ratio of several rows."""
    ratios = [row.sgd_ratio if row.update_ratio is None else row.update_ratio for row in rows]
    weights = hypot(*(row.param_norm for row in rows))
    updates = hypot(*(ratio * row.param_norm for ratio, row in zip(ratios, rows, strict=True)))
    return updates / weights if weights else ratios[0]


def _thousandths(ratio: float) -> str:
    """Format 1,000 times a ratio with three digits and no exponent."""
    value = 1e3 * ratio
    if not isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value >= 999.5 else "<0.001" if 0 < value < 0.001 else f"{value:#.3g}".rstrip(".")


@dataclass(frozen=True)
class PerExampleGradients:
    """Gradients of the losses of single examples, and their agreement."""

    loss_B: np.ndarray
    """Mean loss in nats over each example's weighted targets."""
    norm_B: np.ndarray
    """Norm of each gradient."""
    cosine_B: np.ndarray
    """Cosine similarity of each gradient with the mean gradient."""
    parameters: dict[str, np.ndarray]
    """Norms by parameter, `(B,)`, or `(B, H)` for parameters of attention heads."""
    mean_norm: float
    """Norm of the mean gradient."""

    @property
    def noise_scale(self) -> float:
        """Gradient noise scale in examples; see `noise_scale`."""
        return noise_scale(self.norm_B, self.mean_norm)

    def __repr__(self) -> str:
        columns = zip(self.loss_B, self.norm_B, self.cosine_B, strict=True)
        rows = [(str(i), *(f"{value:.4g}" for value in row)) for i, row in enumerate(columns)]
        mean = f"mean gradient: norm {self.mean_norm:.4g}, noise scale {self.noise_scale:.4g} examples"
        return f"{first_rows(('example', 'loss', 'norm', 'cosine'), rows, '>>>>')}\n{mean}"


@of_run
def per_example_gradients(model: nn.Module, params: Params, batch: Batch) -> PerExampleGradients:
    """Measure the gradient of each example of a batch, without dropout; the mean weights all examples equally.

    Args:
      batch: examples, each with a target of nonzero weight.
    """
    batch = jax.tree.map(jnp.asarray, batch)
    n, size = len(batch.targets), sum(x.nbytes for x in jax.tree.leaves(params))
    chunk = max(1, min(EXAMPLES_PER_CHUNK, MAX_GRADIENT_BYTES // size))
    means = _named(_mean_gradient(model, params, batch)) if n > chunk else {}  # of one chunk, from its gradients
    losses, chunks = [], list[dict[str, tuple]]()
    for first in range(0, n, chunk):
        examples = jax.tree.map(lambda x, first=first: x[first : first + chunk], batch)
        loss_B, grads_B = _gradients(model, params, examples)
        losses.append(loss_B)
        named = _named(grads_B).items()
        chunks.append({name: _measure(name.rpartition(".")[2], g_B, means.get(name)) for name, g_B in named})
        del grads_B, named  # before the next ones
    losses, chunks = jax.device_get((losses, chunks))
    norms, dots = ({name: np.concatenate([c[name][i] for c in chunks]) for name in chunks[0]} for i in (0, 1))
    norm_B = np.sqrt(sum(np.square(x, dtype=np.float64).reshape(n, -1).sum(axis=1) for x in norms.values()))
    mean_norm = float(np.sqrt(sum(np.square(x[2], dtype=np.float64).sum() for x in chunks[0].values())))
    with np.errstate(invalid="ignore", divide="ignore"):  # a gradient may be 0
        cosine_B = sum(dots.values()) / (norm_B * mean_norm)
    return PerExampleGradients(np.concatenate(losses), norm_B, cosine_B, norms, mean_norm)


@of_run
@partial(jax.jit, static_argnames=("model", "names"))
def gradients_by_position(
    model: nn.Module, params: Params, example: Batch, names: str | tuple[str, ...] = "embed"
) -> Activations:
    """Return the norm of the gradient of an example's loss with respect to activations at each position, `(T,)`
    float32: how much an earlier position can contribute to learning (Bengio et al. 1994).

    Args:
      example: the example; if it has weights, the loss covers the targets with nonzero weight.
      names: activations with a position axis, named as by `capture`: `embed`, or `blocks.*.resid_pre` for each depth.

    Raises:
      KeyError, IndexError: see `capture`.
    """
    _, grads = capture_gradients(lambda: objective_of(model).example_loss(model, params, example), names=names)
    rows = {name: jnp.moveaxis(g, position_axis(name, g.shape), 0) for name, g in grads.items()}
    return OrderedDict((name, _position_norms(g.reshape(len(g), -1).astype(jnp.float32))) for name, g in rows.items())


def _position_norms(x_TD: jax.Array) -> jax.Array:
    """Return the norms of rows, `(T,)`; scaled, as squares of values below 1e-19 would underflow float32."""
    largest_T1 = jnp.max(jnp.abs(x_TD), axis=-1, keepdims=True)
    return largest_T1[:, 0] * jnp.linalg.norm(x_TD / jnp.where(largest_T1 > 0, largest_T1, 1), axis=-1)


def noise_scale(norm_B: np.ndarray, mean_norm: float) -> float:
    """Return the gradient noise scale, tr(Σ) / |G|², in examples: the batch size at which signal and noise are equal,
    with the covariance Σ of per-example gradients and their true mean G (McCandlish et al. 2018, equation 2.9).

    Numerator and denominator are the unbiased estimates of their appendix A.1, with batches of 1 and B. Infinite if B
    examples show no signal, NaN for a single example.

    Args:
      norm_B: norm of each example's gradient.
      mean_norm: norm of the mean gradient.
    """
    B, mean_square = len(norm_B), mean_norm**2
    if B < 2:
        return float("nan")
    noise = max(0.0, (float(np.mean(np.square(norm_B))) - mean_square) * B / (B - 1))
    signal = mean_square - noise / B
    return noise / signal if signal > 0 else float("inf")


def _named(tree: Params) -> dict[str, jax.Array]:
    return {dotted(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _loss(model: nn.Module, params: Params, example: Batch) -> jax.Array:
    nll = objective_of(model).example_loss(model, params, example)
    return nll if example.weights is None else nll / jnp.sum(example.weights)


@partial(jax.jit, static_argnames="model")
def _gradients(model: nn.Module, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
    """Return the loss of each example and its gradient."""
    return jax.vmap(partial(jax.value_and_grad(partial(_loss, model)), params))(batch)


@partial(jax.jit, static_argnames="model")
def _mean_gradient(model: nn.Module, params: Params, batch: Batch) -> Params:
    return jax.grad(lambda params: jnp.mean(jax.vmap(partial(_loss, model, params))(batch)))(params)


@partial(jax.jit, static_argnames="name")
def _measure(name: str, g_B: jax.Array, mean: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the norms of each example's gradient of one parameter, its dot product with the mean gradient, and the
    norms of the mean. A program for each shape takes a tenth of the time that the compiler takes for one of all
    parameters of a deep model.

    Args:
      name: last part of the parameter's name.
      mean: the mean gradient; None for that of these examples.
    """
    if mean is None:
        mean = jnp.asarray(sum(g_B)) / len(g_B)  # XLA adds few rows faster than it reduces their axis
    norms = lambda g: parameter_norms({name: g})[name]  # noqa: E731
    return jax.vmap(norms)(g_B), jax.vmap(lambda g: jnp.sum(g * mean))(g_B), norms(mean)

"""Check of a gradient, parameter by parameter, against difference quotients of the loss in float64.

A network's loss is smooth except at kinks (a ReLU's unit at 0) and jumps (a token's choice of experts), and it is
computed with rounding errors. So the quotients to the right and to the left of a point,

    F = (L(h) - L(0)) / h    and    B = (L(0) - L(-h)) / h,

differ from the slope by curvature, by the kinks within h, and by rounding errors over h. All three are measured:

- Rounding: the spread of the loss under changes of the parameters' last bits.
- Curvature: F - B is h · L''(0), while the mean of F and B is off by h² · L'''/6 only.
- Kinks: if one of the two sides has none, its quotient is the slope up to curvature, so the slope lies between F and B.

Therefore the slope is (F + B) / 2 with an uncertainty of |F - B| / 2 plus rounding, and a gradient within it is not
wrong. This bound fails only if kinks on both sides change both quotients alike, which another point and direction
undoes; a wrong gradient is wrong at all of them. Points are drawn close to the parameters and not at them, where
zeros, such as biases before training, could put many units at their kinks.

A direction moves all parameters by amounts that make each contribute as much to the slope, so none drowns in the
others. Along its gradient, the amount is fixed, which detects every wrong factor; other errors meet random directions.
If the quotients of a group differ from its slope by more than the accuracy of a single contribution, or say little,
halves of the group are measured on their own, down to single parameters. Quotients that agree this closely although
they are less certain hardly agree by chance: their uncertainty is a bound, which a smooth loss is far from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.models.objective import Params
from jaxformer.nn.parameter_norms import dotted

ACCURACY = 1e-5
"""Error of a slope, relative to the expected contribution of one parameter, that the step aims at and that passes."""
ROUGH = 1e-3
"""Uncertainty of a slope above which its comparison says little."""
LARGEST_STEP = 1e-3
"""Largest step, relative to the parameters, and distance of the points from the parameters."""
ATTEMPTS = 3
"""Points at which a parameter may fail before its gradient is wrong, or be uncertain."""


class Slope(NamedTuple):
    """Comparison of a slope with difference quotients, relative to the contribution of one parameter."""

    error: float
    uncertainty: float

    @property
    def is_measured(self) -> bool:
        """True if the quotients are as accurate as intended."""
        return self.uncertainty <= ACCURACY

    @property
    def is_rough(self) -> bool:
        """True if the comparison says little."""
        return self.uncertainty > ROUGH

    @property
    def deviation(self) -> float:
        """The error or, for inaccurate quotients that differ, what of it exceeds their uncertainty; NaN for NaN."""
        agrees = self.is_measured or self.error <= ACCURACY
        return self.error if agrees else float(np.maximum(0.0, self.error - self.uncertainty))

    @property
    def holds(self) -> bool:
        """True if the deviation is within the accuracy."""
        return self.deviation <= ACCURACY


@np.errstate(over="ignore", invalid="ignore")  # infinite gradients are reported as NaN
def compare_slopes(
    loss: Callable[[Params], jax.Array], gradient: Callable[[Params], Params], params: Params
) -> dict[str, Slope]:
    """Return the comparison of each parameter's gradient with difference quotients, by dotted name.

    Args:
      loss: function of float64 parameters, a float64 scalar.
      gradient: function of float64 parameters that should return the loss's gradient.
      params: parameters. Points, directions and gradients are held in float32, which halves the memory: what this
        rounds off a gradient is far below `ACCURACY`.
    """
    slopes: dict[int, Slope] = {}
    values, tree = jax.tree.flatten(params)

    @jax.jit
    def rounded_gradient(params: Params) -> Params:
        return _cast(gradient(_cast(params, jnp.float64)), jnp.float32)

    @jax.jit
    def shifted_loss(values: list[jax.Array], directions: list[jax.Array], amounts: jax.Array) -> jax.Array:
        values = _cast(values, jnp.float64)
        return loss(jax.tree.unflatten(tree, [x + a * d for x, d, a in zip(values, directions, amounts, strict=True)]))

    for seed in range(ATTEMPTS):
        left = [i for i in range(len(values)) if i not in slopes or slopes[i].is_rough or not slopes[i].holds]
        if left:
            point = _Point(rounded_gradient, shifted_loss, params, seed)
            for i, slope in point.compare(left):
                slopes[i] = min(slope, slopes.get(i, slope), key=_rank)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return {dotted(path): slopes[i] for i, path in enumerate(paths)}


def _rank(slope: Slope) -> tuple[bool, float]:
    """Return a key that is lowest for the measured slope of least error or else for the least uncertain one."""
    return not slope.is_measured, slope.error if slope.is_measured else slope.uncertainty


class _Point:
    """A point close to the parameters, with a gradient and a direction for each of them."""

    def __init__(self, gradient: Callable, shifted_loss: Callable, params: Params, seed: int) -> None:
        self._loss, rng = shifted_loss, np.random.default_rng(seed)
        leaves, tree = jax.tree.flatten(params)
        self.values, self.directions = [], []
        self.sizes, self.slopes, self.expected = np.zeros((3, len(leaves)))
        for i, leaf in enumerate(leaves):
            value = np.asarray(leaf, np.float64)
            value = value + LARGEST_STEP * (_rms(value) or 1) * rng.standard_normal(value.shape, np.float32)
            self.values.append(jnp.asarray(value, jnp.float32))
            self.sizes[i] = _rms(np.asarray(self.values[i], np.float64))
        for i, leaf in enumerate(jax.tree.leaves(gradient(jax.tree.unflatten(tree, self.values)))):
            grad = np.asarray(leaf, np.float64)
            norm = np.linalg.norm(grad)
            direction = rng.standard_normal(grad.shape, np.float32)
            if 0 < norm < np.inf:  # replace the component along the gradient by 1 to 2
                unit = grad / norm
                direction += ((1 + rng.random() - np.vdot(unit, direction)) * unit).astype(np.float32)
            self.directions.append(jnp.asarray(direction))
            self.slopes[i] = self.sizes[i] * np.vdot(grad, direction)
            self.expected[i] = self.sizes[i] * norm
        eps = np.finfo(np.float64).eps
        last_bits = [self.at(np.full(len(leaves), k * eps)) for k in range(-3, 4)]
        self.rounding = 2 * (np.ptp(last_bits) + eps * abs(last_bits[3]))
        # The largest step of a parameter that hardly matters exceeds rounding only for a larger contribution.
        self.expected = np.maximum(self.expected, 2 * self.rounding / (ACCURACY * LARGEST_STEP))

    def at(self, amounts: np.ndarray) -> float:
        """Return the loss at amounts of each direction, relative to the parameter's size."""
        return float(self._loss(self.values, self.directions, amounts * self.sizes))

    def compare(self, group: Sequence[int]) -> Iterator[tuple[int, Slope]]:
        """Yield the index of each parameter of a group and the comparison of the smallest group that holds, or of its
        own."""
        group = sorted(group, key=lambda i: self.expected[i])
        slope = self._slope(group)
        if len(group) == 1 or (slope.error <= ACCURACY and not slope.is_rough):
            yield from ((i, slope) for i in group)
            return
        half = len(group) // 2
        yield from self.compare(group[:half])
        yield from self.compare(group[half:])

    def _slope(self, group: Sequence[int]) -> Slope:
        """Return the most certain comparison along a direction that moves only a group of parameters."""
        amounts = np.zeros(len(self.values))
        unit = self.expected[group].max()
        amounts[group] = unit / self.expected[group]
        slope = amounts[group] @ self.slopes[group]
        if not np.isfinite(slope):
            return Slope(np.nan, 0.0)
        best, center = Slope(np.inf, np.inf), self.at(0 * amounts)
        step = min(2 * self.rounding / (ACCURACY * unit), LARGEST_STEP / amounts.max())
        for _ in range(3):
            right, left = ((self.at(h * amounts) - center) / h for h in (step, -step))
            bend = abs(right - left)
            uncertainty = bend / 2 + self.rounding / step
            if not uncertainty < best.uncertainty * unit:
                break
            best = Slope(float(abs((right + left) / 2 - slope) / unit), float(uncertainty / unit))
            if best.is_measured:
                break
            step = (2 * self.rounding * step / bend) ** 0.5 if bend else step  # where both halves are equal
        return best


def _cast(params: Params, dtype: DTypeLike) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0

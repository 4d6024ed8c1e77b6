"""Detection of divergence while the loss is still finite, and of the parameter that moved first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import inf, isfinite, log
from typing import Any

import numpy as np
import optax

from jaxformer.config import ModelConfig

MEAN_STEPS = 10
"""Steps that the mean loss is taken over: with small batches, single losses vary by up to 0.85 nats in a healthy
run."""
MARGIN_NATS = 0.5
"""Nats above the lowest mean loss beyond which a batch's loss counts as high."""
MAX_LOST = 2.0
"""Largest fraction of the learned nats that one step counts as lost: a single batch may be corrupt, and the first steps
of a warm-up may overshoot."""
LOST_STEPS = 24
"""Consecutive steps with everything that was learned lost that make a divergence; a fraction counts by its square.
Spikes that recovered lost 0.7 for 30 steps."""
HISTORY_STEPS = 250
"""Steps whose norms are stored to find the parameter that moved first."""
MOVED_FACTOR, MOVING_STEPS = 5.0, 25
"""A parameter counts as moved when its update norm per unit of learning rate exceeds `MOVED_FACTOR` times its median
over the `MOVING_STEPS` recorded steps before those that are searched. The move is sought within `MOVING_STEPS` steps
before the loss leaves its minimum."""


@dataclass(frozen=True)
class Divergence:
    """A divergence at the step at which it was detected."""

    step: int
    began: int
    """First of the consecutive steps with a high loss or a zero gradient."""
    loss: float
    """Loss in nats at `step`."""
    minimum: float
    """Lowest earlier mean of up to `MEAN_STEPS` losses, in nats."""
    minimum_step: int
    reason: str
    """Description of the rule that was broken, as the end of a sentence about the loss."""

    def __str__(self) -> str:
        return (
            f"the loss has been diverging since step {self.began:,}: {self.loss:.4g} at step {self.step:,}, after a "
            f"minimum of {self.minimum:.4g} (mean of up to {MEAN_STEPS} steps) at step {self.minimum_step:,}; "
            f"{self.reason}"
        )


@dataclass
class DivergenceMonitor:
    """Monitor of loss and gradient norm per step, which distinguishes a divergence from a spike.

    While the loss is high, each step adds the square of the fraction of the learned nats that it has lost; at
    `LOST_STEPS` the run has diverged. So the larger the loss, the sooner a divergence is reported. A gradient of
    exactly 0 counts as the largest loss: training is stuck.

    The monitor is pure Python on values that all processes share, so that all reach the same decision; `as_dict` is
    stored with checkpoints, so that a resumed run decides like an uninterrupted one.
    """

    chance: float = -inf
    """Chance loss in nats; minus infinity if unknown."""
    ceiling: float = -inf
    """Larger of the chance loss and the first loss, in nats."""
    recent: list[float] = field(default_factory=list)
    """Last `MEAN_STEPS` losses, or fewer."""
    minimum: float = inf
    """Lowest mean of `recent` so far."""
    minimum_step: int = 0
    began: int = 0
    """First of the latest consecutive steps with a high loss or a zero gradient; 0 for none."""
    lost: float = 0.0
    """Sum of the squared fractions of the learned nats that were lost at the steps since `began`."""
    noticed: bool = False
    """True from when a divergence was returned until the mean loss recovers."""

    @classmethod
    def restore(cls, stored: Mapping[str, Any] | None, chance: float, stops: bool) -> DivergenceMonitor:
        """Return the monitor that `as_dict` stored, or a fresh one; of an earlier version, the fields that it shares.

        Args:
          stops: True if a divergence ends the run. One that was noticed but did not end the run is then counted anew.
        """
        names = {each.name for each in fields(cls)} - {"chance"}
        monitor = cls(chance, **{name: value for name, value in (stored or {}).items() if name in names})
        if stops and monitor.noticed:
            monitor.noticed, monitor.lost = False, LOST_STEPS / 4
        return monitor

    @property
    def healthy(self) -> bool:
        """True until a fourth of what makes a divergence has been seen; less is noise or a spike that recovers."""
        return self.lost < LOST_STEPS / 4

    def as_dict(self) -> dict[str, object]:
        """Return plain JSON types for `restore`."""
        return {name: value for name, value in asdict(self).items() if name != "chance"}

    def update(self, step: int, loss: float, grad_norm: float) -> Divergence | None:
        """Return a divergence at the step at which it is detected, and None until the loss has recovered from it.

        Args:
          step: optimizer step, counted from 1.
          loss: mean loss of the batch in nats, before the update; a non-finite loss is ignored.
          grad_norm: global norm of the gradient.
        """
        if not isfinite(loss):
            return None
        if not self.recent:
            self.ceiling = max(self.chance, loss)
        self.recent = [*self.recent, loss][-MEAN_STEPS:]
        mean = sum(self.recent) / len(self.recent)
        if mean < self.minimum:
            self.minimum, self.minimum_step = mean, step
        stuck = grad_norm == 0 and loss > 0
        if not stuck and (mean if self.noticed else loss) <= self.minimum + MARGIN_NATS:
            self.began, self.lost, self.noticed = 0, 0.0, False
            return None
        self.began = self.began or step
        if self.noticed:
            return None
        self.lost += (MAX_LOST if stuck else min(self._fraction_lost(loss), MAX_LOST)) ** 2
        if self.lost < LOST_STEPS:
            return None
        self.noticed = True
        above = f"it is {loss - self.minimum:.3g} above that"
        ceiling = f"the larger of its first value and the chance loss is {self.ceiling:.3g}"
        reason = "its gradient is exactly 0" if stuck else f"{above}, and {ceiling}"
        return Divergence(step, self.began, loss, self.minimum, self.minimum_step, reason)

    def _fraction_lost(self, loss: float) -> float:
        """Return how far the loss is above its minimum, as a fraction of the learned nats."""
        # The model did not learn its way up to a first loss above chance, so learned nats count from chance.
        top = self.chance if self.minimum < self.chance else self.ceiling
        # While little has been learned, an overshoot is measured against a fourth of what there is to learn.
        return (loss - self.minimum) / max(top - self.minimum, abs(top) / 4, MARGIN_NATS / 4)


def chance_loss(model: ModelConfig) -> float:
    """Return the loss of a uniform prediction in nats; minus infinity for a model without classes."""
    n_classes = model.contract.n_classes
    return log(n_classes) if n_classes else -inf


@dataclass(frozen=True)
class Mover:
    """Parameter, or one head's part of it, whose updates exceeded their usual norm."""

    name: str
    """Dotted path; see `parameter_norms.row_names`."""
    step: int
    update: float
    """Norm of its update over the norm of its weights, at that step."""
    grad_norm: float
    """Norm of its gradient at that step."""
    factor: float | None
    """Update norm over its usual value, both relative to the learning rate; None without a usual value."""

    def __str__(self) -> str:
        usual = (
            "the largest update, with no earlier ones to compare"
            if self.factor is None
            else f"{self.factor:.3g} times the usual"
        )
        return (
            f"{self.name} at step {self.step:,}, by an update of {self.update:.2g} of its norm, {usual}; "
            f"its gradient's norm was {self.grad_norm:.2g}"
        )


def first_to_move(
    names: Sequence[str], norms: Sequence[tuple[int, np.ndarray]], began: int, schedule: optax.Schedule
) -> Mover | None:
    """Return the parameter whose updates were first to exceed their usual norm as a divergence began; None if none did.

    For a run that diverges from the start, where no usual norm exists, it is the parameter with the largest last update
    relative to its weights.

    Args:
      names: parameter names, one per head where heads are separate; see `parameter_norms.row_names`.
      norms: steps in order, each with the norms of gradients, updates and weights, `(3, R)`.
      began: step at which the loss left its minimum; only updates before it can have caused that.
      schedule: learning rate by step, counted from 0; updates that grow in proportion to it are usual.
    """
    known = [(step, norms_3R) for step, norms_3R in norms if step < began and np.isfinite(norms_3R).all()]
    if not known:
        return None
    tiny = np.finfo(np.float32).tiny
    steps, norms_S3R = np.array([step for step, _ in known]), np.stack([norms_3R for _, norms_3R in known])
    grads_SR, updates_SR, weights_SR = np.moveaxis(norms_S3R.astype(np.float64), 1, 0)
    ratios_SR = updates_SR / np.maximum(weights_SR, tiny)

    def mover(at: int, row: int, factor: float | None) -> Mover:
        return Mover(names[row], int(steps[at]), float(ratios_SR[at, row]), float(grads_SR[at, row]), factor)

    before = steps <= began - MOVING_STEPS
    if before.sum() < MOVING_STEPS // 5:  # a run that diverges from the start has no usual norms
        return mover(-1, int(ratios_SR[-1].argmax()), None)
    learning_rate_S = np.maximum([float(schedule(step - 1)) for step in steps], tiny)
    relative_SR = updates_SR / learning_rate_S[:, None]
    usual_R = np.maximum(np.median(relative_SR[before][-MOVING_STEPS:], axis=0), tiny)
    factor_SR = relative_SR / usual_R
    moved = np.flatnonzero((factor_SR > MOVED_FACTOR).any(axis=1) & ~before)
    if not len(moved):
        return None
    row = int(factor_SR[moved[0]].argmax())
    return mover(int(moved[0]), row, float(factor_SR[moved[0], row]))


def head_entropy(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the end of a sentence that states the last measured attention entropy of a parameter's head, in nats;
    empty if the parameter belongs to no head or nothing was measured.

    Args:
      name: dotted path; see `parameter_norms.row_names`.
      rows: rows of the log, in order.
    """
    match = re.match(r"blocks\.(\d+)\.attention\.heads\.(\d+)\.", name)
    measured = [row for row in rows if row.get("entropy")]
    if match is None or not measured:
        return ""
    block, head = map(int, match.groups())
    entropy, step = measured[-1]["entropy"][block][head], measured[-1]["step"]
    return "" if entropy is None else f"; its head's attention entropy was {entropy:.2f} nats at step {step:,}"

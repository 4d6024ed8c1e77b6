"""Divergence that is finite: when a loss has left its minimum for good, and what moved first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, log
from typing import Any

import numpy as np

from jaxformer.config import ModelConfig

MARGIN = 0.5
"""Nats above the running minimum, below which a loss counts as healthy: batches differ by less."""
ENORMOUS, ENORMOUS_STEPS = 10.0, 3
"""A loss of so many times the ceiling is orders of magnitude off; one batch alone may be broken, three are not."""
ABOVE_STEPS = 12
"""Steps in a row at more than `MARGIN` above the ceiling: worse than knowing nothing. Overshoots of a first warm-up
last a few steps."""
LOST, LOST_STEPS = 0.8, 16
"""Share of all that was learned that is gone for so many steps in a row. Spikes that healed lost up to 0.7."""
HALF_LOST, HALF_LOST_STEPS = 0.5, 100
"""A collapse that stays: to predicting frequencies, for one. Spikes healed within some tens of steps."""
LEARNED = 1.0
"""Nats below the ceiling from which on a share of what was learned means something."""
FLAT_STEPS = 5
"""Steps in a row whose gradient is exactly 0 with a loss that is not: nothing can be learned any more."""
HISTORY_STEPS = HALF_LOST_STEPS + 50
"""Steps whose norms are kept, so that what moved first can be told: as long as the slowest rule, and some before."""
MOVED, MOVING_STEPS = 5.0, 25
"""A parameter has moved when the norm of its update is so many times its median over as many steps before; so many
steps before the loss leaves its minimum count as the move."""


@dataclass(frozen=True)
class Divergence:
    """A divergence, at the step that it was noticed."""

    step: int
    began: int
    """The first step whose loss was `MARGIN` above the running minimum, or whose gradient was 0, with no return."""
    loss: float
    """In nats, at `step`."""
    minimum: float
    """The lowest loss before, in nats."""
    minimum_step: int
    reason: str
    """The rule that was broken, as the end of a sentence about the loss."""

    def __str__(self) -> str:
        return (
            f"the loss has been diverging since step {self.began:,}: {self.loss:.4g} at step {self.step:,}, after a "
            f"minimum of {self.minimum:.4g} at step {self.minimum_step:,}; {self.reason}"
        )


@dataclass
class DivergenceMonitor:
    """Follow the loss and the gradient norm of each step, and tell a divergence from a spike.

    The further the loss has gone, the sooner it counts. Pure Python on numbers that all processes share, so that all
    decide alike; `as_dict` is stored with checkpoints, so that a resumed run decides as one that never stopped.
    """

    ceiling: float = -inf
    """The larger of the first loss and that of knowing nothing, in nats."""
    minimum: float = inf
    minimum_step: int = 0
    began: int = 0
    """The first step of the present departure from the minimum; 0 while healthy."""
    noticed: bool = False
    """True from when a divergence was returned until the loss returns."""
    in_a_row: dict[str, int] = field(default_factory=dict)
    """Steps in a row that each rule has been broken for."""

    @property
    def healthy(self) -> bool:
        """True if the last loss was near the minimum, and its gradient not 0."""
        return not self.began

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types, from which `DivergenceMonitor(**...)` goes on."""
        return asdict(self)

    def update(self, step: int, loss: float, grad_norm: float) -> Divergence | None:
        """Return a divergence at the step that it is noticed, once until the loss has returned.

        Args:
          step: counted from 1.
          loss: mean of the batch in nats, before the update; one that is not finite is passed over.
          grad_norm: global norm of the gradient.
        """
        if not isfinite(loss):
            return None
        if self.minimum == inf:
            self.ceiling = max(self.ceiling, loss)
        if loss < self.minimum:
            self.minimum, self.minimum_step = loss, step
        flat = grad_norm == 0 and loss > 0
        if loss <= self.minimum + MARGIN and not flat:
            self.began, self.noticed, self.in_a_row = 0, False, {}
            return None
        self.began = self.began or step
        broken = [reason for reason, limit in self._rules(loss, flat) if self._count(reason) >= limit]
        if self.noticed or not broken:
            return None
        self.noticed = True
        return Divergence(step, self.began, loss, self.minimum, self.minimum_step, broken[0])

    def _rules(self, loss: float, flat: bool) -> list[tuple[str, int]]:
        """The rules that this step breaks, and for how many steps in a row each may be; the others begin anew."""
        learned = self.ceiling - self.minimum
        lost = (loss - self.minimum) / learned if learned >= LEARNED else 0.0
        rules = [
            (flat, f"its gradient has been exactly 0 for {FLAT_STEPS} steps", FLAT_STEPS),
            (
                loss > ENORMOUS * max(self.ceiling, MARGIN),
                f"it has been more than {ENORMOUS:g} times its first value for {ENORMOUS_STEPS} steps",
                ENORMOUS_STEPS,
            ),
            (
                loss > self.ceiling + MARGIN,
                f"it has been higher than that of a model that knows nothing for {ABOVE_STEPS} steps",
                ABOVE_STEPS,
            ),
            (lost > LOST, f"most of what was learned has been lost for {LOST_STEPS} steps", LOST_STEPS),
            (
                lost > HALF_LOST,
                f"half of what was learned has been lost for {HALF_LOST_STEPS} steps",
                HALF_LOST_STEPS,
            ),
        ]
        found = [(reason, limit) for broken, reason, limit in rules if broken]
        self.in_a_row = {reason: self.in_a_row.get(reason, 0) for reason, _ in found}
        return found

    def _count(self, reason: str) -> int:
        self.in_a_row[reason] += 1
        return self.in_a_row[reason]


def chance_loss(model: ModelConfig) -> float:
    """Return the loss in nats of predicting all classes alike; minus infinity where there are none to count."""
    classes = getattr(model, "vocab_size", getattr(model, "n_classes", 0))
    return log(classes) if model.objective == "cross_entropy" and classes else -inf


@dataclass(frozen=True)
class Mover:
    """A parameter, or one head's part of it, whose updates left their usual size."""

    name: str
    step: int
    update: float
    """Norm of its update at that step."""
    usual: float | None
    """The median of that norm before, at that step's learning rate; None where there was no before."""

    def __str__(self) -> str:
        usual = "" if self.usual is None else f", {self.update / self.usual:.3g} times what was usual"
        return f"{self.name} at step {self.step:,}, by an update of norm {self.update:.2g}{usual}"


def first_to_move(
    names: Sequence[str], updates: Sequence[tuple[int, np.ndarray]], began: int, schedule: Callable[[int], Any]
) -> Mover | None:
    """Return the parameter whose updates left their usual size first, as a divergence began.

    Args:
      names: of parameters, heads apart; see `parameters.row_names`.
      updates: steps in order, each with the norms of its updates, `(R,)`.
      began: the step that the loss left its minimum at. It is the updates before that made it.
      schedule: learning rate by step, counted from 0: updates that grow with it are usual.
    """
    known = [(step, norms_R) for step, norms_R in updates if step < began and np.isfinite(norms_R).all()]
    if not known:
        return None
    steps, norms_SR = np.array([step for step, _ in known]), np.stack([norms_R for _, norms_R in known])
    rate_S = np.maximum([float(schedule(step - 1)) for step in steps], np.finfo(np.float32).tiny)
    before = steps <= began - MOVING_STEPS
    if before.sum() < MOVING_STEPS // 5:  # a run that diverges as it begins has nothing usual
        row = int(norms_SR[-1].argmax())
        return Mover(names[row], int(steps[-1]), float(norms_SR[-1, row]), None)
    relative_SR = norms_SR.astype(np.float64) / rate_S[:, None]
    usual_R = np.maximum(np.median(relative_SR[before][-MOVING_STEPS:], axis=0), np.finfo(np.float32).tiny)
    factor_SR = relative_SR[~before] / usual_R
    moved = np.flatnonzero((factor_SR > MOVED).any(axis=1))
    at = int(moved[0]) if len(moved) else int(factor_SR.max(axis=1).argmax())
    row = int(factor_SR[at].argmax())
    update = float(norms_SR[~before][at, row])
    return Mover(names[row], int(steps[~before][at]), update, update / float(factor_SR[at, row]))

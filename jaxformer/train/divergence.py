"""Detection of divergence while the loss is still finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf, isfinite, log
from typing import Any

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

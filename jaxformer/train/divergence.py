"""Detection of a divergence that is finite, and of the parameter that moved first."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import inf, isfinite, log
from typing import Any

import numpy as np

from jaxformer.config import ModelConfig

MEAN_STEPS = 10
"""Steps of the mean loss that is compared: of small batches, single ones differ by up to 0.85 nats in a healthy run."""
MARGIN_NATS = 0.5
"""Nats above the lowest mean loss from which a batch's loss is high."""
MAX_SPIKE_STEPS = 3
"""Steps in a row with a high loss that are noise, or a spike that recovers by itself: the run is healthy."""
ENORMOUS_FACTOR, ENORMOUS_STEPS = 10.0, 3
"""A loss at this multiple of the ceiling is orders of magnitude off; one batch alone may be corrupt, not three."""
ABOVE_STEPS = 12
"""Steps in a row at more than `MARGIN_NATS` above the ceiling: worse than chance. Overshoots of a first warm-up
last a few steps."""
LOST_SHARE, LOST_STEPS = 0.8, 16
"""Share of the learned nats that is lost for as many steps in a row. Spikes that recovered lost up to 0.7."""
HALF_LOST_SHARE, HALF_LOST_STEPS = 0.5, 100
"""A collapse that persists, such as to predicting frequencies. Spikes recovered within tens of steps."""
PART_LOST_SHARE, PART_LOST_STEPS = 0.25, 200
"""A smaller collapse that persists, in the mean loss, which single batches hardly change. Labels that are wrong at
random and a learning rate that stays high slow a loss down or let it rise a little, not by a quarter of the learned
nats and by `MARGIN_NATS` for 200 steps."""
MIN_LEARNED_NATS, MIN_LEARNED_SHARE = 1.0, 0.3
"""Nats below the chance loss from which a share of the learned nats is meaningful; where the chance loss is small, as
of two classes, this share of it."""
FLAT_STEPS = 5
"""Steps in a row whose gradient is exactly 0 with a loss that is not: training is stuck."""
HISTORY_STEPS = PART_LOST_STEPS + 50
"""Steps whose norms are stored to find the parameter that moved first: those of the slowest rule, and some before."""
MOVED_FACTOR, MOVING_STEPS = 5.0, 25
"""A parameter has moved when the norm of its update is this multiple of its median over as many steps before; as many
steps before the loss leaves its minimum count as the move."""


@dataclass(frozen=True)
class Divergence:
    """A divergence, at the step that it was noticed."""

    step: int
    began: int
    """First of the steps in a row whose loss was high, or whose gradient was 0."""
    loss: float
    """In nats, at `step`."""
    minimum: float
    """Lowest mean of up to `MEAN_STEPS` losses before, in nats."""
    minimum_step: int
    reason: str
    """Rule that was broken, as the end of a sentence about the loss."""

    def __str__(self) -> str:
        return (
            f"the loss has been diverging since step {self.began:,}: {self.loss:.4g} at step {self.step:,}, after a "
            f"minimum of {self.minimum:.4g} (mean of up to {MEAN_STEPS} steps) at step {self.minimum_step:,}; "
            f"{self.reason}"
        )


@dataclass
class DivergenceMonitor:
    """Monitor of the loss and the gradient norm of each step, which tells a divergence from a spike.

    The larger the loss, the sooner it counts. Pure Python on numbers that all processes share, so that all decide
    alike; `as_dict` is stored with checkpoints, so that a resumed run decides as one that never stopped.
    """

    chance: float = -inf
    """Chance loss in nats; minus infinity where it is not known."""
    ceiling: float = -inf
    """Larger of the chance loss and the first loss."""
    recent: list[float] = field(default_factory=list)
    """Last `MEAN_STEPS` losses, or fewer."""
    minimum: float = inf
    """Lowest mean of these so far."""
    minimum_step: int = 0
    began: int = 0
    """First of the steps in a row up to now whose loss is high or whose gradient is 0; 0 for none."""
    sank: int = 0
    """First of the steps in a row up to now whose mean loss shows that part of the learned nats is lost."""
    noticed: bool = False
    """True from when a divergence was returned until the loss returns."""
    in_a_row: dict[str, int] = field(default_factory=dict)
    """Steps in a row up to now that each rule has been broken for."""

    @classmethod
    def restore(cls, stored: dict[str, Any] | None, chance: float, stops: bool) -> DivergenceMonitor:
        """Return the monitor that `as_dict` stored, or a fresh one.

        Args:
          stops: a divergence ends the run. One that was noticed and passed over is then counted anew.
        """
        if stored is None or stored.keys() != {each.name for each in fields(cls)} - {"chance"}:
            return cls(chance)
        monitor = cls(chance, **stored)
        if stops and monitor.noticed:
            monitor.noticed, monitor.in_a_row = False, {"high": monitor.in_a_row.get("high", 0)}
        return monitor

    @property
    def healthy(self) -> bool:
        """True unless more than `MAX_SPIKE_STEPS` losses in a row were high, part of the learned nats is lost, or the
        gradient is 0."""
        return self.in_a_row.get("high", 0) <= MAX_SPIKE_STEPS and not {"flat", "part_lost"} & self.in_a_row.keys()

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types for `restore`."""
        return {name: value for name, value in asdict(self).items() if name != "chance"}

    def update(self, step: int, loss: float, grad_norm: float) -> Divergence | None:
        """Return a divergence at the step at which it is noticed, once until the loss has recovered.

        Args:
          step: counted from 1.
          loss: mean of the batch in nats, before the update; one that is not finite is passed over.
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
        rules = self._rules(loss, mean, grad_norm)
        self.in_a_row = {rule: self.in_a_row.get(rule, 0) + 1 for rule, (broken, *_) in rules.items() if broken}
        self.began = (self.began or step) if {"high", "flat"} & self.in_a_row.keys() else 0
        self.sank = (self.sank or self.began or step) if "part_lost" in self.in_a_row else 0
        self.noticed = self.noticed and bool(self.began or self.sank)
        if self.noticed:
            return None
        for rule, (_, limit, reason) in rules.items():
            if self.in_a_row.get(rule, 0) >= limit:
                self.noticed = True
                began = self.sank if rule == "part_lost" else self.began
                return Divergence(step, began, loss, self.minimum, self.minimum_step, f"{reason} for {limit} steps")
        return None

    def _rules(self, loss: float, mean: float, grad_norm: float) -> dict[str, tuple[bool, float, str]]:
        """Return for each rule whether a step breaks it, its limit of such steps in a row, and its description; "high",
        of a loss that is high, has no limit."""
        # A first loss above chance was not learned: the learned nats count from chance.
        top = self.chance if self.minimum < self.chance else self.ceiling
        learned = top - self.minimum
        enough = learned > min(MIN_LEARNED_NATS, MIN_LEARNED_SHARE * abs(top))
        lost, mean_lost = ((x - self.minimum) / learned if enough else 0.0 for x in (loss, mean))
        high, sunk = loss > self.minimum + MARGIN_NATS, mean > self.minimum + MARGIN_NATS
        enormous = max(self.ceiling, MARGIN_NATS)
        of_guessing = "the larger of its first value and that of guessing,"
        of_learned = "of what was learned has been lost"
        return {
            "high": (high, inf, ""),
            "flat": (grad_norm == 0 and loss > 0, FLAT_STEPS, "its gradient has been exactly 0"),
            "enormous": (
                high and loss > ENORMOUS_FACTOR * enormous, ENORMOUS_STEPS,
                f"it has been more than {ENORMOUS_FACTOR:g} times {enormous:.3g}, {of_guessing}",
            ),
            "above": (
                high and loss > self.ceiling + MARGIN_NATS, ABOVE_STEPS,
                f"it has been more than {MARGIN_NATS:g} above {self.ceiling:.3g}, {of_guessing}",
            ),
            "lost": (high and lost > LOST_SHARE, LOST_STEPS, f"more than {LOST_SHARE:.0%} {of_learned}"),
            "half_lost": (
                high and lost > HALF_LOST_SHARE, HALF_LOST_STEPS, f"more than {HALF_LOST_SHARE:.0%} {of_learned}"
            ),
            "part_lost": (
                sunk and mean_lost > PART_LOST_SHARE, PART_LOST_STEPS,
                f"in the mean of {MEAN_STEPS} steps, more than {PART_LOST_SHARE:.0%} {of_learned}",
            ),
        }  # fmt: skip


def chance_loss(model: ModelConfig) -> float:
    """Return the loss in nats of a uniform prediction; minus infinity for a model without classes."""
    n_classes = model.contract.n_classes
    return log(n_classes) if n_classes else -inf


@dataclass(frozen=True)
class Mover:
    """Parameter, or one head's part of it, whose updates left their usual size."""

    name: str
    """Dotted path; see `parameters.row_names`."""
    step: int
    update: float
    """Norm of its update over that of its weights, at that step."""
    grad_norm: float
    """Norm of its gradient at that step."""
    factor: float | None
    """Norm of the update over its usual norm, relative to the learning rate; None without a usual norm."""

    def __str__(self) -> str:
        usual = (
            "the largest update, with no earlier ones to compare"
            if self.factor is None
            else f"{self.factor:.3g} times what was usual"
        )
        return (
            f"{self.name} at step {self.step:,}, by an update of {self.update:.2g} of its norm, {usual}; "
            f"its gradient's norm was {self.grad_norm:.2g}"
        )


def first_to_move(
    names: Sequence[str], norms: Sequence[tuple[int, np.ndarray]], began: int, schedule: Callable[[int], Any]
) -> Mover | None:
    """Return the parameter whose updates left their usual size first, as a divergence began; None if none did.

    Of a run that diverges as it begins, which has no usual size, it is the parameter with the largest last update.

    Args:
      names: of parameters, heads apart; see `parameters.row_names`.
      norms: steps in order, each with the norms of gradients, updates and weights, `(3, R)`.
      began: the step that the loss left its minimum at. It is the updates before that made it.
      schedule: learning rate by step, counted from 0: updates that grow with it are usual.
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
    if before.sum() < MOVING_STEPS // 5:  # a run that diverges as it begins has nothing usual
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
    """Return the end of a sentence with the attention entropy in nats of a parameter's head, as measured last; nothing
    for a parameter of no head, or without a measurement.

    Args:
      name: dotted path; see `parameters.row_names`.
      rows: of the log, in order.
    """
    match = re.match(r"blocks\.(\d+)\.attention\.heads\.(\d+)\.", name)
    measured = [row for row in rows if row.get("entropy")]
    if match is None or not measured:
        return ""
    block, head = map(int, match.groups())
    entropy, step = measured[-1]["entropy"][block][head], measured[-1]["step"]
    return "" if entropy is None else f"; its head's attention entropy was {entropy:.2f} nats at step {step:,}"

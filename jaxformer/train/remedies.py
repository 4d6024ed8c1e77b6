"""What to try against a loss that diverges, as options with values."""

from __future__ import annotations

from jaxformer.config import Config

USUAL_RATES = {"nesterov_sgd": 1.0, "adamw": 3e-3, "muon": 3e-3, "lion": 3e-4, "schedule_free": 3e-3}
"""Learning rates that small models train at; what is advised is no higher."""


def optimizer_remedies(config: Config) -> list[tuple[str, str]]:
    """Return what usually helps and its options, the least change first; each fits a checkpoint of the run."""
    o, found = config.optimizer, []
    rate = ("a lower learning rate", f"--optimizer.learning-rate {min(o.learning_rate / 4, USUAL_RATES[o.name]):g}")
    if o.clip_norm is None or o.clip_norm > 1:
        found.append(("clipped gradients", "--optimizer.clip-norm 1"))
    far_off = o.learning_rate > 4 * USUAL_RATES[o.name]
    return [rate, *found] if far_off else [*found, rate]


def remedies(config: Config) -> str:
    """Return all that usually helps, in words."""
    found = optimizer_remedies(config)
    if getattr(config.model, "norm", None) == "none":
        found.insert(0, ("a norm before every layer", "--model.norm rmsnorm"))
    if not config.optimizer.warmup_steps:
        found.append(("a warm-up", "--optimizer.warmup-steps 100"))
    return ", ".join(f"{what} ({option})" for what, option in found)

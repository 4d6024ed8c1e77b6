"""Remedies for a diverging loss, as command-line options with values."""

from __future__ import annotations

from jaxformer.config import Config
from jaxformer.train.optimizer import RULES


def optimizer_remedies(config: Config) -> list[tuple[str, str]]:
    """Return descriptions and options of the usual remedies, the smallest change first; each is compatible with the
    run's checkpoints."""
    o, rule = config.optimizer, RULES.get(config.optimizer.name)
    usual = o.learning_rate if rule is None else rule.usual_learning_rate
    lower = [("a lower learning rate", f"--optimizer.learning-rate {min(o.learning_rate / 4, usual):g}")]
    unclipped = o.clip_norm is None or o.clip_norm > 1
    clipping = [("clipped gradients", "--optimizer.clip-norm 1")] if unclipped else []
    return lower + clipping if o.learning_rate > 4 * usual else clipping + lower


def remedies(config: Config) -> str:
    """Return all usual remedies as text."""
    options = optimizer_remedies(config)
    if getattr(config.model, "norm", None) == "none":
        options.insert(0, ("a norm before every layer", "--model.norm rmsnorm"))
    if not config.optimizer.warmup_steps:
        options.append(("a warm-up", "--optimizer.warmup-steps 100"))
    return ", ".join(f"{what} ({option})" for what, option in options)

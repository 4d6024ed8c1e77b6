"""Hints for a diverging loss, as fields of the config with values."""

from __future__ import annotations

from jaxformer.config import Config
from jaxformer.train.optimizer import RULES


def hints(config: Config) -> list[tuple[str, str]]:
    """Return descriptions and fields with values of what usually helps, the smallest change first.

    The first that is a field of the optimizer never asks for new checkpoints.
    """
    o, rule = config.optimizer, RULES.get(config.optimizer.name)
    usual = o.learning_rate if rule is None else rule.usual_learning_rate
    lower = "a lower learning rate", f"`optimizer.learning_rate={min(o.learning_rate / 4, usual):g}`"
    far_too_high = o.learning_rate > 4 * usual
    table = (
        (getattr(config.model, "norm", None) == "none", "a norm before every layer", "`model.norm='rmsnorm'`"),
        (far_too_high, *lower),
        (o.clip_norm is None or o.clip_norm > 1, "clipped gradients", "`optimizer.clip_norm=1`"),
        (not far_too_high, *lower),
        (not o.warmup_steps, "a warm-up", "`optimizer.warmup_steps=100`"),
    )
    return [(what, option) for applies, what, option in table if applies]


def hint_text(config: Config) -> str:
    """Return all hints as text."""
    return ", ".join(f"{what} ({option})" for what, option in hints(config))

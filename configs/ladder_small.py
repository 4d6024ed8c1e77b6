"""The rungs of `ladder.py` at a size that two cores train in about two minutes each, as in `docs/ladder.md`."""

from dataclasses import replace
from typing import Any

from jaxformer.config import ComputeConfig, Config
from jaxformer.config.files import load_module

LADDER = load_module("ladder")


def small(config: Config) -> Config:
    """Return a rung at the small size."""
    model: Any = replace(config.model, vocab_size=512, d_model=64, d_ff=(256, 256))  # type: ignore[call-arg]
    if config.name == "multihead_full":
        model = replace(model, head_dim=64)  # as wide as the model
    return replace(
        config, model=model, steps=3000, optimizer=replace(config.optimizer, learning_rate=0.1),
        train=replace(config.train, batch_size=32, eval_every=500), compute=ComputeConfig(),
    )  # fmt: skip


globals().update({name: small(getattr(LADDER, name)) for name in LADDER.REPORTED})

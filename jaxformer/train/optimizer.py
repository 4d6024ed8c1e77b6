"""The optimizer a config names, from optax."""

from typing import Any

import jax
import optax

from jaxformer.config import OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up, then constant or half a cosine down to `final_fraction`."""
    peak = config.learning_rate
    if config.schedule == "cosine":
        rest = optax.cosine_decay_schedule(peak, max(1, steps - config.warmup_steps), config.final_fraction)
    else:
        rest = optax.constant_schedule(peak)
    if not config.warmup_steps:
        return rest
    # The first update is taken at 1/warmup of the peak, not at zero.
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, config.warmup_steps - 1)
    return optax.join_schedules([warmup, rest], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, if asked for, then the named optimizer.

    `nesterov_sgd` is Sutskever et al. 2013 as torch has it: v ← m·v + g, w ← w - lr·(g + m·v). `adamw` is
    Loshchilov and Hutter 2019.
    """
    schedule = make_schedule(config, steps)
    if config.name == "adamw":
        rule = optax.adamw(schedule, config.b1, config.b2, weight_decay=config.weight_decay, mask=_is_matrix)
    else:
        rule = optax.sgd(schedule, config.momentum, nesterov=True)
    return rule if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)


def _is_matrix(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim >= 2 and path[-1].key != "W_pos", params)

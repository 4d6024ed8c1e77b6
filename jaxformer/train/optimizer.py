"""The optimizer a config names, from optax."""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod, sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.config import OptimizerConfig
from jaxformer.contract import ParameterAxes, Role
from jaxformer.models.objective import Params
from jaxformer.parameters import global_norm, row_norms

Axes = Mapping[str, ParameterAxes]
"""Axes of each parameter by its dotted name; see `nn.parameters.parameter_axes`."""
MUON_RMS = 0.2
"""Root mean square of Muon's updates over the learning rate: about that of AdamW (Liu et al. 2025, section 2.2)."""


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate by step, counted from 0: linear warm-up, then the shape that `schedule` names.

    'cosine' is half a cosine down to `final_fraction` (Loshchilov and Hutter 2017, without restarts), 'linear' a
    straight line. 'wsd', warm-up stable decay, stays at the peak until a straight line falls to `final_fraction` (Hu et
    al. 2024; the line and its fifth of all steps are Hägele et al. 2024). These three would reach their end one step
    after the last, so that the last still learns. 'inverse_sqrt' is peak · √(warmup / (step + 1)) (Vaswani et al. 2017,
    equation 3).
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    parts: list[optax.Schedule] = [optax.constant_schedule(peak)]
    joints: list[int] = []
    if config.schedule == "cosine":
        parts = [optax.cosine_decay_schedule(peak, max(1, steps - warmup), config.final_fraction)]
    elif config.schedule == "linear":
        parts = [optax.linear_schedule(peak, peak * config.final_fraction, max(1, steps - warmup))]
    elif config.schedule == "wsd":
        decay_steps = config.decay_steps(steps)
        parts += [optax.linear_schedule(peak, peak * config.final_fraction, decay_steps)]
        joints = [steps - decay_steps]
    elif config.schedule == "inverse_sqrt":
        parts = [lambda count: peak * jnp.sqrt(warmup / (warmup + count + 1))]
    if warmup:
        # The first update is taken at 1/warmup of the peak, not at zero.
        parts = [optax.linear_schedule(peak / warmup, peak, warmup - 1), *parts]
        joints = [warmup, *joints]
    return optax.join_schedules(parts, joints)


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, axes: Axes, width: int | None = None
) -> optax.GradientTransformation:
    """Return the named optimizer, after gradient clipping if `clip_norm` is set; its state is the same without.

    Weight decay is decoupled, w ← w - lr·decay·w, and reaches matrices and embeddings; see `is_decayed`.

    With `base_width`, the learning rate of the matrices that sum over the width of the model, W_out among them, is
    multiplied by base_width / width, but not in their weight decay; see `scale_by_width`.

    - `nesterov_sgd`: Sutskever et al. 2013 as torch has it: v ← m·v + g, w ← w - lr·(g + m·v).
    - `adamw`: Loshchilov and Hutter 2019.
    - `muon`: Jordan et al. 2024 for matrices, also for those of ViT's patches and of CLIP's joint space; `adamw` for
      embeddings of tokens and of CLIP's patches, logits, positions, gains and biases; see `muon_or_adamw`. Its
      updates are given the size of AdamW's (Liu et al. 2025, equation 4), so that one learning rate and one weight
      decay serve both. optax corrects the bias of the momentum, as Adam does and the authors do not: for the first
      1/(1 - momentum) steps or so the newest gradient counts for more.
    - `lion`: Chen et al. 2023, algorithm 2.
    - `schedule_free`: Defazio et al. 2024, algorithm 1, over AdamW. The parameters are the average x, which is what
      to evaluate; the gradient must be taken at `gradient_point`. The weights of the average are squared learning
      rates without the algorithm's Adam correction, as in the authors' later code.
    """
    factor = 1.0 if config.base_width is None or width is None else config.base_width / width
    rule = config.rule(schedule, axes) or RULES[config.name].make(config, schedule, axes, factor)
    return rule if config.clip_norm is None else _clipped(rule, config.clip_norm)


def _sgd(config: OptimizerConfig, schedule: optax.Schedule, axes: Axes, factor: float) -> optax.GradientTransformation:
    return optax.sgd(schedule, config.momentum, nesterov=True)  # factor 1: the config refuses another


def _adamw(
    config: OptimizerConfig, schedule: optax.Schedule, axes: Axes, factor: float
) -> optax.GradientTransformation:
    return _with_decay(optax.scale_by_adam(config.b1, config.b2), config, schedule, axes, factor)


def _lion(config: OptimizerConfig, schedule: optax.Schedule, axes: Axes, factor: float) -> optax.GradientTransformation:
    return _with_decay(optax.scale_by_lion(config.b1, config.b2), config, schedule, axes, factor)


def _with_decay(
    rule: optax.GradientTransformation, config: OptimizerConfig, schedule: optax.Schedule, axes: Axes, factor: float
) -> optax.GradientTransformation:
    """Return a rule whose updates are scaled by width, after which weight decay and learning rate follow."""
    return optax.chain(
        scale_by_width(rule, axes, factor),
        optax.add_decayed_weights(config.weight_decay, partial(is_decayed, axes)),
        optax.scale_by_learning_rate(schedule),
    )


def _muon_and_adamw(
    config: OptimizerConfig, schedule: optax.Schedule, axes: Axes, factor: float
) -> optax.GradientTransformation:
    rules = {"muon": _muon(config, schedule, axes, sqrt(factor)), "adamw": _adamw(config, schedule, axes, factor)}
    return optax.partition(rules, partial(muon_or_adamw, axes))


def scale_by_width(rule: optax.GradientTransformation, axes: Axes, factor: float) -> optax.GradientTransformation:
    """Return a rule that multiplies its updates by a factor where a matrix sums over the width of the model.

    Numbers of Adam's updates are all about as large, and have the signs of what they are multiplied with, so that a
    product changes in proportion to the numbers that it sums (Yang et al. 2022, appendix J): with `base_width / width`
    as factor, it changes as much at every width. Muon's updates are as large, but orthogonal: their products change in
    proportion to the square root.
    """
    if factor == 1:
        return rule

    def update(grads: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        updates, state = rule.update(grads, state, params)

        def scaled(path: Any, update: jax.Array) -> jax.Array:
            return factor * update if axes[_name(path)].sums_over_width else update

        return jax.tree_util.tree_map_with_path(scaled, updates), state

    return optax.GradientTransformation(rule.init, update)


def _clipped(rule: optax.GradientTransformation, limit: float) -> optax.GradientTransformation:
    """Return a rule after optax's `clip_by_global_norm`, without a state and with the norm as the step computes it: the
    compiler merges the two."""

    def update(grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        norm = global_norm(row_norms(grads))
        clipped = jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm) * limit), grads)
        return rule.update(clipped, state, params)

    return optax.GradientTransformation(rule.init, update)


def updates_taken(opt_state: Any) -> jax.Array:
    """Return the count by which `make_optimizer` reads its schedule, an int32 scalar: all steps but skipped ones."""
    counts = (x.count for x in jax.tree.leaves(opt_state, is_leaf=_is_schedule) if _is_schedule(x))
    return next(counts)


def _is_schedule(state: Any) -> bool:
    return isinstance(state, optax.ScaleByScheduleState)


def gradient_point(config: OptimizerConfig, params: Params, opt_state: Any) -> Params:
    """Return the parameters at which the optimizer needs the gradient.

    They are the parameters themselves, but for `schedule_free`, whose parameters are the average x: it learns at
    y = (1 - b1)·z + b1·x, where z is the fast sequence in its state.
    """
    if config.name != "schedule_free":
        return params
    return jax.tree.map(lambda x, z: (1 - config.b1) * z + config.b1 * x, params, opt_state.z)


def muon_axes(axes: Axes, params: Params) -> Params:
    """Return the axes of each weight that make the matrix that Muon orthogonalises: those summed over, and the others.

    W_Q, W_K and W_V are one D × (H·K) matrix each, over all heads, and W_O is one of (H·K) × D, as in the trainings
    that Jordan et al. and Liu et al. report. Along the axes before these (experts, gates), matrices count apart.
    """

    def numbers(path: Any, _: Any) -> optax.contrib.MuonDimensionNumbers:
        sides = axes[_name(path)]
        n_inputs, n_outputs = len(sides.inputs), len(sides.outputs)
        inputs = tuple(range(-n_inputs - n_outputs, -n_outputs))
        return optax.contrib.MuonDimensionNumbers(inputs, tuple(range(-n_outputs, 0)))

    return jax.tree_util.tree_map_with_path(numbers, params)


def _muon(config: OptimizerConfig, schedule: optax.Schedule, axes: Axes, factor: float) -> optax.GradientTransformation:
    """Return momentum that is orthogonalised. An orthogonal m × n matrix has a root mean square of 1/√max(m, n)."""

    def scale_to_adamw_rms(updates: Params, _: Params) -> Params:
        def scaled(update: jax.Array, sides: tuple[tuple[int, ...], ...]) -> jax.Array:
            return MUON_RMS * sqrt(max(prod(update.shape[i] for i in side) for side in sides)) * update

        return jax.tree.map(scaled, updates, muon_axes(axes, updates))

    rule = optax.contrib.scale_by_muon(beta=config.momentum, weight_dimension_numbers=partial(muon_axes, axes))
    return optax.chain(
        scale_by_width(rule, axes, factor),
        optax.stateless(scale_to_adamw_rms),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _schedule_free(
    config: OptimizerConfig, schedule: optax.Schedule, axes: Axes, factor: float
) -> optax.GradientTransformation:
    """Return optax's rule, whose parameters are y, for parameters x."""
    normalized = optax.scale_by_rms(config.b2, eps=1e-8, eps_in_sqrt=False, bias_correction=True)
    rule = optax.contrib.schedule_free(
        _with_decay(normalized, config, schedule, axes, factor),
        # A step is weighted by its own learning rate, but here optax counts from 1.
        lambda count: schedule(count - 1),
        config.b1,
    )

    def update(grads: Params, state: Any, x: Params) -> tuple[Params, Any]:
        y = gradient_point(config, x, state)
        updates, state = rule.update(grads, state, y)
        learned = optax.contrib.schedule_free_eval_params(state, optax.apply_updates(y, updates))
        return jax.tree.map(jnp.subtract, learned, x), state

    return optax.GradientTransformation(rule.init, update)


def muon_or_adamw(axes: Axes, params: Params) -> Params:
    """Return the optimizer of each parameter: muon for the matrices between the embedding and the unembedding."""
    rule = lambda path, _: "muon" if axes[_name(path)].role is Role.MATRIX else "adamw"  # noqa: E731
    return jax.tree_util.tree_map_with_path(rule, params)


def is_decayed(axes: Axes, params: Params) -> Params:
    """Return the weight-decay mask: True for matrices and embeddings, False for positions, gains and biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: axes[_name(path)].role in (Role.MATRIX, Role.EMBEDDING), params
    )


def _name(path: Any) -> str:
    return ".".join(key.key for key in path)


class Rule(NamedTuple):
    """An optimizer that `OptimizerConfig.name` names.

    Attributes:
      make: returns the transformation for a config, a schedule, the axes of the parameters, and the factor of
        `scale_by_width`.
      usual_learning_rate: learning rate that small models train at; a remedy for divergence is never higher.
    """

    make: Callable[[OptimizerConfig, optax.Schedule, Axes, float], optax.GradientTransformation]
    usual_learning_rate: float


RULES = {
    "nesterov_sgd": Rule(_sgd, 1.0),
    "adamw": Rule(_adamw, 3e-3),
    "muon": Rule(_muon_and_adamw, 3e-3),
    "lion": Rule(_lion, 3e-4),
    "schedule_free": Rule(_schedule_free, 3e-3),
}
"""Optimizers by their name, which is also a choice of `OptimizerConfig.name`."""

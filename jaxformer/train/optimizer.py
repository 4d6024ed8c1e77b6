"""Optimizers and learning-rate schedules of a config, built from optax."""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from optax import OptState

from jaxformer.config import OptimizerConfig
from jaxformer.contract import ParameterAxes, Role
from jaxformer.models.objective import Params
from jaxformer.nn.parameter_norms import global_norm, row_norms

Axes = Mapping[str, ParameterAxes]
"""Axes of each parameter by its dotted name; see `nn.parameters.parameter_axes`."""
MUON_RMS = 0.2
"""Root mean square of Muon's updates relative to the learning rate, close to that of AdamW (Liu et al. 2025, section
2.2)."""


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning-rate schedule by step, counted from 0: linear warm-up, then the shape named by `schedule`.

    'cosine' decays along half a cosine to `final_fraction` (Loshchilov and Hutter 2017, without restarts), 'linear'
    along a straight line. 'wsd', warm-up stable decay, stays at the peak and then decays linearly to `final_fraction`
    (Hu et al. 2024; the linear decay over a fifth of all steps is from Hägele et al. 2024). These three would reach
    their final value one step after the last, so that the last step still learns. 'inverse_sqrt' is peak · √(warmup /
    (step + 1)) (Vaswani et al. 2017, equation 3). A schedule that the config's class makes itself comes first.
    """
    if (own := config.make_schedule(steps)) is not None:
        return own
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
        # The first update has a learning rate of 1/warmup of the peak, not zero.
        parts = [optax.linear_schedule(peak / warmup, peak, warmup - 1), *parts]
        joints = [warmup, *joints]
    return optax.join_schedules(parts, joints)


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, axes: Axes, width: int | None = None
) -> optax.GradientTransformation:
    """Return the named optimizer, preceded by gradient clipping if `clip_norm` is set, which adds no state.

    Weight decay is decoupled, w ← w - lr·decay·w, and applies to matrices and embeddings; see `is_decayed`.

    With `base_width`, the learning rate of the matrices that sum over the model's width, including W_out, is multiplied
    by base_width / width, except in their weight decay; see `scale_by_width`.

    - `nesterov_sgd`: Sutskever et al. 2013 in PyTorch's form: v ← m·v + g, w ← w - lr·(g + m·v).
    - `adamw`: Loshchilov and Hutter 2019.
    - `muon`: Jordan et al. 2024 for matrices, including those of ViT's patches and CLIP's joint space; `adamw` for
      embeddings of tokens and of CLIP's patches, logits, positions, gains and biases; see `muon_or_adamw`. Its updates
      are scaled to the size of AdamW's (Liu et al. 2025, equation 4), so that both share one learning rate and one
      weight decay. optax corrects the bias of the momentum, as Adam does and the authors do not: for about the first
      1/(1 - momentum) steps, the newest gradient has a larger weight.
    - `lion`: Chen et al. 2023, algorithm 2.
    - `schedule_free`: Defazio et al. 2024, algorithm 1, over AdamW. The parameters are the average x, at which to
      evaluate; the gradient must be taken at `eval_point`. The weights of the average are squared learning rates
      without the algorithm's Adam correction, as in the authors' later code.
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
    """Return a rule whose updates are scaled by width, followed by weight decay and learning rate."""
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
    """Return a rule that multiplies its updates by `factor` for matrices that sum over the model's width.

    The entries of an Adam update have similar magnitudes, and signs that correlate with the matmul's input, so the
    change in the matmul's output after one update grows with its fan-in (Yang et al. 2022, appendix J). With a factor
    of `base_width / width`, the change is the same at every width. Entries of Muon's updates have the same magnitude,
    but the updates are orthogonal, so the change grows with the square root of the fan-in.
    """
    if factor == 1:
        return rule

    def update(grads: Params, state: OptState, params: Params | None = None) -> tuple[Params, OptState]:
        updates, state = rule.update(grads, state, params)

        def scaled(path: KeyPath, update: jax.Array) -> jax.Array:
            return factor * update if axes[_name(path)].sums_over_width else update

        return jax.tree_util.tree_map_with_path(scaled, updates), state

    return optax.GradientTransformation(rule.init, update)


def _clipped(rule: optax.GradientTransformation, limit: float) -> optax.GradientTransformation:
    """Return a rule preceded by the clipping of optax's `clip_by_global_norm`, without state, and with the norm
    computed as in the train step so that the compiler merges the two."""

    def update(grads: Params, state: OptState, params: Params) -> tuple[Params, OptState]:
        norm = global_norm(row_norms(grads))
        clipped = jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm) * limit), grads)
        return rule.update(clipped, state, params)

    return optax.GradientTransformation(rule.init, update)


def updates_taken(opt_state: OptState) -> jax.Array:
    """Return the step count with which `make_optimizer` reads its schedule, an int32 scalar that excludes skipped
    steps."""
    counts = (x.count for x in jax.tree.leaves(opt_state, is_leaf=_is_schedule) if _is_schedule(x))
    return next(counts)


def _is_schedule(state: object) -> bool:
    return isinstance(state, optax.ScaleByScheduleState)


def eval_point(config: OptimizerConfig, params: Params, opt_state: OptState) -> Params:
    """Return the parameters at which the optimizer needs the gradient.

    They are the parameters themselves, except for `schedule_free`, whose parameters are the average x: its gradient is
    taken at y = (1 - b1)·z + b1·x, where z is the fast sequence in its state.
    """
    if config.name != "schedule_free":
        return params
    return jax.tree.map(lambda x, z: (1 - config.b1) * z + config.b1 * x, params, opt_state.z)


def muon_axes(axes: Axes, params: Params) -> Params:
    """Return the axes of each weight that form the matrix that Muon orthogonalises: those summed over, and the others.

    W_Q, W_K and W_V are each one D × (H·K) matrix over all heads, and W_O is one (H·K) × D matrix, as in the training
    runs that Jordan et al. and Liu et al. report. Matrices along any leading axes (experts, gates) are separate.
    """

    def numbers(path: KeyPath, _: jax.Array) -> optax.contrib.MuonDimensionNumbers:
        sides = axes[_name(path)]
        n_inputs, n_outputs = len(sides.inputs), len(sides.outputs)
        inputs = tuple(range(-n_inputs - n_outputs, -n_outputs))
        return optax.contrib.MuonDimensionNumbers(inputs, tuple(range(-n_outputs, 0)))

    return jax.tree_util.tree_map_with_path(numbers, params)


def _muon(config: OptimizerConfig, schedule: optax.Schedule, axes: Axes, factor: float) -> optax.GradientTransformation:
    """Return Muon, which orthogonalises the momentum. The root mean square of an orthogonal m × n matrix is 1/√max(m,
    n)."""

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
    """Return optax's schedule-free rule, whose parameters are y, adapted to parameters x."""
    normalized = optax.scale_by_rms(config.b2, eps=1e-8, eps_in_sqrt=False, bias_correction=True)
    rule = optax.contrib.schedule_free(
        _with_decay(normalized, config, schedule, axes, factor),
        # A step is weighted by its own learning rate, but optax passes a count from 1.
        lambda count: schedule(count - 1),
        config.b1,
    )

    def update(grads: Params, state: OptState, x: Params) -> tuple[Params, OptState]:
        y = eval_point(config, x, state)
        updates, state = rule.update(grads, state, y)
        learned = optax.contrib.schedule_free_eval_params(state, optax.apply_updates(y, updates))
        return jax.tree.map(jnp.subtract, learned, x), state

    return optax.GradientTransformation(rule.init, update)


def muon_or_adamw(axes: Axes, params: Params) -> Params:
    """Return the optimizer of each parameter: 'muon' for the matrices between embedding and unembedding, else
    'adamw'."""
    rule = lambda path, _: "muon" if axes[_name(path)].role is Role.MATRIX else "adamw"  # noqa: E731
    return jax.tree_util.tree_map_with_path(rule, params)


def is_decayed(axes: Axes, params: Params) -> Params:
    """Return the weight-decay mask: True for matrices and embeddings, False for positions, gains and biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: axes[_name(path)].role in (Role.MATRIX, Role.EMBEDDING), params
    )


def _name(path: KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


class Rule(NamedTuple):
    """An optimizer that can be selected by `OptimizerConfig.name`.

    Attributes:
      make: function that returns the transformation for a config, a schedule, the axes of the parameters, and the
        factor of `scale_by_width`.
      usual_learning_rate: usual learning rate of small models; the remedy for a divergence never exceeds it.
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
"""Optimizers by name, the choices of `OptimizerConfig.name`."""

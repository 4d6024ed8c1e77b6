"""Forecast of a training run of a language model, from its config and counts in its text, and its score afterwards.

- Attention entropies and the loss at step 0 follow from second moments of random weights; see `init_check`.
- The first plateau is the loss of counting tokens, which a run passes unless it becomes non-finite.
- The final loss is not above that of a table of logits, one for each pair of tokens, that starts at the frequencies of
  tokens, plus noise of the logits' variance at step 0, and that gradient flow trains for the time κ Σ η / (1 - β),
  with the momentum β and the tangent kernel κ, at step 0, of the logits of two inputs with the same last token (Jacot
  et al. 2018). Features learned during training enlarge the kernel, so that a model learns faster. The noise of batches
  of n targets adds at most η κ / (4 n (1 - β)), with the kernel κ of an input with itself: the excess of SGD at a
  minimum with the curvature of a cross-entropy, whose trace is below 1. Other optimizers learn all pairs.
- The final loss has no lower bound but 0. Counts of triples are none: a model shares what it learns between contexts
  that counting keeps apart. With 2,048 tokens, `quick:modern` ends 0.8 nats below them.
- A run becomes non-finite if its first update promises, to first order, to lower the loss by more than twice the loss
  itself: such a step leads away from the minimum (Polyak 1987). This is the one part that is not derived: the gradient
  is that of fresh weights, not those of the run, on tokens drawn by their frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import acos, pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.config import Config, OptimizerConfig
from jaxformer.data.counts import Counts
from jaxformer.data.windows import next_token_batch
from jaxformer.inspect.init_check import Moments, expected_moments, mlp_mean_square
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.ladder.rungs import RungDecoderConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params, mean_loss
from jaxformer.nn.parameters import parameter_axes
from jaxformer.train.optimizer import make_optimizer, make_schedule

ENTROPY_TOLERANCE, MIN_ENTROPY_TOLERANCE = 0.15, 0.02
"""Relative error, and error in nats, within which an entropy counts as forecast."""
STREAM_TOLERANCE = 0.3
"""Relative error of the residual stream's mean square, which blocks after the first write with dependent positions."""
LEARNED = 0.1
"""Fraction of the nats from counting tokens to counting pairs by which a loss may exceed its estimate."""
TABLE_SIZE, FLOW_STEPS = 2**22, 64
"""Maximum logits of a table of pairs, and steps in which it is learned, each longer than the one before it."""
MAX_TOKENS = 1024
"""Random tokens from which the gradient is computed, at least one window."""
MEMORIES = 2
"""Number of the momentum's time constants 1/(1 - β) within which a run becomes non-finite."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Forecast:
    """Forecast of one run. Losses are held-out losses in nats per token."""

    entropy: tuple[float, ...]
    """Attention entropy of each block at step 0 in nats, a mean over heads and positions."""
    first_loss: Interval
    """Lowest and highest loss at step 0."""
    non_finite: tuple[int, int] | None
    """First and last step at which the run becomes non-finite or diverges; None if it does not."""
    plateau: float
    """First plateau of the loss: that of counting tokens."""
    final_loss: Interval | None
    """0 and the highest loss at the end; None for a run that becomes non-finite."""


def forecast(config: Config, counts: Counts) -> Forecast:
    """Return the forecast of a run, without training.

    Args:
      config: run of a decoder or of an MLP over tokens.
      counts: counts of tokens and pairs in its text, `TextDataset.counts()`.

    Raises:
      TypeError: the model is another one.
    """
    model = config.model
    if not isinstance(model, MLPConfig | DecoderConfig):
        raise TypeError(f"expected a decoder or an MLP over tokens, got a {type(model).__name__}.")
    moments = expected_moments(model, model.context_length) if isinstance(model, DecoderConfig) else ()
    own, variance = _logits(model, moments)
    noise = 2 * sqrt(variance * float(np.square(counts.frequency_V).sum()))  # of the mean logit of the targets
    vocab_size, cap = len(counts.frequency_V), getattr(model, "logit_soft_cap", None)
    low, high = (_random_loss(own, variance * (1 + sign * STREAM_TOLERANCE), vocab_size, cap) for sign in (-1, 1))
    diverges = _promised_decrease(config, counts) > 2
    memory = 1 / max(1 - config.optimizer.momentum, 1e-3)
    return Forecast(
        entropy=tuple(block.entropy for block in moments),
        first_loss=(low - noise, high + noise),
        non_finite=(1, round(MEMORIES * memory)) if diverges else None,
        plateau=counts.loss(1),
        final_loss=None if diverges else _final_loss(config, counts, moments, variance, high + noise),
    )


def score(forecast: Forecast, log: Sequence[Mapping[str, Any]], ended: int | None) -> dict[str, tuple[Any, bool]]:
    """Return the outcome for each field of a forecast, and True if it came as forecast; fields without an outcome are
    left out. The plateau came as forecast if the loss passed it and no divergence was forecast, or neither.

    Args:
      log: rows of the run's log, as JSON types.
      ended: step at which the run diverged or became non-finite; None if it did not. A last loss that is not finite
        counts, too.
    """
    evaluated = [(row["step"], row["val_loss"]) for row in log if "val_loss" in row]
    losses = [(step, loss) for step, loss in evaluated if loss is not None]
    if ended is None and evaluated and evaluated[-1][1] is None:
        ended = evaluated[-1][0]
    scores: dict[str, tuple[Any, bool]] = {}
    first = next((row for row in log if row["step"] == 0 and row.get("val_loss") is not None), None)
    if first is not None:
        low, high = forecast.first_loss
        scores["first_loss"] = first["val_loss"], low <= first["val_loss"] <= high
        if forecast.entropy and "entropy" in first:  # not measured if the model is too large to copy to one device
            entropy = tuple(float(np.mean([np.nan if x is None else x for x in heads])) for heads in first["entropy"])
            pairs = zip(entropy, forecast.entropy, strict=True)
            near = [abs(x - y) <= max(ENTROPY_TOLERANCE * y, MIN_ENTROPY_TOLERANCE) for x, y in pairs]
            scores["entropy"] = entropy, all(near)
    limits = forecast.non_finite
    came = ended is limits if ended is None or limits is None else limits[0] <= ended <= limits[1]
    scores["non_finite"] = ended, came
    passed = next((step for step, loss in losses if loss <= forecast.plateau), None)
    scores["plateau"] = passed, (passed is None) == (forecast.final_loss is None)
    if ended is None and losses:
        final, last = forecast.final_loss, losses[-1][1]
        scores["final_loss"] = last, final is not None and final[0] <= last <= final[1]
    return scores


def describe_forecast(forecast: Forecast) -> str:
    """Return a forecast in one line."""
    between = lambda x: f"{x[0]:.3g} to {x[1]:.3g}"  # noqa: E731
    entropy = f"entropy {' '.join(f'{x:.3g}' for x in forecast.entropy)}, " if forecast.entropy else ""
    limits = forecast.non_finite
    end = f"not finite at step {limits[0]} to {limits[1]}" if limits else "no divergence"
    final = (
        f", plateau {forecast.plateau:.3g}, at the end at most {forecast.final_loss[1]:.3g}"
        if forecast.final_loss
        else ""
    )
    return f"{entropy}loss at first {between(forecast.first_loss)}, {end}{final}"


def _mixed(c: MLPConfig) -> tuple[float, float]:
    """Return the mean square of the MLP's input, a sum over positions of embeddings and positions of variance 1 each,
    and the part of it that is the same wherever the current token stands."""
    T, D = c.context_length, c.d_model
    visible = (T + 1) / (2 * T) if c.causal else 1.0  # mean fraction of all positions
    return {
        "none": (2.0, 1.0),
        "concatenate": (2.0, 1 / T),  # features of the last position only
        "static": (2 * visible, 1 / T**2),  # another weight at each position
        "dynamic": (4 * visible, 1 / T**2),
        "gram": (8 * (visible + D / T), 4 * D / T),  # a position's product with itself is √D times the others'
        "qkv": (8 * visible, 1 / T),
    }[c.mixing]


def _logits(c: MLPConfig | DecoderConfig, moments: Sequence[Moments]) -> tuple[float, float]:
    """Return the logit of the current token, which only a tied embedding favours, and the variance of all logits."""
    if isinstance(c, MLPConfig):
        d_in = c.d_model * (c.context_length if c.mixing == "concatenate" else 1)
        return 0.0, mlp_mean_square(_mixed(c)[0], d_in, c.d_ff)
    stream = moments[-1].stream * moments[-1].growth
    if isinstance(c, RungDecoderConfig) and c.mlp_logits:
        return 0.0, stream
    std = c.embedding_std if c.unembedding == "tied" else c.unembedding_std
    norm = sqrt(stream) if c.final_norm else 1.0
    own = c.d_model * c.embedding_scale * c.embedding_std**2 / norm if c.unembedding == "tied" else 0.0
    return c.logit_scale * own, c.logit_scale**2 * stream / norm**2 * (1.0 if std is None else c.d_model * std**2)


def _random_loss(own: float, variance: float, vocab_size: int, cap: float | None) -> float:
    """Return the mean loss of normal logits, a Monte Carlo estimate."""
    logits = sqrt(variance) * np.random.default_rng(0).normal(size=(256, vocab_size))
    logits[:, 0] += own
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    largest = logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(logits - largest).sum(axis=1)) + largest[:, 0]) - np.mean(logits[:, 1:]))


def _promised_decrease(config: Config, counts: Counts) -> float:
    """Return the decrease of the loss to first order by the first update at the peak learning rate, as a fraction of
    the loss, for fresh weights and tokens drawn by their frequencies."""
    c: Any = config.model
    optimizer = config.optimizer
    T = c.context_length
    n = max(1, min(config.train.batch_size, MAX_TOKENS // T))
    V = len(counts.frequency_V)
    windows = np.random.default_rng(0).choice(V, (n, T + 1), p=counts.frequency_V).astype(np.int32)
    batch, model = jax.tree.map(jnp.asarray, next_token_batch(windows, c.n_predicted)), c.build()
    key = jax.random.fold_in(jax.random.key(config.seed), 1)  # not the run's own
    schedule, width = optax.constant_schedule(optimizer.learning_rate), c.contract.scaled_width
    rule = make_optimizer(optimizer, schedule, parameter_axes(model), width)

    @jax.jit
    def decrease(params: Params) -> jax.Array:
        loss, gradient = jax.value_and_grad(lambda params: mean_loss(model, params, batch))(params)
        updates, _ = rule.update(gradient, rule.init(params), params)
        return -optax.tree.vdot(gradient, updates) / loss

    return float(decrease(jax.jit(model.init)(key, batch.inputs[0][0])["params"]))


def _final_loss(
    config: Config, counts: Counts, moments: Sequence[Moments], variance: float, first_loss: float
) -> Interval:
    c: Any = config.model
    optimizer, targets = config.optimizer, config.train.batch_size * c.n_predicted
    tokens, pairs = counts.loss(1), counts.loss(2)
    if not getattr(c, "causal", True):  # it reads its targets
        return 0.0, min(tokens, pairs)
    learned, noise = pairs, 0.0
    if optimizer.name == "nesterov_sgd" and type(optimizer).rule is OptimizerConfig.rule:
        steps_N = np.arange(config.steps, dtype=np.float32)
        rates = np.broadcast_to(make_schedule(optimizer, config.steps)(steps_N), config.steps)
        rates = rates / (1 - optimizer.momentum)
        kernel, own = _kernels(c, moments)
        learned = _table_loss(counts, kernel * float(rates.sum()), variance)
        noise = float(rates[-1]) * own / (4 * targets)
    return 0.0, min(learned + noise + LEARNED * (tokens - pairs), first_loss)


def _table_loss(counts: Counts, time: float, variance: float) -> float:
    """Return the held-out loss of a table of logits, one for each pair of tokens, after gradient flow on the pairs of
    the training text for some time. The first logits predict the frequencies of tokens, plus normal noise.

    Of a large vocabulary, rows are drawn by how often the held-out text has their token first."""
    V, rng = len(counts.frequency_V), np.random.default_rng(0)
    (pairs_K, count_K), (val, n_val) = counts.pairs, np.unique(counts.val_pairs_M, return_counts=True)
    weight_V = np.bincount(val // V, n_val, minlength=V)
    if V**2 > TABLE_SIZE:  # at equal distances, which leaves the frequent ones their weight
        at = (rng.random() + np.arange(n_rows := max(1, TABLE_SIZE // V))) / n_rows * weight_V.sum()
        weight_V = np.bincount(np.searchsorted(np.cumsum(weight_V), at), minlength=V)
    tokens_R = np.arange(V) if V**2 <= TABLE_SIZE else np.flatnonzero(weight_V)
    row_V = np.full(V, -1)
    row_V[tokens_R] = np.arange(len(tokens_R))
    count_RV, n_RV = np.zeros((2, len(tokens_R), V), np.float32)
    for table_RV, pairs, n in ((count_RV, pairs_K, count_K), (n_RV, val, n_val)):
        drawn = row_V[pairs // V] >= 0
        table_RV[row_V[pairs[drawn] // V], pairs[drawn] % V] = n[drawn]
    total_R1 = count_RV.sum(axis=1, keepdims=True)
    target_RV, rate_R1 = count_RV / np.maximum(total_R1, 1), total_R1 / counts.n_tokens
    logits_RV = np.log(counts.frequency_V) + rng.normal(0, sqrt(variance), count_RV.shape)
    logits_RV = logits_RV.astype(np.float32)
    for step in (time * np.diff(np.geomspace(1e-3, 1.0, FLOW_STEPS), prepend=0.0)).astype(np.float32):
        p_RV = _softmax(logits_RV)
        logits_RV += step * rate_R1 * (target_RV - p_RV) / (1 + step * rate_R1 * p_RV * (1 - p_RV))
    loss_R = -(n_RV * np.log(_softmax(logits_RV))).sum(axis=1) / np.maximum(n_RV.sum(axis=1), 1)
    return float(np.average(loss_R, weights=weight_V[tokens_R]))


def _softmax(logits_RV: np.ndarray) -> np.ndarray:
    weights_RV = np.exp(logits_RV - logits_RV.max(axis=1, keepdims=True))
    return weights_RV / weights_RV.sum(axis=1, keepdims=True)


def _kernels(c: Any, moments: Sequence[Moments]) -> tuple[float, float]:
    """Return the tangent kernel of a logit for two inputs of which only the last token is the same, less that for
    inputs without a common token, and the kernel of an input with itself. The first is 0 for attention without a
    residual stream, which does not single out the last token before it has learned to."""
    if isinstance(c, MLPConfig):
        (square, own), T = _mixed(c), c.context_length if c.mixing == "concatenate" else 1
        last, none, same = (_mlp_kernel(square, x, c.d_model * T, c.d_ff) for x in (own, 0.0, square))
        return last - none, same
    stream = moments[-1].stream * moments[-1].growth
    if isinstance(c, RungDecoderConfig) and c.mlp_logits:
        square = moments[-1].stream * c.d_model * c.attention_std**2
        return 0.0, _mlp_kernel(square, square, c.d_model, c.d_ff)
    norm = stream if c.final_norm else 1.0
    return c.d_model * (c.embedding_scale * c.embedding_std) ** 2 / norm, c.d_model * stream / norm


def _mlp_kernel(square: float, covariance: float, d_in: int, d_ff: Sequence[int]) -> float:
    """Return the tangent kernel of an MLP's logit for two inputs with a mean square and a covariance, by the recursion
    of Jacot et al. 2018 for ReLU, with weights and biases of variance 1/(3·fan-in)."""
    kernel, active = 0.0, 0.0
    for fan_in in (d_in, *d_ff):
        kernel = fan_in * covariance + 1 + active / 3 * kernel
        square, covariance = square / 3 + 1 / (3 * fan_in), covariance / 3 + 1 / (3 * fan_in)
        angle = acos(min(1.0, covariance / square))
        active = (pi - angle) / (2 * pi)
        covariance = (sqrt(max(0.0, square**2 - covariance**2)) + (pi - angle) * covariance) / (2 * pi)
        square /= 2
    return kernel

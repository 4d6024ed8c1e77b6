"""Initialisation check of a decoder: expected and observed statistics, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import nan, sqrt

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.inspect.activations import capture
from jaxformer.inspect.of_run import of_run
from jaxformer.models.decoder import Decoder, DecoderConfig, ExpertsConfig
from jaxformer.models.objective import Params
from jaxformer.nn.block import PARALLEL
from jaxformer.nn.local_heads import biases_at
from jaxformer.nn.mlp import ACTIVATIONS, GATED
from jaxformer.nn.norms import epsilon
from jaxformer.ops.attention import row_entropy
from jaxformer.ops.experts import route, route_in_groups
from jaxformer.ops.positions import RoPE, Scaling
from jaxformer.terminal import align

ONE_HOT = 0.1
"""Fraction of the maximal attention entropy below which attention counts as one-hot."""
DEEP = 3
"""Smallest number of blocks for which a residual stream without norms was observed to grow until it is not finite."""


@dataclass(frozen=True)
class Moments:
    """Statistics of one block at initialisation: means over positions, features and heads."""

    stream: float
    """Mean square of the residual stream before the block."""
    scores: float
    """Variance of a row's visible scores; the softmax is invariant to their mean."""
    entropy: float
    """Attention entropy in nats."""
    growth: float
    """Mean square of the residual stream after the block divided by that before it."""


@dataclass(frozen=True)
class InitReport:
    """Statistics of each block of a decoder, and warnings; `str()` gives a table."""

    expected: tuple[Moments, ...]
    observed: tuple[Moments, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        rows = [["block", "residual stream, mean square", "attention scores, variance", "attention entropy, nats"]]
        for i, (p, o) in enumerate(zip(self.expected, self.observed, strict=True)):
            pairs = ((o.stream, p.stream), (o.scores, p.scores), (o.entropy, p.entropy))
            rows.append([str(i), *(f"{observed:.3g} ({expected:.3g})" for observed, expected in pairs)])
        lines = ["initialisation check, observed (expected):", *(f"  {line}" for line in align(rows, ">>>>"))]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


@of_run
def check_init(model: Decoder, params: Params, tokens_BT: jax.Array) -> InitReport:
    """Compare a decoder's statistics with those expected at initialisation, and warn of unstable configurations.

    Args:
      params: fresh parameters, or those of a run, whose distance from the expected statistics is due to training.
      tokens_BT: tokens of several examples; with a run, also texts of one length.

    Raises:
      TypeError: the model is not a decoder.
    """
    if not isinstance(getattr(model, "config", None), DecoderConfig):
        raise TypeError(f"a {type(model).__name__} has no expected statistics; give a decoder")
    n_tokens = tokens_BT.shape[1]
    observed = tuple(Moments(*map(float, block)) for block in _observe(model, params, tokens_BT))
    return InitReport(
        expected_moments(model.config, n_tokens), observed, tuple(_warnings(model.config, observed, n_tokens))
    )


def expected_moments(config: DecoderConfig, n_tokens: int) -> tuple[Moments, ...]:
    """Return the expected statistics of each block, averaged over initialisations and texts of distinct tokens.

    Weights are independent of their inputs, so second moments multiply: a matmul with fan-in n and weight variance v
    scales the mean square by n·v. The scores of a query are then normal; the entropy of their softmax, and how much it
    averages the values, are Monte Carlo estimates.
    """
    c = config
    stream, moments = (c.embedding_scale * c.embedding_std) ** 2, []
    stream += {"learned": c.embedding_std**2, "sinusoidal": 0.5}.get(c.positions, 0.0)
    if c.embedding_norm:
        stream /= stream + epsilon(c.norm, c.norm_eps)
    for i, window in enumerate(c.block_windows):
        before = stream
        projected = c.d_model * c.attention_std**2 * _read(c, before)
        rope_gain = _rope_gain(c.block_rope(i))
        if (latents := c.latents) is None:
            scores, values = c.width_of_head * (1.0 if c.qk_norm else projected**2) * rope_gain, projected
        else:  # latents are normalised, and the rotated part of keys is not of them
            n_rotated = latents.rope_width
            queries, values = 1.0 if c.has_query_latents else projected, 1.0
            scores = queries * (c.width_of_head - n_rotated + n_rotated * projected * rope_gain)
        scores *= c.scale**2
        visible = min(n_tokens, window)
        slopes = [0.0] * c.n_heads if c.score_bias is None else c.score_bias.slopes
        heads = [_head(scores, slope, n_tokens, visible, c.sinks) for slope in slopes[c.local_heads :]]
        heads += [_local_head(c, i, d, projected, n_tokens, visible) for d in range(1, c.local_heads + 1)]
        scores, entropy, averaged = map(float, np.mean(heads, axis=0))
        stream = _after(c, before, values * averaged * c.attention_gain)
        read = _read(c, before if c.norm_placement in PARALLEL else stream)
        e, hidden, biases = c.experts, c.d_ff, (c.bias, False)
        if e is not None and c.is_dense(i):
            hidden, e = (e.dense_width or c.d_ff[0],), None
        elif e is not None and e.bias:
            biases = True, True
        mlp = mlp_mean_square(read, c.d_model, hidden, c.activation, *biases)
        if e is not None:
            mlp *= _router_weights(read / 3, e)
            if e.shared_expert:
                shared = mlp_mean_square(read, c.d_model, (e.shared_width or c.d_ff[0],), c.activation, *biases)
                mlp += shared * (_gate_square(read / 3) if e.shared_gate else 1.0)
        stream = _after(c, stream, mlp)
        moments.append(Moments(before, scores, entropy, stream / before if before else nan))
    return tuple(moments)


def _read(c: DecoderConfig, stream: float) -> float:
    """Return the mean square of what attention or an MLP reads from the stream: after a norm, with its ε, if there is
    one before it."""
    has_norm = c.norm != "none" and c.norm_placement not in ("post", "output")
    return stream / (stream + epsilon(c.norm, c.norm_eps)) if has_norm else stream


def _router_weights(variance: float, e: ExpertsConfig) -> float:
    """Return the mean sum of squared expert weights from a router with normal logits of the given variance."""
    logits = jnp.asarray(sqrt(variance) * np.random.default_rng(0).normal(size=(1024, e.n_experts)))
    if e.router == "softmax":
        weights = route(logits, e.per_token, e.renormalize)[1]
    else:
        renormalize = e.per_token > 1 if e.renormalize is None else e.renormalize
        groups = e.n_groups, e.groups_per_token
        weights = route_in_groups(logits, e.per_token, 0.0, *groups, renormalize, e.weight_factor)[1]
    return float(jnp.mean(jnp.sum(jnp.square(weights), axis=-1)))


def _gate_square(variance: float) -> float:
    """Return the mean square of the sigmoid of a normal number."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    return float(weights @ np.square(1 / (1 + np.exp(-sqrt(variance) * nodes))) / weights.sum())


def _after(c: DecoderConfig, stream: float, part: float) -> float:
    if c.norm != "none" and c.norm_placement == "post":
        return 1.0
    part = 1.0 if c.norm != "none" and c.norm_placement in ("both", "output") else part
    part *= c.residual_scale**2
    return stream + part if c.contract.has_residual_stream else part


def mlp_mean_square(
    mean_square: float,
    d_in: int,
    d_ff: Sequence[int],
    activation: str = "relu",
    bias: bool = True,
    gate_bias: bool = False,
) -> float:
    """Return the mean square of an MLP's output at initialisation for inputs of the given mean square; weights and
    biases are uniform with variance 1/(3·fan-in)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    weights, gated = weights / weights.sum(), activation in GATED
    for fan_in in (d_in, *d_ff[:-1]):
        linear = mean_square / 3 + bias / (3 * fan_in)
        before = mean_square / 3 if gated and not gate_bias else linear
        activated = float(weights @ np.square(ACTIVATIONS[activation](jnp.asarray(sqrt(before) * nodes))))
        one = activation == "clamped_swiglu"  # is added to the linear part
        mean_square = activated * (linear + one if gated else 1)
    return mean_square / 3 + bias / (3 * d_ff[-1])


@lru_cache
def _head(
    variance: float, slope: float, n_tokens: int, attention_window: int, sinks: bool
) -> tuple[float, float, float]:
    """Return the variance, entropy and sum of squares for independent normal scores with a slope of ALiBi: means over
    the rows of causal attention, where row t has min(t, attention_window) scores, and with `sinks` one more."""
    rng = np.random.default_rng(0)
    rows = np.minimum(_rows(n_tokens), attention_window)
    lengths = np.minimum(np.arange(2, n_tokens + 1), attention_window)
    of_bias = slope**2 * float(np.mean(lengths * (lengths + 1) / 12)) if slope else 0.0  # of t consecutive numbers
    scores = [sqrt(variance) * rng.normal(size=(128, t)) + slope * np.arange(t) for t in rows]
    return variance + of_bias, *_softmax_moments(scores, sinks)


def _rope_gain(rope: RoPE | None) -> float:
    """Return the factor by which RoPE multiplies the variance of scores: rotated queries and keys have an amplitude."""
    if rope is None or not isinstance(rope.scaling, Scaling):
        return 1.0
    return rope.fraction * rope.scaling.amplitude**4 + 1 - rope.fraction


@lru_cache
def _local_head(
    c: DecoderConfig, block: int, distance: int, projected: float, n_tokens: int, attention_window: int
) -> tuple[float, float, float]:
    """Return the variance, entropy and sum of squares for the scores of a head initialised to attend at a distance,
    with random queries and keys."""
    K, scale, rope = c.width_of_head, c.scale, c.block_rope(block)
    assert rope is not None  # as for all local heads
    biases = np.stack(biases_at(distance, K, rope.base, scale))
    draws = np.random.default_rng(0).normal(size=(2, 8, n_tokens, K))
    queries_keys = biases[:, None, None] + sqrt(projected) * draws
    if c.qk_norm:
        queries_keys /= np.sqrt(np.square(queries_keys).mean(axis=-1, keepdims=True))
    # RoPE in NumPy: `rope` would have to be compiled at the start of each training run.
    turns = np.exp(1j * np.outer(np.arange(n_tokens), rope.base ** (-np.arange(K // 2) / (K // 2))))
    queries, keys = (queries_keys[..., : K // 2] + 1j * queries_keys[..., K // 2 :]) * turns * _rope_gain(rope) ** 0.25
    rows = [
        scale * np.einsum("dk,dsk->ds", queries[:, t - 1], keys[:, max(0, t - attention_window) : t].conj()).real
        for t in _rows(n_tokens)
    ]
    variance = float(np.mean([row.var(axis=1, ddof=1).mean() for row in rows if row.shape[1] > 1] or [0.0]))
    return variance, *_softmax_moments(rows, c.sinks)


def _rows(n_tokens: int) -> np.ndarray:
    """Return up to 64 row lengths of causal attention, evenly spaced."""
    return np.unique(np.linspace(1, n_tokens, min(n_tokens, 64)).astype(int))


def _softmax_moments(rows: Sequence[np.ndarray], sinks: bool) -> tuple[float, float]:
    """Return the entropy and the sum of squares of the softmax of scores: means over rows of several samples each, with
    `sinks` without the weight of a logit of 0."""
    entropies, squares = [], []
    for z in rows:
        w = np.exp(z - z.max(axis=1, keepdims=True))
        w /= w.sum(axis=1, keepdims=True) + (np.exp(-z.max(axis=1, keepdims=True)) if sinks else 0)
        entropies.append(float(-(w * np.log(np.where(w > 0, w, 1))).sum(axis=1).mean()))
        squares.append(float(np.square(w).sum(axis=1).mean()))
    return float(np.mean(entropies)), float(np.mean(squares))


@partial(jax.jit, static_argnames="model")
def _observe(model: Decoder, params: Params, tokens_BT: jax.Array) -> list[tuple[jax.Array, ...]]:
    """Return the fields of `Moments` for each block."""

    def observe_example(tokens_T: jax.Array) -> list[tuple[jax.Array, ...]]:
        values = capture(model, params, tokens_T)
        blocks: list[tuple[jax.Array, ...]] = []
        for i in range(model.config.n_blocks):
            before, after = (jnp.mean(jnp.square(values[f"blocks.{i}.{name}"])) for name in ("resid_pre", "resid_post"))
            visible = values[f"blocks.{i}.attention.mask"]
            rows = jnp.var(values[f"blocks.{i}.attention.attn_scores"], axis=-1, where=visible, ddof=1)
            variance = jnp.mean(rows, where=visible.sum(-1) > 1)
            blocks.append((before, variance, jnp.mean(row_entropy(values[f"blocks.{i}.attention.pattern"])), after))
        return blocks

    means = jax.tree.map(jnp.mean, jax.lax.map(observe_example, tokens_BT))
    return [(before, variance, entropy, after / before) for before, variance, entropy, after in means]


def _warnings(config: DecoderConfig, observed: tuple[Moments, ...], n_tokens: int) -> list[str]:
    """Return warnings about unstable configurations, each with the ladder rung that shows the problem and a remedy."""
    c, warnings = config, []
    max_entropy = float(np.mean(np.log(np.minimum(np.arange(1, n_tokens + 1), c.attention_window))))
    hints = []
    if c.scale > c.width_of_head**-0.5:
        hints.append(f"model.score_scale to {c.width_of_head**-0.5:.3g}, 1/sqrt(head_dim)")
    if c.attention_std > 2 / sqrt(c.d_model):
        hints.append(f"model.projection_std to {1 / sqrt(c.d_model):.3g}, 1/sqrt(d_model)")
    if not hints:
        hints.append("model.norm to rmsnorm" if c.norm == "none" else "model.qk_norm to true")
    one_hot = next((i for i, block in enumerate(observed) if block.entropy < ONE_HOT * max_entropy), None)
    if one_hot is not None:
        block = observed[one_hot]
        entropy = f"entropy {block.entropy:.3g} nats of at most {max_entropy:.3g}"
        warnings.append(
            f"scores of blocks.{one_hot} have variance {block.scores:.3g}, so attention is one-hot ({entropy}) and "
            f"learns little, as on the rung attention_unscaled; set {' and '.join(hints)}."
        )
    if c.norm == "none" and c.contract.has_residual_stream and c.n_blocks >= DEEP:
        growth = float(np.prod([block.growth for block in observed]))
        warnings.append(
            f"{c.n_blocks} blocks without a norm, which make the stream {growth:.3g} times larger already, as on the "
            "rung four_blocks, where it grew until it was not finite; set model.norm to rmsnorm."
        )
    return warnings

"""Scaled dot-product attention (Vaswani et al. 2017, equation 1) on one example, heads first.

Query heads may share key/value heads (Ainslie et al. 2023): head h reads group h // (H / G).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.errors import batch_hint
from jaxformer.ops.bias import Bias, bias_array, check_bias
from jaxformer.ops.masks import Causal, Mask, Packed, as_array, check_mask
from jaxformer.ops.precision import accumulation_dtype
from jaxformer.ops.quantized import Quantized
from jaxformer.ops.workarounds import Heads

MASKED = float(jnp.finfo(jnp.float32).min)
"""Value of a masked score. It is finite, so that a row with no visible key does not become NaN."""


def attention_weights(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    mask: Mask = None,
    scale: float | None = None,
    *,
    bias: Bias = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute the attention weights, softmax(scale · q kᵀ) over the visible keys.

    Args:
      q_HTK: queries, heads first; `jax.nn.dot_product_attention` has positions first. H must be a multiple of G.
      k_GSK: keys.
      mask: bool `(T, S)`, or `(H, T, S)` for a mask per head, True where a query may attend; or a `Causal` or `Packed`;
        None for no mask. In `torch.nn.MultiheadAttention`, True means the opposite.
      scale: factor applied to the scores; None for 1/√K, as in the paper.
      bias: numbers added to the scores, floating-point `(T, S)` or `(H, T, S)`, finite; or by distance, such as
        `ALiBi`, for queries and keys in order, as with `Causal`.
      soft_cap: bound c of the scores before the bias is added, which become c · tanh(scores / c) (Gemma 2).
      sinks: logit per head, `(H,)`, whose exponential is added to the denominator of the softmax (GPT-OSS).

    Returns:
      `(H, T, S)` float32. A row sums to one, less with sinks, or to zero where no key is visible.

    Raises:
      TypeError: an input is not floating-point, or the mask is neither boolean nor a `Causal` or `Packed`.
      ValueError: the shapes do not fit together, or the inputs are a batch.
    """
    scale = check_inputs(q_HTK, k_GSK, None, mask, scale, bias, soft_cap, sinks)
    k_GSK = zero_hidden(k_GSK, mask, q_HTK.shape[1])
    return softmax(attention_scores(q_HTK, k_GSK, scale, bias=bias, soft_cap=soft_cap), mask, sinks)


def check_inputs(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    v_GSK: jax.Array | None,
    mask: Mask,
    scale: float | None,
    bias: Bias = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> float:
    """Return the scale, 1/√K for None, after a check of types and shapes, which leaves no trace in a jaxpr. Raises as
    `attention_weights` does."""
    for name, axes, x in (
        ("queries", "(H, T, K)", q_HTK),
        ("keys", "(G, S, K)", k_GSK),
        ("values", "(G, S, K)", v_GSK),
    ):
        if x is None:
            continue
        if x.ndim != 3:
            raise ValueError(f"expected {name} of shape {axes}, got {x.shape}{batch_hint(x.shape, 3)}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} are {x.dtype}; give floating-point numbers")
    (H, T, K), (G, S, _) = q_HTK.shape, k_GSK.shape
    if H % G or k_GSK.shape[2] != K:
        problem = f"queries of shape {q_HTK.shape} do not fit keys of shape {k_GSK.shape}"
        raise ValueError(f"{problem}: both are heads first, H is a multiple of G, and both have the same width")
    if v_GSK is not None and v_GSK.shape[:2] != (G, S):
        raise ValueError(f"expected values for {G} heads and {S} keys, got shape {v_GSK.shape}")
    check_mask(mask, H, T, S)
    check_bias(bias, H, T, S)
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None for no cap")
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(f"expected one sink per query head, ({H},), got {sinks.shape}")
    return K**-0.5 if scale is None else scale


def zero_hidden(x_GSK: jax.Array, mask: Mask, n_queries: int) -> jax.Array:
    """Return keys or values `(G, S, K)` with zeros at positions masked for all queries.

    Their weights are 0, but 0 times NaN or infinity is NaN, in the output and in the gradient of the queries.
    """
    S = x_GSK.shape[1]
    if mask is None or (isinstance(mask, Causal | Packed) and n_queries >= S):  # every key is visible to some query
        return x_GSK
    if isinstance(mask, Causal | Packed):
        visible_S = jnp.arange(S) < n_queries
    else:
        visible_S = mask.any(axis=tuple(range(mask.ndim - 1)))
    return jnp.where(visible_S[:, None], x_GSK, 0)


def attention_scores(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    scale: float | None = None,
    *,
    bias: Bias = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Compute the attention scores, scale · q kᵀ, with soft cap and bias, `(H, T, S)` in float32 or wider; see
    `attention_weights`."""
    scale = check_inputs(q_HTK, k_GSK, None, None, scale, bias, soft_cap)
    H, T, K = q_HTK.shape
    G, S, _ = k_GSK.shape
    # The scale stands at the queries: K products per query instead of S.
    q_GRTK = q_HTK.reshape(G, H // G, T, K) * scale
    # In float32, because the softmax takes exponentials: a bfloat16 score near 16 is off by up to 1/16, and its weight
    # by 6 %.
    scores = jnp.einsum("grtk,gsk->grts", q_GRTK, k_GSK, preferred_element_type=accumulation_dtype(q_HTK.dtype))
    return adjust(scores.reshape(H, T, S), bias_array(bias, T, S), soft_cap)


def adjust(scores_HTS: jax.Array, bias: jax.Array | None, soft_cap: float | None) -> jax.Array:
    """Return the scores after soft cap and bias, `(H, T, S)`."""
    if soft_cap is not None:
        scores_HTS = soft_cap * jnp.tanh(scores_HTS / soft_cap)
    if bias is not None:
        scores_HTS += (bias if bias.ndim == scores_HTS.ndim else bias[None]).astype(scores_HTS.dtype)
    return scores_HTS


def softmax(scores_HTS: jax.Array, mask: Mask = None, sinks_H: jax.Array | None = None) -> jax.Array:
    """Compute the softmax of scores over the visible keys, `(H, T, S)`; see `attention_weights`."""
    if sinks_H is not None:
        mask_TS = as_array(mask, *scores_HTS.shape[1:])
        sinks = sinks_H.reshape(*sinks_H.shape, *(1,) * (scores_HTS.ndim - sinks_H.ndim)).astype(scores_HTS.dtype)
        sinks = jnp.broadcast_to(sinks, (*scores_HTS.shape[:-1], 1))
        logits = jnp.concatenate([jnp.where(mask_TS, scores_HTS, MASKED), sinks], axis=-1)
        return jnp.where(mask_TS, jax.nn.softmax(logits)[..., :-1], 0.0)
    if mask is None:
        return jax.nn.softmax(scores_HTS)
    mask_TS = as_array(mask, *scores_HTS.shape[1:])
    # Masked before the softmax, so that only visible keys share the sum of 1. Minus infinity in place of `MASKED` would
    # make a row without a visible key NaN, since the largest score is subtracted from all; such a row is uniform here,
    # and the outer `where` zeroes it, and stops the gradient to it.
    return jnp.where(mask_TS, jax.nn.softmax(jnp.where(mask_TS, scores_HTS, MASKED)), 0.0)


def attention(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    v_GSK: jax.Array,
    mask: Mask = None,
    scale: float | None = None,
    *,
    bias: Bias = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Compute scaled dot-product attention, softmax(scale · q kᵀ) v over the visible keys, `(H, T, K)`.

    The result has the dtype and width of the values, which may differ from those of queries and keys. The arguments are
    those of `attention_weights`; `is_causal` stands for the mask `Causal()`, and excludes another.

    A query without a visible key gets zeros and passes no gradient.

    A key that is masked for all queries, such as padding, has no effect on the output, even if it is NaN. A key that
    is masked for some queries only, as by a causal mask, must be finite: a NaN there reaches the output of every
    query. Checking every key would take 4 % of the time of a causal pass; fused kernels (`ops.kernels`) do not check
    either."""
    if is_causal:
        if mask is not None:
            raise ValueError("is_causal is set, and there is a mask; give one of them: mask & Causal().array(T, S)")
        mask = Causal()
    scale = check_inputs(q_HTK, k_GSK, v_GSK, mask, scale)
    weights_HTS = attention_weights(q_HTK, k_GSK, mask, scale, bias=bias, soft_cap=soft_cap, sinks=sinks)
    return weighted_sum(weights_HTS, zero_hidden(v_GSK, mask, q_HTK.shape[1]))


def attention_with_lse(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    v_GSK: jax.Array,
    mask: Mask = None,
    scale: float | None = None,
    *,
    bias: Bias = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return `attention`, and the logsumexp of each query's visible scores and sink, `(H, T)` float32: minus infinity
    where there are none. See `combine_attention`."""
    scale = check_inputs(q_HTK, k_GSK, v_GSK, mask, scale, bias, soft_cap, sinks)
    k_GSK, v_GSK = (zero_hidden(x, mask, q_HTK.shape[1]) for x in (k_GSK, v_GSK))
    scores_HTS = attention_scores(q_HTK, k_GSK, scale, bias=bias, soft_cap=soft_cap)
    mask_TS = as_array(mask, *scores_HTS.shape[1:])
    lse_HT = jax.nn.logsumexp(jnp.where(mask_TS, scores_HTS, MASKED), axis=-1)
    lse_HT = jnp.where(mask_TS.any(-1), lse_HT, -jnp.inf)
    if sinks is not None:
        lse_HT = jnp.logaddexp(lse_HT, sinks[:, None].astype(lse_HT.dtype))
    return weighted_sum(softmax(scores_HTS, mask, sinks), v_GSK), lse_HT


def combine_attention(y_NHTK: jax.Array, lse_NHT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the attention to the keys of N parts of a sequence, `(H, T, K)`, and its logsumexp, `(H, T)`, from those
    of each part (Rabe and Staats 2021): the softmax of the logsumexps weights the outputs.

    Parts may lie on several devices, as in ring attention, or be a common prompt and what follows it. Masks and biases
    of the parts are arrays, since keys of a later part are not at positions 0, 1, 2, …; sinks are given to one part.
    """
    is_empty_HT = jnp.max(lse_NHT, axis=0) == -jnp.inf  # minus infinity less itself would be NaN
    lse_NHT = jnp.where(is_empty_HT[None], 0, lse_NHT)
    lse_HT = jax.nn.logsumexp(lse_NHT, axis=0)
    y_HTK = jnp.sum(jnp.exp(lse_NHT - lse_HT[None])[..., None] * y_NHTK, axis=0).astype(y_NHTK.dtype)
    return y_HTK, jnp.where(is_empty_HT, -jnp.inf, lse_HT)


def weighted_sum(weights_HTS: jax.Array, v_GSK: jax.Array) -> jax.Array:
    """Compute sums of the values weighted by attention weights, `(H, T, K)` in their dtype."""
    H, T, S = weights_HTS.shape
    G = v_GSK.shape[0]
    # Weights are at most 1 and sum to 1, so the dtype of the values is precise enough, and matmuls in it are fast.
    weights_GRTS = weights_HTS.astype(v_GSK.dtype).reshape(G, H // G, T, S)
    return jnp.einsum("grts,gsk->grtk", weights_GRTS, v_GSK).reshape(H, T, v_GSK.shape[-1])


def in_segments(n: int, attention: Callable[..., jax.Array] = attention) -> Callable[..., jax.Array]:
    """Return an attention function that attends within each of n equally long segments, without computing masked
    scores.

    The function ignores its mask, which must equal `masks.segment`, and takes no bias.
    """

    def attend(
        q_HTK: jax.Array,
        k_GTK: jax.Array,
        v_GTK: jax.Array,
        mask: Mask = None,
        scale: float | None = None,
        **terms: Any,
    ) -> jax.Array:
        segments = (x.reshape(x.shape[0], n, -1, x.shape[-1]) for x in (q_HTK, k_GTK, v_GTK))
        each = jax.vmap(lambda q, k, v: attention(q, k, v, None, scale, **terms), in_axes=1, out_axes=1)
        return each(*segments).reshape(q_HTK.shape[0], q_HTK.shape[1], -1)

    return attend


def project_heads(x_TD: jax.Array, W_DHK: jax.Array | Quantized | Heads) -> jax.Array:
    """Project features to queries, keys or values, `(H, T, K)`: attention is fastest with heads first."""
    if x_TD.ndim != 2:
        raise ValueError(f"expected a sequence of shape (T, D), got {x_TD.shape}{batch_hint(x_TD.shape, 2)}")
    D, H, K = _projection_shape(W_DHK, "(D, H, K)")
    if isinstance(W_DHK, Quantized | Heads):
        return (x_TD @ W_DHK).swapaxes(0, 1)
    if len(x_TD) == 1:
        # For one row, the compiler would transpose the whole matrix at every decode step.
        return (x_TD @ W_DHK.reshape(D, H * K)).reshape(-1, H, K).swapaxes(0, 1)
    return jnp.einsum("td,dhk->htk", x_TD, W_DHK)


def merge_heads(y_HTK: jax.Array, W_HKD: jax.Array | Quantized) -> jax.Array:
    """Concatenate the heads and multiply them by the output projection, `(T, D)`."""
    H, K, _ = _projection_shape(W_HKD, "(H, K, D)")
    if isinstance(W_HKD, Quantized):
        return y_HTK.swapaxes(0, 1).reshape(-1, H * K) @ W_HKD
    return jnp.einsum("htk,hkd->td", y_HTK, W_HKD)


def _projection_shape(W: jax.Array | Quantized | Heads, axes: str) -> tuple[int, ...]:
    if len(W.shape) != 3:
        raise ValueError(f"expected a projection of shape {axes}, got {W.shape}; reshape it")
    return W.shape


def cross_attention(
    q_HTK: jax.Array,
    x_SD: jax.Array,
    W_K_DGK: jax.Array,
    W_V_DGK: jax.Array,
    mask: Mask = None,
    scale: float | None = None,
) -> jax.Array:
    """Compute cross-attention, softmax(scale · Q (X W_K)ᵀ) X W_V, for each head, `(H, T, K)`.

    Self-attention is the case Q = X W_Q.
    """
    return attention(q_HTK, project_heads(x_SD, W_K_DGK), project_heads(x_SD, W_V_DGK), mask, scale)


def multi_head_attention(
    x_TD: jax.Array,
    source_SD: jax.Array,
    W_Q_DHK: jax.Array,
    W_K_DGK: jax.Array,
    W_V_DGK: jax.Array,
    W_O_HKD: jax.Array,
    mask: Mask = None,
) -> jax.Array:
    """Compute multi-head attention, `(T, D)`, from the four projection matrices (Vaswani et al. 2017, section 3.2.2).

    Args:
      x_TD: source of the queries.
      source_SD: source of keys and values; x_TD itself in self-attention.
    """
    return merge_heads(cross_attention(project_heads(x_TD, W_Q_DHK), source_SD, W_K_DGK, W_V_DGK, mask), W_O_HKD)


def row_entropy(weights: jax.Array) -> jax.Array:
    """Compute the Shannon entropy in nats of distributions along the last axis, with 0·log 0 = 0.

    The entropy is log S for a uniform row of S entries, and 0 for a one-hot row or a row of zeros.
    """
    return -jnp.sum(weights * jnp.log(jnp.where(weights > 0, weights, 1.0)), axis=-1)

"""Multi-head latent attention (DeepSeek-AI 2024, section 2.1), whose keys and values are projections of one latent
vector per position.

C is the width of the latents, R that of the rotated part of queries and keys, K that of the other part.
"""

import jax
import jax.numpy as jnp

from jaxformer.ops.attention import attention
from jaxformer.ops.bias import Bias
from jaxformer.ops.masks import Mask


def latent_attention(
    q_HTK: jax.Array,
    q_HTR: jax.Array,
    latent_SC: jax.Array,
    k_SR: jax.Array,
    W_K_HKC: jax.Array,
    W_V_HCK: jax.Array,
    mask: Mask = None,
    scale: float | None = None,
    *,
    bias: Bias = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Return the attention to keys W_K c and values W_V c of latents c, `(H, T, K)`, without computing these.

    Since the score qᵀ W_K c is the product of W_Kᵀ q and the latent, latents and rotated keys are the keys, and latents
    the values, of one head that all query heads share. They are all that a cache holds, S · (C + R) numbers, to which
    `cache.decode_step` attends alike. Mask, bias, soft cap and sinks are as in `attention`.

    Args:
      q_HTK: queries; their width is that of W_K's keys.
      q_HTR: rotated part of the queries.
      latent_SC: normalised latents.
      k_SR: rotated part of the keys, the same for all heads.
      W_K_HKC: projection of latents to keys.
      W_V_HCK: projection of latents to values.
      scale: factor applied to the scores; None for 1/√(K + R).
    """
    q_HTC = jnp.einsum("htk,hkc->htc", q_HTK, W_K_HKC)
    q_HTK, k_1SK = jnp.concatenate([q_HTC, q_HTR], -1), jnp.concatenate([latent_SC, k_SR], -1)[None]
    scale = (W_K_HKC.shape[1] + k_SR.shape[1]) ** -0.5 if scale is None else scale
    y_HTC = attention(q_HTK, k_1SK, latent_SC[None], mask, scale, bias=bias, soft_cap=soft_cap, sinks=sinks)
    return jnp.einsum("htc,hck->htk", y_HTC, W_V_HCK)

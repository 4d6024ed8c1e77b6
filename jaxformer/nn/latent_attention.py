"""Multi-head latent attention with its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.nn.attention import AXES, MultiHeadAttention
from jaxformer.ops.attention import project_heads
from jaxformer.ops.cache import LayerCache, decode_step
from jaxformer.ops.masks import Mask
from jaxformer.ops.norms import rms_norm

LATENT_EPS = 1e-6
"""ε of the norms of latents, which published configs do not set."""


class LatentAttention(MultiHeadAttention):
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1): `MultiHeadAttention` whose keys and values are
    projections of one normalised latent per position, `(C,)`, beside R features of the keys that are rotated, and the
    same for all heads.

    A cache holds the latents in the place of values, and the rotated features in the place of keys: C + R numbers per
    position. A decode step attends to them as `ops.latent.latent_attention` does; otherwise, keys and values are
    computed.

    Attributes:
      latent_dim: width C of the latents.
      rope_dim: width R of the rotated part of queries and keys, the last of `head_dim`.
      query_latent_dim: width of the latents that queries are projections of; None for queries from the input.
    """

    latent_dim: int = 512
    rope_dim: int = 64
    query_latent_dim: int | None = None

    axes: ClassVar[Mapping[str, str]] = {
        **AXES,
        **dict.fromkeys(("W_DQ", "W_DKV"), "embed -> latent"),
        "W_KR": "embed -> head_dim",
        **dict.fromkeys(("W_K", "W_V"), "latent -> heads head_dim"),
    }

    def queries(self, x_TD: jax.Array) -> jax.Array:
        """See `MultiHeadAttention`."""
        if self.query_latent_dim is not None:
            x_TD = self._latents("DQ", x_TD, self.query_latent_dim)
        return super().queries(x_TD)

    def keys_values(self, x_SD: jax.Array, positions_S: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return what a cache holds: the rotated part of the keys, `(1, S, R)`, and the latents, `(1, S, C)`."""
        latent_SC = self._latents("DKV", x_SD, self.latent_dim)
        D = x_SD.shape[-1]
        k_1SR = (x_SD @ self._parameter("W_KR", self._init(D), D, self.rope_dim))[None]
        return self._normalize_and_rotate("gamma_K", k_1SR, positions_S), latent_SC[None]

    def attend(self, q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, mask: Mask, **terms: Any) -> jax.Array:
        """See `MultiHeadAttention`; given the `keys_values`, from which those of each head are computed."""
        W_K_CHK, W_V_CHK = self._from_latents()
        k_HSK, v_HSK = (project_heads(v_GSK[0], W) for W in (W_K_CHK, W_V_CHK))
        k_HSR = jnp.broadcast_to(k_GSK, (*k_HSK.shape[:2], self.rope_dim))
        return super().attend(q_HTK, jnp.concatenate([k_HSK, k_HSR], axis=-1), v_HSK, mask, **terms)

    def decode_step(
        self,
        q_H1K: jax.Array,
        k_G1K: jax.Array,
        v_G1K: jax.Array,
        cache: LayerCache,
        slot: jax.Array | int,
        mask: jax.Array,
        **terms: Any,
    ) -> tuple[jax.Array, LayerCache]:
        """See `MultiHeadAttention`; given the `keys_values`."""
        W_K_CHK, W_V_CHK = self._from_latents()
        q_H1K, q_H1R = q_H1K[..., : -self.rope_dim], q_H1K[..., -self.rope_dim :]
        q_H1C = jnp.einsum("htk,chk->htc", q_H1K, W_K_CHK)  # qᵀ W_K c is the product of W_Kᵀ q and the latent
        y_H1C, cache = decode_step(q_H1R, k_G1K, v_G1K, cache, slot, mask, self.factor, q_of_values_H1K=q_H1C, **terms)
        return jnp.einsum("htc,chk->htk", y_H1C, W_V_CHK), cache

    def _latents(self, name: str, x_TD: jax.Array, width: int) -> jax.Array:
        """Return normalised latents `(T, width)`, by the name of their matrix and gain."""
        D = x_TD.shape[-1]
        latent_TC = x_TD @ self._parameter(f"W_{name}", self._init(D), D, width)
        return rms_norm(latent_TC, self._parameter(f"gamma_{name}", nn.initializers.ones, width), LATENT_EPS)

    def _from_latents(self) -> tuple[jax.Array, jax.Array]:
        """Return the projections of latents to keys and values, each `(C, H, K)`."""
        C, H = self.latent_dim, self.n_heads
        W_K_CHK = self._parameter("W_K", self._init(C), C, H, self.head_dim - self.rope_dim)
        return W_K_CHK, self._parameter("W_V", self._init(C), C, H, self.value_dim or self.head_dim)

    def _normalize_and_rotate(self, gain: str, x_HTK: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Return queries or keys with their last R features rotated."""
        if self.rope is None:
            return x_HTK
        rotated_HTR = self.rope(x_HTK[..., -self.rope_dim :], positions_T)
        return jnp.concatenate([x_HTK[..., : -self.rope_dim], rotated_HTR], axis=-1)

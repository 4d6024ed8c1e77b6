"""Multi-head attention with its parameters: self-attention and cross-attention."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.errors import UserError
from jaxformer.nn.capture import OUTPUT, capture_point, is_capturing
from jaxformer.nn.norms import RMSNorm
from jaxformer.nn.parameters import parameter
from jaxformer.ops.attention import attention, attention_scores, from_heads, mix, softmax, to_heads
from jaxformer.ops.cache import LayerCache, decode_step, read_layer, write_layer
from jaxformer.ops.masks import Mask, as_array
from jaxformer.ops.norms import rms_norm
from jaxformer.ops.positions import Llama3Scaling, check_positions, query_and_key_at, rope

NARROW, WIDE = (7.0, (0.4, 1.0)), (3.0, (0.05, 0.35))
"""At initialisation, the attention score of the key at a head's distance, where other scores have a magnitude of about
1; and the RoPE frequencies, in radians per position, that distinguish that distance from others."""
AXES = {
    **dict.fromkeys(("W_Q", "W_K", "W_V"), "embed -> heads head_dim"),
    **dict.fromkeys(("b_Q", "b_K", "b_V"), "heads 1 head_dim"),
    **dict.fromkeys(("gamma_Q", "gamma_K"), "head_dim"),
    "W_O": "heads head_dim -> embed",
    "b_O": "embed",
}
"""Axes of the parameters of `MultiHeadAttention`; see `nn.parameters.parameter`."""


def biases_at(
    distance: int, head_dim: int, rope_base: float, scale: float, is_wide: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the initial `b_Q` and `b_K`, each `(K,)` float32, of a head that attends to a distance. The biases by
    themselves yield the score of `NARROW` or `WIDE` there.

    Raises:
      UserError: see `query_and_key_at`.
    """
    score, frequencies = WIDE if is_wide else NARROW
    query_K, key_K = query_and_key_at(distance, head_dim, rope_base, *frequencies)
    norm = sqrt(score / scale)
    return norm * query_K, norm * key_K


class MultiHeadAttention(nn.Module):
    """Multi-head attention with four projections: queries, keys, values, output (Vaswani et al. 2017, section 3.2.2).
    Cross-attention takes its keys and values from another sequence, the source.

    Attributes:
      n_heads: query heads H.
      head_dim: width K of a head's queries and keys, and of its values unless `value_dim` is set.
      n_kv_heads: key/value heads G, shared by the query heads; G divides H. None for H.
      scaled: divide the scores by √K.
      init_std: standard deviation of every projection at initialisation; None for 1/√D.
      output_projection: multiply the concatenated heads by `W_O`; otherwise the output is the heads themselves, `(T,
        H·K)`.
      bias: add `b_Q`, `b_K`, `b_V` and, with `W_O`, `b_O`; all 0 at initialisation.
      qk_norm: RMS-normalise every query and key, with learned gains (after Henry et al. 2020, who use the l2 norm).
      rope_base: base of RoPE, which rotates queries and keys by their position; None for no rotation.
      attention: implementation, with the signature of `ops.attention.attention`. With that function itself, a decode
        step uses the faster `ops.cache.decode_step`.
      rope_scaling: divisor of the positions in RoPE, or scaling of its frequencies.
      norm_eps: ε of the norms of queries and keys.
      output_bias: add `b_O`; None to follow `bias`.
      score_scale: factor applied to the scores instead of 1/√K.
      sum_heads: without `W_O`, sum the heads instead of concatenating them; the output is `(T, K)`.
      value_dim: width of a head's values and output; None for head_dim. Shape suffixes call it K as well.
      distances: distances of the keys that the first heads attend to at initialisation, regardless of content, in
        positions back, or ahead if negative. They set the initial b_Q and b_K, which need `bias` and `rope_base` and,
        unlike the slopes of ALiBi (Press et al. 2022), are trained.
      is_wide: attend less sharply, to some 10 positions around each distance.
    """

    n_heads: int
    head_dim: int
    n_kv_heads: int | None = None
    scaled: bool = True
    init_std: float | None = None
    output_projection: bool = True
    bias: bool = False
    qk_norm: bool = False
    rope_base: float | None = None
    attention: Callable[..., jax.Array] = attention
    rope_scaling: float | Llama3Scaling = 1.0
    norm_eps: float = RMSNorm.eps
    output_bias: bool | None = None
    score_scale: float | None = None
    sum_heads: bool = False
    value_dim: int | None = None
    distances: tuple[int, ...] = ()
    is_wide: bool = False

    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array | None = None,
        mask: Mask = None,
        cache: LayerCache | None = None,
        slot: jax.Array | int = 0,
        source: jax.Array | LayerCache | None = None,
        token_values: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Map `(T, D)` to `(T, D)`, and the cache, if given, to the cache with keys and values written at `slot`.

        Args:
          positions_T: int32 positions for RoPE; by default 0, 1, 2, …
          mask: keys that a query may attend to, True for visible, as in `ops.attention.attention`; by default all.
          source: sequence `(S, D)` to attend to instead of x_TD, or a cache that holds its `keys_values`; `cache` must
            then be None.
          token_values: additional values `(G, T, K)` for self-attention, added to those of x_TD before they are cached.

        Raises:
          UserError: `x_TD` does not have 2 axes.
          ValueError: positions or mask do not have the shape that `x_TD` requires.
          TypeError: the mask is not boolean.
        """
        if x_TD.ndim != 2:
            raise UserError(f"expected an input of shape (T, D), got {x_TD.shape}; use jax.vmap for a batch.")
        T, D = x_TD.shape
        H = self.n_heads
        positions_T = jnp.arange(T) if positions_T is None else check_positions(positions_T, T)
        q_HTK = self._add_bias(to_heads(x_TD, self._projection("Q", D, H)), "Q")
        if isinstance(source, LayerCache):
            k_GTK, v_GTK = read_layer(source, x_TD.dtype)
        elif source is not None:
            k_GTK, v_GTK = self.keys_values(source, jnp.arange(len(source)))
        else:
            k_GTK, v_GTK = self.keys_values(x_TD, positions_T)
        if token_values is not None:
            v_GTK = v_GTK + token_values
        q_HTK = self._normalize_and_rotate(q_HTK, "Q", positions_T)
        if cache is not None and T == 1 and self.attention is attention:
            assert isinstance(mask, jax.Array)  # computed from the positions in the cache
            y_HTK, cache = decode_step(q_HTK, k_GTK, v_GTK, cache, slot, mask, self.scale)
        else:
            if cache is not None:
                cache = write_layer(cache, k_GTK, v_GTK, slot)
                k_GTK, v_GTK = read_layer(cache, x_TD.dtype)
            y_HTK = self.attend(q_HTK, k_GTK, v_GTK, mask)
        if not self.output_projection:
            y_TD = y_HTK.sum(axis=0) if self.sum_heads else y_HTK.swapaxes(0, 1).reshape(T, -1)
            return capture_point(self, OUTPUT, y_TD), cache
        W_HKD = self._parameter("W_O", self._init(D), H, self._width("V"), D)
        y_TD = from_heads(y_HTK, W_HKD)
        if self.bias if self.output_bias is None else self.output_bias:
            y_TD = y_TD + self._parameter("b_O", nn.initializers.zeros, D)
        return capture_point(self, OUTPUT, y_TD), cache

    def keys_values(self, x_SD: jax.Array, positions_S: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of a sequence, each `(G, S, K)`."""
        D, G = x_SD.shape[-1], self.n_kv_heads or self.n_heads
        k_GSK, v_GSK = (self._add_bias(to_heads(x_SD, self._projection(name, D, G)), name) for name in "KV")
        return self._normalize_and_rotate(k_GSK, "K", positions_S), v_GSK

    def _projection(self, name: str, d_model: int, n_heads: int) -> jax.Array:
        """Return `W_Q`, `W_K` or `W_V`, `(D, H, K)`."""
        return self._parameter(f"W_{name}", self._init(d_model), d_model, n_heads, self._width(name))

    def _width(self, name: str) -> int:
        """Return the width of a head's queries, keys or values."""
        return self.value_dim or self.head_dim if name == "V" else self.head_dim

    def _add_bias(self, y_HTK: jax.Array, name: str) -> jax.Array:
        """Return queries, keys or values with `b_Q`, `b_K` or `b_V` added, if `bias` is set."""
        if not self.bias:
            return y_HTK
        init = self._init_bias(name) if self.distances and name != "V" else nn.initializers.zeros
        return y_HTK + self._parameter(f"b_{name}", init, len(y_HTK), 1, self._width(name))

    def _init_bias(self, name: str) -> nn.initializers.Initializer:
        """Return the initialiser of `b_Q` or `b_K`, under which the scores of the first heads peak at their distances.

        The biases of the other heads, and of keys that only they attend to, start at zero."""
        assert self.rope_base is not None  # scores do not depend on distances otherwise
        pairs = [biases_at(d, self.head_dim, self.rope_base, self.scale, self.is_wide) for d in self.distances]
        queries, keys = zip(*pairs, strict=True)
        per_key_head = self.n_heads // (self.n_kv_heads or self.n_heads)
        biases = queries if name == "Q" else keys[::per_key_head]

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
            b_H1K = jnp.zeros(shape, dtype)
            return b_H1K.at[: len(biases), 0].set(jnp.stack(biases).astype(dtype))

        return init

    def _normalize_and_rotate(self, x_HTK: jax.Array, name: str, positions_T: jax.Array) -> jax.Array:
        """Return queries or keys after `qk_norm` and RoPE, `(H, T, K)`."""
        if self.qk_norm:
            gamma_K = self._parameter(f"gamma_{name}", nn.initializers.ones, self.head_dim)
            x_HTK = rms_norm(x_HTK, gamma_K, self.norm_eps)
        return x_HTK if self.rope_base is None else rope(x_HTK, positions_T, self.rope_base, self.rope_scaling)

    @nn.compact
    def _parameter(self, name: str, init: nn.initializers.Initializer, *shape: int) -> jax.Array:
        """Return a parameter. Linen allows one compact method per class, and `keys_values` is also called directly."""
        return parameter(self, name, init, shape, AXES[name])

    def _init(self, d_model: int) -> nn.initializers.Initializer:
        return nn.initializers.normal(1 / sqrt(d_model) if self.init_std is None else self.init_std)

    def attend(self, q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, mask: Mask) -> jax.Array:
        """Return the attention output of the heads, `(H, T, K)`. Not called for a decode step."""
        q_HTK, k_GSK, v_GSK = (
            capture_point(self, name, x) for name, x in (("queries", q_HTK), ("keys", k_GSK), ("values", v_GSK))
        )
        weights_HTS = self._replaced_weights(q_HTK, k_GSK, mask) if is_capturing() else None
        if weights_HTS is None:
            y_HTK = self.attention(q_HTK, k_GSK, v_GSK, mask, self.scale)
        else:
            y_HTK = mix(weights_HTS, v_GSK)
        return capture_point(self, "heads", y_HTK)

    def _replaced_weights(self, q_HTK: jax.Array, k_GSK: jax.Array, mask: Mask) -> jax.Array | None:
        """Pass scores, mask and weights, which no attention implementation returns, to their capture points. Return the
        weights `(H, T, S)` if one of the three was replaced, else None."""
        scores_HTS = attention_scores(q_HTK, k_GSK, self.scale)
        visible_TS = as_array(mask, *scores_HTS.shape[1:])
        new_scores_HTS = capture_point(self, "scores", scores_HTS)
        new_visible_TS = capture_point(self, "visible", visible_TS)
        weights_HTS = softmax(new_scores_HTS, mask if new_visible_TS is visible_TS else new_visible_TS)
        new_weights_HTS = capture_point(self, "weights", weights_HTS)
        is_same = new_scores_HTS is scores_HTS and new_visible_TS is visible_TS and new_weights_HTS is weights_HTS
        return None if is_same else new_weights_HTS

    @property
    def scale(self) -> float:
        """Factor applied to the scores."""
        if self.score_scale is not None:
            return self.score_scale
        return 1 / sqrt(self.head_dim) if self.scaled else 1.0

"""Multi-head attention with its parameters: self-attention and cross-attention."""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any, ClassVar, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.nn.capture import OUTPUT, capture_point, is_capturing
from jaxformer.nn.norms import RMSNorm
from jaxformer.nn.parameters import check_name, parameter
from jaxformer.ops.attention import attention, attention_scores, merge_heads, project_heads, softmax, weighted_sum
from jaxformer.ops.bias import Bias, check_cached_bias
from jaxformer.ops.cache import LayerCache, decode_step, read_layer, write_layer
from jaxformer.ops.masks import Mask, as_array
from jaxformer.ops.norms import layer_norm, rms_norm
from jaxformer.ops.positions import RoPE, check_positions

QKNorm = Literal["head", "width", "layernorm"]
"""Names of norms of queries and keys in configs; see `MultiHeadAttention`."""
AXES = {
    **dict.fromkeys(("W_Q", "W_K", "W_V"), "embed -> heads head_dim"),
    **dict.fromkeys(("b_Q", "b_K", "b_V"), "heads 1 head_dim"),
    "W_O": "heads head_dim -> embed",
    "b_O": "embed",
    "sinks": "heads",
}
"""Axes of parameters by name; see `nn.parameters.parameter`."""


class MultiHeadAttention(nn.Module):
    """Multi-head attention with four projections: queries, keys, values, output (Vaswani et al. 2017, section 3.2.2).
    Cross-attention takes its keys and values from another sequence, the source.

    Attributes:
      n_heads: query heads H.
      head_dim: width K of a head's queries and keys, and of its values unless `value_dim` is set.
      n_kv_heads: key/value heads G, shared by the query heads; G divides H. None for H.
      value_dim: width of a head's values and output; None for head_dim. Shape suffixes call it K as well.
      scale: factor applied to the scores; None for 1/√K.
      init_std: standard deviation of every projection at initialisation; None for 1/√D.
      bias: add `b_Q`, `b_K`, `b_V` and `b_O`, all 0 at initialisation.
      output_bias: add `b_O`; None to follow `bias`.
      qk_norm: normalise every query and key, with learned gains (after Henry et al. 2020, who use the l2 norm).
      qk_norm_kind: 'head' for RMSNorm of each head by itself, with a gain that heads share, `gamma_Q` and `gamma_K`
        `(K,)`; 'width' for one norm of all heads together (OLMo 2), or 'layernorm' for LayerNorm of each head without a
        bias (Cohere), both with gains `(H, K)` and `(G, K)`.
      norm_eps: ε of these norms.
      rope: rotation of queries and keys by their position; None for no rotation.
      soft_cap: bound of the scores; None for no bound. See `ops.attention.attention`.
      sinks: add a learned logit per head to the denominator of the softmax, `sinks`, 0 at initialisation.
      attention: implementation, with the signature of `ops.attention.attention`. With that function itself, a decode
        step uses the faster `ops.cache.decode_step`, unless activations are captured.
    """

    n_heads: int
    head_dim: int
    n_kv_heads: int | None = None
    value_dim: int | None = None
    scale: float | None = None
    init_std: float | None = None
    bias: bool = False
    output_bias: bool | None = None
    qk_norm: bool = False
    qk_norm_kind: QKNorm = "head"
    norm_eps: float = RMSNorm.eps
    rope: RoPE | None = None
    soft_cap: float | None = None
    sinks: bool = False
    attention: Callable[..., jax.Array] = attention

    axes: ClassVar[Mapping[str, str]] = AXES

    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array | None = None,
        mask: Mask = None,
        cache: LayerCache | None = None,
        slot: jax.Array | int = 0,
        source: jax.Array | LayerCache | None = None,
        score_bias: Bias = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Map `(T, D)` to `(T, D)`, and the cache, if given, to the cache with keys and values written at `slot`.

        Args:
          positions_T: int32 positions for RoPE; by default 0, 1, 2, …
          mask: keys that a query may attend to, True for visible, as in `ops.attention.attention`; by default all.
          source: sequence `(S, D)` to attend to instead of x_TD, or a cache that holds its `keys_values`; `cache` must
            then be None.
          score_bias: bias of the scores, as in `ops.attention.attention`; with a cache, an array from positions, such
            as `ALiBi(slopes)(positions_T, cache.position_S)`.

        Raises:
          ValueError: the input is a batch, or positions or mask do not have the shape that it requires.
          TypeError: the mask is not boolean, or `score_bias` not an array with a cache.
        """
        q_HTK = self.queries(x_TD)
        positions_T = jnp.arange(len(x_TD)) if positions_T is None else check_positions(positions_T, len(x_TD))
        if isinstance(source, LayerCache):
            k_GSK, v_GSK = read_layer(source, x_TD.dtype)
        elif source is not None:
            k_GSK, v_GSK = self.keys_values(source, jnp.arange(len(source)))
        else:
            k_GSK, v_GSK = self.keys_values(x_TD, positions_T)
        # Keys are rotated by their own positions before they are cached, so they never have to be rotated again.
        q_HTK = self._normalize_and_rotate("gamma_Q", q_HTK, positions_T)
        terms = self._terms(score_bias)
        if cache is not None and len(x_TD) == 1 and self.attention is attention and not is_capturing():
            assert isinstance(mask, jax.Array)  # computed from the positions in the cache
            y_HTK, cache = self.decode_step(q_HTK, k_GSK, v_GSK, cache, slot, mask, **terms)
        else:
            if cache is not None:
                check_cached_bias(score_bias)
                # Written first, so that the queries also attend to each other; the mask hides slots still empty.
                cache = write_layer(cache, k_GSK, v_GSK, slot)
                k_GSK, v_GSK = read_layer(cache, x_TD.dtype)
            y_HTK = self.attend(q_HTK, k_GSK, v_GSK, mask, **terms)
        return capture_point(self, OUTPUT, self.merge_heads(y_HTK, x_TD.shape[1])), cache

    def queries(self, x_TD: jax.Array) -> jax.Array:
        """Return the queries `(H, T, K)`, before `qk_norm` and RoPE."""
        return self._project("W_Q", "b_Q", x_TD, self.n_heads, self.head_dim)

    def keys_values(self, x_SD: jax.Array, positions_S: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of a sequence, each `(G, S, K)`."""
        G = self.n_kv_heads or self.n_heads
        k_GSK = self._project("W_K", "b_K", x_SD, G, self.head_dim)
        v_GSK = self._project("W_V", "b_V", x_SD, G, self.value_dim or self.head_dim)
        return self._normalize_and_rotate("gamma_K", k_GSK, positions_S), v_GSK

    def attend(self, q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, mask: Mask, **terms: Any) -> jax.Array:
        """Return the attention output of the heads, `(H, T, K)`. Not called for a decode step."""
        q_HTK, k_GSK, v_GSK = (capture_point(self, name, x) for name, x in (("q", q_HTK), ("k", k_GSK), ("v", v_GSK)))
        pattern_HTS = self._replaced_pattern(q_HTK, k_GSK, mask, **terms) if is_capturing() else None
        if pattern_HTS is None:
            y_HTK = self.attention(q_HTK, k_GSK, v_GSK, mask, self.factor, **terms)
        else:
            y_HTK = weighted_sum(pattern_HTS, v_GSK)
        return capture_point(self, "z", y_HTK)

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
        """Return the attention output of the heads for one query, `(H, 1, K)`, and the updated cache."""
        return decode_step(q_H1K, k_G1K, v_G1K, cache, slot, mask, self.factor, **terms)

    def merge_heads(self, y_HTK: jax.Array, d_model: int) -> jax.Array:
        """Return the concatenated heads times `W_O`, `(T, D)`."""
        K = self.value_dim or self.head_dim
        y_TD = merge_heads(y_HTK, self._parameter("W_O", self._init(d_model), self.n_heads, K, d_model))
        if self.bias if self.output_bias is None else self.output_bias:
            y_TD = y_TD + self._parameter("b_O", nn.initializers.zeros, d_model)[None]
        return y_TD

    def init_bias(self, name: str) -> nn.initializers.Initializer:
        """Return the initialiser of `b_Q`, `b_K` or `b_V`."""
        return nn.initializers.zeros

    def _project(self, weight: str, bias: str, x_TD: jax.Array, n_heads: int, width: int) -> jax.Array:
        """Return queries, keys or values, `(H, T, K)`, by the names of their parameters."""
        D = x_TD.shape[-1]
        y_HTK = project_heads(x_TD, self._parameter(weight, self._init(D), D, n_heads, width))
        return y_HTK + self._parameter(bias, self.init_bias(bias), n_heads, 1, width) if self.bias else y_HTK

    def _normalize_and_rotate(self, gain: str, x_HTK: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Return queries or keys after `qk_norm`, by the name of its gain, and RoPE: `(H, T, K)`."""
        if self.qk_norm:
            x_HTK = self._normalize(gain, x_HTK)
        return x_HTK if self.rope is None else self.rope(x_HTK, positions_T)

    def _normalize(self, gain: str, x_HTK: jax.Array) -> jax.Array:
        """Return queries or keys after `qk_norm`, by the name of its gain, `(H, T, K)`."""
        check_name("qk_norm_kind", self.qk_norm_kind, get_args(QKNorm))
        if self.qk_norm_kind == "head":
            return rms_norm(x_HTK, self._parameter(gain, nn.initializers.ones, self.head_dim), self.norm_eps)
        H, T, K = x_HTK.shape
        gamma_HK = self._parameter(gain, nn.initializers.ones, H, K)
        if self.qk_norm_kind == "layernorm":
            return layer_norm(x_HTK, eps=self.norm_eps) * gamma_HK[:, None, :].astype(x_HTK.dtype)
        x_TD = rms_norm(x_HTK.swapaxes(0, 1).reshape(T, H * K), gamma_HK.reshape(-1), self.norm_eps)
        return x_TD.reshape(T, H, K).swapaxes(0, 1)

    @nn.compact
    def _parameter(self, name: str, init: nn.initializers.Initializer, *shape: int) -> jax.Array:
        """Return a parameter. Linen allows one compact method per class, and `keys_values` is also called directly."""
        axes = ("head_dim", "heads head_dim")[len(shape) - 1] if name.startswith("gamma") else self.axes[name]
        return parameter(self, name, init, shape, axes)

    def _init(self, d_model: int) -> nn.initializers.Initializer:
        return nn.initializers.normal(1 / sqrt(d_model) if self.init_std is None else self.init_std)

    def _terms(self, score_bias: Bias) -> dict[str, Any]:
        """Return the arguments of attention that change its scores; none of them is None."""
        sinks_H = self._parameter("sinks", nn.initializers.zeros, self.n_heads) if self.sinks else None
        terms = {"bias": score_bias, "soft_cap": self.soft_cap, "sinks": sinks_H}
        return {name: value for name, value in terms.items() if value is not None}

    def _replaced_pattern(
        self, q_HTK: jax.Array, k_GSK: jax.Array, mask: Mask, sinks: jax.Array | None = None, **terms: Any
    ) -> jax.Array | None:
        """Pass scores, mask and pattern, which no attention implementation returns, to their capture points. Return the
        pattern `(H, T, S)` if one of the three was replaced, else None."""
        scores_HTS = attention_scores(q_HTK, k_GSK, self.factor, **terms)
        visible_TS = as_array(mask, *scores_HTS.shape[1:])
        new_scores_HTS = capture_point(self, "attn_scores", scores_HTS)
        new_visible_TS = capture_point(self, "mask", visible_TS)
        pattern_HTS = softmax(new_scores_HTS, mask if new_visible_TS is visible_TS else new_visible_TS, sinks)
        new_pattern_HTS = capture_point(self, "pattern", pattern_HTS)
        is_same = new_scores_HTS is scores_HTS and new_visible_TS is visible_TS and new_pattern_HTS is pattern_HTS
        return None if is_same else new_pattern_HTS

    @property
    def factor(self) -> float:
        """Factor applied to the scores."""
        return 1 / sqrt(self.head_dim) if self.scale is None else self.scale

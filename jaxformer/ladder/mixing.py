"""Weighted sums over positions without a softmax: the steps from a fixed matrix to attention."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.nn.capture import OUTPUT, capture_point
from jaxformer.nn.parameters import parameter
from jaxformer.ops.attention import attention_scores
from jaxformer.ops.masks import Causal


class Mixing(nn.Module):
    """Weighted sums over positions, `(T, D)` to `(T, D)`, with weights `(T, T)` of one of these kinds:

    - 'static': A, one matrix for all sequences.
    - 'dynamic': X B, where the weights of a position depend on its own features.
    - 'gram': X Xᵀ / √D, where the weights depend on the features of both positions.
    - 'qkv': X W_Q (X W_K)ᵀ / √D, with X W_V instead of X: attention without its softmax (Katharopoulos et al. 2020).

    All are divided by √n, so that a sum over n independent positions is about as large as one of them.

    Attributes:
      kind: one of these kinds.
      n_positions: maximum number n of positions.
      causal: set the weights of later positions to 0.
    """

    kind: str
    n_positions: int
    causal: bool = True

    @nn.compact
    def __call__(self, x_TD: jax.Array) -> jax.Array:
        (T, D), n = x_TD.shape, self.n_positions
        q_TD = k_TD = v_TD = x_TD
        if self.kind == "static":
            A_SS = parameter(self, "A", nn.initializers.normal(1.0), (n, n), "queries -> keys")
            scores_TT = A_SS[:T][:, :T]
        elif self.kind == "dynamic":
            scores_TT = (x_TD @ self._matrix("B", D, n, "embed -> keys"))[:, :T]
        else:
            if self.kind == "qkv":
                q_TD, k_TD, v_TD = (x_TD @ self._matrix(f"W_{name}", D, D, "embed -> head_dim") for name in "QKV")
            (scores_TT,) = attention_scores(q_TD[None], k_TD[None], D**-0.5)
        weights_TT = scores_TT * n**-0.5
        if self.causal:
            weights_TT = jnp.where(Causal().array(T, T), weights_TT, 0)
        weights_TT = capture_point(self, "mixing_weights", weights_TT.astype(x_TD.dtype))
        return capture_point(self, OUTPUT, weights_TT @ v_TD)

    def _matrix(self, name: str, d_in: int, d_out: int, axes: str) -> jax.Array:
        return parameter(self, name, nn.initializers.normal(d_in**-0.5), (d_in, d_out), axes)

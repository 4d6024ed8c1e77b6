"""Embedding of the patches of images and videos."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.nn.capture import OUTPUT, capture_point
from jaxformer.nn.mlp import uniform_fan_in
from jaxformer.nn.parameters import parameter
from jaxformer.ops.broadcasting import expand


class PatchEmbedding(nn.Module):
    """Linear layer, `W_patch` and `b_patch`: patches `(…, P)` to `(…, D)`, in the dtype of the weights."""

    d_model: int

    @nn.compact
    def __call__(self, patches: jax.Array) -> jax.Array:
        init = uniform_fan_in(patches.shape[-1])
        W_PD = parameter(self, "W_patch", init, (patches.shape[-1], self.d_model), "pixels -> embed")
        b_D = parameter(self, "b_patch", init, (self.d_model,), "embed")
        return capture_point(self, OUTPUT, patches.astype(b_D.dtype) @ W_PD + expand(b_D, patches.ndim))


class LearnedPositions(nn.Module):
    """Learned position embeddings, added to a sequence `(…, N, D)`.

    Before it come learned tokens, such as a class token, the first rows of `W_pos` (Dosovitskiy et al. 2021, equation
    1). In the paper, each is the sum of a position embedding and another vector; one vector suffices.

    Attributes:
      length: N.
      n_tokens: number of learned tokens, by which the output is longer.
      init_std: standard deviation of `W_pos` at initialisation.
    """

    length: int
    n_tokens: int = 0
    init_std: float = 0.02

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if x.shape[-2] != self.length:
            raise ValueError(f"expected a sequence of {self.length} positions, got shape {x.shape}")
        shape = (self.length + self.n_tokens, x.shape[-1])
        W_pos = parameter(self, "W_pos", nn.initializers.normal(self.init_std), shape, "positions -> embed")
        before = [(0, 0)] * (x.ndim - 2) + [(self.n_tokens, 0), (0, 0)]
        return capture_point(self, OUTPUT, jnp.pad(x, before) + expand(W_pos, x.ndim))

"""Norms with their parameters."""

from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax

from jaxformer.ops import norms


class RMSNorm(nn.Module):
    """`ops.norms.rms_norm` with a learned gain `gamma`, 1 at first. `(…, D)` to `(…, D)`."""

    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return norms.rms_norm(x, self.param("gamma", nn.initializers.ones, x.shape[-1:]), self.eps)


class LayerNorm(nn.Module):
    """`ops.norms.layer_norm` with a learned gain `gamma`, 1 at first, and shift `beta`, 0 at first."""

    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gamma = self.param("gamma", nn.initializers.ones, x.shape[-1:])
        beta = self.param("beta", nn.initializers.zeros, x.shape[-1:])
        return norms.layer_norm(x, gamma, beta, self.eps)


Norm = Literal["rmsnorm", "layernorm"]
"""As configs name them."""
NORMS: dict[str, Callable[..., nn.Module]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
"""The norms by the names that configs use."""

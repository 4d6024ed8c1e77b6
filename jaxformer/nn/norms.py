"""Norm modules with learned parameters."""

from typing import Literal

import flax.linen as nn
import jax

from jaxformer.nn.capture import OUTPUT, capture_point
from jaxformer.nn.parameters import parameter
from jaxformer.ops import norms


class RMSNorm(nn.Module):
    """`ops.norms.rms_norm` with a learned gain `gamma`, 1 at initialisation. `(…, D)` to `(…, D)`."""

    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gamma = parameter(self, "gamma", nn.initializers.ones, x.shape[-1:], "embed")
        return capture_point(self, OUTPUT, norms.rms_norm(x, gamma, self.eps))


class LayerNorm(nn.Module):
    """`ops.norms.layer_norm` with a learned gain `gamma`, 1 at initialisation, and a learned shift `beta`, 0 at
    initialisation."""

    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gamma = parameter(self, "gamma", nn.initializers.ones, x.shape[-1:], "embed")
        beta = parameter(self, "beta", nn.initializers.zeros, x.shape[-1:], "embed")
        return capture_point(self, OUTPUT, norms.layer_norm(x, gamma, beta, self.eps))


def epsilon(norm: str, eps: float | None) -> float:
    """Return `eps`, or a norm's default ε if it is None."""
    return NORMS[norm].eps if eps is None else eps


Norm = Literal["rmsnorm", "layernorm"]
"""Names of norms in configs."""
NORMS: dict[str, type[RMSNorm | LayerNorm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
"""Norm modules by name."""

"""Norm modules with learned parameters."""

from typing import ClassVar, Literal

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
    vectors: ClassVar[tuple[str, ...]] = ("gamma", "beta")
    """Names of its parameters."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = {"gamma": nn.initializers.ones, "beta": nn.initializers.zeros}
        vectors = {name: parameter(self, name, init[name], x.shape[-1:], "embed") for name in self.vectors}
        return capture_point(self, OUTPUT, norms.layer_norm(x, **vectors, eps=self.eps))


class LayerNormNoBias(LayerNorm):
    """`LayerNorm` with the gain alone (Cohere)."""

    vectors: ClassVar[tuple[str, ...]] = ("gamma",)


class LayerNormNoParameters(LayerNorm):
    """`LayerNorm` without parameters (OLMo)."""

    vectors: ClassVar[tuple[str, ...]] = ()


def epsilon(norm: str, eps: float | None) -> float:
    """Return `eps`, or a norm's default ε if it is None."""
    return NORMS[norm].eps if eps is None else eps


Norm = Literal["rmsnorm", "layernorm", "layernorm_no_bias", "layernorm_no_parameters"]
"""Names of norms in configs."""
NORMS: dict[str, type[RMSNorm | LayerNorm]] = {
    "rmsnorm": RMSNorm,
    "layernorm": LayerNorm,
    "layernorm_no_bias": LayerNormNoBias,
    "layernorm_no_parameters": LayerNormNoParameters,
}
"""Norm modules by name."""

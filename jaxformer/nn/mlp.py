"""The multi-layer perceptron."""

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxformer.nn.capture import OUTPUT, capture_point, is_capturing
from jaxformer.nn.parameters import check_name, parameter
from jaxformer.ops.broadcasting import expand
from jaxformer.ops.experts import clamped_swiglu

Activation = Literal[
    "relu", "squared_relu", "gelu", "gelu_exact", "quick_gelu", "silu", "swiglu", "geglu", "geglu_exact",
    "clamped_swiglu",
]  # fmt: skip
"""Names of MLP activations in configs."""
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
    "swiglu": jax.nn.silu,
    "geglu": jax.nn.gelu,
    "geglu_exact": partial(jax.nn.gelu, approximate=False),
    "clamped_swiglu": partial(clamped_swiglu, y=0.0),
    "tanh": jnp.tanh,
}
"""Activations by name. 'swiglu' and 'geglu' are gated: silu(x W_gate) · (x W), or the same with gelu (Shazeer 2020),
and 'geglu_exact' with gelu_exact (ModernBERT); 'clamped_swiglu' is `ops.experts.clamped_swiglu` (GPT-OSS), here for
x W = 0.
'gelu' is the tanh approximation of GPT-2, 'gelu_exact' the exact function, as in BERT, and 'quick_gelu' the sigmoid
approximation of CLIP (Hendrycks and Gimpel 2016); 'silu' is x · sigmoid(x)."""
GATED = ("swiglu", "geglu", "geglu_exact", "clamped_swiglu")
"""Activations of gated MLPs."""
RECOMPUTED = ("gelu", "geglu")
"""Activations that the backward pass recomputes from the matmul's output before the bias: it reads that anyway, whereas
the biased sum and its tanh would have to be written and read in addition."""


_AXES = ("embed", "hidden")
"""Axes before the first layer, after it, and so on alternately: of two layers, the first splits its output over devices
and the second its input (Shoeybi et al. 2019, section 3)."""


def uniform_fan_in(fan_in: int) -> nn.initializers.Initializer:
    """Return the initialiser U(-1/√fan_in, 1/√fan_in), which `torch.nn.Linear` uses for weight and bias."""

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = float) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -1 / sqrt(fan_in), 1 / sqrt(fan_in))

    return init


class MLP(nn.Module):
    """Linear layers with an activation between them: `(…, D)` to `(…, d_out)`, by default D.

    Its parameters are `W_1`, `b_1`, … in order of use, and `W_gate_i` in addition to `W_i` for a gated activation, with
    `gate_bias` also `b_gate_i`.
    """

    hidden: tuple[int, ...]
    d_out: int | None = None
    activation: str = "relu"
    bias: bool = True
    gate_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        check_name("activation", self.activation, ACTIVATIONS)
        d_out = x.shape[-1] if self.d_out is None else self.d_out
        for i in range(1, len(self.hidden) + 1):
            x = self._hidden_layer(x, i)
        return capture_point(self, OUTPUT, self._linear(x, len(self.hidden) + 1, d_out))

    def _hidden_layer(self, x: jax.Array, i: int) -> jax.Array:
        """Return the activations of the i-th hidden layer, counted from 1, `(…, hidden[i - 1])`."""
        width, number = self.hidden[i - 1], f"_{i}" if len(self.hidden) > 1 else ""
        y, b = self._matmul(x, f"W_{i}", i, width), self._bias(x, f"b_{i}", i, width)
        if self.activation in GATED:
            b_gate = self._bias(x, f"b_gate_{i}", i, width) if self.gate_bias else None
            gate = capture_point(self, f"pre{number}", _add(self._matmul(x, f"W_gate_{i}", i, width), b_gate))
            y = capture_point(self, f"pre_linear{number}", _add(y, b))
            is_clamped = self.activation == "clamped_swiglu"
            y = clamped_swiglu(gate, y) if is_clamped else activate(self.activation, gate) * y
            return capture_point(self, f"post{number}", y)
        if is_capturing():  # else the sum is recomputed, not stored
            y, b = capture_point(self, f"pre{number}", _add(y, b)), None
        return capture_point(self, f"post{number}", activate(self.activation, y, b))

    def _linear(self, x: jax.Array, i: int, width: int) -> jax.Array:
        return _add(self._matmul(x, f"W_{i}", i, width), self._bias(x, f"b_{i}", i, width))

    def _bias(self, x: jax.Array, name: str, i: int, width: int) -> jax.Array | None:
        return parameter(self, name, uniform_fan_in(x.shape[-1]), (width,), _AXES[i % 2]) if self.bias else None

    def _matmul(self, x: jax.Array, name: str, i: int, width: int) -> jax.Array:
        axes = f"{_AXES[(i - 1) % 2]} -> {_AXES[i % 2]}"
        return x @ parameter(self, name, uniform_fan_in(x.shape[-1]), (x.shape[-1], width), axes)


def activate(activation: str, y: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """Return the activation function applied to y + b, in the shape of y; see `RECOMPUTED`."""

    def act(y: jax.Array, b: jax.Array | None) -> jax.Array:
        return ACTIVATIONS[activation](_add(y, b))

    return (jax.checkpoint(act) if activation in RECOMPUTED else act)(y, b)


def _add(y: jax.Array, b: jax.Array | None) -> jax.Array:
    """Return y + b, or y without a bias."""
    return y if b is None else y + expand(b, y.ndim)

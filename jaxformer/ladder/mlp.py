"""Language models without attention: the first rungs of the ladder, from a 1-gram model to attention without its
softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.config import TokenModelConfig
from jaxformer.config.fields import Size
from jaxformer.contract import Contract
from jaxformer.errors import UserError
from jaxformer.ladder.mixing import Mixing
from jaxformer.models.inputs import check_length
from jaxformer.nn.capture import capture_point
from jaxformer.nn.embedding import Embedding
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.mlp import MLP


@dataclass(frozen=True)
class MLPConfig(TokenModelConfig):
    """Shape of an `MLPLanguageModel`."""

    d_model: Size = 256
    """Width of the embedding."""
    d_ff: tuple[Size, ...] = (2048, 2048)
    """Widths of the hidden layers."""
    mixing: Literal["none", "concatenate", "static", "dynamic", "gram", "qkv"] = "none"
    """Input of the MLP: each position separately (none), all positions concatenated, or weighted sums over positions,
    as in `nn.mixing.Mixing`."""
    causal: bool = True
    """Mix each position only with those before it. If false, the model reads the tokens that it predicts: it learns to
    copy, and cannot generate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.causal and self.mixing in ("none", "concatenate"):
            raise UserError(f"causal is False, but mixing {self.mixing!r} has no mask; omit it.")

    @property
    def n_predicted(self) -> int:
        return 1 if self.mixing == "concatenate" else self.context_length

    @property
    def contract(self) -> Contract:
        is_fixed = self.mixing == "concatenate"
        return replace(
            super().contract, max_tokens=self.context_length, fixed_length=is_fixed, scaled_width=self.d_model
        )

    def build(self, execution: Execution = PLAIN) -> MLPLanguageModel:
        """Return the module. `execution` has no effect, because there are no blocks and no attention."""
        return MLPLanguageModel(self)


class MLPLanguageModel(nn.Module):
    """Embedding, positions, mixing and MLP, from tokens `(T,)` to logits `(T, V)`.

    Applied to each position separately, it is a 1-gram model. Applied to all positions concatenated, it reads a full
    window and predicts the next token, `(context_length,)` to `(1, V)`; its first matrix grows with the square of
    T·D."""

    config: MLPConfig

    def setup(self) -> None:
        c = self.config
        self.embedding = Embedding(c.vocab_size, c.context_length, c.d_model)
        if c.mixing not in ("none", "concatenate"):
            self.mixing = Mixing(c.mixing, c.context_length, c.causal)
        self.mlp = MLP(c.d_ff, c.vocab_size)

    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        """Return logits. Raises `ValueError` for more tokens than positions, or, with a fixed window, any other
        number."""
        check_length(self.config.contract, len(tokens_T))
        x_TD = self.embedding(tokens_T, jnp.arange(len(tokens_T)))
        if self.config.mixing == "concatenate":
            x_TD = x_TD.reshape(1, -1)
        elif self.config.mixing != "none":
            x_TD = self.mixing(x_TD)
        return capture_point(self, "logits", self.mlp(x_TD))

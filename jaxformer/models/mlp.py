"""Language models without attention: the first two rungs of the ladder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.config import TokenModelConfig
from jaxformer.contract import Contract
from jaxformer.nn.capture import capture_point
from jaxformer.nn.embedding import Embedding
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.mlp import MLP


@dataclass(frozen=True)
class MLPConfig(TokenModelConfig):
    """Shape of an `MLPLanguageModel`."""

    d_model: int = 256
    d_ff: tuple[int, ...] = (2048, 2048)
    """Widths of the hidden layers."""
    concatenate: bool = False
    """One MLP on all positions concatenated, instead of on each position."""

    @property
    def n_predicted(self) -> int:
        return 1 if self.concatenate else self.context_length

    @property
    def contract(self) -> Contract:
        return replace(super().contract, max_tokens=self.context_length, fixed_length=self.concatenate)

    def build(self, execution: Execution = PLAIN) -> MLPLanguageModel:
        """Return the module; without blocks and attention, `execution` changes nothing."""
        return MLPLanguageModel(self)


class MLPLanguageModel(nn.Module):
    """Embedding, positions, MLP, logits.

    Applied to each position, it is a 1-gram model, `(T,)` to `(T, V)`. Applied to all positions concatenated, it reads
    a full window and predicts the next token, `(context_length,)` to `(1, V)`; its first matrix grows with the square
    of T·D."""

    config: MLPConfig

    def setup(self) -> None:
        c = self.config
        self.embedding = Embedding(c.vocab_size, c.context_length, c.d_model)
        self.mlp = MLP(c.d_ff, c.vocab_size)

    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        x_TD = self.embedding(tokens_T, jnp.arange(len(tokens_T)))
        return capture_point(self, "logits", self.mlp(x_TD.reshape(1, -1) if self.config.concatenate else x_TD))

"""How well a model predicts a text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import exp, inf, log

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import Config, ModelConfig
from jaxformer.data.windows import eval_batches
from jaxformer.errors import UserError
from jaxformer.models.objective import Params, next_token_nll
from jaxformer.runs import abstract_params
from jaxformer.sharding import batch_split, place
from jaxformer.train.step import make_eval_step

AHEAD = 2
"""Batches that the devices may be busy with while the next is prepared: one to compute, one to follow at once."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    loss: float
    """Nats a token, the mean over all predicted tokens."""
    bits_per_byte: float
    """All bits over all UTF-8 bytes of the predicted tokens; comparable between tokenizers. The bits of the
    end-of-text tokens count, their bytes are none."""
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)

    def as_row(self) -> dict[str, float]:
        """By the names of the log."""
        return {
            "val_loss": self.loss, "val_ppl": self.perplexity, "val_bpb": self.bits_per_byte,
            "val_tokens": self.tokens,
        }  # fmt: skip


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return exp(loss) if loss < 700 else inf


def n_predicted(config: ModelConfig) -> int:
    """How many tokens of a window of `context_length + 1` the model predicts: the last ones."""
    model, window = config.build(), jax.ShapeDtypeStruct((config.context_length + 1,), np.int32)
    shapes = abstract_params(model, config)
    return jax.eval_shape(lambda p, t: next_token_nll(model, p, t), shapes, window).shape[0]


class Evaluator:
    """Measures parameters on one text, with one compiled step.

    Windows follow each other, or with a stride overlap, so that each token but the first ones is predicted with at
    least `context_length - stride` before it. Each counts once.
    """

    def __init__(
        self, config: Config, mesh: Mesh, tokens: np.ndarray, token_lengths: np.ndarray, stride: int | None = None
    ) -> None:
        self._step, self._split = make_eval_step(config, mesh), batch_split(mesh)
        self._tokens, self._token_lengths = tokens, token_lengths
        self._batch_size, self._length = config.train.batch_size, config.model.context_length + 1
        self._n_predicted = n_predicted(config.model)
        self._stride = min(stride or self._n_predicted, self._n_predicted)
        if len(tokens) <= (before := self._length - self._n_predicted):
            raise UserError(
                f"the held-out text has {len(tokens)} tokens, too few to predict one, which takes {before} before it; "
                "give more text to measure on."
            )

    def __call__(self, params: Params, n_windows: int | None = None) -> Evaluation:
        """On the whole text, each token predicted once, or on `n_windows` evenly spread windows of it."""
        nats = tokens = n_bytes = 0.0
        unread = deque[jax.Array]()
        total = lambda nats_B: np.asarray(nats_B).sum(dtype=np.float64)  # so that the batch's size does not show  # noqa: E731
        batches = eval_batches(self._tokens, self._length, self._n_predicted, self._batch_size, n_windows, self._stride)
        for batch, weights in batches:
            unread.append(self._step(params, place(batch, self._split), place(weights, self._split)))
            if len(unread) > AHEAD:
                nats += total(unread.popleft())
            tokens += float(weights.sum())  # summed in float32, tokens would be lost beyond 2^24
            n_bytes += (self._token_lengths[batch[:, -self._n_predicted :]] * weights).sum()
        nats += sum(map(total, unread))
        return Evaluation(float(nats / tokens), float(nats / log(2) / max(n_bytes, 1)), int(tokens))

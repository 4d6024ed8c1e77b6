"""Evaluation on held-out examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Protocol

import jax
import numpy as np

from jaxformer.data.dataset import Batch
from jaxformer.errors import UserError
from jaxformer.models.objective import OBJECTIVES, Params
from jaxformer.parallel.mesh import batch_sharding, batch_shards, global_device_put
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_eval_step

BATCHES_IN_FLIGHT = 2
"""Batches on the devices while the next is prepared: one being computed, one queued."""


class ValidationData(Protocol):
    """Held-out examples: a `Dataset`, or a text."""

    @property
    def token_lengths(self) -> np.ndarray | None: ...

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    loss: float
    """Mean loss in nats per target."""
    targets: int
    """Number of targets, such as tokens or images."""
    bits_per_byte: float | None = None
    """Bits per UTF-8 byte of the predicted tokens, comparable between tokenizers. End-of-text tokens contribute their
    bits but no bytes. None if the targets are not text."""
    others: dict[str, float] = field(default_factory=dict)
    """Other metrics of the objective, such as accuracy."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)

    def __str__(self) -> str:
        """Return the metrics in the words of the training log."""
        bits = "" if self.bits_per_byte is None else f" ({self.bits_per_byte:.6f} bits/byte)"
        perplexity = [] if self.bits_per_byte is None else [f"perplexity {self.perplexity:.6g}"]
        others = [f"{value:.4%} {name.replace('_', ' ')}" for name, value in self.others.items()]
        return "  ".join([f"{self.loss:.6f}{bits}", *perplexity, *others, f"{self.targets:,} targets"])

    def as_row(self) -> dict[str, float]:
        """Return the metrics, by their names in the log."""
        text = {} if self.bits_per_byte is None else {"ppl": self.perplexity, "bpb": self.bits_per_byte}
        row = {"loss": self.loss, **text, **self.others, "targets": self.targets}
        return {f"val_{name}": value for name, value in row.items()}


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it exceeds a float."""
    return inf if loss >= 700 else exp(loss)


def full_batches(batches: Iterator[Batch], n_shards: int) -> Iterator[Batch]:
    """Yield batches of held-out examples, the first without those of weight 0 at its end, which pad few examples to a
    batch, but for those that divide it among the shards. Other batches keep their shape, for which the step is
    compiled."""
    for number, batch in enumerate(batches):
        if number:
            yield batch
            continue
        used = np.flatnonzero(batch.weights.reshape(len(batch.weights), -1).any(axis=1))
        n = -(-(max(used, default=0) + 1) // n_shards) * n_shards
        yield jax.tree.map(lambda x, n=n: x[:n], batch)


class Evaluator:
    """Evaluation of parameters on held-out examples, with one compiled step per batch shape."""

    def __init__(self, setup: TrainSetup, data: ValidationData) -> None:
        self._step, self._split = make_eval_step(setup), batch_sharding(setup.mesh)
        self._data, self._batch_size, self._n_shards = data, setup.config.train.batch_size, batch_shards(setup.mesh)
        self._objective = OBJECTIVES[setup.config.model.contract.task]

    def __call__(self, params: Params, n: int | None = None) -> Evaluation:
        """Return the evaluation on all held-out examples, or on `n` evenly spaced ones.

        The batch size is that of training, but no larger than `n` needs: a run may train with 4,096 examples
        per batch, and is evaluated on 512.

        Raises:
          UserError: the examples have no targets, as in a short text without a masked token.
        """
        targets = n_bytes = 0.0
        unread, measures = deque[dict[str, jax.Array]](), list[dict[str, np.ndarray]]()
        read = lambda: measures.append({name: np.asarray(x) for name, x in unread.popleft().items()})  # noqa: E731
        batch_size = self._batch_size if n is None else min(self._batch_size, -(-n // self._n_shards) * self._n_shards)
        for batch in full_batches(self._data.val_batches(batch_size, n), self._n_shards):
            unread.append(self._step(params, global_device_put(batch, self._split)))
            if len(unread) > BATCHES_IN_FLIGHT:
                read()
            targets += float(batch.weights.sum())  # a float32 sum would lose targets beyond 2^24
            if self._data.token_lengths is not None:
                n_bytes += (self._data.token_lengths[batch.targets] * batch.weights).sum()
        while unread:
            read()
        if not targets:
            raise UserError("the held-out examples have 0 targets; hold out more data, or raise `train.eval_examples`.")
        joined = {name: np.concatenate([m[name] for m in measures]) for name in measures[0]}
        others = self._objective.summary(joined)
        loss = others.pop("loss")
        bits = None if self._data.token_lengths is None else loss * targets / log(2) / max(n_bytes, 1)
        return Evaluation(loss, int(targets), bits, others)

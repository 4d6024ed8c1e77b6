"""The `Dataset` interface: batches that are pure functions of (data, seed, step)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.terminal import short_repr

VALIDATION_SEED = 2**32
"""Seed for held-out batches, above any run's seed, so that all runs are evaluated on the same batches."""


class Batch(NamedTuple):
    """A batch, each array with leading axis B; or one example, without that axis."""

    inputs: tuple[Any, ...]
    """Arguments of the model; None for one that is omitted, as in `data.packing`."""
    targets: Any = None
    """Target classes, int32, `(B, T)`, or `(B,)` for one per example; None if the objective needs none."""
    weights: Any = None
    """Loss weight of each target, float32, of the targets' shape; None for equal weights. In training they sum to 1
    over the whole batch, so that the losses of microbatches add up; in evaluation they are 0 or 1."""

    def __repr__(self) -> str:
        return short_repr(self)


class Dataset(ABC):
    """A training and a validation split, in batches."""

    unit: ClassVar[Literal["tokens", "examples"]] = "examples"
    """Unit of `per_step`."""
    per_step: float
    """Tokens or examples per step, averaged over an epoch."""
    steps_per_epoch: int
    """Full batches per epoch."""
    fingerprint: str
    """SHA-256 of the data; options that affect only the batching are in the run's config."""
    model: ModelConfig
    """Config of the model to train, with the fields that are inferred from the data."""
    notes: Sequence[str] = ()
    """Notes about inferred fields and about data that is resized or left out."""
    tokenizer: Tokenizer | None = None
    """Tokenizer of the data, stored with the run; None for data without tokens."""
    classes: Sequence[str] = ()
    """Names of the target classes, stored with the run; empty if the targets are tokens."""
    token_lengths: np.ndarray | None = None
    """Bytes per token, `(V,)`; None if bits per byte are not defined."""

    @abstractmethod
    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """Return rows of the training batch at a step, counted from 0: all, or those of one of several processes.

        Weights are normalised over the whole batch, whatever `rows` is.
        """

    @abstractmethod
    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        """Yield the validation examples, or about `n` evenly spaced ones, in a fixed order and in batches of equal
        size.

        The last batch is padded with examples of weight 0.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return one line about the content and the size of both splits."""

    def stream(self, start: int, stop: int, rows: slice | np.ndarray = slice(None)) -> Iterator[Batch]:
        """Yield the batches of the steps start, …, stop - 1, prefetched by grain in a background thread."""
        import grain  # slow to import

        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        batches = grain.MapDataset.range(start, stop).map(lambda step: self.batch(step, rows))
        return iter(batches.to_iter_dataset(ahead))


def task_error(model: ModelConfig, data: str, needed: str) -> UserError:
    """Return the error for data of one kind, such as "pairs of texts", and a model that is not the needed one."""
    return UserError(f"the data is {data}, but {type(model).__name__} does not configure {needed}; change one.")


def batch_error(name: str, n: int, examples: str, batch_size: int) -> UserError:
    """Return the error for a training split with fewer examples than a batch needs."""
    remedy = f"set it to at most {n}" if n else "shorten `model.context_length`"
    return UserError(f"{name} has {n} {examples}, fewer than `train.batch_size` {batch_size}; {remedy}, or give more.")


@lru_cache(maxsize=2)
def epoch_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of range(n), `(n,)` uint32 or uint64, determined by seed and epoch."""
    indices = np.arange(n, dtype=np.uint32 if n < 2**32 else np.uint64)
    np.random.Generator(np.random.Philox(key=[seed, epoch])).shuffle(indices)
    return indices


def batch_indices(n: int, batch_size: int, seed: int, step: int) -> tuple[int, np.ndarray]:
    """Return the epoch of a step, and the indices `(B,)` of its examples among n. Each epoch visits the examples in a
    new order, without replacement, and drops a last incomplete batch."""
    epoch, position = divmod(step, n // batch_size)
    start = position * batch_size
    return epoch, epoch_permutation(n, seed, epoch)[start : start + batch_size]


def padded_batches(indices: np.ndarray, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the indices in batches `(B,)`, the last one padded with its first index, and weights `(B,)`, 0 for
    padding."""
    for start in range(0, len(indices), batch_size):
        part = indices[start : start + batch_size]
        padding = np.repeat(part[:1], batch_size - len(part))
        yield np.concatenate([part, padding]), (np.arange(batch_size) < len(part)).astype(np.float32)


def step_rng(seed: int, step: int) -> np.random.Generator:
    """Return the random generator of one step or epoch, independent of `epoch_permutation`."""
    return np.random.Generator(np.random.Philox(key=[seed, step], counter=[0, 0, 0, 1]))


@lru_cache(maxsize=2)
def epoch_uniforms(n: int, k: int, seed: int, epoch: int) -> np.ndarray:
    """Return k uniform samples per example for an epoch, `(n, k)` float64 in [0, 1), independent of the examples'
    order."""
    return step_rng(seed, epoch).random((n, k))


def evenly_spaced(n: int, count: int | None) -> np.ndarray:
    """Return `count` evenly spaced indices below n, including the first and the last; all for None."""
    return np.arange(n) if count is None or count >= n else np.linspace(0, n - 1, count).astype(np.int64)
